"""Every invariant of a graph, checked at once: a broken graph is reported whole, not one finding at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from epl.errors import GraphError, bulleted
from epl.ir.graph import Graph, Op, refs_in
from epl.ir.types import TensorType

__all__ = ["verify", "violations"]


def verify(graph: Graph, *, after: str = "capture", colocated: bool = False) -> Graph:
    """Return the graph if it is sound.

    Args:
        graph: The graph to check.
        after: What made it, for the message.
        colocated: True if all TaskGraphs run on the same devices, and so share memory.

    Raises:
        GraphError: lists every violation.
    """
    found = violations(graph, colocated=colocated)
    if found:
        raise GraphError(bulleted(f"the graph after {after} breaks {len(found)} invariants:", found))
    return graph


def violations(graph: Graph, *, colocated: bool = False) -> list[str]:
    """What is wrong with the graph, one line each; empty when it is sound."""
    found = [*_names(graph), *_uses(graph), *_tasks(graph), *_outputs(graph)]
    # memory can be followed only where every name is known
    return found if found or colocated else list(_writes(graph))


def _names(graph: Graph) -> Iterator[str]:
    leaves = (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants, *graph.taken)
    counts = Counter([leaf.name for leaf in leaves] + [op.name for op in graph.ops])
    for name, count in counts.items():
        if count > 1:
            yield f"the name {name} is given {count} times"
        if not name.isidentifier():
            yield f"the name {name!r} is not an identifier"


def _uses(graph: Graph) -> Iterator[str]:
    known = set(graph.leaves)
    later = {op.name for op in graph.ops}
    for op in graph.ops:
        for name in op.reads:
            if name not in known:
                fault = "before it is made" if name in later else "which nothing makes"
                yield f"{_at(op)} uses {name} {fault}"
        for name in (*op.writes, *op.views):
            if name not in op.reads:
                yield f"{_at(op)} says it touches {name}, which is not among its arguments"
        known.add(op.name)


def _tasks(graph: Graph) -> Iterator[str]:
    if not graph.tasks:
        if any(op.task is not None for op in graph.ops):
            yield "operators are in TaskGraphs, but the graph has none"
        return
    for op in graph.ops:
        if op.task is None or not 0 <= op.task < len(graph.tasks):
            yield f"{_at(op)} is in TaskGraph {op.task}; the graph has {len(graph.tasks)}"
    for index, spec in enumerate(graph.tasks):
        if spec.device_count < 1:
            yield f"TaskGraph {index} ({spec.name}) has device_count {spec.device_count}; at least 1 is needed"


def _writes(graph: Graph) -> Iterator[str]:
    """A value changes in place only where it is made; other TaskGraphs get it when it changes no more."""
    made = graph.op_by_name
    place = {op.name: number for number, op in enumerate(graph.ops)}
    for root, writers in graph.written.items():
        if root not in made:
            continue
        for writer in writers:
            if writer.task != made[root].task:
                yield f"{_at(writer)} in TaskGraph {writer.task} changes {root} of TaskGraph {made[root].task} in place"
        for op in graph.ops[: place[writers[-1].name]]:
            if op.task != made[root].task and any(graph.storage_roots[name] == root for name in op.reads):
                yield (
                    f"{_at(op)} in TaskGraph {op.task} uses {root}, which {_at(writers[-1])} in TaskGraph "
                    f"{writers[-1].task} changes in place later"
                )


def _outputs(graph: Graph) -> Iterator[str]:
    known = set(graph.leaves) | set(graph.op_by_name)
    roles = Counter(output.role for output in graph.outputs)
    for role, count in roles.items():
        if count > 1:
            yield f"the output {role} is given {count} times"
    for output in graph.outputs:
        for name in refs_in(output.value):
            if name not in known:
                yield f"the output {output.role} is {name}, which nothing makes"
            elif output.role in ("loss", "total") and not _is_scalar(graph, name):
                yield f"the output {output.role} is {name} of type {graph.type_of(name)}; one number is needed"


def _is_scalar(graph: Graph, name: str) -> bool:
    kind = graph.type_of(name)
    return isinstance(kind, TensorType) and kind.size_bytes == kind.dtype.itemsize


def _at(op: Op) -> str:
    place = f" ({op.source})" if op.source else ""
    return f"{op.name} = {op.target}{place}"
