"""Every option of every rule, run on shards and compared with the whole, forward and backward."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers.integrations.moe  # noqa: F401, registers an operator that models with experts call

from epl.sharding.forms import FORMS
from epl.sharding.options import PARTIAL, WHOLE, Option
from epl.sharding.placements import Shard
from epl.sharding.rules import RULES, options_of
from tests.sharding import samples_math, samples_nets, samples_pointwise, samples_shape
from tests.sharding.checks import check, variants
from tests.sharding.samples import Sample, case, real

FAMILIES = (samples_pointwise, samples_shape, samples_math, samples_nets)
SAMPLES = [sample for family in FAMILIES for sample in family.samples()]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of deprecated names and slow paths
def test_shards_give_what_the_whole_gives(sample: Sample):
    for option in _cuts(sample):
        for variant, size in ((option, 3), *((variant, 2) for variant in variants(option))):
            try:
                check(sample, variant, size)
            except Exception as error:
                raise AssertionError(f"{size} ranks, {_text(variant)}") from error


@cache
def _cuts(sample: Sample) -> tuple[Option, ...]:
    return options_of(sample.call)[1:]


def _text(option) -> str:
    return f"{', '.join(map(str, option.inputs))} -> {', '.join(map(str, option.outputs))} {option.form}"


def test_every_rule_has_a_sample():
    assert not RULES.keys() - {sample.target for sample in SAMPLES}


def test_every_sample_has_a_rule():
    assert not {sample.target for sample in SAMPLES} - RULES.keys()


def test_every_rule_gives_an_option_that_was_compared():
    """An option is of two units at least, so it was run on two ranks."""
    cut = {sample.target for sample in SAMPLES if _cuts(sample)}
    assert not RULES.keys() - cut


def test_every_form_is_used():
    assert not FORMS.keys() - {option.form for sample in SAMPLES for option in _cuts(sample)}


def test_no_option_is_whole():
    for sample in SAMPLES:
        assert not any(option.is_whole for option in _cuts(sample)), sample.target


WRONG = {
    "a function that is not linear, of summands": (case("relu", real(5, 4)), Option((PARTIAL,), (PARTIAL,))),
    "a whole addend of summands": (case("add.Tensor", real(5), real(5)), Option((PARTIAL, WHOLE), (PARTIAL,))),
    "softmax of parts": (case("softmax.int", real(5, 4), 0), Option((Shard(0),), (Shard(0),))),
    "a sum that comes out whole": (case("sum", real(5)), Option((Shard(0),), (WHOLE,))),
    "another dimension": (case("t", real(6, 6)), Option((Shard(0),), (Shard(0),))),
    "a mean of means": (case("mean", real(5)), Option((Shard(0),), (PARTIAL,))),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_option_is_noticed(mistake: str):
    with pytest.raises((AssertionError, RuntimeError)):
        check(*WRONG[mistake], size=2)


def test_every_rule_is_of_an_operator_of_torch():
    for target in RULES:
        space, packet, overload = target.split(".")
        assert hasattr(getattr(getattr(torch.ops, space), packet), overload), target
