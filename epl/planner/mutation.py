"""Values that are changed in place, and what shares their storage.

A graph with TaskGraphs on several devices has no shared storage between them. So whatever touches a value that is
changed in place (its maker, its views, its writers) stands in one TaskGraph; where the user's tags put a writer
elsewhere, that TaskGraph changes a copy of its own, which later readers then read.
"""

from __future__ import annotations

from dataclasses import replace

from epl.errors import StrategyError
from epl.ir.graph import Argument, Graph, Op, Ref, map_refs
from epl.ir.types import TensorType

__all__ = ["copy_before_foreign_writes", "mutation_groups"]


def mutation_groups(graph: Graph) -> list[frozenset[str]]:
    """Sets of operators whose results share a storage that some operator changes in place."""
    root = _storage_roots(graph)
    written = {root[name] for op in graph.ops for name in op.writes}
    groups: dict[str, set[str]] = {name: set() for name in written}
    for op in graph.ops:
        for name in {root[op.name], *(root[written_name] for written_name in op.writes)}:
            if name in groups:
                groups[name].add(op.name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]


def _storage_roots(graph: Graph) -> dict[str, str]:
    """The value whose storage each value lives in; a result that views several is joined to the first."""
    root = {name: name for name in graph.leaves}
    for op in graph.ops:
        root[op.name] = root[op.views[0]] if op.views else op.name
        if op.target == "python.getitem" and isinstance(op.args[0], Ref):
            root[op.name] = root[op.args[0].name]
    return root


def copy_before_foreign_writes(graph: Graph) -> Graph:
    """Give each TaskGraph that writes to another one's value, or to the batch, a copy to write to."""
    inputs = {leaf.name for leaf in graph.inputs}
    root = _storage_roots(graph)
    ops: list[Op] = []
    renamed: dict[str, str] = {}
    for op in graph.ops:
        op = _renamed(op, renamed)
        for name in op.writes:
            maker = graph.op_by_name.get(name)
            foreign = name in inputs or (maker is not None and maker.task != op.task)
            if foreign and name not in renamed.values():
                _refuse_shared_storage(graph, root, name, op)
                copy = f"{name}_copy"
                kind = graph.type_of(name)
                ops.append(
                    Op(copy, kind, "aten.clone.default", (Ref(name),), task=op.task, module=op.module, source=op.source)
                )
                renamed[name] = copy
                op = _renamed(op, renamed)
        ops.append(op)
    outputs = tuple(replace(out, value=map_refs(out.value, lambda n: Ref(renamed.get(n, n)))) for out in graph.outputs)
    return replace(graph, ops=tuple(ops), outputs=outputs)


def _refuse_shared_storage(graph: Graph, root: dict[str, str], name: str, writer: Op) -> None:
    """A copy is right only if nothing else that shares the storage is used afterwards."""
    place = next(place for place, op in enumerate(graph.ops) if op.name == writer.name)
    for op in graph.ops[place + 1 :]:
        for other in op.reads:
            shares = other != name and root[other] == root[name] and isinstance(graph.type_of(other), TensorType)
            made_before = other in graph.leaves or graph.ops.index(graph.op_by_name[other]) < place
            if shares and made_before and other not in writer.reads:
                raise StrategyError(
                    f"{writer.target} at {writer.source} (module {writer.module}) changes {name} in place in TaskGraph "
                    f"{writer.task}, but {name} is made in another TaskGraph and {other}, which shares its memory, is "
                    f"used later at {op.source}. Write the operation out of place (x = x + y instead of x += y)."
                )


def _renamed(op: Op, renamed: dict[str, str]) -> Op:
    if not renamed or all(name not in renamed for name in op.reads):
        return op

    def rename(name: str) -> Argument:
        return Ref(renamed.get(name, name))

    return replace(
        op,
        args=tuple(map_refs(arg, rename) for arg in op.args),
        kwargs=tuple((key, map_refs(value, rename)) for key, value in op.kwargs),
        writes=tuple(renamed.get(name, name) for name in op.writes),
        views=tuple(renamed.get(name, name) for name in op.views),
    )
