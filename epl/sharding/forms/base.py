"""What forms are made of: how a call is cut, operators by name, and sums over ranks that autograd runs through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from epl.sharding.collectives import Collectives
from epl.sharding.placements import Placement, Shard, local_shape

__all__ = ["Cut", "Form", "Names", "first_of", "operator", "shape_of", "sizes_of", "sum_over_ranks", "widened"]


@dataclass(frozen=True)
class Cut:
    """How one call is cut.

    Args:
        inputs: What each tensor argument is used as, in the order of ``Call.refs``; units as they are.
        outputs: What each result comes out as.
        input_shapes: Shapes of the whole arguments.
        output_shapes: Shapes of the whole results.
        output_dtypes: Element types of the results; empty: those of the arguments. Inside autocast they may differ.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[torch.dtype, ...] = ()

    def typed(self, made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """A result, computed in some longer type, in the type that it is to have."""
        return made.to(self.output_dtypes[0] if self.output_dtypes else given.dtype)


Form = Callable[..., Any]
Names = dict[str, Form]


def operator(target: str) -> Callable[..., Any]:
    """The operator of a target such as ``aten.add.Tensor``."""
    space, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def shape_of(ranks: Collectives, cut: Cut, place: int = 0) -> tuple[int, ...]:
    """The shape of this rank's part of a result."""
    shape = local_shape(cut.output_shapes[place], cut.outputs[place], ranks.size, ranks.rank)
    return tuple(size or 0 for size in shape)


def first_of(ranks: Collectives, cut: Cut, place: int = 0) -> tuple[int, int]:
    """(dim, start): along which dimension an argument is cut, and where this rank's part of it begins."""
    shard = cut.inputs[place]
    assert isinstance(shard, Shard)
    assert shard.repeats == 1
    start, _ = shard.span(cut.input_shapes[place][shard.dim], ranks.size, ranks.rank)
    return shard.dim, start


def sizes_of(ranks: Collectives, cut: Cut, place: int = 0) -> tuple[int, ...]:
    """How much of the cut dimension of an argument each rank has."""
    shard = cut.inputs[place]
    assert isinstance(shard, Shard)
    return shard.sizes(cut.input_shapes[place][shard.dim], ranks.size)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 if it is of a shorter type, as torch's own kernels compute what they sum up."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sum_over_ranks(ranks: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, each of which uses it for its own part: gradients add up too."""
    return _SumOverRanks.apply(tensor, ranks)  # type: ignore[no-any-return]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Collectives) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.all_reduce(gradients[0].contiguous()), None
