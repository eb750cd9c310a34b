"""The memory of units in a step: what `epl.runtime.shard_reducer` and the lending of weights hold, as sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from epl.planner.units import Unit
from epl.program.curve import Meter
from epl.stage.leases import UnitCache

__all__ = ["UnitGradients", "looks_ahead", "stand_in_lender"]

_MOST_UNDER_WAY = 2  # as of the reducer


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
class _Bucket:
    unit: Unit
    is_there: bool = False
    missing: set[str] = field(default_factory=set)
    has_shard: bool = False


class UnitGradients:
    """Follows the gradients of units.

    Args:
        meter: Where their memory is counted.
        units: The rank's units.
        sends_straight: True if ranks send shards to one another, and not by a collective.
    """

    def __init__(self, meter: Meter, units: Sequence[Unit], *, sends_straight: bool) -> None:
        self._meter, self._straight = meter, sends_straight
        self._buckets = [_Bucket(unit) for unit in units if unit.is_trained]
        self._of = {slot.path: bucket for bucket in self._buckets for slot in bucket.unit.slots}
        self._whole: dict[str, int] = {}  # gradients that wait for the last backward pass
        self._queue: deque[_Bucket] = deque()
        self._under_way: deque[tuple[_Bucket, int]] = deque()

    def accumulate(self, path: str, size_bytes: int) -> bool:
        """A gradient is complete; False if its weight is in no unit."""
        bucket = self._of.get(path)
        if bucket is None:
            return False
        if bucket in self._queue and path in bucket.missing:
            self._fill(bucket, path, size_bytes)
            self._send_ready()
        elif path not in self._whole:
            self._whole[path] = size_bytes
            self._meter.add("gradients", size_bytes)
        return True

    def _fill(self, bucket: _Bucket, path: str, size_bytes: int) -> None:
        bucket.missing.discard(path)
        if bucket.unit.is_one_weight and not bucket.is_there and (size_bytes or path in self._whole):
            bucket.is_there = True  # the gradient is the bucket
            self._meter.add("gradients", -self._whole.pop(path, 0))
            self._meter.add("communication", bucket.unit.size_bytes)
            return
        self._make(bucket)
        if size_bytes:
            self._meter.spike("gradients", size_bytes)  # while it is copied
        self._meter.add("gradients", -self._whole.pop(path, 0))

    def _make(self, bucket: _Bucket) -> None:
        if not bucket.is_there:
            bucket.is_there = True
            self._meter.add("communication", bucket.unit.size_bytes)

    def start_round(self) -> None:
        """The next backward pass is summed by itself."""
        self._open([bucket for bucket in self._buckets if bucket.unit.each_backward])

    def start(self) -> None:
        """The next backward pass is the last."""
        self._open([b for b in self._buckets if not (b.unit.each_backward or b.unit.is_tied)])

    def finish_round(self) -> None:
        """What is left of the round is sent."""
        self._flush()

    def finish(self) -> None:
        """All is sent, and has arrived."""
        self._flush()
        self._open([bucket for bucket in self._buckets if bucket.unit.is_tied])
        self._flush()
        while self._under_way:
            self._arrive()

    def _open(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            bucket.missing = {slot.path for slot in bucket.unit.slots}
        self._queue.extend(buckets)

    def _flush(self) -> None:
        for bucket in list(self._queue):
            for path in sorted(bucket.missing):
                self._fill(bucket, path, 0)
        self._send_ready()

    def _send_ready(self) -> None:
        while self._queue and not self._queue[0].missing:
            self._send(self._queue.popleft())

    def _send(self, bucket: _Bucket) -> None:
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._arrive()
        unit = bucket.unit
        self._make(bucket)
        room = unit.size_bytes - unit.shard_bytes if unit.num_shards > 1 and self._straight else 0
        self._meter.add("communication", room)
        bucket.is_there = False
        self._under_way.append((bucket, room))

    def _arrive(self) -> None:
        bucket, room = self._under_way.popleft()
        unit = bucket.unit
        is_room = unit.num_shards == 1 or room == unit.shard_bytes  # the shard's memory is there already
        if is_room:
            self._meter.add("communication", -unit.size_bytes - room)
        if not bucket.has_shard:
            bucket.has_shard = True
            self._meter.add("gradients", unit.shard_bytes)
        if not is_room:
            self._meter.add("communication", -unit.size_bytes - room)
