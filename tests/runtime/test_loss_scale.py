"""The loss scale follows overflows, and says when that does not help.

A mistake shows as a training that skips every step without a word, or whose small gradients stay zero.
"""

from __future__ import annotations

import json
import warnings

import pytest

from epl.errors import RunError
from epl.runtime.loss_scale import GOOD_STEPS, START, LossScale


def after(scale: LossScale, *overflows: bool) -> LossScale:
    for overflow in overflows:
        scale.update(overflow)
    return scale


def test_an_overflow_halves_the_scale_and_is_counted() -> None:
    scale = after(LossScale(), True, False, True)
    assert (scale.scale, scale.num_skipped) == (START / 4, 2)


def test_many_good_steps_in_a_row_double_the_scale() -> None:
    scale = after(LossScale(), *[False] * (GOOD_STEPS - 1))
    assert scale.scale == START
    assert after(scale, False).scale == 2 * START
    assert after(scale, *[False] * GOOD_STEPS).scale == 4 * START
    assert scale.num_skipped == 0


def test_an_overflow_starts_the_count_of_good_steps_anew() -> None:
    scale = after(LossScale(), *[False] * (GOOD_STEPS - 1), True, *[False] * (GOOD_STEPS - 1))
    assert scale.scale == START / 2
    assert after(scale, False).scale == START


def test_the_scale_stays_at_1_with_one_warning() -> None:
    scale = LossScale()
    while scale.scale > 1:
        scale.update(True)
    scale.update(True)
    with pytest.warns(UserWarning, match=r"2 steps one after another, at loss scale 1.*weights stay.*'bf16'"):
        scale.update(True)
    after(scale, *[True] * 20)
    assert scale.scale == 1
    assert scale.num_skipped == 15 + 2 + 20


def test_a_few_overflows_are_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after(LossScale(), True, True, False, True, True)
        after(LossScale(64.0), *[True] * 9, False, *[True] * 9)


def test_a_fixed_scale_stays_and_warns_when_nothing_but_overflows_comes() -> None:
    scale = after(LossScale(64.0), *[False] * GOOD_STEPS, *[True] * 9)
    with pytest.warns(UserWarning, match=r"10 steps one after another, at loss scale 64.*'dynamic' or a smaller one"):
        scale.update(True)
    assert (scale.scale, scale.num_skipped) == (64, 10)


def test_a_training_goes_on_with_the_scale_that_it_had() -> None:
    scale = after(LossScale(), True, *[False] * (GOOD_STEPS - 1))
    other = LossScale()
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert (other.scale, other.num_skipped) == (scale.scale, 1)
    assert after(other, False).scale == START  # the good steps are counted on, too


def test_a_configured_scale_is_stronger_than_that_of_a_checkpoint() -> None:
    scale = LossScale(128.0)
    scale.load_state_dict(after(LossScale(), True).state_dict())
    assert (scale.scale, scale.num_skipped) == (128, 1)


def test_something_else_is_no_state() -> None:
    with pytest.raises(RunError, match="lacks \\['num_good_steps', 'num_skipped'\\]"):
        LossScale().load_state_dict({"scale": 2.0})
