"""How the batch is shared out over replicas, devices of a TaskGraph and micro-batches, and what replicas start from."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

import epl
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, Normed, Tagger, batch_of, tokens_of
from tests.runtime.problems import Problem, Way, check, my_share, seeded, start
from tests.runtime.test_losses import token_loss
from tests.zoo import annotate

WHOLE = [["a", "b", "c", "d"]]
HALVES = [["a", "b"], ["c", "d"]]
COLOCATED = {"cluster.colocate_split_and_replicate": True}


def chain(*sizes: int) -> Problem:
    return Problem(partial(seeded, Chain), [batch_of(size, seed) for seed, size in enumerate(sizes)])


def test_batches_smaller_than_the_number_of_micro_batches() -> None:
    check(chain(2, 3, 1), Way(2, HALVES, micro_batches=4), Way(1, micro_batches=4), Way(2, micro_batches=3))


@pytest.mark.parametrize("sizes", [(5, 2, 1), pytest.param((4, 1, 4), marks=pytest.mark.slow)])
def test_a_replica_without_samples_takes_part(sizes: tuple[int, ...]) -> None:
    """A last batch that is too small for all: its gradients are those of the samples that there are."""
    check(chain(*sizes), Way(2, micro_batches=2), Way(3), Way(4, HALVES, micro_batches=2))


def test_a_replica_without_samples_in_a_sum_over_a_count() -> None:
    problem = Problem(partial(seeded, Tagger), [tokens_of(size, seed) for seed, size in enumerate((4, 1))], token_loss)
    check(problem, Way(2, micro_batches=2))


def test_a_taskgraph_of_two_devices_shares_the_batch_out_over_them() -> None:
    """Alone, twice beside each other, and with fewer samples than devices."""
    check(chain(8, 7, 1), Way(2, WHOLE, devices=2), Way(4, WHOLE, devices=2, micro_batches=2))


def test_a_pipeline_of_stages_of_two_devices() -> None:
    check(chain(8, 7, 5), Way(4, HALVES, devices=2, micro_batches=2), Way(8, HALVES, devices=2, micro_batches=2))


def test_taskgraphs_on_the_same_devices() -> None:
    """The pipeline folds up to data parallelism; with two devices each, the batch is shared out once."""
    check(chain(8, 7, 6), Way(2, HALVES, config=COLOCATED, micro_batches=2))


def parts_seen(rank: int, way: Way) -> tuple[int, tuple[int, ...], list[int]]:
    """Which rows of the global batch this rank's stage was given, by the joined result of a loss with more."""
    problem = Problem(partial(seeded, Chain), [batch_of(7)], rank_loss)
    engine = start(problem, way)
    _, aux = engine.train_step(my_share(engine, rank, problem.batches[0]))
    return engine.plan.num_replicas, engine.plan.place_of(rank), aux["rows"].tolist()


def rank_loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return model(**batch), {"rows": batch["x"][:, 0]}


def test_every_sample_is_seen_once_and_in_order() -> None:
    rows = batch_of(7)["x"][:, 0].tolist()
    for way in (Way(4, WHOLE, devices=2, micro_batches=2), Way(4, HALVES, devices=2, micro_batches=3)):
        for _, _, seen in launch(4, parts_seen, way):
            assert seen == rows


def test_colocated_taskgraphs_run_on_the_same_ranks() -> None:
    found = launch(2, parts_seen, Way(2, HALVES, config=COLOCATED))
    assert [(num_replicas, place) for num_replicas, place, _ in found] == [(2, (0, 0, 0)), (2, (0, 1, 0))]


def from_own_weights(
    rank: int, problem: Problem, cut: list[list[str]], same: bool
) -> tuple[list[str], float, dict[str, Any]]:
    """Unless they are the same, every rank has a seed of its own, and other running statistics."""
    epl.init(epl.Config({"run.print_plan": False}))
    torch.manual_seed(0 if same else rank)
    model = Normed().double()
    with torch.no_grad():
        model.get_buffer("a.1.running_mean").fill_(0 if same else rank)
    engine = epl.parallelize(annotate(model, cut), problem.optimize(model))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine.prepare(problem.batches[0])
    state = engine.state_dict()
    return [str(warning.message) for warning in seen], engine.train_step(problem.batches[0]).item(), state


@pytest.mark.parametrize("cut", [[], [["a"], ["b", "c"]]], ids=["data", "pipeline"])
def test_all_ranks_start_from_rank_0s_weights_whatever_the_seeds(cut: list[list[str]]) -> None:
    problem = Problem(partial(seeded, Normed), [batch_of(6)])
    torch.manual_seed(0)
    expected = Normed().double().state_dict()
    found = launch(2, from_own_weights, problem, cut, False)
    for _, loss, state in found:
        assert_close(state, expected, torch.float64)
        assert loss == found[0][1]
    warned = [messages for messages, _, _ in found]
    assert warned[1] == []
    assert warned[0] == ["the ranks started with different weights; all continue with those of rank 0"]


def test_equal_weights_are_not_warned_about() -> None:
    problem = Problem(partial(seeded, Normed), [batch_of(6)])
    assert all(messages == [] for messages, _, _ in launch(2, from_own_weights, problem, [], True))
