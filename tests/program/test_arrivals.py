"""What is let go of has arrived: in every schedule, whatever the ranks' speeds.

A mistake shows as memory that is written to while it is still being sent, or as a wait for a rank that waits for this one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import float32

from epl.ir.types import TensorType
from epl.program.arrivals import over_after
from epl.program.instructions import StageProgram, Transfer
from epl.schedule import SCHEDULE_NAMES, Action, Kind, generate


def chain(stage: int, num_stages: int) -> StageProgram:
    """A stage that takes one value from the stage before and gives one to the next."""

    def transfers(other: int) -> tuple[Transfer, ...]:
        kind = TensorType(float32, (2,))
        return (Transfer("x", other, other, kind, needs_grad=True),) if 0 <= other < num_stages else ()

    before, after = transfers(stage - 1), transfers(stage + 1)
    return StageProgram("s", (), (), before, ("x",), after, after, before, (), needs_backward=True)


def told(schedule: str, num_stages: int, num_micro: int) -> Iterator[tuple[Action, Action, int]]:
    """(after this action, this one's message, to that stage)."""
    rows = generate(schedule, num_stages, num_micro)
    for stage in range(num_stages):
        found = over_after(rows, rows[stage], [chain(stage, num_stages)] * num_micro)
        yield from ((action, sent, target) for action, over in found.items() for sent, target in over)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(("num_stages", "num_micro"), [(2, 1), (2, 4), (3, 5), (4, 8)])
def test_what_is_let_go_of_was_taken_before_the_message_that_tells_it_was_made(
    schedule: str, num_stages: int, num_micro: int
) -> None:
    rows = generate(schedule, num_stages, num_micro)
    place = {action: number for row in rows for number, action in enumerate(row)}
    seen = set()
    for action, sent, target in told(schedule, num_stages, num_micro):
        taker = Action(target, sent.kind, sent.micro_batch)
        teller = Action(target, action.kind, action.micro_batch)
        assert place[taker] < place[teller]
        assert place[sent] < place[action]
        assert (sent, target) not in seen
        seen.add((sent, target))


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_everything_that_was_sent_forward_is_let_go_of(schedule: str) -> None:
    over = {sent for _, sent, _ in told(schedule, 3, 6) if sent.kind is Kind.FORWARD}
    assert over == {Action(stage, Kind.FORWARD, micro) for stage in (0, 1) for micro in range(6)}


def test_1f1b_lets_go_of_most_gradients_too() -> None:
    over = [sent for _, sent, _ in told("PreferBackward", 2, 6) if sent.kind is Kind.BACKWARD]
    assert over == [Action(1, Kind.BACKWARD, micro) for micro in range(4)]
