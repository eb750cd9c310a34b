"""Recompute and losses in chunks together, under mixtures of strategies: the numbers of one process.

A mistake shows as a gradient that differs: an operator that both passes have taken, a collective inside a segment.
"""

from __future__ import annotations

import pytest

from tests.marks import slow
from tests.runtime.problems import Way, check
from tests.runtime.test_experts import COLOCATE, EXPERTS, problem
from tests.runtime.training import Job, check_parity

BOTH = {
    "gradient_checkpoint.type": "auto",
    "gradient_checkpoint.extra_compute": 1.0,
    "loss.chunked": "on",
    "loss.chunk_rows": 5,
}


@pytest.mark.parametrize("name", ["bert", *slow("gpt2", "t5", "llama", "mixtral")])
def test_data_parallelism_with_accumulation_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, micro_batches=2, config=BOTH))


@pytest.mark.parametrize("name", ["gpt2", *slow("bert", "t5", "llama", "mixtral")])
def test_a_pipeline_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, num_stages=2, micro_batches=4, config=BOTH))


@pytest.mark.parametrize("name", ["bert", *slow("t5", "gpt2", "llama", "mixtral")])
def test_split_with_micro_batches_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, split=2, micro_batches=2, config=BOTH))


@pytest.mark.parametrize("name", slow("bert", "gpt2", "t5"))
def test_split_and_pipeline_and_data_parallelism_equal_one_process(name: str) -> None:
    check_parity(Job(name, world=8, num_stages=2, split=2, micro_batches=2, config=BOTH))


@pytest.mark.parametrize("world", [2, *slow(4)])
def test_experts_over_the_ranks_that_replicate_the_rest(world: int) -> None:
    check(problem(), Way(world, EXPERTS, devices=world, split=(1,), config={**COLOCATE, **BOTH}))


@pytest.mark.slow
def test_experts_with_data_parallelism_and_micro_batches() -> None:
    check(problem(), Way(4, EXPERTS, devices=2, split=(1,), micro_batches=2, config={**COLOCATE, **BOTH}))
