"""The branches of a captured model that the batch alone decides, as a function that says whether they go the same way.

Draft export leaves an assertion for each branch on a value. Where the value depends on the batch and on constants only,
every rank of a replica can evaluate it before the step, and choose or capture the right graph. Other assertions (on
activations, weights or random numbers) stay in the graph and stop the run if they fail.
"""

from __future__ import annotations

from dataclasses import dataclass

from epl.ir.graph import Graph, Op, Ref
from epl.stage.codegen import StageCode, generate_code

__all__ = ["GuardCode", "guard_of"]


@dataclass(frozen=True)
class GuardCode:
    """A function of buffers and constants (``held``) and of the batch's tensors at ``inputs``, giving truth values."""

    code: StageCode
    held: tuple[str, ...]
    inputs: tuple[int, ...]


def guard_of(graph: Graph) -> GuardCode | None:
    """The guard of a graph; None if no branch depends on the batch alone."""
    known = graph.known_from_batch
    conditions = [
        op.args[0].name
        for op in graph.ops
        if op.target.startswith("aten._assert_scalar") and isinstance(op.args[0], Ref) and op.args[0].name in known
    ]
    if not conditions:
        return None
    ops = _slice(graph, conditions)
    read = {name for op in ops for name in op.reads} | set(conditions)
    held = tuple(leaf.name for leaf in (*graph.buffers, *graph.constants) if leaf.name in read)
    inputs = tuple(place for place, leaf in enumerate(graph.inputs) if leaf.name in read)
    arguments = (*held, *(graph.inputs[place].name for place in inputs))
    return GuardCode(generate_code("guard", ops, arguments, tuple(conditions)), held, inputs)


def _slice(graph: Graph, names: list[str]) -> tuple[Op, ...]:
    needed = set(names)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in needed:
            kept.append(op)
            needed.update(op.reads)
    return tuple(reversed(kept))
