"""What is read of buffers after forward has changed them is a copy, if other micro-batches follow before backward.

A micro-batch may read a running average after it has changed it, keep that for backward, send it on, or read it again
when a segment is recomputed. By then the next micro-batch has changed the same memory. In one process, with backward right
after forward, there is no next one; so each micro-batch gets a copy of what it reads.
"""

from __future__ import annotations

from dataclasses import replace

from epl.ir.graph import Graph, Op, Ref, map_refs
from epl.ir.rename import renamed
from epl.planner.plan import Plan
from epl.stage.stage import Stage

__all__ = ["settle_buffers"]


def settle_buffers(stage: Stage, plan: Plan) -> Stage:
    """Copy what is read of a weight or buffer after its last change; with one micro-batch at a time nothing has to be."""
    if stage.num_in_flight == 1:
        return stage
    late = _late(stage.graph)
    return replace(stage, graph=_copied(stage.graph, late)) if late else stage


def _late(graph: Graph) -> dict[str, int]:
    """Names of memory that is there when it changes no more, and is read after that, with the place of the last change."""
    place = {op.name: number for number, op in enumerate(graph.ops)}
    last = {root: place[ops[-1].name] for root, ops in graph.written.items() if root in graph.leaves}
    found: dict[str, int] = {}
    for name, root in graph.storage_roots.items():
        if root in last and place.get(name, -1) <= last[root]:
            readers = (place[op.name] for op in graph.readers.get(name, ()))
            if name in graph.output_names or any(reader > last[root] for reader in readers):
                found[name] = last[root]
    return found


def _copied(graph: Graph, late: dict[str, int]) -> Graph:
    """The graph with a copy of each of these values after its last change, for all who read it from there on."""
    names: dict[str, str] = {}
    ops: list[Op] = []

    for number, op in enumerate(graph.ops):
        ops.append(renamed(op, names))
        for name in (each for each, last in late.items() if last == number):
            copy = f"{name}_settled"
            ops.append(Op(copy, graph.type_of(name), "aten.clone.default", (Ref(name),), task=op.task, grad=op.grad))
            names[name] = copy
    outputs = tuple(
        replace(output, value=map_refs(output.value, lambda name: Ref(names.get(name, name))))
        for output in graph.outputs
    )
    return replace(graph, ops=tuple(ops), outputs=outputs)
