"""``engine.verify`` says whether a plan computes what one process computes: it passes what is right, and finds faults.

Each fault is planted by a patch in one place of the runtime. A verify that compared a plan with itself, or only the loss,
would pass some of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import epl
from epl.runtime import engine as engine_module
from epl.runtime import runner as runner_module
from epl.runtime.results import Merged
from tests.ranks import launch
from tests.runtime.odd_nets import TiedTagger, Unused, batch_of, tokens_of
from tests.runtime.problems import Problem, Way, my_share, seeded, start, user_model
from tests.runtime.test_gradients import by_replica, token_mean
from tests.runtime.test_losses import token_loss

TIED = [["embedding"], ["middle", "head"]]
PIPELINE = Way(2, TIED, micro_batches=3)
DATA = Way(2, micro_batches=2)


def tagger(loss_fn: Any = token_mean) -> Problem:
    return Problem(partial(seeded, TiedTagger), [tokens_of(9)], loss_fn)


# ------------------------------------------------------------------------------------------------------------- passes


def verify_right(rank: int, jobs: list[tuple[Problem, Way]]) -> list[tuple[bool, float]]:
    """Whether the plain model ran on parts, and the largest error; gradients from before must still be there."""
    found = []
    for problem, way in jobs:
        engine = start(problem, way)
        batch = my_share(engine, rank, problem.batches[0])
        engine.forward_backward(batch)
        before = engine.gradients()
        report = engine.verify(batch)
        after = engine.gradients()
        assert before.keys() == after.keys()
        assert all(
            b is None if (b := before[name]) is None or a is None else torch.equal(a, b) for name, a in after.items()
        )
        found.append((report.by_parts, max(difference.error for difference in report.differences)))
    return found


def test_verify_passes_what_is_right() -> None:
    """A sum over a count, gradients that are summed, unused layers, uneven parts; on the whole batch where it can."""
    summed = {"communication.gradients_reduce_method": "sum"}
    jobs = [
        (tagger(), PIPELINE),
        (tagger(token_loss), PIPELINE),
        (tagger(token_loss), DATA),
        (tagger(), Way(2, TIED, micro_batches=3, config=summed)),
        (tagger(token_loss), Way(2, micro_batches=2, config=summed)),
        (Problem(partial(seeded, Unused), [batch_of(5)]), DATA),
        (Problem(partial(seeded, TiedTagger, sparse=True), [tokens_of(6)], token_mean), DATA),
    ]
    for found in launch(2, verify_right, jobs, timeout_s=100.0):
        assert [by_parts for by_parts, _ in found] == [False, False, False, True, True, False, False]
        assert all(error < 1e-9 for _, error in found)


def verify_unlike_replicas(rank: int) -> bool:
    """The replicas' batches have other forms, and other lengths."""
    epl.init(epl.Config({"run.print_plan": False}))
    engine = epl.parallelize(seeded(Unused), example_batch=by_replica(batch_of(6), 1))
    return engine.verify(by_replica(batch_of(6), rank)).by_parts


def test_verify_runs_on_parts_where_replicas_batches_cannot_be_joined() -> None:
    assert launch(2, verify_unlike_replicas) == [True, True]


# -------------------------------------------------------------------------------------------------------------- faults


def forget_tied_sum(rank: int, patch: Any) -> None:
    """The gradient of the tied weight is not summed over its stages."""
    plain: Callable[..., Any] = runner_module.Runner._reduce_groups

    def without_tied(self: Any) -> Any:
        return [group for group in plain(self) if "embedding.weight" not in group.names]

    patch.setattr(runner_module.Runner, "_reduce_groups", without_tied)


def average_loss_twice(rank: int, patch: Any) -> None:
    """What is reported is divided by the micro-batches once more; the gradients are right."""

    def twice(*args: Any) -> Merged:
        merged = plain(*args)
        return Merged(merged.loss / 3, merged.aux, merged.divisor, merged.graph)

    plain = runner_module.merge
    patch.setattr(runner_module, "merge", twice)


def average_gradients_twice(rank: int, patch: Any) -> None:
    """The loss that is reported is right, and every gradient too small."""
    plain = runner_module.seed_of
    patch.setattr(runner_module, "seed_of", lambda *args: plain(*args) / 3)


def drop_micro_batch(rank: int, patch: Any) -> None:
    plain: Callable[..., Any] = runner_module.Runner._parts
    patch.setattr(runner_module.Runner, "_parts", lambda *args: plain(*args)[:-1])


def nothing(rank: int, patch: Any) -> None:
    """The fault is in the weights, see below."""


FAULTS: dict[str, tuple[Callable[[int, Any], None], Way, list[str]]] = {
    "a tied gradient that is not summed": (
        forget_tied_sum,
        PIPELINE,
        ["2 of 5 quantities differ", "first of them global norm", "embedding.weight ", "held by stages [0, 1]"],
    ),
    "a loss that is averaged twice": (
        average_loss_twice,
        PIPELINE,
        ["1 of 5 quantities differ from one process, first of them loss", "1/3 of the expected value"],
    ),
    "gradients that are averaged twice": (
        average_gradients_twice,
        PIPELINE,
        ["4 of 5 quantities differ", "first of them global norm", "1/3 of the expected value", "middle.weight "],
    ),
    "a micro-batch that is dropped": (
        drop_micro_batch,
        PIPELINE,
        ["5 of 5 quantities differ", "first of them loss"],
    ),
    "a stale tied weight on the last stage": (
        nothing,
        PIPELINE,
        ["first of them weight embedding.weight", "the weight itself is another on ranks [1] than on rank 0"],
    ),
    "a stale weight of a replica": (
        nothing,
        DATA,
        ["first of them weight middle.bias", "the weight itself is another on ranks [1] than on rank 0"],
    ),
}


def verify_faulty(rank: int) -> dict[str, str]:
    """Each fault on an engine of its own; the message of the error, or what else came."""
    messages = {}
    for name, (plant, way, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(rank, patch)
            problem = tagger()
            engine = start(problem, way)
            batch = my_share(engine, rank, problem.batches[0])
            if rank == 1 and plant is nothing:
                weight = user_model(engine).get_parameter("middle.bias" if way is DATA else "embedding.weight")
                weight.data += 0.01
            try:
                messages[name] = f"passed: {engine.verify(batch)}"
            except epl.VerifyError as error:
                messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return launch(2, verify_faulty, timeout_s=100.0)


@pytest.mark.parametrize("name", FAULTS)
def test_verify_finds_a_planted_fault_and_names_it_on_all_ranks(messages: list[dict[str, str]], name: str) -> None:
    first, second = messages
    for text in FAULTS[name][2]:
        assert text in first[name]
    assert second[name] == first[name]


# ------------------------------------------------------------------------------------------------------ at the start


def verify_by_environment(rank: int, faulty: bool) -> list[str]:
    """The first training step is verified, whichever call makes it; later ones are not."""
    os.environ["EPL_DEBUG_VERIFY"] = "1"
    problem = tagger()
    with pytest.MonkeyPatch.context() as patch:
        calls: list[Any] = []
        plain: Callable[..., Any] = engine_module.Engine._report
        patch.setattr(engine_module.Engine, "_report", lambda *args: calls.append(args) or plain(*args))
        if faulty:
            forget_tied_sum(rank, patch)
        engine = start(problem, PIPELINE)
        batch = my_share(engine, rank, problem.batches[0])
        try:
            losses = [engine.model(**batch).item(), engine.train_step(batch).item()]
        except epl.VerifyError as error:
            return [str(error)]
    return [str(len(calls)), str(losses[0] == losses[1])]


def test_the_environment_asks_for_a_verified_first_step() -> None:
    assert launch(2, verify_by_environment, False) == [["1", "True"]] * 2
    for [message] in launch(2, verify_by_environment, True):
        assert "embedding.weight" in message
