"""Find the linear layers whose results go into a cross entropy, by nothing but what moves rows or maps each logit.

What moves rows (views, slices, transposes) does the same to the rows of the layer's argument, so it may as well be done
before the layer: x[:, :-1] W' is (x W')[:, :-1], with features in the place of classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from epl.ir.graph import Argument, Graph, Op, Ref
from epl.ir.types import TensorType
from epl.passes.chunked_operator import Map
from epl.passes.row_moves import IDENTITIES, MOVES, Moved, No
from epl.sharding.local import LocalForm
from epl.sharding.options import Call
from epl.stage.stage import Stage

__all__ = ["Head", "Refusal", "Step", "find_heads"]

_LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default")
_FORMS = ("cross_entropy_classes", *(f"mean.{target}" for target in _LOSSES))


@dataclass(frozen=True)
class Step:
    """An operator between the layer and the loss.

    Args:
        op: The operator.
        dim: Where the classes are in its result.
        moved: The same done to rows; None if it leaves them.
        map: What it does to each logit; None if nothing.
    """

    op: Op
    dim: int
    moved: Moved | None = None
    map: Map | None = None


@dataclass(frozen=True)
class Head:
    """A linear layer and its cross entropy.

    Args:
        linear: The layer.
        dim: Where the classes are in its result.
        x: Its argument.
        weight: Its weight, (classes, features), or (features, classes) if it ``is_flipped``.
        bias: Its bias, if there is one.
        steps: What is between the two, in order.
        loss: The cross entropy, and its arguments by name.
        form: Its local form, if devices share it out.
        metrics: Other operators that read the logits; no gradient flows through them.
        is_flipped: See ``weight``.
    """

    linear: Op
    dim: int
    x: str
    weight: str
    bias: str | None
    steps: tuple[Step, ...]
    loss: Op
    arguments: dict[str, Argument]
    form: LocalForm | None = None
    metrics: tuple[Op, ...] = ()
    is_flipped: bool = False

    @property
    def ops(self) -> tuple[Op, ...]:
        """The layer, and what is between it and the loss."""
        return (self.linear, *(step.op for step in self.steps))

    @property
    def dims(self) -> tuple[int, ...]:
        """Where the classes are in the result of each of ``ops``."""
        return (self.dim, *(step.dim for step in self.steps))

    def place_read_by(self, op: Op) -> int:
        """The first of ``ops`` that an operator reads."""
        return next(place for place, made in enumerate(self.ops) if made.name in op.reads)

    def last_read_by(self, op: Op) -> int:
        """The last of ``ops`` that an operator reads."""
        return max(place for place, made in enumerate(self.ops) if made.name in op.reads)

    @property
    def maps(self) -> tuple[Map, ...]:
        """What happens to each logit."""
        return tuple(step.map for step in self.steps if step.map is not None)

    @property
    def ref(self) -> str:
        """The logits as the loss takes them."""
        return self.ops[-1].name


@dataclass(frozen=True)
class Refusal:
    """A cross entropy whose logits stay whole, and why."""

    loss: Op
    why: str


def find_heads(stage: Stage) -> Iterator[Head | Refusal]:
    """Every cross entropy of a stage, with its linear layer or the reason why there is none."""
    for op in stage.graph.ops:
        function = stage.functions.get(op.target)
        form = function if isinstance(function, LocalForm) else None
        if op.target in _LOSSES or (form is not None and ("cross_entropy" in form.form or "nll_" in form.form)):
            try:
                yield _Finder(stage.graph, op, form).head()
            except No as why:
                yield Refusal(op, str(why))


class _Finder:
    """Looks for the layer of one loss."""

    def __init__(self, graph: Graph, loss: Op, form: LocalForm | None) -> None:
        self.graph, self.loss, self.form = graph, loss, form
        self.arguments = dict(loss.kwargs) if form is not None else Call(loss, graph.type_of).arguments
        kind = self._type(self._ref(self.arguments["self"]))
        self.dim = min(1, len(kind.shape) - 1)
        self.num_classes = kind.sizes[self.dim]

    def head(self) -> Head:
        """The layer and its loss, or `No`."""
        if self.form is not None and self.form.form not in _FORMS:
            raise No(f"its devices share it out as {self.form.form}")
        if self._type(self._ref(self.arguments["target"])).is_differentiable:
            raise No("its targets are probabilities, which are as large as the logits")
        class_weight = self.arguments["weight"]
        if isinstance(class_weight, Ref) and class_weight.name in self.graph.needs_grad:
            raise No("its class weights take a gradient")
        linear, between = self._walk_back()
        x, weight, bias, is_flipped = self._layer(linear)
        rank, shape = len(self._type(linear.name).shape), self._type(weight).shape
        steps: list[Step] = []
        for op in between:
            dim = steps[-1].dim if steps else rank - 1
            if op.target == "aten.add.Tensor":
                if bias is not None or any(step.map for step in steps):
                    raise No(f"{_text(op)} adds to its logits")
                bias = self._added(op)
                steps.append(Step(op, dim))
            else:
                steps.append(self._step(op, dim))
        is_same = len(shape) == 2 and shape[int(is_flipped)] == self.num_classes
        if not is_same or (steps[-1].dim if steps else rank - 1) != self.dim:
            raise No(f"its classes are not the results of {_text(linear)}")
        self._check_loss(steps)
        head = Head(
            linear, rank - 1, x, weight, bias, tuple(steps), self.loss, self.arguments, self.form, (), is_flipped
        )
        self._check_memory(head)
        return replace(head, metrics=self._metrics(head))

    def _walk_back(self) -> tuple[Op, list[Op]]:
        """The layer, and what is between it and the loss."""
        name, between = self._ref(self.arguments["self"]), []
        while (op := self.graph.op_by_name.get(name)) is not None:
            if op.target in _LAYERS:
                return op, between[::-1]
            if op.target not in (*MOVES, *IDENTITIES, *_MAPS, "aten.add.Tensor"):
                raise No(f"its logits come from {_text(op)}, not from a linear layer")
            between.append(op)
            refs = [argument.name for argument in op.args if isinstance(argument, Ref)]
            if op.target == "aten.add.Tensor":
                refs = [ref for ref in refs if not self._is_bias(ref)]
            if not refs or not isinstance(self.graph.type_of(refs[0]), TensorType):
                raise No(f"its logits come from {_text(op)}, not from a linear layer")
            name = refs[0]
        leaf = self.graph.leaves[name]
        raise No(f"its logits come from {'another stage' if leaf in self.graph.taken else leaf.name}")

    def _layer(self, op: Op) -> tuple[str, str, str | None, bool]:
        call = Call(op, self.graph.type_of)
        names = _LAYERS[op.target]
        x, weight = (self._ref(call[name]) for name in names[:2])
        bias = self._ref(call[names[2]]) if len(names) > 2 and isinstance(call[names[2]], Ref) else None
        if op.target == "aten.addmm.default" and (call["beta"], call["alpha"]) != (1, 1):
            raise No(f"{_text(op)} scales what it adds")
        if op.target == "aten.addmm.default" and (bias is None or not self._is_bias(bias)):
            raise No(f"{_text(op)} adds to its logits what is not a bias")
        if len(self._type(x).shape) < 2 and op.target != "aten.linear.default":
            raise No(f"{_text(op)} multiplies a vector")
        return x, weight, bias, op.target != "aten.linear.default"

    def _step(self, op: Op, dim: int) -> Step:
        """An operator that moves rows, or changes each logit."""
        source = self._type(self._ref(op.args[0]))
        result = self._type(op.name)
        if op.target in MOVES:
            moved = MOVES[op.target](Call(op, self.graph.type_of), source, result, dim)
            return Step(op, moved.dim, moved)
        if op.target in IDENTITIES:
            return Step(op, dim, map=None if source.dtype == result.dtype else Map("to", result.dtype))
        if op.target == "aten.log_softmax.int":
            if Call(op, self.graph.type_of).dim("dim") != dim:
                raise No(f"{_text(op)} is not over its classes")
            # the cross entropy of log-probabilities is that of the logits: theirs sum up to 1
            return Step(op, dim, map=None if source.dtype == result.dtype else Map("to", result.dtype))
        if op.target == "aten.tanh.default":
            return Step(op, dim, map=Map("tanh", result.dtype))
        number = op.args[1]
        if not isinstance(number, (int, float)):
            raise No(f"{_text(op)} changes its logits by a tensor")
        is_product = op.target.startswith("aten.mul.")
        return Step(op, dim, map=Map("times", result.dtype, float(number) if is_product else 1 / number))

    def _added(self, op: Op) -> str:
        call = Call(op, self.graph.type_of)
        (name,) = [ref for _, ref in call.refs if self._is_bias(ref)]
        if call["alpha"] != 1 or self._type(name).dtype != self._type(op.name).dtype:
            raise No(f"{_text(op)} adds to its logits what is not a bias")
        return name

    def _is_bias(self, name: str) -> bool:
        shape = self._type(name).shape
        return prod(self._type(name).sizes) == self.num_classes and shape[-1:] == (self.num_classes,)

    def _check_loss(self, steps: list[Step]) -> None:
        name = self.form.form if self.form is not None else self.loss.target
        maps = [step.op for step in steps if step.op.target in _MAPS]
        normal = [op for op in maps if op.target == "aten.log_softmax.int"]
        if "nll_loss" in name and not normal:
            raise No("it is of what is not the result of log_softmax")
        if normal and normal != maps[-1:]:
            raise No(f"the results of {_text(normal[0])} are changed before it")

    def _check_memory(self, head: Head) -> None:
        """Logits may go only if nobody else needs them, and the layer may run later only if nothing changes meanwhile."""
        graph = self.graph
        place = {op.name: number for number, op in enumerate(graph.ops)}
        for op in head.ops:
            if graph.storage_roots[op.name] in graph.written:
                raise No(f"its logits ({_text(op)}) are changed in place")
            if op.name in graph.output_names:
                raise No(f"its logits ({_text(op)}) are a result of the step")
            if op.grad != self.loss.grad:
                raise No(f"autograd is off for {_text(op)} or for the loss, and on for the other")
        for name in (head.x, head.weight, *([head.bias] if head.bias else [])):
            for writer in graph.written.get(graph.storage_roots[name], ()):
                if place[head.linear.name] < place[writer.name] < place[self.loss.name]:
                    raise No(f"{_text(writer)} changes {name} in place between the linear layer and the loss")

    def _metrics(self, head: Head) -> tuple[Op, ...]:
        """Other readers of the logits, in order."""
        follows = {before.name: after.name for before, after in zip(head.ops, (*head.ops[1:], self.loss), strict=True)}
        found: dict[str, Op] = {}
        for name, following in follows.items():
            for reader in self.graph.readers.get(name, ()):
                if reader.name != following:
                    found[reader.name] = reader
        for reader in found.values():
            if reader.name in self.graph.needs_grad:
                raise No(f"{_text(reader)} uses its logits too, and a gradient flows through it")
        return tuple(op for op in self.graph.ops if op.name in found)

    def _ref(self, argument: Any) -> str:
        if not isinstance(argument, Ref):
            raise No("an argument is not a tensor")
        return argument.name

    def _type(self, name: str) -> TensorType:
        kind = self.graph.type_of(name)
        if not isinstance(kind, TensorType):
            raise No(f"{name} is not a tensor")
        return kind


# the names of argument, weight and bias
_LAYERS: dict[str, tuple[str, ...]] = {
    "aten.linear.default": ("input", "weight", "bias"),
    "aten.addmm.default": ("mat1", "mat2", "self"),
    "aten.matmul.default": ("self", "other"),
    "aten.mm.default": ("self", "mat2"),
}
_MAPS = (
    *("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"),
    *("aten.tanh.default", "aten.log_softmax.int"),
)


def _text(op: Op) -> str:
    place = f" at {op.source}" if op.source else ""
    return f"{op.name} = {op.target}{place}"
