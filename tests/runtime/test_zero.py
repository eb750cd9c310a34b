"""ZeRO: replicas share out optimizer states, gradients and weights, and the numbers are those of one process."""

from __future__ import annotations

import pytest

from tests.marks import slow
from tests.runtime.problems import Way, check
from tests.runtime.test_experts import COLOCATE, EXPERTS, problem
from tests.runtime.training import Job, check_parity


def _level(level: str) -> dict[str, str]:
    return {"zero.level": level}


@pytest.mark.parametrize("level", ["v0", "v2", *slow("v1")])
@pytest.mark.parametrize("name", ["bert", *slow("gpt2", "t5", "mixtral", "resnet")])
def test_data_parallelism_equals_one_process(name: str, level: str) -> None:
    check_parity(Job(name, world=2, config=_level(level)))


@pytest.mark.parametrize("level", ["v1", *slow("v0", "v2")])
@pytest.mark.parametrize("name", ["t5", *slow("bert", "gpt2", "mixtral")])
def test_accumulation_over_four_ranks_equals_one_process(name: str, level: str) -> None:
    check_parity(Job(name, world=4, micro_batches=2, config=_level(level)))


@pytest.mark.parametrize("level", ["v2", *slow("v0", "v1")])
@pytest.mark.parametrize("name", ["gpt2", *slow("bert", "t5", "mixtral")])
def test_pipelines_beside_one_another_equal_one_process(name: str, level: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, micro_batches=2, config=_level(level)))


@pytest.mark.parametrize("level", ["v2", *slow("v0", "v1")])
@pytest.mark.parametrize("name", ["bert", *slow("gpt2", "t5", "mixtral")])
def test_split_with_data_parallelism_equals_one_process(name: str, level: str) -> None:
    check_parity(Job(name, world=4, split=2, config=_level(level)))


@pytest.mark.parametrize("level", ["v1", *slow("v0", "v2")])
def test_experts_over_the_ranks_that_replicate_the_rest(level: str) -> None:
    check(problem(), Way(4, EXPERTS, devices=2, split=(1,), micro_batches=2, config={**COLOCATE, **_level(level)}))
