"""A linear layer, what follows it and its cross entropy, replaced by one operator in a stage's graph."""

from __future__ import annotations

from dataclasses import replace

from epl.ir.graph import Argument, Graph, Op, Ref
from epl.ir.types import ListType, TensorType
from epl.passes.chunked_operator import NONE, ChunkedLoss
from epl.passes.loss_heads import Head, Step
from epl.sharding.options import Call
from epl.stage.stage import Stage

__all__ = ["fused_argmax", "rewrite"]

Shape = tuple[int | None, ...]


def rewrite(stage: Stage, head: Head, operator: ChunkedLoss) -> Stage:
    """The stage with one operator in the place of a layer and its loss.

    Metrics that read the logits get them as before, without autograd, so that they are gone before the backward pass;
    unless they are the largest class of each row, which the operator finds.
    """
    return _Rewriter(stage, head, operator).stage()


class _Rewriter:
    def __init__(self, stage: Stage, head: Head, operator: ChunkedLoss) -> None:
        self.old, self.graph, self.head = stage, stage.graph, head
        self.functions = dict(stage.functions)
        self.made: list[Op] = []
        self._types: dict[str, TensorType] = {}
        self._taken = set(stage.graph.leaves) | set(stage.graph.op_by_name)
        self._steps = {step.op.name: step for step in head.steps}
        self._rows = {
            head.linear.name: head.x
        }  # the rows of features in the place of each value between layer and loss
        self._best = None if operator.cut is not None else fused_argmax(stage.graph, head)
        if self._best is not None:
            before = head.steps[: head.place_read_by(self._best)]
            operator = replace(operator, argmax_after=sum(step.map is not None for step in before))
        self.operator = operator

    def stage(self) -> Stage:
        sizes = {op.name for op in self.head.metrics if _is_size_of_rows(self.graph, self.head, op)}
        whole = [op for op in self.head.metrics if op.name not in sizes and op is not self._best]
        kept = self.head.ops[: 1 + max((self.head.last_read_by(op) for op in whole), default=-1)]
        late = [] if self._best is None else _dependent(self.graph, self._best, self.head.loss)
        for op in self.graph.ops:
            if op in kept:
                self.made.append(replace(op, grad=False))
            if op is self.head.loss:
                self._fused()
                self.made += late
            elif op.name in self._steps:
                self._move(self._steps[op.name])
            elif op.name in sizes:
                rows = self._rows[self.head.ops[self.head.place_read_by(op)].name]
                self.made.append(replace(op, args=(Ref(rows), *op.args[1:])))
            elif op not in (self.head.linear, self._best, *late):
                self.made.append(op)
        used = {op.target for op in self.made}
        functions = {target: function for target, function in self.functions.items() if target in used}
        return replace(self.old, graph=replace(self.graph, ops=tuple(self.made)), functions=functions)

    def _move(self, step: Step) -> None:
        """What an operator does to logits, done to rows of features."""
        op, moved = step.op, step.moved
        place = self.head.ops.index(op)
        source = self._rows[self.head.ops[place - 1].name]
        if moved is None:
            self._rows[op.name] = source
            return
        features = self._type(source).shape[self.head.dims[place - 1]]
        shape = tuple(features if dim == moved.dim else size for dim, size in enumerate(moved.shape))
        if moved.is_view:
            self._rows[op.name] = self._add(op, "aten.reshape.default", (Ref(source), _sizes(shape)), shape)
        else:
            args = (Ref(source), *op.args[1:])
            self._rows[op.name] = self._add(replace(op, kwargs=op.kwargs), op.target, args, shape)

    def _add(self, like: Op, target: str, args: tuple[Argument, ...], shape: Shape) -> str:
        """An operator that moves the elements of its first argument, named after another one."""
        source = args[0]
        assert isinstance(source, Ref)
        name = self._fresh(f"{like.name}_rows")
        self._types[name] = TensorType(self._type(source.name).dtype, shape)
        kwargs = like.kwargs if target == like.target else ()
        views = () if target in ("aten.index.Tensor", "aten.index_select.default") else (source.name,)
        made = Op(name, self._types[name], target, args, kwargs, like.task, like.tag, like.module, like.source)
        self.made.append(replace(made, views=views, segment=like.segment, grad=like.grad))
        return name

    def _fused(self) -> None:
        """The new operator, and before it what makes its arguments two dimensions, or one."""
        head = self.head
        like = Op(head.loss.name, head.loss.type, "", (), (), head.loss.task, head.loss.tag, head.loss.module)
        like = replace(like, source=head.loss.source, grad=head.loss.grad)  # no segment: its gradients are kept
        rows, dim = self._rows[head.ref], head.dims[-1]
        shape = self._type(rows).shape
        if dim != len(shape) - 1:
            order = (*(place for place in range(len(shape)) if place != dim), dim)
            rows = self._add(like, "aten.permute.default", (Ref(rows), order), tuple(shape[place] for place in order))
        target, class_weight = head.arguments["target"], head.arguments["weight"]
        assert isinstance(target, Ref)
        bias = None if head.bias is None else Ref(self._flat(like, head.bias, 1))
        flat = self._flat(like, target.name, 1)
        args = (Ref(self._flat(like, rows, 2)), Ref(head.weight), bias, Ref(flat), class_weight)
        numbers = range(len(self.functions) + 1)
        name = next(name for i in numbers if (name := f"loss.chunked_{i}") not in self.functions)
        self.functions[name] = self.operator
        self._results(replace(like, target=name, args=args), self._type(flat).shape)

    def _results(self, made: Op, rows: Shape) -> None:
        loss, best = self.head.loss, self._best
        kind = TensorType(self._type(loss.name).dtype, rows if self.operator.reduction == NONE else ())
        if best is None:
            self._result(loss, replace(made, type=kind))
            return
        both = self._fresh(f"{loss.name}_and_{best.name}")
        kinds = (kind, TensorType(self._type(best.name).dtype, rows))
        self.made.append(replace(made, name=both, type=ListType(kinds)))
        for place, op in enumerate((loss, best)):
            picked = replace(made, type=kinds[place], target="python.getitem", args=(Ref(both), place), grad=op.grad)
            self._result(op, picked)

    def _result(self, op: Op, made: Op) -> None:
        """What ``made`` gives as rows, in the shape and under the name of ``op``'s result."""
        if made.type == op.type:
            self.made.append(replace(made, name=op.name))
            return
        flat = self._fresh(f"{op.name}_rows")
        self.made.append(replace(made, name=flat))
        args = (Ref(flat), _sizes(self._type(op.name).shape))
        self.made.append(
            replace(made, name=op.name, type=op.type, target="aten.reshape.default", args=args, views=(flat,))
        )

    def _flat(self, like: Op, name: str, rank: int) -> str:
        """A value in so many dimensions: its first ones become one."""
        shape = self._type(name).shape
        if len(shape) == rank:
            return name
        last = shape[len(shape) - rank + 1 :]
        first = _sizes(shape[: len(shape) - len(last)])
        count: int | None = 1
        for size in first:
            count = None if size == -1 or count is None else count * size
        flat = (count, *last)
        return self._add(like, "aten.reshape.default", (Ref(name), _sizes(flat)), flat)

    def _fresh(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _type(self, name: str) -> TensorType:
        kind = self._types[name] if name in self._types else self.graph.type_of(name)
        assert isinstance(kind, TensorType)
        return kind


def _sizes(shape: Shape) -> tuple[int, ...]:
    return tuple(-1 if size is None else size for size in shape)


def fused_argmax(graph: Graph, head: Head) -> Op | None:
    """A metric that the chunks can compute: the largest class of the very rows that the loss is of."""
    for op in head.metrics:
        if op.target != "aten.argmax.default":
            continue
        call, at = Call(op, graph.type_of), head.place_read_by(op)
        is_of_classes = call["dim"] is not None and call.dim("dim") == head.dims[at] and not call["keepdim"]
        is_of_all = all(step.moved is None or step.moved.keeps_order for step in head.steps[at:])
        late = _dependent(graph, op, head.loss)
        may_wait = all(_may_wait(graph, each) for each in late) and head.loss.name not in {each.name for each in late}
        if is_of_classes and is_of_all and may_wait:
            return op
    return None


def _dependent(graph: Graph, op: Op, end: Op) -> list[Op]:
    """What hangs on an operator's result, as far as it stands before ``end``, or is that."""
    found: dict[str, Op] = {}
    names = {op.name}
    for each in graph.ops[: graph.ops.index(end) + 1]:
        if not names.isdisjoint(each.reads):
            found[each.name] = each
            names.add(each.name)
    return list(found.values())


def _may_wait(graph: Graph, op: Op) -> bool:
    """True if nothing but its result tells when an operator has run."""
    roots = (graph.storage_roots[name] for name in (op.name, *op.reads))
    is_plain = op.target.startswith(("aten.", "python.")) and op.random is None and op.segment is None
    return is_plain and not op.writes and not any(root in graph.written for root in roots)


def _is_size_of_rows(graph: Graph, head: Head, op: Op) -> bool:
    """A dimension of the logits that rows of features have too."""
    if op.target != "aten.sym_size.int":
        return False
    return Call(op, graph.type_of).dim("dim") != head.dims[head.place_read_by(op)]
