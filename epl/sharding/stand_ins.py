"""Stand-ins: small calls that have the shapes of larger ones, for an operator that is tried out.

Calls with the same ranks and the same pattern of equal sizes are of one *shape class*, and share a stand-in: sizes that
are equal stay equal, 1 stays 1, and the larger stays the larger. Floating numbers become float64, so that what differs is
told from what is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from epl.ir.graph import Argument, map_refs
from epl.ir.types import TensorType
from epl.sharding.options import Call

__all__ = ["StandIn", "operator_of", "shape_class", "stand_ins"]

_SMALL_SIZES = (4, 6, 8, 12, 16, 18, 20, 24)  # several divisors each; over 3 ranks some are cut evenly, some not
_SMALL_ELEMENTS = 4096  # in all arguments of a call that is tried with its own sizes


@dataclass(frozen=True)
class StandIn:
    """A small call like a given one; calls of one *shape class* have the same.

    Args:
        target: The operator.
        arguments: Arguments by name; a Ref stands for the next of ``kinds``.
        kinds: Types of the tensor arguments.
        results: Shapes of the results as far as they follow from the sizes of the arguments; None: they do not.
        grad: Whether gradients have to be right, too.
    """

    target: str
    arguments: tuple[tuple[str, Argument], ...]
    kinds: tuple[TensorType, ...]
    results: tuple[tuple[int | None, ...], ...]
    grad: bool = True

    def __str__(self) -> str:
        kinds = iter(self.kinds)
        given = [f"{name}={map_refs(argument, lambda _: str(next(kinds)))}" for name, argument in self.arguments]
        return f"{self.target}({', '.join(given)}){'' if self.grad else ' without gradient'}"

    def run(self, tensors: Sequence[torch.Tensor], changed: Mapping[str, Argument] | None = None) -> list[torch.Tensor]:
        """The results of the operator on these tensors, with some other arguments changed."""
        left = iter(tensors)
        given: dict[str, Any] = {name: map_refs(value, lambda _: next(left)) for name, value in self.arguments}  # type: ignore[arg-type, return-value]
        made = operator_of(self.target)(**{**given, **(changed or {})})
        return list(made) if isinstance(made, (list, tuple)) else [made]


def operator_of(target: str) -> Any:
    """The operator of a target such as ``aten.add.Tensor``."""
    space, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def shape_class(call: Call, *, keep: int = 1, multiples: bool = False) -> StandIn:
    """The stand-in of a call: other sizes that are as different, and in the same order.

    Args:
        call: A call of known shapes.
        keep: Sizes up to this one stay what they are.
        multiples: A size that is 2 to 4 times another stays so.
    """
    sizes = sorted({size for name, _ in call.refs for kind in call.types(name) for size in kind.sizes})
    kept = [size for size in sizes if size <= max(1, keep)]
    others = [size for size in sizes if size > max(1, keep)]
    small = dict(zip(kept, kept, strict=True)) | dict(zip(others, _small_sizes(others, multiples), strict=True))
    names = dict.fromkeys(name for name, _ in call.refs)
    kinds = [kind for name in names for kind in call.types(name)]
    largest_rank = max((len(kind.shape) for kind in (*kinds, *call.results)), default=0)
    shapes = {kind.sizes for kind in call.results}

    def change(argument: Argument) -> Argument:
        if isinstance(argument, tuple) and argument in shapes:
            return tuple(small.get(size, size) for size in argument if isinstance(size, int))
        if isinstance(argument, tuple):
            return tuple(map(change, argument))
        if isinstance(argument, torch.dtype):
            return _exact(argument)
        # a smaller number is a dimension, a count or a stride
        is_size = isinstance(argument, int) and not isinstance(argument, bool) and argument > largest_rank
        return small.get(argument, argument) if is_size else argument  # type: ignore[arg-type, call-overload]

    return StandIn(
        call.op.target,
        tuple((name, change(argument)) for name, argument in call.arguments.items()),
        tuple(TensorType(_exact(kind.dtype), tuple(small[size] for size in kind.sizes)) for kind in kinds),
        tuple(tuple(small.get(size) for size in kind.sizes) for kind in call.results),
        call.op.grad,
    )


def _small_sizes(sizes: Sequence[int], multiples: bool) -> list[int]:
    """Small numbers in the place of larger ones, which ascend."""
    small: dict[int, int] = {}
    for size in sizes:
        last = max(small.values(), default=0)
        following = next((number for number in _SMALL_SIZES if number > last), last + 4)
        ratios = [(small[other], size // other) for other in small if size % other == 0 and size // other <= 4]
        kept = [number * ratio for number, ratio in ratios if number * ratio > last]
        small[size] = kept[-1] if multiples and kept else following
    return list(small.values())


def stand_ins(call: Call) -> Iterator[StandIn]:
    """What is tried in turn until one runs.

    Small sizes; those with multiples, as of a gate beside its values; those but for kernels and pairs; and then the real
    ones, if they are small.
    """
    kinds = [kind for name in dict.fromkeys(name for name, _ in call.refs) for kind in call.types(name)]
    yield shape_class(call)
    if shape_class(call) != shape_class(call, multiples=True):
        yield shape_class(call, multiples=True)
    if any(size in (2, 3) for kind in kinds for size in kind.sizes):
        yield shape_class(call, keep=3, multiples=True)
    if sum(prod(kind.sizes) for kind in kinds) <= _SMALL_ELEMENTS:
        yield shape_class(call, keep=_SMALL_ELEMENTS)


def _exact(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
