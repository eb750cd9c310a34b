"""What ranks of one group can do together, as the layers above the runtime see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["Collectives", "LonelyRank", "StandInRank"]


class Collectives(Protocol):
    """A rank of a group, and what it does with the others. Results are new tensors; nothing here is differentiable.

    Attributes:
        rank: This rank's place in the group, from 0.
        size: Number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        """The sum, or the maximum (``operation="max"``), over all ranks."""
        ...

    def all_gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Every rank's tensor, rank 0 first; ``shapes`` are theirs."""
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks of the piece for this rank; ``pieces[r]`` goes to rank r."""
        ...

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """What every rank has for this one; ``pieces[r]`` goes to rank r, ``shapes[r]`` comes from it."""
        ...


class LonelyRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        return tensor.clone()

    def all_gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [tensor]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return pieces[0].clone()

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return list(pieces)


class StandInRank:
    """A rank of a group that is not there: results have the right shapes and no values, for runs on fake tensors."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        everyone = tensor.new_empty(max(sizes) * self.size)
        chunks = everyone.split(max(sizes)) if max(sizes) else [everyone] * self.size
        return [chunk[:size].view(tuple(shape)) for chunk, size, shape in zip(chunks, sizes, shapes, strict=True)]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([pieces[self.rank]] * self.size).sum(0)

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        received = flat.new_empty(sum(sizes))
        return [chunk.view(tuple(shape)) for chunk, shape in zip(received.split(sizes), shapes, strict=True)]
