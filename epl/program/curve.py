"""The memory of one rank over one step, by what it is for: predicted or measured, in the same form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["CATEGORIES", "MemoryCurve", "Meter", "Sample"]

CATEGORIES = ("weights", "optimizer", "communication", "gradients", "activations", "temporaries")
_MOST_SAMPLES = 40  # of one instruction; the largest are kept, so that a peak is never lost


class Sample(NamedTuple):
    """A moment: the instruction that ran, and the bytes of each category."""

    instruction: str
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class MemoryCurve:
    """One rank's memory over one step.

    Args:
        samples: Moments in their order; of many events the largest are kept.
        problems: What is not in it, and why.
    """

    samples: tuple[Sample, ...]
    problems: tuple[str, ...] = ()

    @property
    def peak(self) -> Sample:
        """The first moment of the most memory."""
        return max(self.samples, key=lambda sample: sample.total)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once."""
        return self.peak.total

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes of each category at the peak."""
        return dict(zip(CATEGORIES, self.peak.sizes, strict=True))

    def largest(self, category: str) -> int:
        """The most bytes of one category at any moment."""
        place = CATEGORIES.index(category)
        return max(sample.sizes[place] for sample in self.samples)


@dataclass
class Meter:
    """Adds up what comes and goes, and remembers the curve."""

    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    _samples: list[Sample] = field(default_factory=list)
    _now: list[Sample] = field(default_factory=list)
    _instruction: str = ""

    @staticmethod
    def starting_with(sizes: Mapping[str, int]) -> Meter:
        """A meter at the start of a step, with what is there before it."""
        return Meter({category: sizes.get(category, 0) for category in CATEGORIES})

    def begin(self, instruction: str) -> None:
        """What follows happens in this instruction."""
        self._end()
        self._instruction = instruction
        self._note()

    def add(self, category: str, size_bytes: int) -> None:
        """Memory is made, or given back if negative."""
        if size_bytes:
            self.live[category] += size_bytes
            self._note()

    def move(self, source: str, target: str, size_bytes: int) -> None:
        """The same memory is for something else from here on."""
        self.live[source] -= size_bytes
        self.live[target] += size_bytes

    def spike(self, category: str, size_bytes: int) -> None:
        """Memory that is made and given back at once."""
        self.add(category, size_bytes)
        self.add(category, -size_bytes)

    def curve(self, problems: Iterable[str] = ()) -> MemoryCurve:
        """All that was added."""
        self._note()
        self._end()
        return MemoryCurve(tuple(self._samples), tuple(dict.fromkeys(problems)))

    def _note(self) -> None:
        self._now.append(Sample(self._instruction, tuple(self.live[category] for category in CATEGORIES)))

    def _end(self) -> None:
        if not self._now:
            return
        step = -(-len(self._now) // _MOST_SAMPLES)
        groups = (self._now[start : start + step] for start in range(0, len(self._now), step))
        self._samples += [max(group, key=lambda sample: sample.total) for group in groups]
        self._samples.append(self._now[-1])
        self._now = []
