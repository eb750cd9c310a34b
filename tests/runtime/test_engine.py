"""The engine's own calls: evaluation, clipping, schedulers, closing.

A mistake shows as a number that is not the plain one, as a flag or gradient that a call leaves changed, or as a hook that
stays behind.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

import epl
from tests.parity import assert_close
from tests.ranks import launch, launch_expecting_errors
from tests.runtime.odd_nets import (
    Chain,
    Frozen,
    Normed,
    Predictor,
    Recurrent,
    TiedTagger,
    batch_of,
    predictor_loss,
    tokens_of,
)
from tests.runtime.problems import Problem, Way, my_share, plain, seeded, start, user_model
from tests.runtime.test_gradients import token_mean

HALVES = [["a", "b"], ["c", "d"]]
NORMED = [["a"], ["b", "c"]]
TIED = [["embedding"], ["middle", "head"]]


# ---------------------------------------------------------------------------------------------------------- evaluation


class Evaluated(NamedTuple):
    losses: list[float]
    modes: dict[str, bool]
    gradients_kept: bool
    state: dict[str, Tensor]


def evaluate(rank: int, problem: Problem, way: Way) -> Evaluated:
    """Two training steps, each followed by an evaluation; one module is in eval mode from the start."""
    engine = start(problem, way)
    model = user_model(engine)
    model.b.eval()
    losses, kept = [], True
    for batch in problem.batches:
        engine.train_step(my_share(engine, rank, batch))
        before = [p.grad for p in model.parameters()]
        losses.append(engine.eval_step(my_share(engine, rank, batch)).item())
        kept = kept and all(p.grad is gradient for p, gradient in zip(model.parameters(), before, strict=True))
    modes = {name: module.training for name, module in model.named_modules()}
    return Evaluated(losses, modes, kept, dict(model.named_buffers()))


@pytest.mark.parametrize("way", [Way(2, micro_batches=2), Way(4, NORMED, micro_batches=2)], ids=["data", "hybrid"])
def test_eval_step_gives_the_plain_loss_in_eval_mode_and_changes_nothing(way: Way) -> None:
    """All replicas evaluate with the first one's statistics, so that the loss is one model's."""
    problem = Problem(partial(seeded, Normed), [batch_of(8, seed) for seed in range(2)])
    expected = []
    for steps in (1, 2):
        model = problem.build()
        model.load_state_dict(plain(Problem(problem.build, problem.batches[:steps]), 4, counted=2).state)
        with torch.no_grad():
            expected.append(model.eval()(**problem.batches[steps - 1]).item())
    for found in launch(way.world, evaluate, problem, way):
        assert_close(found.losses, expected, torch.float64)
        assert found.gradients_kept
        assert found.modes == {**dict.fromkeys(found.modes, True), "b": False}


def eval_dropout(rank: int, problem: Problem, way: Way) -> list[float]:
    engine = start(problem, way)
    losses = [engine.eval_step(my_share(engine, rank, batch)).item() for batch in problem.batches]
    engine.train_step(my_share(engine, rank, problem.batches[0]))
    return losses


def test_eval_step_without_dropout_on_batches_that_leave_a_replica_empty() -> None:
    tokens = [{**tokens_of(size), "labels": tokens_of(size)["tokens"]} for size in (6, 1, 2)]
    problem = Problem(partial(seeded, Recurrent, 0.5), tokens)
    model = problem.build().eval()
    expected = [model(**batch).item() for batch in tokens]
    for way in (Way(3, micro_batches=2), Way(2, [["embedding"], ["lstm", "head"]], micro_batches=4)):
        for losses in launch(way.world, eval_dropout, problem, way):
            assert_close(losses, expected, torch.float64)


class Mixed(NamedTuple):
    outputs: list[Tensor]
    losses: list[float]


def mix_calls(rank: int, problem: Problem) -> Mixed:
    """Calls of other kinds before and after steps that leave the second replica without a sample."""
    engine = start(problem, Way(2))
    full, single = (my_share(engine, rank, batch) for batch in problem.batches)
    with torch.no_grad():
        outputs = [engine.model(**full), engine.model(**single)]
    losses = [engine.eval_step(single), engine.train_step(single), engine.eval_step(full)]
    return Mixed(outputs, [loss.item() for loss in losses])


def test_an_empty_share_is_of_the_kind_that_the_call_asks_for() -> None:
    """What an empty replica takes part with is the graph of this call, not of the one before it."""
    problem = Problem(partial(seeded, Predictor), [batch_of(4), batch_of(1, seed=1)], predictor_loss)
    first, second = launch(2, mix_calls, problem)
    assert [len(z) for z in (*first.outputs, *second.outputs)] == [2, 1, 2, 0]
    assert first.losses == second.losses
    model = problem.build()
    assert_close(first.losses[:2], [predictor_loss(model, problem.batches[1]).item()] * 2, torch.float64)


# ------------------------------------------------------------------------------------------------------------ clipping


class Clipped(NamedTuple):
    norms: list[Tensor]
    gradients: dict[str, Tensor]


def clip(rank: int, problem: Problem, way: Way, norm_types: list[float]) -> Clipped:
    engine = start(problem, way)
    norms = []
    for norm_type in norm_types:
        engine.zero_grad()
        engine.forward_backward(my_share(engine, rank, problem.batches[0]))
        norms.append(engine.clip_grad_norm_(0.01, norm_type))
    gradients = {name: value for name, value in engine.gradients().items() if value is not None}
    return Clipped(norms, gradients)


@pytest.mark.parametrize("way", [Way(2), Way(2, TIED, micro_batches=2), Way(4, TIED)], ids=["data", "pipeline", "both"])
def test_clipping_is_that_of_torch_for_every_kind_of_norm(way: Way) -> None:
    """The tied weight counts once though two stages hold it, and replicas count once."""
    problem = Problem(partial(seeded, TiedTagger), [tokens_of(8)], token_mean)
    norm_types = [1.0, math.inf, 0.5, 0.0, -math.inf, 3.0, 2.0]
    model = problem.build()
    norms = []
    for norm_type in norm_types:
        model.zero_grad()
        token_mean(model, problem.batches[0]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in launch(way.world, clip, problem, way, norm_types):
        assert_close(found, Clipped(norms, gradients), torch.float64)


def test_the_norm_is_the_same_number_on_ranks_without_gradients() -> None:
    problem = Problem(partial(seeded, Frozen, "d"), [batch_of(8)])
    first, second = launch(2, clip, problem, Way(2, HALVES), [2.0, math.inf])
    assert torch.equal(torch.stack(first.norms), torch.stack(second.norms))
    assert first.norms[0].dtype is torch.float64


def clip_wrongly(rank: int, problem: Problem, max_norm: float) -> None:
    engine = start(problem, Way(2, HALVES))
    engine.forward_backward(problem.batches[0])
    if max_norm > 0 and rank == 0:
        user_model(engine).a.weight.grad.fill_(math.inf)
    engine.clip_grad_norm_(max_norm, error_if_nonfinite=True)


def test_clipping_refuses_a_norm_that_is_not_positive_and_on_demand_one_that_is_not_finite() -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8)])
    for error in launch_expecting_errors(2, clip_wrongly, problem, -1.0):
        assert "clip_grad_norm_(max_norm=-1.0): max_norm must be a positive number" in error
    for error in launch_expecting_errors(2, clip_wrongly, problem, 1.0):
        assert "the total norm of the gradients is inf" in error


def train_clipped(rank: int, problem: Problem, way: Way) -> dict[str, Tensor]:
    engine = start(problem, way)
    for batch in problem.batches:
        engine.train_step(my_share(engine, rank, batch), max_grad_norm=0.05)
    return engine.state_dict()


def test_train_step_clips_on_demand() -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(2)])
    model = problem.build()
    [optimizer] = problem.optimize(model)
    for batch in problem.batches:
        optimizer.zero_grad()
        model(**batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    for state in launch(4, train_clipped, problem, Way(4, HALVES)):
        assert_close(state, model.state_dict(), torch.float64)


# ---------------------------------------------------------------------------------------------------------- schedulers


def momentum(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)]


def warm_up(step: int) -> float:
    return (step + 1) / 4


def train_scheduled(rank: int, problem: Problem, way: Way, kind: str) -> dict[str, Tensor]:
    epl.init(epl.Config({"run.print_plan": False, "pipeline.num_micro_batch": way.micro_batches}))
    model = problem.build()
    [optimizer] = momentum(model)
    scheduler = StepLR(optimizer, 1, 0.5) if kind == "step" else LambdaLR(optimizer, warm_up)
    engine = epl.parallelize(model, optimizer)
    for batch in problem.batches:
        engine.prepare(batch)
        engine.train_step(my_share(engine, rank, batch))
        scheduler.step()
    return engine.state_dict()


@pytest.mark.parametrize("kind", ["step", "lambda"])
def test_schedulers_work_on_the_users_optimizer(kind: str) -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(3)])
    [expected] = [train_scheduled_plainly(problem, kind)]
    for state in launch(2, train_scheduled, problem, Way(2, micro_batches=2), kind):
        assert_close(state, expected, torch.float64)


def train_scheduled_plainly(problem: Problem, kind: str) -> dict[str, Any]:
    model = problem.build()
    [optimizer] = momentum(model)
    scheduler = StepLR(optimizer, 1, 0.5) if kind == "step" else LambdaLR(optimizer, warm_up)
    for batch in problem.batches:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        scheduler.step()
    return model.state_dict()


# ------------------------------------------------------------------------------------------------------------- closing


def close_and_go_on(rank: int, problem: Problem) -> tuple[int, str, dict[str, Tensor]]:
    engine = start(problem, Way(2))
    engine.train_step(my_share(engine, rank, problem.batches[0]))
    model = user_model(engine)
    engine.close()
    hooks = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())
    with pytest.raises(epl.PlanError) as error:
        _ = engine.plan
    again = epl.parallelize(model, problem.optimize(model))
    again.train_step({name: value.tensor_split(2)[rank] for name, value in problem.batches[1].items()})
    return hooks, str(error.value), again.state_dict()


def test_a_closed_engine_leaves_no_hook_and_its_model_can_be_given_to_another() -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(2)])
    for hooks, message, state in launch(2, close_and_go_on, problem):
        assert hooks == 0
        assert "there is no plan before the first batch" in message
        assert_close(state, plain(problem).state, torch.float64)


def spread_and_go_on(rank: int, problem: Problem) -> None:
    engine = start(problem, Way(2, HALVES))
    model = user_model(engine)
    engine.close()
    epl.parallelize(model, problem.optimize(model)).prepare(problem.batches[0])


def test_a_model_that_a_pipeline_has_spread_is_not_taken_for_a_whole_one() -> None:
    """Rank 0's copy has no weights of later stages any more, and would be given to all."""
    errors = launch_expecting_errors(2, spread_and_go_on, Problem(partial(seeded, Chain), [batch_of(8)]))
    for error, missing in zip(errors, ("c.weight", "a.weight"), strict=True):
        assert "RunError: an earlier engine has spread this model over the ranks" in error
        assert f"this rank does not hold {missing} and 3 more of its tensors" in error


def train_two(rank: int, problem: Problem) -> list[dict[str, Tensor]]:
    engines = [start(problem, way) for way in (Way(2), Way(2, HALVES, micro_batches=2))]
    for batch in problem.batches:
        for engine in engines:
            engine.train_step(my_share(engine, rank, batch))
    return [engine.state_dict() for engine in engines]


def test_two_engines_take_turns_in_one_process() -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(3)])
    for states in launch(2, train_two, problem):
        assert_close(states, [plain(problem).state] * 2, torch.float64)
