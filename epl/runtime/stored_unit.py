"""A unit of weights on one rank: its memory, this rank's part of it, and how all of it is brought together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn

from epl.planner.units import Slot, Unit
from epl.runtime.disk import DiskSpace
from epl.runtime.lane import Lane
from epl.runtime.shards import Exchange, ShardTalk

__all__ = ["Arriving", "StoredUnit"]


@dataclass
class Arriving:
    """As of :class:`epl.stage.leases.Coming`."""

    whole: torch.Tensor
    lane: Lane
    arrival: torch.Event | None
    exchange: Exchange | None = None

    def get(self) -> torch.Tensor:
        self.lane.arrive(self.arrival, [self.whole])
        self.arrival = None
        if self.exchange is not None:
            self.exchange.wait()
            self.exchange = None
        return self.whole


@dataclass
class StoredUnit:
    """A unit on this rank.

    Args:
        unit: The unit.
        place: Which shard is this rank's.
        gathering: What the ranks talk through about its weights.
        summing: The same for its gradients.
        stored: The flat memory of the weights: of all shards, or of this rank's own.
        parameters: The model's, by slot.
        leaves: What the stage is given, by slot.
        lane: Where copies between host and device run.
        space: The files in which it is stored, if it is.
    """

    unit: Unit
    place: int
    gathering: ShardTalk
    summing: ShardTalk
    stored: torch.Tensor
    parameters: tuple[nn.Parameter, ...]
    leaves: tuple[torch.Tensor, ...]
    lane: Lane
    space: DiskSpace | None

    @property
    def name(self) -> str:
        """As messages call it."""
        slots = self.unit.slots
        return slots[0].path + (f" and {len(slots) - 1} more" if len(slots) > 1 else "")

    def slots(self) -> Iterator[tuple[Slot, nn.Parameter, torch.Tensor]]:
        """(slot, parameter, leaf) of each weight."""
        return zip(self.unit.slots, self.parameters, self.leaves, strict=True)

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of flat memory of the unit's size."""
        return flat.narrow(0, self.place * self.unit.shard_size, self.unit.shard_size)

    def piece_of(self, slot: Slot, shard: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a weight, in the memory of its shard; in the weight's shape if nothing is shared out."""
        if self.unit.num_shards == 1:
            return shard[slot.start : slot.stop].view(slot.shape)
        start, stop = self.unit.piece(slot, self.place)
        first = slot.start + start - self.place * self.unit.shard_size if start < stop else 0
        return shard.narrow(0, first, stop - start)

    def cut(self, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor of a weight's shape."""
        if self.unit.num_shards == 1:
            return whole
        start, stop = self.unit.piece(slot, self.place)
        return whole.reshape(-1)[start:stop]

    def start(self, device: torch.device) -> Arriving:
        """Bring all shards together in new memory on a device."""
        unit = self.unit
        whole = torch.empty(unit.size, dtype=self.stored.dtype, device=device)
        into = self.shard_of(whole) if unit.is_cut else whole
        self.lane.follow([whole])
        with self.lane.running():
            into.copy_(self.stored, non_blocking=True)
        arriving = Arriving(whole, self.lane, self.lane.mark())
        if self.space is not None:
            self.space.give_back_pages(self.stored)
        if unit.is_cut:
            self.lane.arrive(arriving.arrival, [whole])
            arriving.exchange = self.gathering.gather(whole, f"the weights of {self.name}")
        return arriving
