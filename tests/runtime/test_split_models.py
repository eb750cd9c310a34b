"""Models of the zoo under operator split compute what one process computes."""

from __future__ import annotations

import pytest

from tests.marks import slow
from tests.runtime.training import Job, check_parity

NAMES = ["mlp", "bert", "gpt2", "llama", "t5", "mixtral", "vit", "resnet", "unet", "tied"]


@pytest.mark.parametrize(
    "name", ["mlp", "t5", "mixtral", *slow("bert", "gpt2", "llama", "vit", "resnet", "unet", "tied")]
)
def test_split_over_two_ranks_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, split=2))


@pytest.mark.parametrize("name", ["resnet", *slow(*sorted({*NAMES} - {"resnet"}))])
def test_split_over_three_ranks_equals_one_process(name: str) -> None:
    """Few sizes divide by three: vocabularies, heads, features are cut unevenly."""
    check_parity(Job(name, world=3, split=3, size=7))


@pytest.mark.parametrize("name", slow(*NAMES))
def test_split_over_four_ranks_with_micro_batches_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, split=4, micro_batches=2))


@pytest.mark.parametrize("name", slow(*NAMES))
def test_split_over_eight_ranks_equals_one_process(name: str) -> None:
    """More ranks than heads, experts, classes, or samples."""
    check_parity(Job(name, world=8, split=8, size=7))


@pytest.mark.parametrize("name", slow(*NAMES))
def test_split_over_four_ranks_in_one_part_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, split=4))


@pytest.mark.parametrize("name", ["bert", *slow("llama", "t5")])
def test_split_inside_data_parallelism_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, split=2, micro_batches=2))


@pytest.mark.parametrize("name", ["gpt2", *slow("unet", "t5")])
def test_split_inside_a_pipeline_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, split=2, micro_batches=2))


def test_split_and_pipeline_and_data_parallelism_equal_one_process() -> None:
    check_parity(Job("bert", world=8, num_stages=2, split=2, micro_batches=2))
