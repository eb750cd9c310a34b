"""The memory of units in a step: what `epl.runtime.shard_reducer` and the lending of weights hold, as sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from epl.planner.units import Unit
from epl.program.curve import Meter
from epl.program.unit_rounds import UnitBucket, UnitRounds
from epl.stage.leases import UnitCache

__all__ = ["UnitGradients", "looks_ahead", "stand_in_lender"]


def looks_ahead(units: Sequence[Unit], *, on_accelerator: bool) -> bool:
    """Whether to bring the next unit while the present one is used: if that goes on beside computing."""
    return on_accelerator or any(unit.is_cut and unit.num_shards > 1 for unit in units)


@dataclass
class _Brought:
    """As of :class:`epl.stage.leases.Coming`."""

    whole: torch.Tensor

    def get(self) -> torch.Tensor:
        return self.whole


def stand_in_lender(units: Sequence[Unit], runs: Sequence[int], device: torch.device | None) -> UnitCache:
    """Lends memory without values, as much as the runtime would; for runs on fake tensors."""
    place = device or torch.device("cpu")

    def start(number: int) -> _Brought:
        unit = units[number]
        return _Brought(torch.empty(unit.size, dtype=getattr(torch, unit.dtype), device=place))

    return UnitCache(runs, start, ahead=looks_ahead(units, on_accelerator=place.type != "cpu"))


@dataclass(eq=False)
class _Bucket(UnitBucket):
    """As sizes.

    Args:
        is_there: True if its memory is made.
        has_shard: True if the sum of the own shard is.
        whole: Bytes of gradients that wait for the last backward pass, by place.
        coming: Bytes of the gradient that is put in now.
    """

    is_there: bool = False
    has_shard: bool = False
    whole: dict[int, int] = field(default_factory=dict[int, int])
    coming: int = 0


class UnitGradients(UnitRounds[_Bucket]):
    """Follows the gradients of units.

    Args:
        meter: Where their memory is counted.
        units: The rank's units.
        sends_straight: True if ranks send shards to one another, and not by a collective.
    """

    def __init__(self, meter: Meter, units: Sequence[Unit], *, sends_straight: bool) -> None:
        super().__init__([_Bucket(unit) for unit in units if unit.is_trained])
        self._meter, self._straight = meter, sends_straight
        self._of = {
            slot.path: (bucket, place) for bucket in self.buckets for place, slot in enumerate(bucket.unit.slots)
        }

    def accumulate(self, path: str, size_bytes: int) -> bool:
        """A gradient is complete; False if its weight is in no unit."""
        if path not in self._of:
            return False
        bucket, place = self._of[path]
        if place in bucket.missing:
            bucket.coming = size_bytes
            self._take(bucket, place)
            bucket.coming = 0
        elif place not in bucket.whole:
            bucket.whole[place] = size_bytes
            self._meter.add("gradients", size_bytes)
        return True

    def _expected(self, bucket: _Bucket) -> set[int]:
        return set(range(len(bucket.unit.slots)))

    def _fill(self, bucket: _Bucket, place: int) -> None:
        before = bucket.whole.pop(place, 0)
        if bucket.unit.is_one_weight and not bucket.is_there and (bucket.coming or before):
            bucket.is_there = True  # the gradient is the bucket
            self._meter.add("gradients", -before)
            self._meter.add(_kind(bucket), bucket.unit.size_bytes)
            return
        self._make(bucket)
        if bucket.coming:
            self._meter.spike("gradients", bucket.coming)  # while it is copied
        self._meter.add("gradients", -before)

    def _make(self, bucket: _Bucket) -> None:
        if not bucket.is_there:
            bucket.is_there = True
            self._meter.add(_kind(bucket), bucket.unit.size_bytes)

    def _send(self, bucket: _Bucket) -> tuple[_Bucket, int]:
        unit = bucket.unit
        self._make(bucket)
        room = unit.size_bytes - unit.shard_bytes if unit.num_shards > 1 and self._straight else 0
        self._meter.add(_kind(bucket), room)
        bucket.is_there = False
        return bucket, room

    def _arrive(self, sent: tuple[_Bucket, int]) -> None:
        bucket, room = sent
        unit = bucket.unit
        has_room = unit.num_shards == 1 or room == unit.shard_bytes  # the shard's memory is there already
        if has_room:
            self._meter.add(_kind(bucket), -unit.size_bytes - room)
        if not bucket.has_shard:
            bucket.has_shard = True
            self._meter.add("gradients", unit.shard_bytes)
        if not has_room:
            self._meter.add(_kind(bucket), -unit.size_bytes - room)


def _kind(bucket: _Bucket) -> str:
    """What a bucket's memory is for: of one shard it becomes the gradients, else it is gone when the shard is summed."""
    return "gradients" if bucket.unit.num_shards == 1 else "temporaries"
