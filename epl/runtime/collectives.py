"""Collectives of one group of ranks over torch.distributed: what split stages and their forms talk through.

Every wait has the limit of ``communication.timeout`` and names the ranks that it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from epl.runtime.world import Group, World

__all__ = ["GroupCollectives"]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class GroupCollectives:
    """This rank in a group, as :class:`epl.sharding.collectives.Collectives` has it.

    Args:
        world: The ranks.
        group: Those that work together.
        position: This rank's place among them.
    """

    def __init__(self, world: World, group: Group, position: int) -> None:
        self.rank, self.size = position, group.size
        self._world, self._group = world, group

    def _together(self, kind: str, *tensors: torch.Tensor) -> Any:
        """Around a collective: what messages and the timeline call it."""
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._world.waiting(f"{kind} of {size_bytes:,} bytes within a stage", self._group.ranks)

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        with self._together("all_reduce", result):
            dist.all_reduce(result, _OPERATIONS[operation], group=self._group.handle)
        return result

    def all_gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        room = max(sizes)  # parts of unequal size travel in pieces of one size
        if not room:
            return [tensor.new_empty(tuple(shape)) for shape in shapes]
        mine = tensor.reshape(-1) if tensor.numel() == room else _padded(tensor, room)
        everyone = tensor.new_empty(room * self.size)
        with self._together("all_gather", everyone):
            dist.all_gather_single(everyone, mine.contiguous(), group=self._group.handle)
        chunks = everyone.split(room)
        return [chunk[:size].view(tuple(shape)) for chunk, size, shape in zip(chunks, sizes, shapes, strict=True)]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._world.device.type == "cpu" or len({piece.shape for piece in pieces}) > 1:
            # of gloo's equal forms the fastest, whatever the size: benchmarks/equal_forms.py. It takes unequal pieces, too.
            return torch.stack(self.all_to_all(pieces, [pieces[self.rank].shape] * self.size)).sum(0)
        result = torch.empty_like(pieces[self.rank])
        with self._together("reduce_scatter", *pieces):
            dist.reduce_scatter(result, [piece.contiguous() for piece in pieces], group=self._group.handle)
        return result

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        parts = [pieces[0].new_empty(tuple(shape)) for shape in shapes]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [part.numel() for part in parts]
        received = flat.new_empty(sum(sizes))
        with self._together("all_to_all", flat):
            dist.all_to_all_single(received, flat, sizes, [piece.numel() for piece in pieces], group=self._group.handle)
        return [chunk.view(tuple(shape)) for chunk, shape in zip(received.split(sizes), shapes, strict=True)]


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    padded = tensor.new_zeros(size)
    padded[: tensor.numel()] = tensor.reshape(-1)
    return padded
