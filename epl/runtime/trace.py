"""Record what each rank did and when, as one Chrome trace and as a picture of the pipeline.

The trace opens in Perfetto (ui.perfetto.dev) and chrome://tracing: one process a rank, one row for what it computes and
one for what it waits for. Names are the instructions' own text (``1F2``), so the trace and the plan can be compared.
Format: "Trace Event Format" (Google), complete events ("ph": "X"), times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from epl.lines import warn
from epl.planner.plan import Plan
from epl.runtime.record import Event
from epl.runtime.world import World

__all__ = ["StepTrace", "bubble_of", "chrome_trace", "recording", "save_trace"]


@contextlib.contextmanager
def recording(world: World, plan_of: Callable[[], Plan], path: str) -> Iterator[None]:
    """Record everything inside, on all ranks, and write the trace when it ends.

    Args:
        world: The ranks; all enter and leave together.
        plan_of: Gives the plan, when the recording ends.
        path: File of the trace, on rank 0.
    """
    world.recorder.start(_shared_zero(world))
    try:
        yield
    finally:
        world.recorder.stop()
    by_rank = world.gather(world.recorder.events)
    if world.rank == 0:
        print(save_trace(path, by_rank, plan_of()), flush=True)


class StepTrace:
    """Records the training steps that ``run.trace`` asks for: ``num_steps`` of them, after the first."""

    def __init__(self, world: World, path: str, num_steps: int) -> None:
        self._world, self._path, self._num_steps = world, path, num_steps
        self._step = 0
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def step(self, plan_of: Callable[[], Plan]) -> Iterator[None]:
        """Around each training step."""
        if self._path and self._step == 1:
            self._open.enter_context(recording(self._world, plan_of, self._path))
        yield
        if self._path and self._step == self._num_steps:
            self._open.close()
        self._step += 1


def _shared_zero(world: World) -> float:
    """A moment that all ranks call 0, on this rank's clock: the end of a meeting of all ranks.

    On one host the clock (CLOCK_MONOTONIC) is the same for all processes; between hosts this is right to the time that
    the meeting's last message takes.
    """
    world.gather_numbers([0])
    clocks = world.gather((time.perf_counter(), time.time()))
    here = time.perf_counter(), time.time()
    # the offset between this rank's two clocks tells whether rank 0's perf_counter is the same clock
    same_clock = abs((clocks[0][0] - clocks[0][1]) - (here[0] - here[1])) < 1e-3
    return clocks[0][0] if same_clock else here[0]


def bubble_of(events: Sequence[Event]) -> float:
    """Share of a rank's time in which it computed neither forward nor backward, from its first action to its last."""
    waits = [event for event in events if event.kind == "wait"]
    actions = [event for event in events if event.kind in ("forward", "backward")]
    if not actions:
        return 0.0
    start = min(event.start_s for event in actions)
    end = max(event.start_s + event.duration_s for event in actions)
    waited = sum(wait.duration_s for wait in waits if any(_inside(wait, action) for action in actions))
    busy = sum(event.duration_s for event in actions) - waited
    return 1.0 - busy / (end - start) if end > start else 0.0


def _inside(inner: Event, outer: Event) -> bool:
    return outer.start_s <= inner.start_s and inner.start_s + inner.duration_s <= outer.start_s + outer.duration_s


def chrome_trace(by_rank: Sequence[Sequence[Event]], plan: Plan) -> dict[str, Any]:
    """The Chrome trace of all ranks' events."""
    found: list[dict[str, Any]] = []
    for rank, events in enumerate(by_rank):
        stage, replica, _ = plan.place_of(rank)
        name = f"rank {rank}: stage {stage} {plan.stages[stage].name}, replica {replica}"
        found.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
        for row, text in enumerate(("compute", "communication", "wait")):
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": text}})
        found += [_chrome_event(rank, stage, event) for event in events]
    bubbles = [round(bubble_of(events), 4) for events in by_rank]
    other = {"bubble_by_rank": bubbles, "bubble_of_dry_run": round(plan.bubble, 4), "schedule": plan.schedule}
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}


def _chrome_event(rank: int, stage: int, event: Event) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": rank,
        "tid": {"communication": 1, "wait": 2}.get(event.kind, 0),
        "ts": round(event.start_s * 1e6, 1),
        "dur": round(event.duration_s * 1e6, 1),
        "args": {"stage": stage, "micro_batch": event.micro_batch, "kind": event.kind},
    }


def save_trace(path: str, by_rank: Sequence[Sequence[Event]], plan: Plan) -> str:
    """Write the trace to ``path`` and its picture beside it (``.png``); returns a line about the bubble."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(chrome_trace(by_rank, plan)))
    try:
        from epl.runtime.picture import draw_timeline  # lazy: matplotlib is an extra, wanted for the picture only
    except ImportError:
        warn(f"matplotlib is not installed, so {path} has no picture beside it: pip install matplotlib")
    else:
        draw_timeline(target.with_suffix(".png"), by_rank, plan)
    bubbles = ", ".join(f"rank {rank} {bubble_of(events):.0%}" for rank, events in enumerate(by_rank))
    return f"trace in {path}; idle between first and last action: {bubbles} (dry run: {plan.bubble:.0%})"
