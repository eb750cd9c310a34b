"""How gradients are reduced: buckets, sparse ones, missing ones, and parameters of every form.

A mistake shows as a gradient that is None or zero where one process has the opposite, as an optimizer that moves what it
should leave alone, or as a shape or stride that the bucket gets wrong.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

import epl
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, Mixture, Tagger, TiedTagger, Uncapturable, Unused, batch_of, draw, tokens_of
from tests.runtime.problems import Outcome, Problem, Way, check, my_share, plain, seeded, start, user_model

HALVES = [["a", "b"], ["c", "d"]]
TOKENS = [["embedding"], ["middle", "head"]]


# ---------------------------------------------------------------------------------------------------------- optimizers


def two_groups(model: nn.Module) -> list[Optimizer]:
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    weights = [parameter for name, parameter in model.named_parameters() if "bias" not in name]
    return [AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}], lr=0.01)]


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    weights = [parameter for name, parameter in model.named_parameters() if "bias" not in name]
    return [AdamW(weights, lr=0.01), SGD(biases, lr=0.5, momentum=0.9)]


@pytest.mark.parametrize("optimize", [two_groups, two_optimizers])
def test_parameter_groups_and_several_optimizers(optimize: Any) -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(3)], optimize=optimize)
    check(problem, Way(2, HALVES, micro_batches=2), Way(2), Way(4, HALVES))


# ------------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("num_communicators", [3, *slow(1)])
def test_any_number_of_buckets_and_communicators(num_communicators: int) -> None:
    """From one bucket for everything to more buckets than parameters."""
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(2)])
    configs = [
        {"communication.max_splits": count, "communication.num_communicators": num_communicators}
        for count in (1, 2, 100)
    ]
    check(problem, *(Way(2, config=config) for config in configs))
    check(problem, Way(4, HALVES, micro_batches=2, config=configs[1]), Way(4, HALVES, config=configs[2]))


def test_parameters_of_every_form() -> None:
    """Channels last, a transposed tensor, no dimension, one element, and float32 beside float64."""
    batches = [{"image": draw(6, 2, 5, 5, seed=seed), "y": draw(6, 6, seed=seed + 9)} for seed in range(3)]
    problem = Problem(partial(seeded, Mixture), batches)
    # float32 in the middle of the model rounds everything after it
    check(problem, Way(2, micro_batches=2), Way(2, [["image"], ["single"]], micro_batches=2), dtype=torch.float32)
    check(problem, Way(1, micro_batches=3), Way(3, config={"communication.max_splits": 1}), dtype=torch.float32)


def own_gradients(rank: int, problem: Problem, way: Way) -> dict[str, tuple[Any, ...]]:
    engine = start(problem, way)
    engine.train_step(my_share(engine, rank, problem.batches[0]))
    named = user_model(engine).named_parameters()
    return {
        name: (parameter.grad.dtype, parameter.grad.stride() == parameter.stride())
        for name, parameter in named
        if parameter.grad is not None
    }


def test_gradients_in_buckets_keep_dtype_and_strides() -> None:
    """Optimizers run their quick paths only where gradients lie in memory as parameters do."""
    batch = {"image": draw(4, 2, 5, 5), "y": draw(4, 6)}
    for found in launch(2, own_gradients, Problem(partial(seeded, Mixture), [batch]), Way(2)):
        assert {name for name, (dtype, _) in found.items() if dtype is torch.float32} == {
            "single.weight",
            "single.bias",
        }
        assert all(same for _, same in found.values()), found


# ------------------------------------------------------------------------------------------------------------- missing


def decaying(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.1, weight_decay=0.5)]


def test_unused_parameters_have_no_gradient_and_do_not_decay() -> None:
    """An optimizer leaves alone what has no gradient, and would decay what has one of zeros."""
    problem = Problem(partial(seeded, Unused), [batch_of(6, seed) for seed in range(3)], optimize=decaying)
    expected = plain(problem)
    assert not any(name.startswith(("idle", "rare")) for name in expected.gradients)
    assert torch.equal(expected.state["idle.weight"], problem.build().state_dict()["idle.weight"])
    check(problem, Way(1, micro_batches=2), Way(2, micro_batches=2), Way(2, [["a"], ["b", "idle"]]))


def by_replica(batch: dict[str, Any], replica: int) -> dict[str, Any]:
    """Half a batch; the second replica gets ``extra`` as well."""
    half = {name: value.tensor_split(2)[replica] for name, value in batch.items()}
    return {**half, "extra": half["x"] * 2 if replica else None}


def train_unlike_replicas(rank: int, problem: Problem) -> Outcome:
    epl.init(epl.Config({"run.print_plan": False}))
    model = problem.build()
    engine = epl.parallelize(model, problem.optimize(model), example_batch=by_replica(problem.batches[0], 1))
    losses = [engine.train_step(by_replica(batch, rank)).item() for batch in problem.batches]
    gradients = {name: value for name, value in engine.gradients().items() if value is not None}
    return Outcome(losses, [], gradients, engine.state_dict())


def test_a_parameter_that_one_replica_uses_gets_its_gradient_on_all() -> None:
    """The replicas' batches differ in form: one has None where the other one has a tensor."""
    problem = Problem(partial(seeded, Unused), [batch_of(6, seed) for seed in range(3)], optimize=decaying)
    model = problem.build()
    [optimizer] = decaying(model)
    losses = []
    for batch in problem.batches:
        model.zero_grad()
        loss = torch.stack([model(**by_replica(batch, replica)) for replica in range(2)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert "rare.weight" in gradients
    for outcome in launch(2, train_unlike_replicas, problem):
        assert_close(outcome, Outcome(losses, [], gradients, model.state_dict()), torch.float64)


def thaw(rank: int, problem: Problem, way: Way) -> Outcome:
    """Train with ``a`` and ``c`` frozen for a step, then with ``c`` thawed and ``d`` frozen, then with all."""
    engine = start(problem, way)
    model = user_model(engine)
    losses = []
    for batch, frozen in zip(problem.batches, ("ac", "ad", ""), strict=True):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name[0] not in frozen)
        losses.append(engine.train_step(my_share(engine, rank, batch)).item())
    return Outcome(losses, [], {}, engine.state_dict())


def test_parameters_frozen_and_thawed_between_steps() -> None:
    """What is reduced must follow: a thawed layer whose gradient stays a replica's own drifts apart in silence."""
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(3)])
    model = problem.build()
    [optimizer] = problem.optimize(model)
    losses = []
    for batch, frozen in zip(problem.batches, ("ac", "ad", ""), strict=True):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name[0] not in frozen)
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for way in (Way(2), Way(4, HALVES, micro_batches=2)):
        for outcome in launch(way.world, thaw, problem, way):
            assert_close(outcome, Outcome(losses, [], {}, model.state_dict()), torch.float64)


# -------------------------------------------------------------------------------------------------------------- sparse


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())


def sparse_adam(model: nn.Module) -> list[Optimizer]:
    dense = [parameter for name, parameter in model.named_parameters() if name != "embedding.weight"]
    return [SparseAdam([model.get_parameter("embedding.weight")], lr=0.01), SGD(dense, lr=0.1)]


SPARSE_WAYS = (Way(2, micro_batches=2), Way(3), Way(1, micro_batches=2))


@pytest.mark.parametrize("as_dense", [False, *slow(True)])
@pytest.mark.parametrize("make", [TiedTagger, *slow(Tagger)])
def test_sparse_embeddings_with_sgd(make: Any, as_dense: bool) -> None:
    """The tied one gets a dense gradient from its other use, on another stage under a pipeline."""
    batches = [tokens_of(6, seed) for seed in range(3)]
    problem = Problem(partial(seeded, make, sparse=True), batches, token_mean)
    config = {"communication.sparse_as_dense": as_dense}
    ways = (*SPARSE_WAYS[:2], Way(4, TOKENS, micro_batches=2))
    check(problem, *(Way(way.world, way.cut, way.micro_batches, config=config) for way in ways))


def test_sparse_embeddings_with_sparse_adam() -> None:
    """It moves only the rows that have a gradient, so zeros in their place would show."""
    batches = [tokens_of(6, seed, length=2) for seed in range(3)]
    problem = Problem(partial(seeded, Tagger, sparse=True), batches, token_mean, sparse_adam)
    check(problem, *SPARSE_WAYS, Way(4, TOKENS, micro_batches=2))


# ------------------------------------------------------------------------------------------------------ without a graph


def test_a_model_that_runs_without_a_graph_trains_data_parallel() -> None:
    """Its reentrant checkpoints accumulate one gradient in several goes, and only the last one makes it complete."""
    problem = Problem(partial(seeded, Uncapturable), [batch_of(8, seed) for seed in range(3)])
    check(problem, Way(1, micro_batches=4), num_parts=4)
    check(problem, Way(2, micro_batches=2, config={"communication.max_splits": 100}), num_parts=4, counted=2)
