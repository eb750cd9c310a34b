"""Random numbers hang on the step, the sample's part and the operator, and on nothing else.

So every plan that cuts the global batch at the same places draws the same dropout masks and gets the same numbers, and
a segment that is computed again draws what it drew.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import Noisy, Normed, Recurrent, batch_of, draw, tokens_of
from tests.runtime.problems import Outcome, Problem, Way, my_share, seeded, start
from tests.runtime.problems import train as train_one
from tests.zoo import CASES

SEED = 5
RATE = 0.3


def zoo(name: str, dtype: torch.dtype = torch.float64, *, recompute: bool | None = None) -> nn.Module:
    """A model of the zoo with dropout; ``recompute`` is for checkpoints and says whether they are reentrant."""
    model: Any = CASES[name].build(dtype, dropout=RATE)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return model


def problem_of(name: str, steps: int = 2, **options: Any) -> tuple[Problem, dict[int, list[list[str]]]]:
    if name == "lstm":
        batches = [{**tokens, "labels": tokens["tokens"]} for tokens in (tokens_of(8, seed) for seed in range(steps))]
        return Problem(partial(seeded, Recurrent, RATE), batches), {2: [["embedding"], ["lstm", "head"]]}
    case = CASES[name]
    batches = [case.batch(8, seed, dtype=torch.float64) for seed in range(steps)]
    return Problem(partial(zoo, name, **options), batches, case.loss_fn), case.stages


def train_seeded(rank: int, problem: Problem, way: Way) -> Outcome:
    torch.manual_seed(SEED)
    return train_one(rank, problem, way)


@pytest.mark.parametrize("name", ["lstm", *slow("bert", "mlp", "gpt2")])
def test_plans_that_cut_the_batch_at_the_same_places_draw_the_same_masks(name: str) -> None:
    """Accumulation, data parallelism, devices of one TaskGraph, pipelines, and both: four parts of two samples."""
    problem, cuts = problem_of(name)
    whole = [[path for stage in cuts[2] for path in stage]]
    ways = (Way(1, micro_batches=4), Way(2, micro_batches=2), Way(4), Way(2, cuts[2], micro_batches=4))
    more = (Way(4, cuts[2], micro_batches=2), Way(2, whole, devices=2, micro_batches=2))
    ways = (*ways, *more) if name == "mlp" else (ways[0], ways[1], more[0])
    outcomes = [outcome for way in ways for outcome in launch(way.world, train_seeded, problem, way)]
    for outcome in outcomes[1:]:
        assert_close(outcome, outcomes[0], CASES[name].accuracy(torch.float64) if name in CASES else torch.float64)


@pytest.mark.parametrize("reentrant", [False, *slow(True)])
@pytest.mark.parametrize("name", ["bert", *slow("gpt2")])
def test_recomputed_segments_draw_again_what_they_drew(name: str, reentrant: bool) -> None:
    """With dropout on, a segment that drew new masks would have other gradients than one that is not recomputed."""
    kept, cuts = problem_of(name, steps=1)
    again, _ = problem_of(name, steps=1, recompute=reentrant)
    way = Way(2, cuts[2], micro_batches=2)
    for outcome, expected in zip(launch(2, train_seeded, again, way), launch(2, train_seeded, kept, way), strict=True):
        assert_close(outcome, expected, torch.float64)


# ------------------------------------------------------------------------------------------------------- the masks


def mask_loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    masks = model(*batch)
    return masks.mean(), {"masks": masks}


def masks_of(rank: int, way: Way) -> list[torch.Tensor]:
    torch.manual_seed(SEED)
    problem = Problem(partial(seeded, Noisy), [(draw(4, 6),)], mask_loss)
    engine = start(problem, way)
    batch = my_share(engine, rank, problem.batches[0])
    return [engine.forward_backward(batch)[1]["masks"] for _ in range(2)]


def test_replicas_micro_batches_and_steps_have_masks_of_their_own() -> None:
    first, second = launch(2, masks_of, Way(2, micro_batches=2))[0]
    rows = [*first, *second]
    assert not any(torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


# ------------------------------------------------------------------------------------------------- the user's stream


def own_numbers(rank: int, name: str) -> list[tuple[float, float, float]]:
    """What the user draws after nothing, after captures, steps and a verification."""
    problem, _ = problem_of(name)
    drawn = []
    engine: Any = None
    for call in ("", "prepare", "train_step", "eval_step", "verify"):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        if call:
            engine = engine or start(problem, Way(2))
            getattr(engine, call)(my_share(engine, rank, problem.batches[0]))
        drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
    return drawn


@pytest.mark.parametrize("name", ["mlp", *slow("bart")])
def test_a_step_leaves_the_users_own_random_numbers_alone(name: str) -> None:
    """Neither the capture, which runs the model for real where it branches on data (bart), nor a step draws from them."""
    for drawn in launch(2, own_numbers, name):
        assert all(numbers == drawn[0] for numbers in drawn)


# ------------------------------------------------------------------------------------------------------------- verify


def verify_all(rank: int, jobs: list[tuple[Problem, Way]]) -> list[tuple[bool, int]]:
    reports = []
    for problem, way in jobs:
        engine = start(problem, way)
        batch = my_share(engine, rank, problem.batches[0])
        engine.train_step(batch)
        report = engine.verify(batch)
        reports.append((report.by_parts, len(report.differences)))
        engine.close()
    return reports


@pytest.mark.slow
def test_verify_passes_with_dropout_and_batch_normalisation() -> None:
    """The plain model is given the same parts and the same masks, and the report says so."""
    jobs = []
    for name in ("bert", "gpt2", "lstm"):
        problem, cuts = problem_of(name)
        jobs += [(problem, Way(2, cuts[2], micro_batches=2)), (problem, Way(2))]
    jobs.append((Problem(partial(seeded, Normed), [batch_of(8)]), Way(2, [["a"], ["b", "c"]], micro_batches=2)))
    for reports in launch(2, verify_all, jobs, timeout_s=100.0):
        assert all(by_parts for by_parts, _ in reports)
        assert all(compared > 5 for _, compared in reports)
