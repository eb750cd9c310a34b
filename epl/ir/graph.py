"""The graph of one training step's loss: values, operators, TaskGraphs and the edges between them.

Every class is a frozen value; a pass makes a new graph. An operator is one ATen call (``aten.linear.default``), as
``torch.export`` gives them: no backward operators, since autograd runs through the forward ones. Operators stand in
one list, in an order in which they can run; ``Op.task`` says to which TaskGraph each belongs, and `Graph.taskgraphs`
and `Graph.edges` are views of that list, so the two cannot disagree.

The design follows EPL's IR (operator -> TaskGraph), in the single-assignment form of torch.fx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from epl.ir.types import ListType, TensorType, Type

__all__ = [
    "Argument",
    "Buffer",
    "Constant",
    "Edge",
    "Graph",
    "Input",
    "Op",
    "Output",
    "Parameter",
    "Ref",
    "StrategySpec",
    "Taken",
    "TaskGraph",
    "map_refs",
    "refs_in",
]


@dataclass(frozen=True)
class Ref:
    """The use of a value inside an operator's arguments."""

    name: str


Argument = (
    Ref
    | None
    | bool
    | int
    | float
    | complex
    | str
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | tuple["Argument", ...]
)


@dataclass(frozen=True)
class Input:
    """A tensor of the batch; ``path`` says where it is in the batch (``input_ids``, ``0.mask``)."""

    name: str
    type: TensorType
    path: str


@dataclass(frozen=True)
class Parameter:
    """A parameter under its first name in the model; tied parameters list the other names."""

    name: str
    type: TensorType
    path: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """A buffer of the model (running statistics of batch norm, for instance)."""

    name: str
    type: TensorType
    path: str
    persistent: bool = True


@dataclass(frozen=True)
class Constant:
    """A tensor that the model's code makes from Python numbers, or keeps outside parameters and buffers."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Taken:
    """In the graph of one stage: what another stage has made; its gradient goes back there if ``needs_grad``."""

    name: str
    type: Type
    needs_grad: bool = False


@dataclass(frozen=True)
class Op:
    """One operator call.

    Args:
        name: Name of its result.
        type: Type of its result.
        target: ``aten.linear.default``; ``python.getitem`` and the like for Python's own operators;
            ``function.call_N`` for a callable that the capture keeps beside the graph.
        args: Positional arguments; lists are tuples.
        kwargs: Keyword arguments.
        task: Index of its TaskGraph; None until the graph is cut into TaskGraphs.
        tag: Index of the strategy that the user's scopes give it, if any.
        module: Path of the innermost module whose forward makes the call.
        source: ``file.py:12``, the user's line.
        writes: Values that it changes in place.
        views: Values whose storage its result may share.
        random: Number of its first random draw in the step; None if it draws none.
        segment: Number of the recompute segment that it is in, if any.
        grad: False inside ``torch.no_grad``.
        autocast: ``cpu:bfloat16`` inside ``torch.autocast``, ``cpu:`` where it is turned off inside one, else empty.
    """

    name: str
    type: Type
    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    task: int | None = None
    tag: int | None = None
    module: str = ""
    source: str = ""
    writes: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    random: int | None = None
    segment: int | None = None
    grad: bool = True
    autocast: str = ""

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that it takes, in order, each once."""
        return tuple(dict.fromkeys([*refs_in(self.args), *refs_in(tuple(value for _, value in self.kwargs))]))


@dataclass(frozen=True)
class StrategySpec:
    """A strategy of the user's, as data: ``replicate`` or ``split``, how many devices, and where it was made.

    ``is_default`` says that it was only ever a default: it takes what no scope takes, and may come away with nothing.
    ``placements`` are those that the user has asked for: (name of parameters, with ``*`` for any text; placement).
    """

    kind: str
    device_count: int
    name: str
    where: str = ""
    is_default: bool = False
    placements: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}({self.device_count}, name={self.name!r}) made at {self.where}"


@dataclass(frozen=True)
class Output:
    """A result of the step: ``role`` is ``loss``, ``total``, ``count``, ``aux.NAME`` or ``out.PATH``."""

    role: str
    value: Argument


@dataclass(frozen=True)
class TaskGraph:
    """The operators of one strategy, and what they take and give."""

    index: int
    strategy: StrategySpec
    ops: tuple[Op, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class Edge:
    """A value that one TaskGraph makes and another one uses."""

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Graph:
    """A captured model: what it takes, its operators, and what it gives."""

    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: tuple[Constant, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    strategies: tuple[StrategySpec, ...] = ()
    tasks: tuple[StrategySpec, ...] = field(default=())
    taken: tuple[Taken, ...] = ()

    @cached_property
    def leaves(self) -> dict[str, Input | Parameter | Buffer | Constant | Taken]:
        """Everything that is there before the first operator, by name."""
        leaves = (*self.inputs, *self.parameters, *self.buffers, *self.constants, *self.taken)
        return {leaf.name: leaf for leaf in leaves}

    @cached_property
    def op_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    def type_of(self, name: str) -> Type:
        """Type of a leaf or of an operator's result."""
        leaf = self.leaves.get(name)
        return leaf.type if leaf is not None else self.op_by_name[name].type

    @cached_property
    def readers(self) -> dict[str, tuple[Op, ...]]:
        """The operators that take each value, in order."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in op.reads:
                found.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(name for output in self.outputs for name in refs_in(output.value))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Each value that crosses from one TaskGraph to another, by source, then target, then order of making."""
        found: dict[tuple[int, int, str], None] = {}
        for op in self.ops:
            for name in op.reads:
                maker = self.op_by_name.get(name)
                if maker is not None and maker.task is not None and op.task is not None and maker.task != op.task:
                    found[(maker.task, op.task, name)] = None
        order = {op.name: place for place, op in enumerate(self.ops)}
        ranked = sorted(found, key=lambda edge: (edge[0], edge[1], order[edge[2]]))
        return tuple(Edge(name, source, target) for source, target, name in ranked)

    @cached_property
    def taskgraphs(self) -> tuple[TaskGraph, ...]:
        return tuple(self._taskgraph(index, spec) for index, spec in enumerate(self.tasks))

    def _taskgraph(self, index: int, spec: StrategySpec) -> TaskGraph:
        ops = tuple(op for op in self.ops if op.task == index)
        made = {op.name for op in ops}
        takes = dict.fromkeys(name for op in ops for name in op.reads if name not in made)
        leaving = {edge.name for edge in self.edges if edge.source == index} | set(self.output_names)
        return TaskGraph(index, spec, ops, tuple(takes), tuple(op.name for op in ops if op.name in leaving))

    @cached_property
    def storage_roots(self) -> dict[str, str]:
        """The value whose storage each value lives in; a result that views several is joined to the first."""
        roots = {name: name for name in self.leaves}
        picked: dict[tuple[str, Argument], str] = {}
        for op in self.ops:
            if op.target == "python.getitem" and isinstance(op.args[0], Ref):
                # the results of an operator that makes new ones have a storage each
                source = op.args[0].name
                own = picked.setdefault((source, op.args[1]), op.name)
                roots[op.name] = roots[source] if self._is_view(source) else own
            else:
                roots[op.name] = roots[op.views[0]] if op.views else op.name
        return roots

    def _is_view(self, name: str) -> bool:
        maker = self.op_by_name.get(name)
        return maker is None or bool(maker.views) or maker.target == "python.getitem"

    @cached_property
    def written(self) -> dict[str, tuple[Op, ...]]:
        """The storages that change in place, each with its writers in order; a write to a view is a write to its root."""
        found: dict[str, dict[str, Op]] = {}
        for op in self.ops:
            for name in op.writes:
                found.setdefault(self.storage_roots[name], {})[op.name] = op
        return {root: tuple(ops.values()) for root, ops in found.items()}

    @cached_property
    def feeders(self) -> dict[str, tuple[str, ...]]:
        """What each operator must run after: the makers of what it reads, and earlier writers to those storages."""
        found: dict[str, tuple[str, ...]] = {}
        writers: dict[str, list[str]] = {}
        for op in self.ops:
            roots = dict.fromkeys(self.storage_roots[name] for name in op.reads)
            before = [writer for root in roots for writer in writers.get(root, ())]
            found[op.name] = tuple(dict.fromkeys([*(name for name in op.reads if name in self.op_by_name), *before]))
            for name in op.writes:
                writers.setdefault(self.storage_roots[name], []).append(op.name)
        return found

    @cached_property
    def known_from_batch(self) -> frozenset[str]:
        """Values that the batch, constants and unchanging buffers decide alone, and that nothing changes in place."""
        known = {leaf.name for leaf in (*self.inputs, *self.buffers, *self.constants)} - self.written.keys()
        for op in self.ops:
            is_plain = op.random is None and not op.writes and not op.target.startswith("function.")
            if is_plain and self.storage_roots[op.name] not in self.written and known.issuperset(op.reads):
                known.add(op.name)
        return frozenset(known)

    @cached_property
    def needs_grad(self) -> frozenset[str]:
        """Values through which a gradient may flow from the loss back to a trainable parameter.

        Conservative: an operator's differentiable result needs a gradient if one of its arguments does.
        """
        return frozenset(self._depends_on_parameters & self._has_a_say)

    @cached_property
    def _has_a_say(self) -> set[str]:
        """Values on which the loss, or what goes to other stages, depends by autograd; without any of these, all values."""
        roots = self.storage_roots
        ends = [out for out in self.outputs if out.role in ("loss", "total") or out.role.startswith("give.")]
        needed = {name for out in ends for name in refs_in(out.value)}
        if not needed:
            return set(roots)
        memory = {roots[name] for name in needed}  # what is written to is the same value under each of its names
        for op in reversed(self.ops):
            counts = op.name in needed or roots[op.name] in memory & self.written.keys()
            if _flows(op) and (counts or any(roots[name] in memory for name in op.writes)):
                needed.update(op.reads)
                memory.update(roots[name] for name in op.reads)
        return {name for name, root in roots.items() if name in needed or root in memory & self.written.keys()}

    @cached_property
    def _depends_on_parameters(self) -> set[str]:
        needing = {leaf.name for leaf in self.parameters if leaf.trainable}
        needing |= {leaf.name for leaf in self.taken if leaf.needs_grad}
        for op in self.ops:
            if not needing.isdisjoint(op.writes):
                needing.add(op.name)  # the same tensor, also where autograd is off
            if _flows(op) and _differentiable(op.type) and not needing.isdisjoint(op.reads):
                needing.add(op.name)
                # what is written to and returned carries the gradient of what was written, under each of its names;
                # what is only written to does not (the running statistics of a batch norm)
                written = {self.storage_roots[name] for name in op.writes if op.views}
                needing.update(name for root in written for name in self._aliases[root])
        return needing

    @cached_property
    def _aliases(self) -> dict[str, list[str]]:
        """The names of each storage."""
        found: dict[str, list[str]] = {}
        for name, root in self.storage_roots.items():
            found.setdefault(root, []).append(name)
        return found

    def parameters_of(self, task: int) -> tuple[Parameter, ...]:
        """The parameters that a TaskGraph's operators use, in order of first use."""
        by_name = {parameter.name: parameter for parameter in self.parameters}
        taken = (name for op in self.ops if op.task == task for name in op.reads)
        return tuple(by_name[name] for name in dict.fromkeys(taken) if name in by_name)


def _flows(op: Op) -> bool:
    """True unless autograd stops here."""
    return op.grad and not op.target.startswith(("aten.detach.", "aten.alias_copy."))


def _differentiable(kind: Type) -> bool:
    if isinstance(kind, ListType):
        return any(_differentiable(item) for item in kind.items)
    return isinstance(kind, TensorType) and kind.is_differentiable


def refs_in(argument: Argument) -> Iterator[str]:
    """Names of the values in an argument, nested tuples included."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs_in(item)


def map_refs(argument: Argument, change: Callable[[str], Argument]) -> Argument:
    """The argument with each use of a value replaced by ``change(name)``."""
    if isinstance(argument, Ref):
        return change(argument.name)
    if isinstance(argument, tuple):
        return tuple(map_refs(item, change) for item in argument)
    return argument
