"""Choose which segments to compute again: an exact search along the stage for each price of memory, then the best of all.

    minimise  sum over segments [i, j) of  again_s(i, j) + price * inputs_bytes(i, j)
            + sum over operators p that are in none of     price * saved_bytes(p)
    such that each segment saves at most a window of bytes when it is computed again

is a shortest path over the places of the stage, for each price and window. The choices on the way from "nothing" to "all"
that this gives are judged by the peak of the whole step (:meth:`StageCosts.estimate`), and what is computed again without
need is dropped. Since segments are cut right after operators that are dear (a matrix product saves what it takes, and need
not run again for that), what comes out in transformers is to compute the cheap operators again and keep products.

Sources: Chen et al. 2016 ("Training Deep Nets with Sublinear Memory Cost"), Beaumont et al. 2019 (rotor: optimal
checkpointing of chains), Korthikanti et al. 2022 (selective recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from epl.passes.segment_costs import Estimate, Segment, StageCosts
from epl.stage.saved import Memory

__all__ = ["Choice", "search"]

LONGEST = 100  # operators in a segment: more than a block of any usual model
_PRICES = 2.0 ** np.arange(-8, 9)  # of memory, in units of (time of forward) / (all that it saves)
_WINDOWS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)  # of all that forward saves
_NEAR = 1.02  # peaks this near to each other count as the same


@dataclass(frozen=True)
class Choice:
    """Segments, and what they come to."""

    segments: tuple[Segment, ...]
    estimate: Estimate


def search(costs: StageCosts, longest: Sequence[int], *, most_again_s: float, budget_bytes: float) -> Choice:
    """The best choice; with a budget that no choice keeps, the one of the fewest bytes.

    Args:
        costs: Of the stage.
        longest: For each place, the end of the longest segment that may begin there (the place itself: none may).
        most_again_s: Most seconds of computing again, if there is no budget.
        budget_bytes: Most bytes at the peak, with as little computed again as can be; 0: as few bytes as can be.
    """
    found = _choices(costs, longest)
    if budget_bytes:
        within = [each for each in found if each.estimate.peak_bytes <= budget_bytes]
        if within:
            return _thinned(costs, min(within, key=_again), budget_bytes)
    within = [each for each in found if each.estimate.again_s <= most_again_s]
    least = min(each.estimate.peak_bytes for each in within) * _NEAR
    return _thinned(costs, min((each for each in within if each.estimate.peak_bytes <= least), key=_again), least)


def _again(choice: Choice) -> float:
    return choice.estimate.again_s


def _choices(costs: StageCosts, longest: Sequence[int]) -> list[Choice]:
    """Nothing computed again, and the shortest path for each price and window."""
    paths: dict[tuple[Segment, ...], None] = {(): None}
    tables = _Tables(costs, longest)
    all_bytes, forward_s = tables.saved_bytes.sum(), float(costs.times_s.sum())
    if all_bytes:
        for window in _WINDOWS:
            for price in _PRICES:
                paths[tables.shortest(price * forward_s / all_bytes, window * all_bytes)] = None
    return [Choice(path, costs.estimate(path)) for path in paths]


def _thinned(costs: StageCosts, choice: Choice, most_bytes: float) -> Choice:
    """Without the segments that the peak does not need; the last ones go first, which are needed soonest."""
    for segment in reversed(choice.segments):
        rest = tuple(each for each in choice.segments if each != segment)
        estimate = costs.estimate(rest)
        if estimate.peak_bytes <= most_bytes and estimate.again_s <= choice.estimate.again_s:
            choice = Choice(rest, estimate)
    return choice


class _Tables:
    """Costs of every possible segment, by its start: arrays over its end."""

    def __init__(self, costs: StageCosts, longest: Sequence[int]) -> None:
        self.costs = costs
        saved: list[list[Memory]] = [[] for _ in range(costs.num_ops)]
        read: list[list[Memory]] = [[] for _ in range(costs.num_ops)]
        for each in costs.activations:
            for place in set(each.savers):
                saved[place].append(each)
            for place in set(each.readers):
                if place < costs.num_ops:
                    read[place].append(each)
        self.saved_bytes = np.array(
            [sum(each.size_bytes for each in saved[place] if min(each.savers) == place) for place in range(len(saved))]
        )
        self.starts = [self._from(start, min(end, start + LONGEST), saved, read) for start, end in enumerate(longest)]

    def _from(
        self, start: int, stop: int, saved: list[list[Memory]], read: list[list[Memory]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(bytes of inputs, bytes saved when computed again, seconds) of the segments from ``start`` that end after it."""
        inputs, inside, seen = 0, 0, set()
        rows: list[tuple[float, float, float]] = []
        for place in range(start, stop):
            for each in read[place]:
                if each.maker < start and id(each) not in seen:
                    seen.add(id(each))
                    # an operator between its maker and this segment that saves it has paid for it
                    is_paid = any(each.maker < saver < start for saver in each.savers)
                    inputs += 0 if is_paid else each.size_bytes
            for each in saved[place]:
                if each.maker >= start and id(each) not in seen:
                    seen.add(id(each))
                    inside += each.size_bytes
            rows.append((inputs, inside, self.costs.again_s((start, place + 1))))
        table = np.array(rows).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def shortest(self, price: float, window: float) -> tuple[Segment, ...]:
        """The cheapest choice of segments, for a price of a byte in seconds."""
        num_ops = self.costs.num_ops
        best = np.zeros(num_ops + 1)
        ends = np.zeros(num_ops, dtype=int)
        plain = self.saved_bytes * price
        for start in range(num_ops - 1, -1, -1):
            best[start], ends[start] = plain[start] + best[start + 1], start
            inputs, inside, again_s = self.starts[start]
            if len(inputs):
                cost = price * inputs + again_s + best[start + 1 : start + 1 + len(inputs)]
                cost = np.where(inside <= window, cost, np.inf)
                place = int(cost.argmin())
                if cost[place] < best[start]:
                    best[start], ends[start] = cost[place], start + 1 + place
        return tuple(self._walk(ends))

    def _walk(self, ends: np.ndarray) -> Iterator[Segment]:
        start = 0
        while start < len(ends):
            end = int(ends[start])
            if end > start:
                yield start, end
            start = max(end, start + 1)
