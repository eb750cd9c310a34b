"""Mixed precision: matrix products in bfloat16 or float16, what is delicate in float32, with every cast in the graph.

torch.autocast decides while the model runs and keeps a low-precision copy of each weight until the step ends. As operators,
casts are seen by all that comes later: planning counts them, a pipeline sends what is low in its own type, and the cast of
a weight, made anew for each use, need not be kept for backward. A weight itself and its gradient stay float32.

    linear(x, w, b)      =>   x_bf16 = to(x, bfloat16)      shared by all that read x as it is now
                              w_bf16 = to(w, bfloat16)      this use's own
                              b_bf16 = to(b, bfloat16)
                              linear(x_bf16, w_bf16, b_bf16)

An operator is of one of these kinds (:mod:`epl.passes.precision_lists`): *allowed* ones get low precision, *denied* ones
float32, *fixed* ones what they were captured with; the others run on what comes. Where torch would refuse that, they get
what they were captured with, which they ran on. Memory decides before numbers do: what an operator writes to, it gets
itself and not a cast of it.

Source: Micikevicius et al. 2018, Mixed Precision Training; torch.amp for the lists. What is computed from batch and
constants alone (positions of rotary embeddings, masks) stays as captured: it costs little, and positions beyond 256 are
no bfloat16 numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import Any, TypeGuard

import torch

from epl.ir.graph import Argument, Graph, Op, Output, Parameter, Ref, map_refs, refs_in
from epl.ir.rename import renamed
from epl.ir.types import ListType, TensorType, Type
from epl.passes.precision_lists import (
    is_allowed,
    is_denied,
    is_fixed,
    is_retyping,
    is_whole_view,
    keeps_dtype,
    may_overflow_by_numbers,
    mixes,
)
from epl.passes.precision_types import ResultTypes, is_pointwise, with_dtype

__all__ = ["CAST", "is_weight_cast", "mixed_precision", "precision_lines"]

CAST = "aten.to.dtype"
LOW = (torch.bfloat16, torch.float16)
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}
Casts = dict[str, torch.dtype]  # what an operator reads -> the type it is to get it in


def mixed_precision(graph: Graph, dtype: torch.dtype) -> Graph:
    """The graph with casts, and with the types that values then have; what it gives has the types that it had.

    Args:
        graph: A captured graph, whole; with TaskGraphs or without.
        dtype: ``torch.bfloat16`` or ``torch.float16``, which needs its loss scaled (:mod:`epl.runtime.loss_scale`).
    """
    assert dtype in LOW, dtype
    rewrite = _Rewrite(graph, dtype)
    for op in graph.ops:
        rewrite.add(op)
    return rewrite.end()


def is_weight_cast(graph: Graph, op: Op) -> bool:
    """True for the cast of a weight, or of a part of one: one operator reads it.

    Of a view of all of a weight (``w.t()``) the cast comes first, and the view is of the cast.
    """
    if op.target != CAST or op.views or not isinstance(op.args[0], Ref):
        return False  # a user's own .to() is said to view its argument
    root = graph.leaves.get(graph.storage_roots[op.args[0].name])
    return isinstance(root, Parameter)


def precision_lines(graph: Graph) -> list[str]:
    """What runs in which precision, a line for each kind of operator with floating inputs, and one for the casts."""
    counts: dict[str, Counter[str]] = {}
    casts = {op.name: op for op in graph.ops if op.target == CAST and not op.views}
    for op in graph.ops:
        types = (graph.type_of(name) for name in op.reads)
        floats = sorted({str(kind.dtype).removeprefix("torch.") for kind in types if _is_floating(kind)})
        if floats and op.name not in casts and not op.target.startswith("python."):
            counts.setdefault(op.target, Counter())[" and ".join(floats)] += 1
    lines = [
        f"{target}: {', '.join(f'{count} in {name}' for name, count in sorted(found.items()))}"
        for target, found in sorted(counts.items())
    ]
    num_weights = sum(is_weight_cast(graph, op) for op in casts.values())
    return [
        *lines,
        f"casts: {num_weights} of weights, one for each use, and {len(casts) - num_weights} of other values",
    ]


class _Rewrite:
    """The new graph as far as it is written."""

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self.graph, self.dtype = graph, dtype
        self.types: dict[str, Type] = {leaf.name: leaf.type for leaf in graph.leaves.values()}
        self.captured: dict[str, Type] = {**self.types, **{op.name: op.type for op in graph.ops}}
        self.roots = dict(graph.storage_roots)
        self.ops: list[Op] = []
        self.results = ResultTypes()
        self.pinned = frozenset(self._pinned())
        self.renamed: dict[str, str] = {}  # what is pinned -> its cast, which all read in its place
        self.num_writes: Counter[str] = Counter()  # to each storage, so far
        self.shared: dict[tuple[object, ...], str] = {}
        self.made: dict[str, Op] = {}
        self.retaken: set[str] = set()  # views of weights that have been taken anew

    # -- what each operator gets ------------------------------------------------------------------------------------

    def add(self, captured: Op) -> None:
        """Write an operator, after the casts that it needs."""
        op = renamed(captured, self.renamed)
        casts, kind = self._choose(op)
        op = renamed(op, {name: self._cast(name, casts[name], op) for name in casts})
        self.made[op.name] = op = replace(op, type=kind)
        self.ops.append(op)
        self.types[op.name] = kind
        for name in op.writes:
            self.num_writes[self.roots[name]] += 1
        if op.name in self.pinned and kind != captured.type and isinstance(captured.type, TensorType):
            self.renamed[op.name] = new = self._cast(op.name, captured.type.dtype, op)
            self.roots[new] = op.name

    def _choose(self, op: Op) -> tuple[Casts, Type]:
        """The casts of what an operator reads, and the type of its result."""
        as_captured = {
            name: self._float_of(self.captured[name])
            for name in self._castable(op)
            if self.types[name] != self.captured[name]
        }
        if not is_fixed(op) and not self._overflows(op):
            casts = self._by_kind(op)
            if casts is not None:
                kind = self._type_of_result(op, casts)
                if kind is not None:
                    return casts, kind
        kind = self._type_of_result(op, as_captured) if op.writes else None  # what it writes to is as it is
        return as_captured, kind or op.type

    def _by_kind(self, op: Op) -> Casts | None:
        """The casts that the kind of an operator asks for; None if what comes does not go together."""
        now = {name: self._float_of(self.types[name]) for name in self._castable(op)}
        is_in_place = any(name in op.views for name in op.writes)
        if is_allowed(op) and not is_in_place and torch.float64 not in now.values():
            if not self.graph.known_from_batch.issuperset(op.reads):
                return {name: self.dtype for name, dtype in now.items() if dtype == torch.float32}
        elif is_denied(op) and not is_in_place:
            return {name: torch.float32 for name, dtype in now.items() if dtype in LOW}
        if mixes(op, is_pointwise=is_pointwise(op.target)):
            return {}
        if is_in_place:
            return self._like_written(op, now)
        before = {self._float_of(self.captured[name]) for name in now}
        return {} if len(set(now.values())) <= len(before) else None

    def _like_written(self, op: Op, now: Casts) -> Casts:
        """What is put into a tensor gets its type, if it had it when it was captured."""
        written = next(name for name in op.writes if name in op.views)
        if not _is_floating(self.types[written]):
            return {}
        before, after = self._float_of(self.captured[written]), self._float_of(self.types[written])
        alike = (name for name in now if self._float_of(self.captured[name]) == before)
        return {name: after for name in alike if now[name] != after}

    def _castable(self, op: Op) -> Iterator[str]:
        """The floating tensors that an operator reads and does not write to."""
        return (name for name in op.reads if name not in op.writes and _is_floating(self.types[name]))

    def _overflows(self, op: Op) -> bool:
        """True if a number among the arguments (the fill of a mask) would be infinite in the type of a lowered input."""
        lowered = [self.types[name] for name in op.reads if self.types[name] != self.captured[name]]
        dtypes = {kind.dtype for kind in lowered if _is_floating(kind)}
        return any(_is_beyond(op, dtype) for dtype in dtypes if dtype in LOW)

    def _type_of_result(self, op: Op, casts: Casts) -> Type | None:
        types = {name: self.types[name] for name in op.reads}
        for name, dtype in casts.items():
            types[name] = self._float_type(name, dtype)
        if all(kind == self.captured[name] for name, kind in types.items()):
            return op.type
        if op.target == "python.getitem":
            return _item(types, op)
        if keeps_dtype(op):
            first = op.views[0] if op.views else op.reads[0]
            captured, now = self.captured[first], types[first]
            if isinstance(captured, TensorType) and isinstance(now, TensorType):
                return with_dtype(op.type, now.dtype, instead_of=captured.dtype)
        return self.results.of(op, types)

    @staticmethod
    def _float_of(kind: Type) -> torch.dtype:
        assert isinstance(kind, TensorType)
        return kind.dtype

    # -- casts ------------------------------------------------------------------------------------------------------

    def _cast(self, name: str, dtype: torch.dtype, reader: Op) -> str:
        """The name of the value in another type, for one reader.

        A cast is shared by readers that see the same numbers and run together: of one TaskGraph, one recompute segment,
        one mode of autograd. That of a weight is not shared.
        """
        root = self.roots[name]
        if isinstance(self.graph.leaves.get(root), Parameter):
            return self._cast_weight(name, dtype, reader)
        key = (name, dtype, self.num_writes[root], *_place(reader).values())
        if key not in self.shared:
            self.shared[key] = self._write_cast(name, dtype, reader)
        return self.shared[key]

    def _cast_weight(self, name: str, dtype: torch.dtype, reader: Op) -> str:
        """The cast of a weight; a view of a whole one is taken anew, of the cast, so that all of them are alike."""
        view = self.made.get(name)
        if view is None or not is_whole_view(view) or view.grad != reader.grad:
            return self._write_cast(name, dtype, reader)
        cast = self._cast_weight(view.views[0], dtype, reader)
        self.retaken.add(name)
        kind = self._float_type(name, dtype)
        return self._write_new(name, replace(renamed(view, {view.views[0]: cast}), type=kind, **_place(reader)))

    def _write_cast(self, name: str, dtype: torch.dtype, reader: Op) -> str:
        kind = self._float_type(name, dtype)
        # as the reader in all that says where and how it runs
        cast = replace(
            reader, type=kind, target=CAST, args=(Ref(name), dtype), kwargs=(), writes=(), views=(), random=None
        )
        return self._write_new(name, cast)

    def _float_type(self, name: str, dtype: torch.dtype) -> TensorType:
        kind = self.types[name]
        assert isinstance(kind, TensorType)
        return replace(kind, dtype=dtype)

    def _write_new(self, base: str, op: Op) -> str:
        """Write an operator that the captured graph does not have."""
        assert isinstance(op.type, TensorType)
        name = self._new_name(f"{base}_{_SHORT[op.type.dtype]}")
        self.ops.append(replace(op, name=name))
        self.types[name] = self.captured[name] = op.type
        self.roots[name] = name
        return name

    def _new_name(self, base: str) -> str:
        name, number = base, 0
        while name in self.captured:
            number += 1
            name = f"{base}_{number}"
        return name

    # -- memory -----------------------------------------------------------------------------------------------------

    def _pinned(self) -> Iterator[str]:
        """Values that have to keep their captured type from the start.

        Memory that changes in place, and that an operator shares or changes only while the type is the captured one: a
        user's ``x.float()`` that is x itself, the user's own function that writes to its argument, a mask's large number.
        """
        for op in self.graph.ops:
            touched = {self.roots[name] for name in (*op.views, *op.writes)} & self.graph.written.keys()
            if touched and (is_fixed(op) or is_retyping(op) or (op.writes and _is_beyond(op, self.dtype))):
                yield from touched - self.graph.leaves.keys()

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> Graph:
        """The graph, with what it gives cast to the types that it had."""
        outputs = tuple(self._output(output) for output in self.graph.outputs)
        read = {name for output in outputs for name in refs_in(output.value)}
        ops: list[Op] = []
        for op in reversed(self.ops):
            if op.name not in self.retaken or op.name in read:
                ops.append(op)
                read.update(op.reads)
        return replace(self.graph, ops=tuple(reversed(ops)), outputs=outputs)

    def _output(self, output: Output) -> Output:
        def change(captured: str) -> Argument:
            name, kind = self.renamed.get(captured, captured), self.captured[captured]
            if self.types[name] == kind or not isinstance(kind, TensorType):
                return Ref(name)
            maker = self.graph.op_by_name[captured]
            return Ref(self._cast(name, kind.dtype, replace(maker, segment=None, autocast="")))

        return replace(output, value=map_refs(output.value, change))


def _place(op: Op) -> dict[str, Any]:
    """Where and how an operator runs: what it shares with what is written for it alone."""
    return {"task": op.task, "tag": op.tag, "segment": op.segment, "grad": op.grad, "autocast": op.autocast}


def _is_floating(kind: Type) -> TypeGuard[TensorType]:
    return isinstance(kind, TensorType) and kind.dtype.is_floating_point


def _is_beyond(op: Op, dtype: torch.dtype) -> bool:
    """True if a number among the arguments is finite, but not in this type."""
    largest = torch.finfo(dtype).max
    whole = may_overflow_by_numbers(op, is_pointwise=is_pointwise(op.target))

    def is_large(argument: Argument) -> bool:
        if isinstance(argument, tuple):
            return any(map(is_large, argument))
        if not isinstance(argument, float) and not (whole and isinstance(argument, int)):
            return False
        return isfinite(argument) and abs(argument) > largest

    return any(map(is_large, (*op.args, *(value for _, value in op.kwargs))))


def _item(types: dict[str, Type], op: Op) -> Type:
    """The type of the item that is picked."""
    source, place = op.args
    assert isinstance(source, Ref)
    kind = types[source.name]
    assert isinstance(kind, ListType)
    assert isinstance(place, int)
    return kind.items[place]
