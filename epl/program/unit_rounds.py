"""In which order gradients of units are taken in and sent: one protocol, for the runtime and for the memory model.

    open -> a gradient comes -> ... -> the last one of a unit -> sent, if all units before it are -> arrived

Units are sent in one order, so that all ranks agree, and at most two are under way at once. A round opens the units that
are summed after each backward pass; the last backward pass of a step opens those that are summed once; weights tied over
stages come when all else is done.

Sources: PyTorch DDP (Li et al. 2020: buckets, reverse order, hooks), ZeRO (Rajbhandari et al. 2020, section 5.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from epl.planner.units import Unit

__all__ = ["UnitBucket", "UnitRounds"]

_MOST_UNDER_WAY = 2


@dataclass(eq=False)
class UnitBucket:
    """The gradients of a unit.

    Args:
        unit: The unit.
        missing: Places of the slots whose gradient is still to come in this round; empty if it is not open.
    """

    unit: Unit
    missing: set[int] = field(default_factory=set)


_Bucket = TypeVar("_Bucket", bound=UnitBucket)


class UnitRounds(ABC, Generic[_Bucket]):
    """The rounds of one rank.

    Args:
        buckets: Of its units, in the order in which ranks meet over them.
    """

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._each = [bucket for bucket in buckets if bucket.unit.each_backward]
        self._last = [bucket for bucket in buckets if bucket.unit.is_tied]
        self._once = [bucket for bucket in buckets if not (bucket.unit.each_backward or bucket.unit.is_tied)]
        self._queue: deque[_Bucket] = deque()  # what is open, in order
        self._under_way: deque[Any] = deque()  # what `_send` has given

    @property
    def buckets(self) -> list[_Bucket]:
        """All of them."""
        return [*self._each, *self._once, *self._last]

    def start_round(self) -> None:
        """The next backward pass is summed by itself, for units that are summed after each."""
        self._open(self._each)

    def finish_round(self) -> None:
        """Send what is left of this round."""
        for bucket in list(self._queue):
            for place in sorted(bucket.missing):
                bucket.missing.discard(place)
                self._fill(bucket, place)
        self._send_ready()

    def start(self) -> None:
        """The next backward pass is the last one: what it leaves of the other units is complete."""
        self._open(self._once)

    def finish(self) -> None:
        """Send the rest, and wait for everything."""
        self.finish_round()
        self._open(self._last)
        self.finish_round()
        while self._under_way:
            self._arrive(self._under_way.popleft())

    def _take(self, bucket: _Bucket, place: int) -> None:
        """A gradient that is missing has come."""
        bucket.missing.discard(place)
        self._fill(bucket, place)
        self._send_ready()

    def _open(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            bucket.missing = self._expected(bucket)
        self._queue.extend(buckets)

    def _send_ready(self) -> None:
        while self._queue and not self._queue[0].missing:
            while len(self._under_way) >= _MOST_UNDER_WAY:
                self._arrive(self._under_way.popleft())
            self._under_way.append(self._send(self._queue.popleft()))

    @abstractmethod
    def _expected(self, bucket: _Bucket) -> set[int]:
        """Places of the slots that take gradients."""

    @abstractmethod
    def _fill(self, bucket: _Bucket, place: int) -> None:
        """Put a gradient into the bucket, or take note that there is none."""

    @abstractmethod
    def _send(self, bucket: _Bucket) -> Any:
        """Start to send a bucket; gives what `_arrive` needs."""

    @abstractmethod
    def _arrive(self, sent: Any) -> None:
        """Wait for what was sent, and keep what is this rank's."""
