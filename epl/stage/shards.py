"""The operators of a ``split`` stage as one rank runs them: on shards, with the conversions between them.

A conversion becomes an operator of its own, once for all uses that need it, before the first of them. A local form takes
the place of its operator. Both are functions that the runtime binds to the rank's group (`Exchange`, `LocalForm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from epl.ir.graph import Argument, Graph, Op, Ref, map_refs
from epl.ir.types import ListType, TensorType, Type
from epl.planner.split import SplitChoice
from epl.planner.values import value_names
from epl.sharding.conversions import Conversion
from epl.sharding.forms import Cut
from epl.sharding.local import Exchange, LocalForm
from epl.sharding.options import Call, Option
from epl.sharding.placements import Placement, Shard, local_shape

__all__ = ["ShardedStage", "shard_stage"]


@dataclass(frozen=True)
class ShardedStage:
    """One rank's operators.

    Args:
        ops: In order.
        names: Value of the graph -> the value that has it whole here, for what leaves the stage.
        functions: What operators with the targets ``exchange.*`` and ``form.*`` call.
    """

    ops: tuple[Op, ...]
    names: Mapping[str, str]
    functions: Mapping[str, Exchange | LocalForm]


def shard_stage(graph: Graph, choice: SplitChoice, ops: tuple[Op, ...], position: int) -> ShardedStage:
    """The operators of a stage on one rank.

    Args:
        graph: The graph.
        choice: How each operator runs.
        ops: The stage's operators.
        position: The rank's place in the group.
    """
    writer = _Writer(graph, choice, position)
    for op in ops:
        writer.op(op)
    names = {
        item.name.removeprefix("-> "): writer.leaving(item.name) for item in choice.problem.items if _leaves(item.name)
    }
    return ShardedStage(tuple(writer.ops), names, writer.functions)


def _leaves(item_name: str) -> bool:
    return item_name.startswith("-> ")


class _Writer:
    def __init__(self, graph: Graph, choice: SplitChoice, position: int) -> None:
        self.graph, self.position, self.num_ranks = graph, position, choice.problem.num_ranks
        self.options = choice.options
        self.value_of = value_names(graph)
        self.ops: list[Op] = []
        self.functions: dict[str, Exchange | LocalForm] = {}
        self.before: dict[tuple[str, int], Conversion] = {}  # (user, place of its argument) -> what stands there
        self.value_at: dict[tuple[str, int], str] = {}
        self._made: dict[tuple[str, Conversion, bool], str] = {}
        self._note_conversions(choice)

    def _note_conversions(self, choice: SplitChoice) -> None:
        for edge in choice.problem.edges:
            for use, conversion in zip(edge.uses, choice.conversions(edge), strict=True):
                if not conversion.is_nothing:
                    self.before[choice.problem.items[use.item].name, use.place] = conversion

    def op(self, op: Op) -> None:
        """Write one operator, and before it what its arguments need."""
        if op.target == "python.getitem":
            self.ops.append(replace(op, type=self._picked(op)))
            return
        call = Call(op, self.graph.type_of)
        option = self.options[op.name]
        refs = [(name, self._converted(ref, op, place)) for place, (name, ref) in enumerate(call.refs)]
        local = _with_refs(op, call, refs)
        kinds = self._local_types(op, option)
        local = replace(local, type=kinds)
        if option.sizes:
            assert isinstance(kinds, TensorType)
            local = _with_argument(local, call, option.sizes, kinds.shape)
        self.ops.append(self._as_form(local, call, option) if option.form else local)

    def leaving(self, item_name: str) -> str:
        """The whole of a value that leaves the stage; without a gradient of its own it may have no maker here."""
        name = item_name.removeprefix("-> ")
        maker = self.graph.op_by_name[name]
        end = replace(maker, name=item_name, writes=(), views=(), segment=None)
        return self._converted(name, end, 0)

    def _converted(self, ref: str, op: Op, place: int) -> str:
        conversion = self.before.get((op.name, place))
        if conversion is None:
            return ref
        key = (self.value_of[ref], conversion, op.grad)
        if key not in self._made:
            self._made[key] = self._exchange(ref, op, conversion)
        return self._made[key]

    def _exchange(self, ref: str, op: Op, conversion: Conversion) -> str:
        kind = self.graph.type_of(ref)
        assert isinstance(kind, TensorType)
        number = len(self.functions)
        name, target = f"{ref}_to_{number}", f"exchange.{_label(conversion)}_{number}"
        self.functions[target] = Exchange(conversion, kind.sizes)
        local = self._local(kind, conversion.value.target)
        views = (ref,) if conversion.value.kind == "nothing" else ()
        self.ops.append(
            Op(name, local, target, (Ref(ref),), task=op.task, segment=op.segment, grad=op.grad, views=views)
        )
        return name

    def _as_form(self, op: Op, call: Call, option: Option) -> Op:
        target = f"form.{option.form}_{len(self.functions)}"
        inputs = tuple(_shape_of(self.graph.type_of(ref)) for _, ref in call.refs)
        outputs = tuple(kind.sizes for kind in call.results)
        dtypes = tuple(kind.dtype for kind in call.results)
        self.functions[target] = LocalForm(option.form, Cut(option.inputs, option.outputs, inputs, outputs, dtypes))
        given = _arguments(op, call)
        return replace(op, target=target, args=(), kwargs=tuple(given.items()))

    def _local_types(self, op: Op, option: Option) -> Type:
        if isinstance(op.type, ListType):
            kinds = iter(option.outputs)
            return ListType(
                tuple(self._local(k, next(kinds)) if isinstance(k, TensorType) else k for k in op.type.items)
            )
        return self._local(op.type, option.outputs[0]) if isinstance(op.type, TensorType) else op.type

    def _picked(self, op: Op) -> Type:
        assert isinstance(op.args[0], Ref)
        source, place = op.args[0].name, op.args[1]
        maker = self.graph.op_by_name[source]
        kinds = self._local_types(maker, self.options[source])
        assert isinstance(kinds, ListType)
        assert isinstance(place, int)
        return kinds.items[place]

    def _local(self, kind: TensorType, placement: Placement) -> TensorType:
        if not isinstance(placement, Shard):
            return kind
        return TensorType(kind.dtype, local_shape(kind.sizes, placement, self.num_ranks, self.position))


def _label(conversion: Conversion) -> str:
    """``all_gather``, ``nothing_all_reduce``: what happens forward, and backward if that is something."""
    back = "" if conversion.gradient.kind == "nothing" else f"_{conversion.gradient.kind}"
    return conversion.value.kind + back


def _shape_of(kind: Type) -> tuple[int, ...]:
    return kind.sizes if isinstance(kind, TensorType) else ()


def _with_refs(op: Op, call: Call, refs: list[tuple[str, str]]) -> Op:
    """The operator with other values in the places of its tensors."""
    queues: dict[str, Iterator[str]] = {}
    for name in dict.fromkeys(name for name, _ in refs):
        queues[name] = iter([value for given, value in refs if given == name])
    renamed = {
        name: map_refs(value, lambda ref, name=name: _next(queues, name, ref, call))
        for name, value in call.arguments.items()
    }
    names = list(call.arguments)
    args = tuple(renamed[names[place]] for place in range(len(op.args)))
    now = {old: new for (_, old), (_, new) in zip(call.refs, refs, strict=True)}
    return replace(
        op,
        args=args,
        kwargs=tuple((key, renamed[key]) for key, _ in op.kwargs),
        writes=tuple(now.get(name, name) for name in op.writes),
        views=tuple(now.get(name, name) for name in op.views),
    )


def _next(queues: Mapping[str, Iterator[str]], name: str, ref: str, call: Call) -> Ref:
    is_tensor = (name, ref) in call.refs
    return Ref(next(queues[name])) if is_tensor else Ref(ref)


def _with_argument(op: Op, call: Call, name: str, value: Argument) -> Op:
    place = list(call.arguments).index(name)
    if place < len(op.args):
        return replace(op, args=(*op.args[:place], value, *op.args[place + 1 :]))
    return replace(op, kwargs=(*((key, given) for key, given in op.kwargs if key != name), (name, value)))


def _arguments(op: Op, call: Call) -> dict[str, Argument]:
    """All arguments by name, defaults too, as the operator now has them."""
    return {**call.arguments, **dict(zip(call.arguments, op.args, strict=False)), **dict(op.kwargs)}
