"""What segments of a stage would cost: bytes kept, bytes computed again, seconds; and the peak of any choice of them.

Places are those of operators in the stage's list, 0 to n - 1; a segment is a range of them. Forward keeps the inputs of a
segment only; backward computes it again and then holds what its operators save, until their backward has run. Gradients
of values live from the backward of their last reader to that of their maker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from epl.cost.devices import CPU, DeviceModel
from epl.cost.operators import operator_s, work_of
from epl.ir.graph import Graph, Op
from epl.ir.types import TensorType
from epl.sharding.options import Call
from epl.stage.saved import Memory, OpMemory

__all__ = ["Estimate", "Segment", "StageCosts", "forward_times"]

Segment = tuple[int, int]  # from, to (not included)

# how much longer than their bytes say some operators take on a CPU [measured: 2-core virtual machine, 2026-11]
_SLOW_ON_CPU = {"dropout": 5.0, "native_dropout": 5.0, "bernoulli": 5.0, "where": 3.0}


@dataclass(frozen=True)
class Estimate:
    """What a choice of segments comes to, for one micro-batch but for the peak.

    Args:
        peak_bytes: The most that activations and gradients of values take, with all micro-batches that are in flight.
        kept_bytes: What lives between forward and backward of a micro-batch.
        again_s: Seconds of computing again.
    """

    peak_bytes: float
    kept_bytes: float
    again_s: float


def forward_times(graph: Graph, device: DeviceModel) -> np.ndarray:
    """Seconds of each operator's forward."""
    return np.array([_forward_s(graph, op, device) for op in graph.ops])


def _forward_s(graph: Graph, op: Op, device: DeviceModel) -> float:
    if not op.target.startswith("aten."):
        return device.operator_s
    call = Call(op, graph.type_of)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for argument, ref in call.refs:
        kind = graph.type_of(ref)
        shapes.setdefault(argument, []).append(kind.sizes if isinstance(kind, TensorType) else ())
    itemsize = call.results[0].dtype.itemsize if call.results else 4
    work = work_of(op.target, shapes, [kind.sizes for kind in call.results], itemsize)
    slower = _SLOW_ON_CPU.get(op.target.split(".")[1].rstrip("_"), 1.0) if device is CPU else 1.0
    return slower * operator_s(work, device, backward=False)


@dataclass(frozen=True)
class StageCosts:
    """A stage's memory and times.

    Args:
        memory: As :func:`epl.stage.saved.memory_of` gives it; weights are among what is kept anyway.
        ops: The same, for each operator.
        times_s: Seconds of each operator's forward.
        segment_s: Seconds that a segment costs beside its operators.
        num_in_flight: Micro-batches held at once.
        marked: Segments that are there whatever is chosen: those that the user has marked.
    """

    memory: Sequence[Memory]
    ops: Sequence[OpMemory]
    times_s: np.ndarray
    segment_s: float
    num_in_flight: int
    marked: tuple[Segment, ...] = ()

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    @cached_property
    def activations(self) -> tuple[Memory, ...]:
        """What is there because of this micro-batch, and might be dropped."""
        return tuple(each for each in self.memory if not each.is_kept_anyway and each.size_bytes)

    @cached_property
    def _elapsed_s(self) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(self.times_s)])

    def again_s(self, segment: Segment) -> float:
        """Seconds to compute a segment again: up to the last operator that saves anything.

        That one itself does not run if it saves what it takes and nothing that it makes: recomputing ends when all that
        backward needs is there.
        """
        start, end = segment
        last = next((place for place in range(end - 1, start - 1, -1) if self.ops[place].saves_anything), None)
        if last is None:
            return self.segment_s
        stop = last + 1 if self.ops[last].saves_results else last
        return float(self._elapsed_s[stop] - self._elapsed_s[start]) + self.segment_s

    @cached_property
    def _gradients(self) -> np.ndarray:
        """Bytes of gradients of values while each operator's backward runs."""
        change = np.zeros(self.num_ops + 2)
        for each in self.memory:
            if each.needs_grad and each.readers:
                change[max(each.maker, 0)] += each.size_bytes
                change[min(max(each.readers), self.num_ops) + 1] -= each.size_bytes
        return np.cumsum(change)[: self.num_ops + 1]

    def estimate(self, segments: Sequence[Segment]) -> Estimate:
        """What a choice of segments, apart from each other and from what is marked, comes to."""
        start_of = np.full(self.num_ops + 1, -1)
        end_of = np.full(self.num_ops + 1, -1)
        for start, end in (*segments, *self.marked):
            start_of[start:end], end_of[start:end] = start, end
        backward, forward, again = (np.zeros(self.num_ops + 2) for _ in range(3))
        kept_bytes = 0.0
        for each in self.activations:
            kept_from = _kept_from(each, start_of, self.num_ops)
            made, size = max(each.maker, 0), each.size_bytes
            if kept_from is not None:
                kept_bytes += size
                backward[kept_from] += size
                forward[made] += size
            else:
                forward[made] += size
                forward[min(max(each.readers, default=made), self.num_ops) + 1] -= size
            savers = [place for place in each.savers if start_of[place] >= 0 and start_of[place] <= each.maker]
            if savers:
                backward[min(savers)] += size
                backward[end_of[savers[0]]] -= size
            if each.maker >= 0 and start_of[each.maker] >= 0:  # made again, and there until it is saved or read last
                end = int(end_of[each.maker])
                last = end - 1 if savers else min(max(each.readers, default=made), end - 1)
                again[made] += size
                again[last + 1] -= size
        of_one = max(
            (np.cumsum(backward)[: self.num_ops + 1] + self._gradients).max(initial=0.0),
            np.cumsum(forward)[: self.num_ops + 1].max(initial=0.0),
            self._most_while_again(np.cumsum(backward), np.cumsum(again), (*segments, *self.marked), start_of),
        )
        peak = of_one + (self.num_in_flight - 1) * kept_bytes
        return Estimate(float(peak), kept_bytes, sum(map(self.again_s, segments)))

    def _most_while_again(
        self, backward: np.ndarray, again: np.ndarray, segments: Sequence[Segment], start_of: np.ndarray
    ) -> float:
        """The most while a segment runs again: what it makes, beside what is there when its backward begins."""
        inside = np.zeros(self.num_ops + 1)
        for each in self.activations:
            if each.maker >= 0 and any(start_of[each.maker] == start_of[place] >= 0 for place in each.savers):
                inside[int(start_of[each.maker])] += each.size_bytes
        return max(
            (
                float(backward[end - 1] - inside[start] + self._gradients[end - 1] + again[start:end].max())
                for start, end in segments
            ),
            default=0.0,
        )


def _kept_from(memory: Memory, start_of: np.ndarray, num_ops: int) -> int | None:
    """The place whose backward is the last that needs it; None if forward drops it."""
    needing = [place for place in memory.savers if start_of[place] < 0]
    for place in memory.readers:
        if place == num_ops:
            needing.append(num_ops)  # a result of the stage: until its gradient comes
        elif start_of[place] >= 0 and memory.maker < start_of[place]:
            needing.append(int(start_of[place]))
    return min(needing, default=None)
