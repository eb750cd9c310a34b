"""The choice of placements as a problem: who makes each value, who uses it, and what each could do.

Everything that decides something is an *item* with options: an operator (how it runs), a parameter or another leaf (how
it is stored), and the outside world (the batch comes whole, what is a result leaves whole, and what goes between stages may
be cut on its way). Items of repeated
blocks, such as the layers of a transformer, form one *group* and decide as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from epl.cost.communication import transfer_s
from epl.cost.operators import operator_s, work_of
from epl.errors import StrategyError
from epl.ir.graph import Buffer, Constant, Graph, Op, Parameter
from epl.ir.types import ListType, TensorType
from epl.planner.batch_cuts import batch_cuts
from epl.planner.split_items import STATES, Edge, Item, Problem, SplitGroup, Use
from epl.planner.values import shapes_of, slots_of, value_names
from epl.sharding.options import WHOLE, Call, Option, whole_option
from epl.sharding.patterns import Patterns, Slots
from epl.sharding.placements import Placement, Shard, local_shape
from epl.sharding.rules import options_of

__all__ = ["split_problem"]

SMALL_SHARE = 0.01  # of all weights: a kind of weight below this may stay whole if that saves communication


class _Builder:
    """What is gathered on the way."""

    def __init__(
        self,
        graph: Graph,
        tasks: frozenset[int],
        group: SplitGroup,
        pins: Mapping[str, Placement],
        wishes: Mapping[str, Placement],
    ) -> None:
        self.graph, self.tasks, self.pins, self.wishes = graph, tasks, pins, wishes
        self.num_ranks, self.device = group.num_ranks, group.device
        self.ops = tuple(op for op in graph.ops if op.task in tasks and op.target != "python.getitem")
        self.names = value_names(graph)
        self.shapes = shapes_of(graph)
        self.root_of = {self.names[name]: root for name, root in graph.storage_roots.items()}
        self.order = {op.name: place for place, op in enumerate(self.ops)}
        self.needs_grad = {self.names[name] for name in graph.needs_grad if name in self.names}
        self.copied = frozenset(task for task in tasks if graph.tasks[task].kind == "replicate")
        self.copied_weights = {
            name for op in self.ops if op.task in self.copied for name in op.reads
        } & graph.leaves.keys()
        self.items: list[Item] = []
        self.place_of: dict[str, tuple[int, int]] = {}  # value -> its maker, and which of its results it is
        self.uses: dict[str, list[Use]] = {}
        self._counts: Counter[str] = Counter()

    @cached_property
    def _sizes_by_kind(self) -> Counter[str]:
        """Bytes of the weights, those of repeated blocks together."""
        sizes: Counter[str] = Counter()
        for leaf in self.graph.parameters:
            sizes[_pattern(leaf.path)] += leaf.type.size_bytes
        return sizes

    def is_large(self, leaf: Parameter) -> bool:
        """True for a matrix that counts, alone or with those of its kind in other blocks."""
        sizes = self._sizes_by_kind
        return len(leaf.type.shape) > 1 and sizes[_pattern(leaf.path)] > SMALL_SHARE * sizes.total()

    def add(self, item: Item, makes: Sequence[str]) -> int:
        self.items.append(item)
        index = len(self.items) - 1
        self.place_of.update({name: (index, number) for number, name in enumerate(makes)})
        return index

    def count(self, op: Op) -> int:
        """The how-manieth operator of its module it is."""
        self._counts[op.module] += 1
        return self._counts[op.module]

    def touches_written(self, slots: Slots) -> bool:
        """True for a call that takes or makes a value whose storage is changed in place."""
        names = (*slots.inputs, *slots.outputs)
        return any(self.root_of.get(name, name) in self.graph.written for name in names)

    def size_bytes(self, value: str) -> int:
        maker, _, number = value.partition(".")
        kind = self.graph.type_of(maker)
        kind = kind.items[int(number)] if isinstance(kind, ListType) else kind
        return kind.size_bytes if isinstance(kind, TensorType) else 0


def split_problem(
    graph: Graph,
    tasks: frozenset[int],
    group: SplitGroup,
    pins: Mapping[str, Placement] | None = None,
    wishes: Mapping[str, Placement] | None = None,
    *,
    may_copy_work: bool = False,
) -> Problem:
    """The problem of some TaskGraphs that share a group of ranks.

    What is in a ``replicate`` TaskGraph works on its part of the batch with whole weights (:mod:`epl.planner.batch_cuts`);
    how the others are cut is to be chosen.

    Args:
        graph: A graph whose operators are in TaskGraphs.
        tasks: The TaskGraphs.
        group: The ranks.
        pins: Placements of parameters and buffers as a plan has them, by their names in the graph.
        wishes: Placements that the user asks for; a cut is one along this dimension, wherever it goes.
        may_copy_work: True to let operators of ``replicate`` TaskGraphs run whole on every rank, if they touch what is
            changed in place.

    Raises:
        StrategyError: a weight cannot be placed as the user asks.
    """
    build = _Builder(graph, tasks, group, pins or {}, wishes or {})
    calls = [Call(op, graph.type_of) for op in build.ops]
    slots = [slots_of(call, build.names, build.shapes) for call in calls]
    by_batch = batch_cuts(graph) if build.copied else {}
    ways = [_ways_to_run(build, call, by_batch) for call in calls]
    patterns = Patterns(group.num_ranks, build.pins, build.shapes)
    # what is decided goes first, so that no choice of others takes units away from it
    patterns.tie(sorted(zip(slots, ways, strict=True), key=lambda way: len(way[1]) > 2))
    _add_leaves(build, patterns)
    for call, slot, options in zip(calls, slots, ways, strict=True):
        real = [found for found in (patterns.concrete(slot, option) for option in options) if found is not None]
        is_decided = call.op.task in build.copied and not (may_copy_work and build.touches_written(slot))
        _add_op(build, call, slot, real[-1:] if is_decided else real)
    _add_outside(build, patterns)
    return Problem(tuple(build.items), tuple(_edges(build)), group, _summed(build))


def _ways_to_run(build: _Builder, call: Call, by_batch: Mapping[str, Option]) -> tuple[Option, ...]:
    """All ways; in a ``replicate`` TaskGraph only whole, or, where there is one, the way that goes by the batch, last."""
    if call.op.task not in build.copied:
        return options_of(call)
    return tuple(dict.fromkeys([whole_option(call), by_batch.get(call.op.name, whole_option(call))]))


def _summed(build: _Builder) -> frozenset[str]:
    """The weights of ``replicate`` TaskGraphs: each rank has a summand of their gradients, from its part of the batch."""
    return frozenset(leaf.name for leaf in build.graph.parameters if leaf.name in build.copied_weights)


# -- items --------------------------------------------------------------------------------------------------------


def _add_leaves(build: _Builder, patterns: Patterns) -> None:
    """Parameters, buffers and constants of these TaskGraphs, each with the ways to store it."""
    read = {name for op in build.ops for name in op.reads}
    for leaf in (*build.graph.parameters, *build.graph.buffers, *build.graph.constants):
        if leaf.name in read:
            _add_leaf(build, leaf, _ways_to_store(build, patterns, leaf))
    for name in sorted(read - build.place_of.keys() - {op.name for op in build.graph.ops if op.task in build.tasks}):
        # the batch is there whole; of what other stages make, the part that is asked for comes
        value, is_batch = build.names[name], name in build.graph.leaves
        ways = [WHOLE] if is_batch else _ways_to_travel(build, patterns, value)
        options = tuple(Option((), (way,)) for way in ways)
        times = tuple(0.0 if is_batch else _travel_s(build, value, way) for way in ways)
        build.add(Item(name, "given", (name,), ("given", name), options, times, (0.0,) * len(ways)), [value])


def _ways_to_travel(build: _Builder, patterns: Patterns, value: str) -> list[Placement]:
    """Whole, or cut into one stretch a rank, so that what goes between two ranks is one piece."""
    known = build.shapes.get(value)
    return [WHOLE, *(shard for shard in patterns.shards_of(value, known) if shard.repeats == 1)] if known else [WHOLE]


def _travel_s(build: _Builder, value: str, way: Placement) -> float:
    """Seconds to send or receive what a rank holds, and its gradient the other way."""
    passes = 2 if value in build.needs_grad else 1
    share = build.size_bytes(value) / (1 if way == WHOLE else build.num_ranks)
    return passes * transfer_s(share, build.device.link)


def _ways_to_store(build: _Builder, patterns: Patterns, leaf: Parameter | Buffer | Constant) -> list[Placement]:
    """A matrix is cut if it can be: that is what ``split`` is asked for. Constants belong to the code, and stay whole."""
    if leaf.name in build.pins:
        return [build.pins[leaf.name]]
    if isinstance(leaf, Constant) or leaf.name in build.copied_weights:
        return [_as_wished(build, leaf, []) if leaf.name in build.wishes else WHOLE]
    shards = list(patterns.shards_of(leaf.name, leaf.type.sizes))
    if leaf.name in build.wishes:
        return [_as_wished(build, leaf, shards)]
    if not shards and isinstance(leaf, Parameter) and build.is_large(leaf) and leaf.type.sizes[0] >= build.num_ranks:
        shards = [Shard(0)]  # no operator can use a part of it, but it can be gathered where it is used
    is_written = leaf.name in build.graph.written  # in place, perhaps by an operator that has to see all of it
    must_cut = isinstance(leaf, Parameter) and build.is_large(leaf) and shards and not is_written
    return [*([] if must_cut else [WHOLE]), *shards]


def _as_wished(build: _Builder, leaf: Parameter | Buffer | Constant, shards: list[Shard]) -> Placement:
    wish = build.wishes[leaf.name]
    if not isinstance(wish, Shard):
        return wish
    fitting = [shard for shard in shards if shard.dim == wish.dim]
    if not fitting:
        shape = list(leaf.type.shape)
        size = leaf.type.sizes[wish.dim] if wish.dim < len(shape) else 0
        is_short = 0 < size < build.num_ranks
        count = build.num_ranks
        cure = f"take at least {count} (of experts: num_experts), or at most {size} devices"
        why = f"{size} along dimension {wish.dim} are not one for each device: {cure}; " if is_short else ""
        possible = ", ".join(["R", *dict.fromkeys(f"S({shard.dim})" for shard in shards)])
        raise StrategyError(
            f"{_path(leaf)} of shape {shape} cannot be placed as {wish} on {build.num_ranks} devices, as "
            f"split(placements=...) or its module asks: {why}possible are {possible}"
        )
    return fitting[0]


def _path(leaf: Parameter | Buffer | Constant) -> str:
    return leaf.name if isinstance(leaf, Constant) else leaf.path


def _add_leaf(build: _Builder, leaf: Parameter | Buffer | Constant, ways: list[Placement]) -> None:
    path = _path(leaf)
    trained = isinstance(leaf, Parameter) and leaf.trainable
    whole_bytes = leaf.type.size_bytes * (STATES if trained else 1)
    sizes = tuple(whole_bytes / (1 if way == WHOLE else build.num_ranks) for way in ways)
    options = tuple(Option((), (way,)) for way in ways)
    build.add(
        Item(
            leaf.name,
            "stored",
            (_pattern(path),),
            ("stored", _block(path), options),
            options,
            (0.0,) * len(ways),
            sizes,
        ),
        [leaf.name],
    )


def _add_op(build: _Builder, call: Call, slots: Slots, options: Sequence[Option]) -> None:
    op = call.op
    backward = op.name in build.graph.needs_grad
    times = tuple(_time_s(build, call, option, backward=backward) for option in options)
    place = build.count(op)
    group = (
        "op",
        _block(op.module),
        place,
        op.target,
        tuple(options),
        tuple(build.shapes[name] for name in slots.inputs),
    )
    label = (_pattern(op.module), op.target.split(".")[1])
    index = build.add(Item(op.name, "op", label, group, tuple(options), times, (0.0,) * len(options)), slots.outputs)
    for place, name in enumerate(slots.inputs):
        build.uses.setdefault(name, []).append(Use(index, place))


def _time_s(build: _Builder, call: Call, option: Option, *, backward: bool) -> float:
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for (argument, ref), placement in zip(call.refs, option.inputs, strict=True):
        kind = build.graph.type_of(ref)
        shape = kind.sizes if isinstance(kind, TensorType) else ()
        shapes.setdefault(argument, []).append(_largest(shape, placement, build.num_ranks))
    outputs = [
        _largest(kind.sizes, placement, build.num_ranks)
        for kind, placement in zip(call.results, option.outputs, strict=True)
    ]
    itemsize = call.results[0].dtype.itemsize if call.results else 4
    return operator_s(work_of(call.op.target, shapes, outputs, itemsize), build.device, backward=backward)


def _largest(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> tuple[int, ...]:
    """What rank 0 holds, which never has less than the others."""
    return local_shape(shape, placement, num_ranks, 0)


def _pattern(path: str) -> str:
    """``encoder.layer.7.output`` -> ``encoder.layer.*.output``: blocks that are repeated have one name."""
    return re.sub(r"\b\d+\b", "*", path)


def _block(path: str) -> str:
    """``blocks.7.0.weight`` -> ``blocks.*.0.weight``: blocks are alike, and the layers within one are not."""
    return re.sub(r"\b\d+\b", "*", path, count=1)


# -- edges --------------------------------------------------------------------------------------------------------


def _add_outside(build: _Builder, patterns: Patterns) -> None:
    """What the step's results take leaves whole; what other stages take, whole or cut."""
    inside = {op.name for op in build.ops}
    taken = [name for op in build.graph.ops if op.task not in build.tasks for name in op.reads]
    results = set(build.graph.output_names)
    for name in dict.fromkeys([*taken, *build.graph.output_names]):
        value = build.names[name]
        if value.partition(".")[0] in inside and value in build.place_of:
            ways = [WHOLE] if name in results else _ways_to_travel(build, patterns, value)
            options = tuple(Option((way,), ()) for way in ways)
            times = tuple(0.0 if name in results else _travel_s(build, value, way) for way in ways)
            index = build.add(Item(f"-> {name}", "out", (name,), ("out", name), options, times, (0.0,) * len(ways)), [])
            build.uses.setdefault(value, []).append(Use(index, 0))


def _edges(build: _Builder) -> Iterator[Edge]:
    parameters = {leaf.name for leaf in build.graph.parameters}
    last_write = _last_writes(build)
    for value, uses in build.uses.items():
        maker, result = build.place_of[value]
        until = last_write.get(build.root_of.get(value, value), -1)
        fixed = frozenset(use for use in uses if build.order.get(build.items[use.item].name, len(build.order)) <= until)
        yield Edge(
            value,
            maker,
            result,
            tuple(uses),
            build.size_bytes(value),
            value in build.needs_grad,
            value in parameters,
            fixed,
        )


def _last_writes(build: _Builder) -> dict[str, int]:
    """The place of the last operator that changes each storage."""
    return {
        root: max(build.order[op.name] for op in ops if op.name in build.order)
        for root, ops in build.graph.written.items()
        if any(op.name in build.order for op in ops)
    }
