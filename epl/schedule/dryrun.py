"""Run a schedule on paper: does it end, how long does it take, how many micro-batches are alive at once.

All stages are simulated together. A stage runs its actions in the order of its list, one at a time. An action starts
when the stage is free and what it needs has arrived:

    start(s, F, m) = max(free(s), end(r, F, m) + transfer   for every edge r -> s of the stage graph)
    start(s, B, m) = max(free(s), end(t, B, m) + transfer   for every edge s -> t)
    end            = start + forward_s[s] or backward_s[s]
    bubble         = idle time / (makespan * number of stages)

Messages take ``transfer_s`` and keep neither of the two stages busy. In equal stages without transfer time the bubble
of GPipe and of 1F1B is (p - 1) / (m + p - 1) for p stages and m micro-batches (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters", section 2.2).

This is where a mistake in a schedule becomes an error on one line of text and not a hang of a cluster. No devices, no
process group and no torch are needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epl.errors import PlanError, bulleted
from epl.schedule.actions import Action, Kind

__all__ = ["DryRun", "TimedAction", "chain", "draw", "dry_run"]


@dataclass(frozen=True)
class TimedAction:
    """An action with the time at which it starts and ends, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class DryRun:
    """What came of running a schedule on paper.

    Args:
        timeline: for each stage its actions in order, with their times.
        makespan_s: when the last action ends.
        peak_in_flight: for each stage the most micro-batches it holds at once: those whose forward pass has begun and
            whose backward pass has not ended. Without backward passes a micro-batch is let go after its forward pass.
        stage_bubbles: for each stage the part of the makespan in which it is idle, 0 to 1.
        bubble: the part of all stages' time that is idle, 0 to 1.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan_s: float
    peak_in_flight: tuple[int, ...]
    stage_bubbles: tuple[float, ...]
    bubble: float


def dry_run(
    schedule: Sequence[Sequence[Action]],
    *,
    forward_s: float | Sequence[float] = 1.0,
    backward_s: float | Sequence[float] = 2.0,
    transfer_s: float = 0.0,
    dependencies: Iterable[tuple[int, int]] | None = None,
) -> DryRun:
    """Check a schedule and simulate it.

    Args:
        schedule: for each stage its actions in order. If no stage has a backward pass, it is one for evaluation.
        forward_s: seconds of one micro-batch's forward pass, for all stages or one number per stage.
        backward_s: the same for the backward pass.
        transfer_s: seconds from the end of an action to the moment at which another stage can use its result.
        dependencies: all edges ``(from_stage, to_stage)`` of the stage graph; by default ``chain(len(schedule))``. For
            a model whose stage 0 also feeds stage 3: ``chain(4) | {(0, 3)}``.

    Returns:
        The times of all actions and what follows from them.

    Raises:
        PlanError: a schedule that is incomplete or contradicts itself (all findings in one message), one that cannot
            come to its end (the message says where each stage stands and what it waits for), or numbers that fit no
            schedule.

    Example:
        >>> from epl.schedule.generators import generate
        >>> run = dry_run(generate("PreferBackward", 4, 8))
        >>> run.makespan_s, run.peak_in_flight, round(run.bubble, 3)
        (33.0, (4, 3, 2, 1), 0.273)
    """
    num_stages = len(schedule)
    edges = chain(num_stages) if dependencies is None else frozenset(dependencies)
    durations_s = {
        Kind.FORWARD: _per_stage("forward_s", forward_s, num_stages),
        Kind.BACKWARD: _per_stage("backward_s", backward_s, num_stages),
    }
    (transfer_s,) = _per_stage("transfer_s", transfer_s, 1)
    violations = [*_edge_violations(edges, num_stages), *_violations(schedule)]
    if violations:
        raise PlanError(bulleted("the schedule cannot be run:", violations))
    return _summary(_simulate(schedule, durations_s, transfer_s, edges))


def chain(num_stages: int) -> frozenset[tuple[int, int]]:
    """The stage graph in which each stage feeds the next one.

    Args:
        num_stages: number of stages.

    Returns:
        The edges ``(stage, stage + 1)``.

    Example:
        >>> sorted(chain(3))
        [(0, 1), (1, 2)]
    """
    return frozenset((stage, stage + 1) for stage in range(num_stages - 1))


def draw(run: DryRun, *, max_columns: int = 240) -> str:
    """A timeline in text, one line per stage, for documents and logs.

    An action is drawn as long as it takes, ``F0|`` or ``B0---|``; dots are idle time. Where there is no room for the
    number of the micro-batch only the letter is drawn; what takes no time at all is left out.

    Args:
        run: what :func:`dry_run` returned.
        max_columns: the most columns for the time itself.

    Returns:
        Lines of text without a newline at the end.

    Example:
        >>> from epl.schedule.generators import generate
        >>> print(draw(dry_run(generate("PreferBackward", 2, 2), backward_s=1.0)))
        stage 0 F0|F1|...B0|...B1|  in flight 2, idle 33.3%
        stage 1 ...F0|B0|F1|B1|...  in flight 1, idle 33.3%
        makespan 6 s, bubble 33.3%, 3 columns = 1 s
    """
    columns_per_s = _columns_per_s(run, max_columns)
    width = round(run.makespan_s * columns_per_s)
    name_width = len(str(max(len(run.timeline) - 1, 0)))
    lines = [
        f"stage {stage:>{name_width}} {_draw_stage(actions, columns_per_s, width)}"
        f"  in flight {run.peak_in_flight[stage]}, idle {run.stage_bubbles[stage]:.1%}"
        for stage, actions in enumerate(run.timeline)
    ]
    scale = f", {columns_per_s:.4g} columns = 1 s" if width else ""
    return "\n".join([*lines, f"makespan {run.makespan_s:.6g} s, bubble {run.bubble:.1%}{scale}"])


def _per_stage(name: str, seconds: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    values = tuple(seconds) if isinstance(seconds, Sequence) else (seconds,) * num_stages
    if len(values) != num_stages:
        raise PlanError(f"{name} has {len(values)} numbers for {num_stages} stages: give one number, or one per stage")
    wrong = [value for value in values if not (math.isfinite(value) and value >= 0)]
    if wrong:
        raise PlanError(f"{name} has {wrong[0]}: times are finite and 0 or more, in seconds")
    return values


def _edge_violations(edges: Iterable[tuple[int, int]], num_stages: int) -> list[str]:
    return [
        f"the dependency {edge} is not between two of the stages 0 to {num_stages - 1}"
        for edge in sorted(edges)
        if edge[0] == edge[1] or not all(0 <= stage < num_stages for stage in edge)
    ]


def _violations(schedule: Sequence[Sequence[Action]]) -> list[str]:
    """Everything that is wrong with the lists themselves, before any stage waits for another."""
    every = [action for actions in schedule for action in actions]
    num_micro_batches = 1 + max((action.micro_batch for action in every), default=-1)
    trains = any(action.kind is Kind.BACKWARD for action in every)
    kinds = (Kind.FORWARD, Kind.BACKWARD) if trains else (Kind.FORWARD,)
    return [
        violation
        for stage, actions in enumerate(schedule)
        for violation in _stage_violations(
            actions, [Action(stage, kind, m) for kind in kinds for m in range(num_micro_batches)], stage
        )
    ]


def _stage_violations(actions: Sequence[Action], expected: Sequence[Action], stage: int) -> list[str]:
    count = Counter(actions)
    place = {action: index for index, action in reversed([*enumerate(actions)])}
    found = [f"{action} stands in the list of stage {stage}" for action in count if action.stage != stage]
    found += [f"{action} runs {times} times" for action, times in count.items() if times > 1]
    found += [f"{action} is missing" for action in expected if action not in count]
    for action in count:
        forward = Action(action.stage, Kind.FORWARD, action.micro_batch)
        if action.kind is Kind.BACKWARD and place.get(forward, -1) > place[action]:
            found.append(f"{action} runs before {forward}")
    return found


def _simulate(
    schedule: Sequence[Sequence[Action]],
    durations_s: dict[Kind, tuple[float, ...]],
    transfer_s: float,
    edges: Iterable[tuple[int, int]],
) -> tuple[tuple[TimedAction, ...], ...]:
    """Let the stages take turns, one action each, until none can go on."""
    sources = _sources(len(schedule), edges)
    timeline: list[list[TimedAction]] = [[] for _ in schedule]
    end_s: dict[Action, float] = {}

    def step(stage: int) -> bool:
        done = timeline[stage]
        if len(done) == len(schedule[stage]):
            return False
        action = schedule[stage][len(done)]
        needs = _needs(action, sources)
        if any(need not in end_s for need in needs):
            return False
        free_s = done[-1].end_s if done else 0.0
        start_s = max([free_s, *(end_s[need] + transfer_s for need in needs)])
        end_s[action] = start_s + durations_s[action.kind][stage]
        done.append(TimedAction(action, start_s, end_s[action]))
        return True

    steps_taken = -1
    while steps_taken:
        steps_taken = sum(step(stage) for stage in range(len(schedule)))
    _check_all_ran(schedule, timeline, sources)
    return tuple(tuple(actions) for actions in timeline)


def _sources(num_stages: int, edges: Iterable[tuple[int, int]]) -> dict[Kind, list[list[int]]]:
    """For each kind and stage the stages it receives from: along the edges forward, against them backward."""
    sources: dict[Kind, list[list[int]]] = {kind: [[] for _ in range(num_stages)] for kind in Kind}
    for before, after in sorted(edges):
        sources[Kind.FORWARD][after].append(before)
        sources[Kind.BACKWARD][before].append(after)
    return sources


def _needs(action: Action, sources: dict[Kind, list[list[int]]]) -> list[Action]:
    return [Action(stage, action.kind, action.micro_batch) for stage in sources[action.kind][action.stage]]


def _check_all_ran(
    schedule: Sequence[Sequence[Action]],
    timeline: Sequence[Sequence[TimedAction]],
    sources: dict[Kind, list[list[int]]],
) -> None:
    ran = {timed.action for actions in timeline for timed in actions}
    blocked = [actions[len(done)] for actions, done in zip(schedule, timeline, strict=True) if len(done) < len(actions)]
    if not blocked:
        return
    lines = []
    for action in blocked:
        awaited = [str(need) for need in _needs(action, sources) if need not in ran]
        lines.append(f"stage {action.stage} stands at {action} and waits for {' and '.join(awaited)}")
    raise PlanError(bulleted("the schedule does not end, its stages wait for one another:", lines))


def _summary(timeline: tuple[tuple[TimedAction, ...], ...]) -> DryRun:
    makespan_s = max((actions[-1].end_s for actions in timeline if actions), default=0.0)
    trains = any(timed.action.kind is Kind.BACKWARD for actions in timeline for timed in actions)
    busy_s = [math.fsum(timed.end_s - timed.start_s for timed in actions) for actions in timeline]
    # A step that takes no time has no idle time either; rounding may leave a hair below 0.
    bubbles = tuple(max(0.0, 1.0 - busy / makespan_s) if makespan_s else 0.0 for busy in busy_s)
    return DryRun(
        timeline=timeline,
        makespan_s=makespan_s,
        peak_in_flight=tuple(_peak_in_flight(actions, trains) for actions in timeline),
        stage_bubbles=bubbles,
        bubble=math.fsum(bubbles) / len(bubbles) if bubbles else 0.0,
    )


def _peak_in_flight(actions: Sequence[TimedAction], trains: bool) -> int:
    if not trains:
        return min(len(actions), 1)
    peak = alive = 0
    for timed in actions:
        alive += 1 if timed.action.kind is Kind.FORWARD else -1
        peak = max(peak, alive)
    return peak


def _columns_per_s(run: DryRun, max_columns: int) -> float:
    """As many as the shortest action needs for its label, unless the whole would become too wide."""
    timed = [action for actions in run.timeline for action in actions if action.end_s > action.start_s]
    if not timed:
        return 0.0
    shortest_s = min(action.end_s - action.start_s for action in timed)
    label_columns = 1 + max(len(_label(action.action)) for action in timed)
    return min(label_columns / shortest_s, max_columns / run.makespan_s)


def _label(action: Action) -> str:
    return f"{action.kind.value}{action.micro_batch}"


def _draw_stage(actions: Sequence[TimedAction], columns_per_s: float, width: int) -> str:
    line = ""
    for timed in actions:
        begin, end = round(timed.start_s * columns_per_s), round(timed.end_s * columns_per_s)
        line += "." * (begin - len(line))
        if end > begin:
            line += _box(_label(timed.action), end - begin)
    return line + "." * (width - len(line))


def _box(label: str, columns: int) -> str:
    # A cut number would be read as another one: "F1" for micro-batch 15.
    text = label if len(label) < columns else label[:1]
    return text[: columns - 1].ljust(columns - 1, "-") + "|"
