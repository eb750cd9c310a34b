"""Generators: the expected schedules drawn as tables, and what holds for every size."""

from __future__ import annotations

import itertools

import pytest

from epl.errors import PlanError
from epl.schedule import (
    DEFAULT_SCHEDULE,
    SCHEDULE_NAMES,
    Kind,
    Schedule,
    dry_run,
    forward_only,
    generate,
    schedule_name,
)

SIZES = list(itertools.product(range(1, 6), range(8)))  # (num_stages, num_micro_batches), M < S and M = 0 among them


def clock_table(schedule: Schedule) -> str:
    """One column per unit of time, a forward pass as long as a backward pass; dots are idle time."""
    run = dry_run(schedule, forward_s=1.0, backward_s=1.0)
    table = [["." for _ in range(round(run.makespan_s))] for _ in schedule]
    for stage, actions in enumerate(run.timeline):
        for timed in actions:
            table[stage][round(timed.start_s)] = f"{timed.action.kind.value}{timed.action.micro_batch}"
    return "\n".join(" ".join(f"{cell:2}" for cell in row).rstrip() for row in table)


def drawn(table: str) -> str:
    return "\n".join(" ".join(f"{cell:2}" for cell in line.split()).rstrip() for line in table.strip().splitlines())


def peaks(schedule: Schedule) -> list[int]:
    """Forward passes minus backward passes, at its highest; written apart from the dry run's own count."""
    result = []
    for actions in schedule:
        steps = [1 if action.kind is Kind.FORWARD else -1 for action in actions]
        result.append(max(itertools.accumulate(steps), default=0))
    return result


def test_prefer_forward_drawn() -> None:
    expected = """
        F0 F1 F2 F3 .  .  B0 B1 B2 B3
        .  F0 F1 F2 F3 B0 B1 B2 B3 .
    """
    assert clock_table(generate("PreferForward", 2, 4)) == drawn(expected)


def test_prefer_backward_drawn() -> None:
    expected = """
        F0 F1 .  B0 F2 B1 F3 B2 .  B3
        .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """
    assert clock_table(generate("PreferBackward", 2, 4)) == drawn(expected)


def test_prefer_backward_of_four_stages_drawn() -> None:
    expected = """
        F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
        .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .
    """
    assert clock_table(generate("PreferBackward", 4, 6)) == drawn(expected)


def test_prefer_backward_optimizer_drawn() -> None:
    expected = """
        F0 F1 F2 B0 F3 B1 .  B2 .  B3
        .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """
    assert clock_table(generate("PreferBackwardOptimizer", 2, 4)) == drawn(expected)


def test_forward_only_drawn() -> None:
    expected = """
        F0 F1 F2 F3 .
        .  F0 F1 F2 F3
    """
    assert clock_table(forward_only(2, 4)) == drawn(expected)


def test_order_of_the_first_of_two_stages() -> None:
    """The order that EPL documents for PreferBackward, spelled out."""
    first = generate("PreferBackward", 2, 4)[0]
    assert " ".join(map(str, first)) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PreferForward", [6, 6, 6, 6]),
        ("PreferBackward", [4, 3, 2, 1]),
        ("PreferBackwardOptimizer", [5, 4, 3, 1]),
    ],
)
def test_micro_batches_in_flight(name: str, expected: list[int]) -> None:
    """The numbers measured on EPL's own scheduler for six micro-batches and four stages."""
    assert peaks(generate(name, 4, 6)) == expected


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_micro_batch_runs_once_and_its_backward_pass_last(name: str) -> None:
    for num_stages, num_micro_batches in SIZES:
        schedule = generate(name, num_stages, num_micro_batches)
        assert len(schedule) == num_stages
        for stage, actions in enumerate(schedule):
            assert all(action.stage == stage for action in actions)
            assert len(actions) == 2 * num_micro_batches
            for kind in Kind:
                # In order of the micro-batches: each once, and gradients are summed alike under every schedule.
                assert [a.micro_batch for a in actions if a.kind is kind] == [*range(num_micro_batches)]
            assert all(
                running >= 0 for running in itertools.accumulate(1 if a.kind is Kind.FORWARD else -1 for a in actions)
            )


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_ends(name: str) -> None:
    for num_stages, num_micro_batches in SIZES:
        dry_run(generate(name, num_stages, num_micro_batches))


def test_live_micro_batches_never_exceed_stages_left() -> None:
    """More would be memory that 1F1B promises not to need; fewer would leave a stage idle in mid-pipeline."""
    for num_stages, num_micro_batches in SIZES:
        left = [num_stages - stage for stage in range(num_stages)]
        assert peaks(generate("PreferBackward", num_stages, num_micro_batches)) == [
            min(num_micro_batches, limit) for limit in left
        ]
        assert peaks(generate("PreferBackwardOptimizer", num_stages, num_micro_batches)) == [
            min(num_micro_batches, limit if limit == 1 else limit + 1) for limit in left
        ]
        assert peaks(generate("PreferForward", num_stages, num_micro_batches)) == [num_micro_batches] * num_stages


def test_forward_only_runs_each_micro_batch_once() -> None:
    for num_stages, num_micro_batches in SIZES:
        for stage, actions in enumerate(forward_only(num_stages, num_micro_batches)):
            assert [str(action) for action in actions] == [f"{stage}F{m}" for m in range(num_micro_batches)]


def test_names_are_read_in_any_case() -> None:
    assert generate("preferforward", 3, 4) == generate("PREFERFORWARD", 3, 4) == generate("PreferForward", 3, 4)
    assert schedule_name("preferBACKWARDoptimizer") == "PreferBackwardOptimizer"


def test_the_default_is_a_known_name() -> None:
    assert DEFAULT_SCHEDULE == "PreferBackward"
    assert DEFAULT_SCHEDULE in SCHEDULE_NAMES


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PreferBackwrd", "PreferBackward"),
        ("prefer_forward", "PreferForward"),
        ("optimizer", "PreferBackwardOptimizer"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all(name: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=f"no pipeline schedule '{name}': did you mean '{nearest}'") as error:
        generate(name, 2, 2)
    assert all(known in str(error.value) for known in SCHEDULE_NAMES)


def test_an_unknown_name_is_answered_even_if_nothing_is_near() -> None:
    with pytest.raises(PlanError, match="did you mean"):
        generate("", 2, 2)


def test_sizes_out_of_range_are_refused() -> None:
    for name in SCHEDULE_NAMES:
        with pytest.raises(PlanError, match="num_stages is 0"):
            generate(name, 0, 1)
        with pytest.raises(PlanError, match="num_micro_batches is -1"):
            generate(name, 1, -1)
    with pytest.raises(PlanError, match="num_stages is -2"):
        forward_only(-2, 1)
