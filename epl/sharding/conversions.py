"""From one placement to another: what moves, forward for the value and backward for its gradient.

A *move* changes the placement of one tensor. A *conversion* stands on an edge of the graph and is two moves: the value
from how its maker leaves it to how its user takes it, and the gradient from how the user hands it back to how the maker
expects it:

    value        gradient back   forward          backward
    R -> R       R               nothing          nothing
    R -> R       P               nothing          all-reduce        (Megatron's f)
    R -> S       S               keep own slice   all-gather
    S -> R       R               all-gather       keep own slice
    S -> R       P               all-gather       reduce-scatter    (Megatron's sequence parallelism)
    P -> R       R               all-reduce       nothing           (Megatron's g)
    P -> R       P               all-reduce       all-reduce
    P -> S       S               reduce-scatter   all-gather
    S(a) -> S(b) S(b)            all-to-all       all-to-all
    R -> P       R               rank 0 keeps     nothing

Sources: Megatron-LM (Shoeybi et al. 2019, figure 3), Korthikanti et al. 2022 (section 4), GSPMD (Xu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epl.sharding.collectives import Collectives
from epl.sharding.options import gradient_expected
from epl.sharding.placements import Partial, Placement, Replicated, Shard, join_shards, local_shape, take_shard

__all__ = ["Conversion", "Move", "convert", "move"]


@dataclass(frozen=True)
class Move:
    """A change of placement of one tensor."""

    source: Placement
    target: Placement

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"

    @property
    def kind(self) -> str:
        """What it takes: ``nothing``, ``slice``, ``zero`` (the last two within a rank), or the name of a collective."""
        source, target = self.source, self.target
        if source == target:
            return "nothing"
        if isinstance(source, Replicated):
            return "slice" if isinstance(target, Shard) else "zero"
        if isinstance(source, Partial):
            return "reduce_scatter" if isinstance(target, Shard) else "all_reduce"
        if isinstance(target, Partial):
            return "zero"
        if isinstance(target, Replicated) or target.dim == source.dim:
            return "all_gather"
        return "all_to_all"


@dataclass(frozen=True)
class Conversion:
    """What happens on an edge.

    Args:
        value: How the value moves, forward.
        gradient: How its gradient moves, backward.

    Example:
        >>> edge = Conversion.of(Replicated(), Replicated(), Partial())
        >>> edge.value.kind, edge.gradient.kind
        ('nothing', 'all_reduce')
    """

    value: Move
    gradient: Move

    @staticmethod
    def of(made: Placement, used: Placement, handed_back: Placement) -> Conversion:
        """The conversion from how a value is made to how it is used, with its gradient handed back like this."""
        return Conversion(Move(made, used), Move(handed_back, gradient_expected(made)))

    @property
    def is_nothing(self) -> bool:
        return self.value.kind == self.gradient.kind == "nothing"


def move(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    """Change the placement of a tensor; not differentiable.

    Args:
        ranks: The group.
        tensor: What this rank holds.
        change: From which placement to which.
        shape: The shape of the whole tensor.
    """
    return _MOVES[change.kind](ranks, tensor, change, shape)


def _nothing(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    return tensor


def _slice(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    return take_shard(tensor, change.target, ranks.size, ranks.rank).contiguous()


def _zero(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    """A summand of the whole: rank 0's copy of it, or each rank's part with zeros around it."""
    if not isinstance(change.source, Shard):
        return take_shard(tensor, change.target, ranks.size, ranks.rank)
    whole = tensor.new_zeros(tuple(shape))
    start, stop = change.source.span(shape[change.source.dim], ranks.size, ranks.rank)
    dim, repeats = change.source.dim, change.source.repeats
    stretch = shape[dim] // repeats
    inside = whole.unflatten(dim, (repeats, stretch)).narrow(dim + 1, start, stop - start)
    inside.copy_(tensor.unflatten(dim, (repeats, stop - start)))
    return whole


def _all_reduce(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    return ranks.all_reduce(tensor)


def _all_gather(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    whole = join_shards(ranks.all_gather(tensor, _shapes(ranks, change.source, shape)), change.source)
    return take_shard(whole, change.target, ranks.size, ranks.rank).contiguous()


def _reduce_scatter(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    return ranks.reduce_scatter(_pieces(ranks, tensor, change.target))


def _all_to_all(ranks: Collectives, tensor: torch.Tensor, change: Move, shape: Sequence[int]) -> torch.Tensor:
    assert isinstance(change.source, Shard)
    mine = local_shape(shape, change.target, ranks.size, ranks.rank)
    coming = _shapes(ranks, change.source, mine)
    return join_shards(ranks.all_to_all(_pieces(ranks, tensor, change.target), coming), change.source)


_MOVES = {
    "nothing": _nothing,
    "slice": _slice,
    "zero": _zero,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _pieces(ranks: Collectives, tensor: torch.Tensor, target: Placement) -> list[torch.Tensor]:
    return [take_shard(tensor, target, ranks.size, rank).contiguous() for rank in range(ranks.size)]


def _shapes(ranks: Collectives, placement: Placement, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """What each rank holds of a tensor of this shape."""
    return [local_shape(shape, placement, ranks.size, rank) for rank in range(ranks.size)]


def convert(ranks: Collectives, tensor: torch.Tensor, conversion: Conversion, shape: Sequence[int]) -> torch.Tensor:
    """Change the placement of a value, and of its gradient on the way back.

    Args:
        ranks: The group.
        tensor: What this rank holds of the value.
        conversion: Both moves.
        shape: The shape of the whole value.
    """
    return _Convert.apply(tensor, ranks, conversion, tuple(shape))  # type: ignore[no-any-return]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: Collectives, conversion: Conversion, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.ranks, ctx.conversion, ctx.shape = ranks, conversion, shape
        moved = move(ranks, tensor, conversion.value, shape)
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        return move(ctx.ranks, gradient.contiguous(), ctx.conversion.gradient, ctx.shape), None, None, None
