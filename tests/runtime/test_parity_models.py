"""Every model of the zoo, under data parallelism, pipelines and both, computes what one process computes.

A mistake shows as the name of the first tensor that differs: a tied weight whose gradient is not summed over its stages,
a micro-batch that weighs wrong, a value that a late stage got from the wrong micro-batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.marks import slow
from tests.runtime.training import Job, check_parity
from tests.zoo import CASES

NAMES = [name for name in CASES if name != "bart"]  # bart branches on data: test_branches


def quick(*names: str) -> list[Any]:
    """These models, and all others for ``make test-all``."""
    return [*names, *slow(*(name for name in NAMES if name not in names))]


@pytest.mark.parametrize("name", quick("bert", "resnet"))
def test_one_process_with_accumulation_equals_plain_training(name: str) -> None:
    check_parity(Job(name, world=1, micro_batches=4, size=7))


@pytest.mark.parametrize("name", quick("mlp", "bert", "resnet", "mixtral"))
def test_data_parallel_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2))


@pytest.mark.parametrize("name", quick("bert", "gpt2", "unet", "tied", "none_int"))
def test_pipeline_of_two_stages_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, num_stages=2, micro_batches=4))


@pytest.mark.parametrize("name", ["resnet", *slow("bert", "t5", "unet", "gpt2", "llama", "vit", "tied")])
def test_pipeline_of_four_stages_with_uneven_micro_batches_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=4, micro_batches=4, size=7))


@pytest.mark.parametrize("name", ["bert", *slow("t5", "resnet", "gpt2", "unet")])
def test_pipeline_inside_data_parallelism_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, micro_batches=2))


@pytest.mark.parametrize("name", ["mlp", *slow("bert", "t5")])
def test_eight_ranks_equal_one_process(name: str) -> None:
    check_parity(Job(name, world=8, num_stages=4, micro_batches=2))


@pytest.mark.parametrize("schedule", ["PreferBackwardOptimizer", *slow("PreferForward", "preferbackward")])
@pytest.mark.parametrize(("name", "num_stages"), [("gpt2", 3), pytest.param("unet", 4, marks=pytest.mark.slow)])
def test_each_schedule_equals_one_process(name: str, num_stages: int, schedule: str) -> None:
    check_parity(Job(name, world=num_stages, num_stages=num_stages, micro_batches=5, size=10, schedule=schedule))


@pytest.mark.parametrize("name", ["mlp", *slow("bert", "llama", "vit")])
def test_float32_equals_one_process_to_its_own_rounding(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, micro_batches=2, dtype=torch.float32))


@pytest.mark.slow
def test_three_replicas_of_an_uneven_batch_equal_one_process() -> None:
    check_parity(Job("bert", world=3, size=7, micro_batches=2))
