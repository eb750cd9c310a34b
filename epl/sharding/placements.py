"""Placements: what each rank of a group holds of a tensor.

``R``: all of it. ``S(d)``: a part, cut along dimension d. ``P``: a summand; the tensor is the sum over the ranks.

A dimension is cut in *units*, so that a head, or a row of a view of it, stays on one rank: 768 features cut in units of
64 over 5 ranks are 192, 192, 128, 128, 128. With ``repeats`` the dimension is a row of equal stretches, each of which
is cut: of the 3 x 768 features of queries, keys and values beside one another, each rank takes a part of all three.

Source: the placements of GSPMD (Xu et al. 2021) and of torch's DTensor, and of Whale (Jia et al. 2022, section 3.3),
with units and repeats added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epl.errors import PlanError

__all__ = ["Partial", "Placement", "Replicated", "Shard", "join_shards", "local_shape", "parse_placement", "take_shard"]


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a summand."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """Every rank holds a part along ``dim``.

    Args:
        dim: The dimension that is cut, from 0.
        unit: Elements that stay together.
        repeats: Equal stretches of the dimension, each of which is cut.

    Example:
        >>> Shard(0, unit=64).sizes(768, 5)
        (192, 192, 128, 128, 128)
    """

    dim: int
    unit: int = 1
    repeats: int = 1

    def __str__(self) -> str:
        extra = [f"unit={self.unit}"] * (self.unit != 1) + [f"repeats={self.repeats}"] * (self.repeats != 1)
        return f"S({', '.join([str(self.dim), *extra])})"

    def num_units(self, size: int) -> int | None:
        """Units in each stretch of a dimension of this size; None if it has no whole number of them."""
        count, rest = divmod(size, self.unit * self.repeats)
        return None if rest else count

    def sizes(self, size: int, num_ranks: int) -> tuple[int, ...]:
        """Elements of one stretch on each rank: the first ranks hold a unit more where it does not divide."""
        count = self.num_units(size)
        assert count is not None, f"{self} of {size}"
        each, more = divmod(count, num_ranks)
        return tuple((each + (rank < more)) * self.unit for rank in range(num_ranks))

    def span(self, size: int, num_ranks: int, rank: int) -> tuple[int, int]:
        """(start, stop) of a rank's part in each stretch."""
        sizes = self.sizes(size, num_ranks)
        return sum(sizes[:rank]), sum(sizes[: rank + 1])


Placement = Replicated | Shard | Partial


def parse_placement(text: str) -> Placement:
    """The placement that ``str(placement)`` wrote.

    Raises:
        PlanError: the text is not a placement.
    """
    if text == "R":
        return Replicated()
    if text == "P":
        return Partial()
    match = re.fullmatch(r"S\((\d+)(?:, unit=([1-9]\d*))?(?:, repeats=([1-9]\d*))?\)", text)
    if match is None:
        raise PlanError(f"{text!r} is not a placement: R (whole), P (partial sums) or S(0) (cut along dimension 0)")
    return Shard(int(match[1]), int(match[2] or 1), int(match[3] or 1))


def local_shape(shape: Sequence[int], placement: Placement, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of what one rank holds."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    dim = placement.dim
    return (*shape[:dim], placement.sizes(shape[dim], num_ranks)[rank] * placement.repeats, *shape[dim + 1 :])


def take_shard(whole: torch.Tensor, placement: Placement, num_ranks: int, rank: int) -> torch.Tensor:
    """What one rank holds of a whole tensor; a view where that can be. Of ``P``, rank 0 holds all and others zeros."""
    if isinstance(placement, Partial):
        return whole if rank == 0 else torch.zeros_like(whole)
    if isinstance(placement, Replicated):
        return whole
    start, stop = placement.span(whole.shape[placement.dim], num_ranks, rank)
    if placement.repeats == 1:
        return whole.narrow(placement.dim, start, stop - start)
    stretches = _stretches(whole, placement)
    return stretches.narrow(placement.dim + 1, start, stop - start).flatten(placement.dim, placement.dim + 1)


def join_shards(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor from what all ranks hold, rank 0 first."""
    if isinstance(placement, Replicated):
        return parts[0]
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    if placement.repeats == 1:
        return torch.cat(list(parts), placement.dim)
    stretches = [_stretches(part, placement) for part in parts]
    return torch.cat(stretches, placement.dim + 1).flatten(placement.dim, placement.dim + 1)


def _stretches(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    return tensor.unflatten(shard.dim, (shard.repeats, tensor.shape[shard.dim] // shard.repeats))
