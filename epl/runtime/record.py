"""What one rank did and when: events that are collected while a recording is on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from epl.program.instructions import Backward, Forward, Instruction

__all__ = ["Event", "Recorder"]


@dataclass(frozen=True)
class Event:
    """Something that took time on one rank.

    Args:
        name: The instruction's text, or what was waited for.
        kind: ``forward``, ``backward``, ``communication``, ``wait`` or ``step``.
        micro_batch: Micro-batch; -1 where there is none.
        start_s: Seconds since the recording began, on the clock that the ranks share.
        duration_s: Seconds.
    """

    name: str
    kind: str
    micro_batch: int
    start_s: float
    duration_s: float


class Recorder:
    """Collects a rank's events while it is on; costs next to nothing while it is off."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_on = False
        self._zero_s = 0.0

    def start(self, zero_s: float) -> None:
        """Record from here on; ``zero_s`` is this rank's ``time.perf_counter()`` at the moment that is called 0."""
        self.events, self.is_on, self._zero_s = [], True, zero_s

    def stop(self) -> None:
        self.is_on = False

    @contextlib.contextmanager
    def instruction(self, instruction: Instruction) -> Iterator[None]:
        """Record an instruction."""
        if not self.is_on:
            yield
            return
        kind = {Forward: "forward", Backward: "backward"}.get(type(instruction), "communication")
        action = getattr(instruction, "action", None)
        with self._timed(str(instruction), kind, -1 if action is None else action.micro_batch):
            yield

    @contextlib.contextmanager
    def other(self, name: str, kind: str) -> Iterator[None]:
        """Record a wait, or a whole step."""
        if not self.is_on:
            yield
            return
        with self._timed(name, kind, -1):
            yield

    @contextlib.contextmanager
    def _timed(self, name: str, kind: str, micro_batch: int) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.events.append(Event(name, kind, micro_batch, start_s - self._zero_s, end_s - start_s))
