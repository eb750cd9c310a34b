"""The element types of an operator's results on inputs of other types than those it was captured with.

A table would be a second truth beside PyTorch's rules of promotion; so the operator runs once on fake tensors. Shapes stay
as captured: sizes that are known only at run time would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from epl.capture.fakes import Fakes
from epl.ir.graph import Argument, Op, Ref, map_refs
from epl.ir.types import ListType, ScalarType, TensorType, Type
from epl.stage.codegen import resolve

__all__ = ["ResultTypes", "is_pointwise", "with_dtype"]

_CPU = torch.device("cpu")  # the rules of promotion are the same everywhere, and this device is


class ResultTypes:
    """Finds the types of results; the same call is tried once."""

    def __init__(self) -> None:
        self._fakes = Fakes()
        self._found: dict[str, Type | None] = {}

    def of(self, op: Op, types: Mapping[str, Type]) -> Type | None:
        """The type of the operator's result on inputs of these types; None if it does not run on fake tensors."""
        # repr, since 1, 1.0 and True are one key, but not one promotion
        call = [map_refs(arg, lambda name: str(types[name])) for arg in (*op.args, *(value for _, value in op.kwargs))]
        key = f"{op.target} {op.type} {call!r} {[key for key, _ in op.kwargs]}"
        if key not in self._found:
            self._found[key] = self._try(op, types)
        return self._found[key]

    def _try(self, op: Op, types: Mapping[str, Type]) -> Type | None:
        args = [self._value(arg, types) for arg in op.args]
        kwargs = {key: self._value(arg, types) for key, arg in op.kwargs}
        try:
            with self._fakes.mode, torch.no_grad():
                return _retyped(op.type, resolve(op.target)(*args, **kwargs))
        except Exception:  # it needs values, or refuses these types
            return None

    def _value(self, argument: Argument, types: Mapping[str, Type]) -> Any:
        if isinstance(argument, Ref):
            return self._stand_in(types[argument.name])
        if isinstance(argument, tuple):
            return [self._value(item, types) for item in argument]
        return _CPU if isinstance(argument, torch.device) else argument

    def _stand_in(self, kind: Type) -> Any:
        if isinstance(kind, TensorType):
            return self._fakes.tensor(kind, _CPU)
        if isinstance(kind, ListType):
            return [self._stand_in(item) for item in kind.items]
        assert isinstance(kind, ScalarType)
        return {"int": 1, "float": 1.0, "bool": True, "none": None}[kind.kind]


def _retyped(kind: Type, result: Any) -> Type:
    """The captured type with the element types of a result."""
    if isinstance(kind, TensorType) and isinstance(result, torch.Tensor):
        return replace(kind, dtype=result.dtype)
    if isinstance(kind, ListType):
        return ListType(tuple(_retyped(item, each) for item, each in zip(kind.items, result, strict=True)))
    return kind


def with_dtype(kind: Type, dtype: torch.dtype, *, instead_of: torch.dtype) -> Type:
    """The type with another element type wherever it had this one."""
    if isinstance(kind, ListType):
        return ListType(tuple(with_dtype(item, dtype, instead_of=instead_of) for item in kind.items))
    return replace(kind, dtype=dtype) if isinstance(kind, TensorType) and kind.dtype == instead_of else kind


def is_pointwise(target: str) -> bool:
    """True if torch tags the operator as one that works element by element, by the rules of promotion."""
    return torch.Tag.pointwise in getattr(resolve(target), "tags", ())
