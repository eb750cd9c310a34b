"""The choice of placements as a problem: who makes each value, who uses it, and what each could do.

Everything that decides something is an *item* with options: an operator (how it runs), a parameter or another leaf (how
it is stored), and the outside world (inputs come whole, what leaves the TaskGraphs leaves whole). Items of repeated
blocks, such as the layers of a transformer, form one *group* and decide as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from epl.cost.devices import DeviceModel
from epl.cost.operators import operator_s, work_of
from epl.ir.graph import Buffer, Constant, Graph, Input, Op, Parameter, Ref
from epl.ir.types import ListType, TensorType, Type
from epl.sharding.options import WHOLE, Call, Option, gradient_handed_back, whole_option
from epl.sharding.patterns import Patterns, Slots
from epl.sharding.placements import Placement, local_shape
from epl.sharding.rules import options_of

__all__ = ["Edge", "Item", "Problem", "Use", "split_problem"]

Leaf = Input | Parameter | Buffer | Constant


@dataclass(frozen=True)
class Item:
    """Something that decides.

    Args:
        name: Of the operator or leaf; ``"-> name"`` for the outside world, which takes a value.
        group: Items of one group decide alike.
        options: What it may do; for a leaf one result and no inputs.
        times_s: Seconds of each option.
        sizes_bytes: Memory that each option takes for as long as the training runs: weights and what belongs to them.
    """

    name: str
    group: Hashable
    options: tuple[Option, ...]
    times_s: tuple[float, ...]
    sizes_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Use:
    """A value as one item takes it: the argument at ``place`` of item ``item``."""

    item: int
    place: int


@dataclass(frozen=True)
class Edge:
    """A value and those who use it.

    Args:
        value: Its name.
        maker: The item that makes it, as its result number ``result``.
        uses: Who takes it.
        size_bytes: Of the whole value.
        needs_grad: True if a gradient comes back.
        is_weight: True for a parameter: a gradient that every rank has a part of is summed once a step.
        fixed: Uses that must take it as it is made, because it is changed in place later.
    """

    value: str
    maker: int
    result: int
    uses: tuple[Use, ...]
    size_bytes: int
    needs_grad: bool
    is_weight: bool
    fixed: frozenset[Use]


@dataclass(frozen=True)
class Problem:
    """Items, edges, and the number of ranks."""

    items: tuple[Item, ...]
    edges: tuple[Edge, ...]
    num_ranks: int
    device: DeviceModel

    def placement_back(self, use: Use, option: Option) -> Placement:
        """How the gradient of an argument comes out of the option's backward pass."""
        return gradient_handed_back(option, use.place)


@dataclass
class _Builder:
    graph: Graph
    ops: tuple[Op, ...]
    num_ranks: int
    device: DeviceModel
    pins: Mapping[str, Placement]
    items: list[Item] = field(default_factory=list)
    place_of: dict[str, tuple[int, int]] = field(default_factory=dict)  # value -> its maker, and the result it is
    uses: dict[str, list[Use]] = field(default_factory=dict)


def split_problem(
    graph: Graph,
    tasks: frozenset[int],
    num_ranks: int,
    device: DeviceModel,
    pins: Mapping[str, Placement] | None = None,
) -> Problem:
    """The problem of some TaskGraphs that share a group of ranks.

    Args:
        graph: A graph whose operators are in TaskGraphs.
        tasks: The TaskGraphs.
        num_ranks: Ranks in the group.
        device: What each rank computes on.
        pins: Placements of parameters that are given, by their names in the graph.
    """
    ops = tuple(op for op in graph.ops if op.task in tasks and op.target != "python.getitem")
    build = _Builder(graph, ops, num_ranks, device, pins or {})
    calls = [Call(op, graph.type_of) for op in ops]
    slots = [_slots(graph, call) for call in calls]
    wishes = [_wishes(call) for call in calls]
    patterns = Patterns(num_ranks, dict(build.pins), _shapes(graph))
    patterns.tie(list(zip(slots, wishes, strict=True)))
    _add_leaves(build, patterns)
    for call, slot, wish in zip(calls, slots, wishes, strict=True):
        _add_op(build, call, slot, [o for o in (patterns.concrete(slot, option) for option in wish) if o is not None])
    _add_outside(build, tasks)
    return Problem(tuple(build.items), tuple(_edges(build)), num_ranks, device)


def _wishes(call: Call) -> tuple[Option, ...]:
    return options_of(call) if call.op.segment is None or True else (whole_option(call),)


def _shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    leaves = {name: leaf.type for name, leaf in graph.leaves.items()}
    return {name: _static(kind) for name, kind in (leaves | _result_types(graph)).items()}


def _result_types(graph: Graph) -> dict[str, TensorType]:
    """Types of all results: those of an operator with several have the names ``op.0``, ``op.1``, ..."""
    found: dict[str, TensorType] = {}
    for op in graph.ops:
        if isinstance(op.type, ListType):
            found |= {f"{op.name}.{n}": kind for n, kind in enumerate(op.type.items) if isinstance(kind, TensorType)}
        elif isinstance(op.type, TensorType):
            found[op.name] = op.type
    return found


def _static(kind: TensorType) -> tuple[int, ...]:
    return tuple(size or 0 for size in kind.shape)
