"""The dry run: times against closed forms and hand-made tables, and what it refuses."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from epl.errors import PlanError
from epl.schedule import SCHEDULE_NAMES, Action, DryRun, Schedule, chain, draw, dry_run, forward_only, generate

SIZES = list(itertools.product(range(1, 6), range(1, 9)))


def schedule_of(text: str) -> Schedule:
    """One stage a line."""
    return tuple(tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines())


def times(run: DryRun) -> dict[str, tuple[float, float]]:
    return {str(timed.action): (timed.start_s, timed.end_s) for actions in run.timeline for timed in actions}


def test_times_of_a_small_schedule() -> None:
    """Worked out by hand: forward 1 s, backward 2 s, half a second from stage to stage."""
    run = dry_run(generate("PreferBackward", 2, 2), forward_s=1.0, backward_s=2.0, transfer_s=0.5)
    assert times(run) == {
        "0F0": (0.0, 1.0),
        "0F1": (1.0, 2.0),
        "1F0": (1.5, 2.5),
        "1B0": (2.5, 4.5),
        "1F1": (4.5, 5.5),
        "0B0": (5.0, 7.0),
        "1B1": (5.5, 7.5),
        "0B1": (8.0, 10.0),
    }
    assert run.makespan_s == 10.0
    assert run.stage_bubbles == pytest.approx((0.4, 0.4))
    assert run.bubble == pytest.approx(0.4)


def test_stages_may_take_different_times() -> None:
    run = dry_run(generate("PreferForward", 2, 1), forward_s=[1.0, 3.0], backward_s=[2.0, 6.0])
    assert times(run) == {"0F0": (0.0, 1.0), "1F0": (1.0, 4.0), "1B0": (4.0, 10.0), "0B0": (10.0, 12.0)}
    assert run.stage_bubbles == pytest.approx((9 / 12, 3 / 12))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_makespan_is_the_closed_form(name: str) -> None:
    """The three schedules take the same time where messages cost nothing: M + S - 1 of each kind."""
    for num_stages, num_micro_batches in SIZES:
        for backward_s in (1.0, 2.0):
            run = dry_run(generate(name, num_stages, num_micro_batches), forward_s=1.0, backward_s=backward_s)
            assert run.makespan_s == (num_micro_batches + num_stages - 1) * (1.0 + backward_s)


def test_bubble_of_1f1b_is_the_closed_form() -> None:
    for num_stages, num_micro_batches in SIZES:
        run = dry_run(generate("PreferBackward", num_stages, num_micro_batches))
        expected = (num_stages - 1) / (num_micro_batches + num_stages - 1)
        assert run.bubble == pytest.approx(expected)
        assert run.stage_bubbles == pytest.approx([expected] * num_stages)


def test_one_more_micro_batch_hides_the_transfer() -> None:
    """Why PreferBackwardOptimizer exists: with messages that take time it is faster than 1F1B."""
    plain, ahead = (
        dry_run(generate(name, 4, 16), transfer_s=0.25) for name in ("PreferBackward", "PreferBackwardOptimizer")
    )
    assert ahead.makespan_s < plain.makespan_s


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_nothing_starts_before_what_it_needs(name: str) -> None:
    """Each start is checked against its stage and its edges, with times that fit no grid."""
    forward_s, backward_s, transfer_s = [0.7, 1.3, 0.2, 0.9], [1.1, 2.7, 0.3, 2.2], 0.15
    run = dry_run(generate(name, 4, 5), forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s)
    at = times(run)
    for stage, micro_batch in itertools.product(range(4), range(5)):
        forward, backward = at[f"{stage}F{micro_batch}"], at[f"{stage}B{micro_batch}"]
        assert forward[1] - forward[0] == pytest.approx(forward_s[stage])
        assert backward[1] - backward[0] == pytest.approx(backward_s[stage])
        assert backward[0] >= forward[1]
        if stage > 0:
            assert forward[0] >= at[f"{stage - 1}F{micro_batch}"][1] + transfer_s
            assert at[f"{stage - 1}B{micro_batch}"][0] >= backward[1] + transfer_s
    for actions in run.timeline:
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(actions))
    busy_s = 5 * (math.fsum(forward_s) + math.fsum(backward_s))
    assert run.bubble == pytest.approx(1 - busy_s / (4 * run.makespan_s))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("PreferForward", (6, 6, 6, 6)), ("PreferBackward", (4, 3, 2, 1)), ("PreferBackwardOptimizer", (5, 4, 3, 1))],
)
def test_peak_in_flight(name: str, expected: tuple[int, ...]) -> None:
    assert dry_run(generate(name, 4, 6)).peak_in_flight == expected


def test_without_backward_passes_one_micro_batch_is_alive_at_a_time() -> None:
    run = dry_run(forward_only(3, 4))
    assert run.peak_in_flight == (1, 1, 1)
    assert run.makespan_s == 6.0


def test_a_schedule_without_actions_takes_no_time() -> None:
    for schedule in (generate("PreferBackward", 3, 0), ()):
        run = dry_run(schedule)
        assert (run.makespan_s, run.bubble) == (0.0, 0.0)
        assert run.peak_in_flight == run.stage_bubbles == (0,) * len(schedule)


def test_an_edge_over_stages_delays_what_hangs_on_it() -> None:
    """Stage 2 also reads from stage 0: its forward pass waits for both, and so does stage 0's backward pass."""
    schedule = generate("PreferForward", 3, 1)
    forward_s = [5.0, 1.0, 1.0]
    assert times(dry_run(schedule, forward_s=forward_s, dependencies=chain(3) | {(0, 2)}))["2F0"] == (6.0, 7.0)
    apart = times(dry_run(schedule, forward_s=forward_s, dependencies={(0, 2), (1, 2)}))
    assert (apart["0F0"], apart["1F0"], apart["2F0"]) == ((0.0, 5.0), (0.0, 1.0), (5.0, 6.0))
    assert apart["0B0"] == apart["1B0"] == (8.0, 10.0)


def test_a_skip_edge_can_deadlock_what_the_chain_would_run() -> None:
    schedule = schedule_of("0F0 0F1\n1F0 1F1\n2F1 2F0")
    dry_run(schedule, dependencies=())
    # Out of order, yet without a cycle: stage 2 is late and gets there.
    assert times(dry_run(schedule))["2F1"] == (3.0, 4.0)
    with pytest.raises(PlanError, match="stage 0 stands at 0F0 and waits for 2F0"):
        dry_run(schedule, dependencies={(0, 1), (1, 2), (2, 0)})


def test_a_deadlock_names_where_each_stage_stands() -> None:
    """Stage 0 wants its gradient before it sends what stage 1 needs first."""
    schedule = schedule_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(PlanError) as error:
        dry_run(schedule)
    assert str(error.value).splitlines() == [
        "the schedule does not end, its stages wait for one another:",
        "  - stage 0 stands at 0B0 and waits for 1B0",
        "  - stage 1 stands at 1F1 and waits for 0F1",
    ]


def test_a_stage_that_is_done_is_not_called_blocked() -> None:
    schedule = schedule_of("0F0 0F1\n1F0 1F1\n2F1 2F0")
    with pytest.raises(PlanError) as error:
        dry_run(schedule, dependencies={(0, 1), (1, 2), (2, 1)})
    assert "stage 0" not in str(error.value)
    assert "stage 1 stands at 1F0 and waits for 2F0" in str(error.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    schedule = schedule_of("0F0 0B0 0B1 0F1\n1F1 1F1 1B1 0F0")
    with pytest.raises(PlanError) as error:
        dry_run(schedule, dependencies={(0, 1), (1, 7)})
    lines = [line.removeprefix("  - ") for line in str(error.value).splitlines()[1:]]
    assert sorted(lines) == sorted(
        [
            "the dependency (1, 7) is not between two of the stages 0 to 1",
            "0B1 runs before 0F1",
            "0F0 stands in the list of stage 1",
            "1F1 runs 2 times",
            "1F0 is missing",
            "1B0 is missing",
        ]
    )


def test_a_missing_backward_pass_is_found() -> None:
    with pytest.raises(PlanError, match="1B0 is missing"):
        dry_run(schedule_of("0F0 0B0\n1F0"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward_s": [1.0]}, "forward_s has 1 numbers for 2 stages"),
        ({"backward_s": -1.0}, "backward_s has -1.0"),
        ({"transfer_s": math.inf}, "transfer_s has inf"),
        ({"forward_s": math.nan}, "forward_s has nan"),
    ],
)
def test_times_that_are_none_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        dry_run(generate("PreferBackward", 2, 2), **arguments)


def test_drawing_of_1f1b() -> None:
    expected = """
stage 0 F0|F1|......B0---|F2|B1---|...B2---|  in flight 2, idle 25.0%
stage 1 ...F0|B0---|F1|B1---|F2|B2---|......  in flight 1, idle 25.0%
makespan 12 s, bubble 25.0%, 3 columns = 1 s
"""
    assert draw(dry_run(generate("PreferBackward", 2, 3))) == expected.strip()


def test_a_drawing_stays_within_its_width_and_never_cuts_a_number() -> None:
    """A number that lost a digit would name another micro-batch."""
    run = dry_run(generate("PreferForward", 3, 120))
    for max_columns in (1, 50, 400, 1000, 5000):
        for stage, line in enumerate(draw(run, max_columns=max_columns).splitlines()[:-1]):
            timeline = line.split("  ")[0].removeprefix(f"stage {stage} ")
            assert len(timeline) <= max_columns
            boxes = re.findall(r"([FB]?\d*)-*\|", timeline)
            labels = [str(timed.action)[1:] for timed in run.timeline[stage]]
            # Too narrow for a box of its own for each: then no box is wide enough for a number either.
            if len(boxes) < len(labels):
                assert set(boxes) <= {"", "F", "B"}
                continue
            assert all(box in ("", label[0], label) for box, label in zip(boxes, labels, strict=True))
            assert boxes == labels or max_columns < 5000


def test_what_takes_no_time_is_left_out_of_a_drawing() -> None:
    text = draw(dry_run(generate("PreferBackward", 2, 2), forward_s=0.0))
    assert "F" not in text
    assert "B0" in text
    assert draw(dry_run(generate("PreferBackward", 1, 0))).endswith("makespan 0 s, bubble 0.0%")
