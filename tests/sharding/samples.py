"""Sample calls: what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epl.ir.graph import Op, Ref
from epl.ir.types import ListType, ScalarType, TensorType, Type
from epl.sharding.options import Call
from tests.sharding.threads import SEED

_generator = torch.Generator().manual_seed(SEED)


def real(*shape: int) -> torch.Tensor:
    """Random numbers between 0.05 and 0.95, where every function is smooth, with a gradient."""
    return const(*shape).requires_grad_()


def const(*shape: int) -> torch.Tensor:
    """The same without a gradient."""
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.9 + 0.05


def whole(high: int, *shape: int) -> torch.Tensor:
    """Random whole numbers below ``high``."""
    return torch.randint(high, shape, generator=_generator)


def truth(*shape: int) -> torch.Tensor:
    return whole(2, *shape).bool()


@dataclass(frozen=True, eq=False)
class Sample:
    """An operator call with tensors for its arguments."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return self.target

    @cached_property
    def schema(self) -> torch._C.FunctionSchema:
        return self.operator._schema

    @cached_property
    def written(self) -> list[str]:
        """Arguments that the operator changes in place, and says so."""
        return [given.name for given in self.schema.arguments if given.alias_info and given.alias_info.is_write]

    @cached_property
    def operator(self) -> Any:
        space, packet, overload = self.target.split(".")
        return getattr(getattr(getattr(torch.ops, space), packet), overload)

    @cached_property
    def given(self) -> dict[str, Any]:
        """Arguments by name, as far as the sample says them."""
        names = [argument.name for argument in self.schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """In the order of the schema, as ``Call.refs`` has them."""
        names = [argument.name for argument in self.schema.arguments]
        return [tensor for name in names for tensor in _tensors(self.given.get(name))]

    def arguments(self, tensors: list[Any]) -> dict[str, Any]:
        """The arguments with other tensors in their places."""
        names = [argument.name for argument in self.schema.arguments if argument.name in self.given]
        left = iter(tensors)
        return {name: _replaced(self.given[name], left) for name in names}

    @cached_property
    def call(self) -> Call:
        """The call as rules see it."""
        torch.manual_seed(SEED)
        result = self.operator(**self.arguments([tensor.detach().clone() for tensor in self.tensors]))
        arguments = self.arguments([Ref(f"t{place}") for place in range(len(self.tensors))])
        types = {f"t{place}": _type(tensor) for place, tensor in enumerate(self.tensors)}
        op = Op("result", _type(result), self.target, kwargs=tuple(arguments.items()))
        return Call(op, types.__getitem__)


def case(name: str, *args: Any, **kwargs: Any) -> Sample:
    """A call of an ATen operator."""
    return Sample(f"aten.{name}" if "." in name else f"aten.{name}.default", args, kwargs)


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for item in argument for tensor in _tensors(item)] if isinstance(argument, (list, tuple)) else []


def _replaced(argument: Any, tensors: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return next(tensors)
    return tuple(_replaced(item, tensors) for item in argument) if isinstance(argument, (list, tuple)) else argument


def _type(result: Any) -> Type:
    if isinstance(result, torch.Tensor):
        return TensorType(result.dtype, tuple(result.shape))
    return ListType(tuple(map(_type, result))) if isinstance(result, (list, tuple)) else ScalarType("int")
