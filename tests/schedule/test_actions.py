"""Actions: the text form comes back as it was written, and nothing else is taken for an action."""

from __future__ import annotations

import itertools

import pytest

from epl.errors import PlanError
from epl.schedule import Action, Kind


def test_text_form_is_stage_letter_micro_batch() -> None:
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"
    assert str(Action(0, Kind.BACKWARD, 17)) == "0B17"


def test_every_action_comes_back_from_its_text() -> None:
    """Small numbers exhaustively, and the places at which the number of digits changes."""
    numbers = [*range(12), 99, 100, 1023]
    for stage, kind, micro_batch in itertools.product(numbers, Kind, numbers):
        action = Action(stage, kind, micro_batch)
        assert Action.parse(str(action)) == action


def test_what_parses_is_exactly_what_is_written() -> None:
    """All texts of up to four characters over a small alphabet: each is refused or comes back to the letter."""
    for length in range(5):
        for letters in itertools.product("01FBf- ", repeat=length):
            text = "".join(letters)
            try:
                action = Action.parse(text)
            except PlanError:
                continue
            assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F0", "2f0", "2W0", "-1F0", "2F-1", " 2F0", "2F0\n", "02F0", "2F0 2F1"]
)
def test_bad_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match=r'is not an action: write .* as in "2F0"'):
        Action.parse(text)


def test_digits_of_other_scripts_are_refused() -> None:
    """``int`` reads them, so that the text would not come back as it was written."""
    with pytest.raises(PlanError):
        Action.parse("\u0662F0")


@pytest.mark.parametrize(("stage", "micro_batch"), [(-1, 0), (0, -1)])
def test_numbers_below_zero_are_refused(stage: int, micro_batch: int) -> None:
    with pytest.raises(PlanError, match="counted from 0"):
        Action(stage, Kind.FORWARD, micro_batch)


def test_actions_are_values() -> None:
    assert len({Action(0, Kind.FORWARD, 0), Action.parse("0F0"), Action.parse("0B0")}) == 2
