"""What saves memory, in all combinations: shared states, files, recompute, chunks, groups, micro-batches.

In float64 the numbers are those of one process; mixed precision, which casts float32 only, is compared with one process
under the same casts. A mistake shows as the table of the tensors that differ, or as a hang.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from tests.marks import slow
from tests.parity import Reference, assert_close, reference_steps
from tests.ranks import launch
from tests.runtime.problems import Way, check
from tests.runtime.test_experts import COLOCATE, EXPERTS, problem
from tests.runtime.training import Job, _without_statistics, train
from tests.zoo import CASES

MODELS = ("bert", "t5", "gpt2", "mixtral")
LEVELS = ("v0", "v1", "v2")
WISHES: dict[str, dict[str, Any]] = {
    **{level: {"zero.level": level} for level in LEVELS},
    "disk": {"offload.level": "disk"},
    "recompute": {"gradient_checkpoint.type": "auto"},
    "chunked": {"loss.chunked": "on", "loss.chunk_rows": 8},
    "groups": {"optimizer.num_apply_group": 2},
    "parts": {"pipeline.num_micro_batch": 2},
}
PAIRS = [pair for pair in combinations(WISHES, 2) if not set(pair) <= set(LEVELS)]
ALL = [(level, *(name for name in WISHES if name not in LEVELS)) for level in LEVELS]
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"world": 2},
    "four": {"world": 4},
    "pipelines": {"world": 4, "num_stages": 2},
    "split": {"world": 4, "split": 2},
}


def _config(wishes: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for wish in wishes for key, value in WISHES[wish].items()}


def _train_each(rank: int, jobs: list[Job]) -> list[tuple[Any, ...]]:
    return [train(rank, job) for job in jobs]


def _jobs(name: str, layout: str, combined: list[tuple[str, ...]]) -> list[Job]:
    jobs: list[Job] = []
    for wishes in combined:
        config = _config(wishes)
        parts = config.pop("pipeline.num_micro_batch", 1)
        jobs.append(Job(name, **LAYOUTS[layout], micro_batches=parts, config=config, steps=2))
    return jobs


def _check(name: str, layout: str, combined: list[tuple[str, ...]]) -> None:
    """All of them with one start of the ranks, against one process."""
    case = CASES[name]
    jobs = _jobs(name, layout, combined)
    expected = reference_steps(case, torch.float64, jobs[0].batches(), jobs[0].steps)
    accuracy = case.accuracy(torch.float64)
    for rank, results in enumerate(launch(jobs[0].world, _train_each, jobs, timeout_s=60.0 + 10 * len(jobs))):
        for wishes, job, result in zip(combined, jobs, results, strict=True):
            found = Reference(*result)
            found = found._replace(state=_without_statistics(found.state, job))
            try:
                assert_close(found, expected, accuracy)
            except AssertionError as error:
                raise AssertionError(f"{' + '.join(wishes)} on rank {rank}: {error}") from error


@pytest.mark.parametrize("layout", ["replicas", *slow("pipelines", "split")])
def test_everything_together_equals_one_process(layout: str) -> None:
    _check("gpt2", layout, [ALL[2]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_each_level_with_everything_else_equals_one_process(name: str, layout: str) -> None:
    _check(name, layout, ALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_all_pairs_equal_one_process(name: str, layout: str) -> None:
    _check(name, layout, PAIRS)


def _experts(wishes: tuple[str, ...]) -> Way:
    config = _config(wishes)
    parts = config.pop("pipeline.num_micro_batch", 1)
    return Way(4, EXPERTS, devices=2, split=(1,), micro_batches=parts, config={**COLOCATE, **config})


@pytest.mark.slow
def test_experts_with_everything_equal_one_process() -> None:
    check(problem(), _experts(ALL[2]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("combined", [ALL, PAIRS[: len(PAIRS) // 2], PAIRS[len(PAIRS) // 2 :]])
def test_experts_with_all_combinations_equal_one_process(combined: list[tuple[str, ...]]) -> None:
    check(problem(), *map(_experts, combined))


# ------------------------------------------------------------------------------------------------------ mixed precision

BF16: dict[str, Any] = {"amp.level": "O1"}
FP16: dict[str, Any] = {"amp.level": "O1", "amp.dtype": "fp16", "amp.loss_scale": 1024.0}
# without chunked losses: a chunk's sum is rounded by itself
WITH_AMP = [tuple(name for name in wishes if name != "chunked") for wishes in ALL]
PAIRS_WITH_AMP = [(wish,) for wish in WISHES if wish not in ("chunked", "parts")]


def _check_mixed(name: str, layout: str, half: dict[str, Any], combined: list[tuple[str, ...]]) -> None:
    jobs = [
        Job(name, **LAYOUTS[layout], micro_batches=2, config={**_config(wishes), **half}, steps=1, dtype=torch.float32)
        for wishes in combined
    ]
    for job in jobs:
        job.config.pop("pipeline.num_micro_batch", None)
    parts = 2 * jobs[0].num_replicas
    one = Job(name, world=1, micro_batches=parts, config=half, steps=1, dtype=torch.float32)
    expected = Reference(*launch(1, train, one)[0])
    for results in launch(jobs[0].world, _train_each, jobs, timeout_s=60.0 + 10 * len(jobs)):
        for wishes, result in zip(combined, results, strict=True):
            try:
                assert_close(Reference(*result), expected, torch.float32)
            except AssertionError as error:
                raise AssertionError(f"{' + '.join(wishes)}: {error}") from error


@pytest.mark.slow
def test_mixed_precision_with_everything_equals_one_process() -> None:
    _check_mixed("mixtral", "replicas", BF16, WITH_AMP[2:])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("half", [BF16, FP16])
@pytest.mark.parametrize("layout", ["replicas", "four", "pipelines"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_precision_with_each_other_wish_equals_one_process(name: str, layout: str, half: dict[str, Any]) -> None:
    _check_mixed(name, layout, half, WITH_AMP + PAIRS_WITH_AMP)
