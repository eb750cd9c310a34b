"""Flat memory that ranks share out: every rank's shard to all of them, and the sum of all to each one's shard.

NCCL has both as collectives. gloo's cost more than what has to be sent: its all-gather copies, and its reduce-scatter is an
all-reduce. There each rank sends its shards straight to the others [measured: two ranks, 64 MiB, loopback, 2026-11: gather
25 ms against 84, sum 38 ms against 62 for an all-reduce].
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epl.runtime.world import Group, World

__all__ = ["Exchange", "ShardTalk"]


class Exchange:
    """An exchange under way; `wait` ends it.

    Args:
        world: The ranks.
        group: Those that take part.
        what: What is waited for, in words.
        works: What has to end.
        sums: For each of the first works, what is received is added: (to what, what).
    """

    def __init__(self, world: World, group: Group, what: str, works: list[Any], sums: list[tuple[Any, Any]]) -> None:
        self._world, self._group, self._what = world, group, what
        self._works, self._sums = works, sums

    def wait(self) -> None:
        """Return when all has been sent and received.

        Raises:
            RunError: a rank is gone, or ``communication.timeout`` has passed.
        """
        if not self._works:
            return
        with self._world.waiting(self._what, self._group.ranks), torch.no_grad():
            for place, work in enumerate(self._works):
                if work.wait(timedelta(seconds=self._world.timeout_s)) is False:
                    raise RuntimeError("Timed out")  # which `waiting` turns into an error that says more
                if place < len(self._sums):
                    into, received = self._sums[place]
                    into.add_(received)
        self._works, self._sums = [], []


class ShardTalk:
    """What the ranks of one group say to one another about flat memory.

    Exchanges of one ``ShardTalk`` are started in the same order on all its ranks.

    Args:
        world: The ranks.
        group: Those that share out the memory.
    """

    def __init__(self, world: World, group: Group) -> None:
        self._world, self._group = world, group
        self._place = group.ranks.index(world.rank)
        self._straight = world.device.type == "cpu"

    def gather(self, whole: torch.Tensor, what: str) -> Exchange:
        """Fill in the shards of the others; this rank's own is in its place already."""
        group, shards = self._group, whole.chunk(self._group.size)
        if group.handle is None or not whole.numel():
            return Exchange(self._world, group, what, [], [])
        with self._world.waiting(what, group.ranks):
            if not self._straight:
                mine = shards[self._place]
                work = dist.all_gather_single(whole, mine, group=group.handle, async_op=True)
                return Exchange(self._world, group, what, [work], [])
            works = [dist.irecv(shards[place], group.ranks[place], group=group.handle) for place in self._others()]
            works += [
                dist.isend(shards[self._place], group.ranks[place], group=group.handle) for place in self._others(-1)
            ]
        return Exchange(self._world, group, what, works, [])

    def reduce_scatter(self, whole: torch.Tensor, room: torch.Tensor, what: str) -> Exchange:
        """Make this rank's shard of ``whole`` the sum over all ranks; the other shards are undefined after that.

        Args:
            whole: This rank's summand.
            room: Memory for what comes: a shard from each of the other ranks.
            what: For messages.
        """
        group, shards = self._group, whole.chunk(self._group.size)
        if group.handle is None or not whole.numel():
            return Exchange(self._world, group, what, [], [])
        mine = shards[self._place]
        with self._world.waiting(what, group.ranks):
            if not self._straight:
                work = dist.reduce_scatter_single(mine, whole, group=group.handle, async_op=True)
                return Exchange(self._world, group, what, [work], [])
            rooms = room.chunk(group.size - 1)
            works = [
                dist.irecv(into, group.ranks[place], group=group.handle)
                for into, place in zip(rooms, self._others(), strict=True)
            ]
            works += [dist.isend(shards[place], group.ranks[place], group=group.handle) for place in self._others(-1)]
        return Exchange(self._world, group, what, works, [(mine, into) for into in rooms])

    def all_reduce(self, whole: torch.Tensor, what: str) -> Exchange:
        """Make ``whole`` the sum over all ranks."""
        if self._group.handle is None:
            return Exchange(self._world, self._group, what, [], [])
        with self._world.waiting(what, self._group.ranks):
            work = dist.all_reduce(whole, group=self._group.handle, async_op=True)
        return Exchange(self._world, self._group, what, [work], [])

    def room_size(self, size: int) -> int:
        """Elements of room that `reduce_scatter` needs for a whole of ``size``."""
        return size - size // self._group.size if self._straight else 0

    def _others(self, step: int = 1) -> list[int]:
        """The other places, the next one first: receives and sends go round in opposite directions, so they meet."""
        size = self._group.size
        return [(self._place + step * away) % size for away in range(1, size)]
