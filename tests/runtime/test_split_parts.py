"""Models of the zoo of which a part is split and the rest is not: the head, the first half, the middle.

Slow but for one: each is a pipeline in which some stages are of one device, and the split ones of several.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.marks import slow
from tests.parity import make_optimizer
from tests.runtime.problems import Problem, Way, check
from tests.runtime.test_split import COLOCATE
from tests.runtime.test_split_models import NAMES
from tests.zoo import CASES, Cut

PARTS = 2  # micro-batches
pytestmark = pytest.mark.timeout(300)  # several trainings one after another


def adamw(model: nn.Module) -> list[Optimizer]:
    return [make_optimizer(model)]


def build(name: str) -> nn.Module:
    return CASES[name].build(torch.float64)


def problem_of(name: str) -> Problem:
    case = CASES[name]
    batches = [case.batch(8, seed, dtype=torch.float64) for seed in range(3)]
    return Problem(partial(build, name), batches, case.loss_fn, adamw)


def check_case(name: str, *ways: Way) -> None:
    case = CASES[name]
    num_parts = 1 if case.independent_samples else PARTS
    for way in ways:
        check(problem_of(name), way, num_parts=num_parts, dtype=case.accuracy(torch.float64))


def head_of(name: str) -> Cut:
    """All but the last module, and the last module."""
    units = [path for paths in CASES[name].stages[2] for path in paths]
    return [units[:-1], units[-1:]]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", slow(*NAMES))
def test_a_split_head_or_first_half_beside_a_stage_of_one_device(name: str, size: int) -> None:
    check_case(
        name,
        Way(1 + size, head_of(name), PARTS, (1, size), split=(1,)),
        Way(1 + size, CASES[name].stages[2], PARTS, (size, 1), split=(0,)),
    )


@pytest.mark.parametrize("name", slow(*NAMES))
def test_a_split_middle_between_stages_of_one_device(name: str) -> None:
    check_case(name, Way(4, CASES[name].stages[3], PARTS, (1, 2, 1), split=(1,)))


@pytest.mark.parametrize("name", ["mlp", *slow(*sorted({*NAMES} - {"mlp"}))])
def test_only_the_head_is_annotated_or_the_rest_is_replicated_on_the_same_devices(name: str) -> None:
    """What no annotation names goes to the only TaskGraph there is."""
    cut = head_of(name)
    check_case(
        name,
        Way(2, cut[1:], PARTS, 2, split=(0,)),
        Way(2, cut, PARTS, 2, split=(1,), config=COLOCATE),
    )
