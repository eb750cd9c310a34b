"""What else has to hold under operator split, beside the numbers of whole models (test_split_models)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epl
from epl.cost.devices import CPU, LinkModel
from epl.planner import make
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch, launch_expecting_errors, run_on
from tests.runtime.odd_nets import Chain, Mixture, Normed, Recurrent, TiedTagger, batch_of, draw, tokens_of
from tests.runtime.problems import Outcome, Problem, Way, check, my_share, plain, seeded, start, train, user_model
from tests.runtime.test_gradients import token_mean
from tests.zoo import CASES

WHOLE = [[""]]
SPLIT_2 = Way(2, WHOLE, devices=2, split=(0,))
SPLIT_3 = Way(3, WHOLE, devices=3, split=(0,))
COLOCATE = {"cluster.colocate_split_and_replicate": True}


def chain(steps: int = 3, size: int = 7) -> Problem:
    return Problem(partial(seeded, Chain), [batch_of(size, seed) for seed in range(steps)])


def tagger(steps: int = 3) -> Problem:
    return Problem(partial(seeded, TiedTagger), [tokens_of(7, seed) for seed in range(steps)], token_mean)


class Clipped(nn.Module):
    """An embedding that renormalises its rows in place, and statistics inside a checkpoint that is run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, max_norm=1.0)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        z = self.embedding(tokens).flatten(0, 1)
        for _ in range(2):
            z = checkpoint(self.norm, z, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(z), tokens.flatten())


def test_weights_and_buffers_that_change_in_place() -> None:
    problem = Problem(partial(seeded, Clipped), [tokens_of(8, seed) for seed in range(3)])
    check(problem, Way(1), SPLIT_2)


# --------------------------------------------------------------------------------------- parts of a model, and mixtures


def test_a_split_stage_between_stages_of_one_device() -> None:
    """Its ranks all get what the stage before has made, and one of them gives on what they have made together."""
    cut = [["a"], ["b", "c"], ["d"]]
    check(chain(), Way(4, cut, devices=(1, 2, 1), split=(1,), micro_batches=2))


def test_split_stages_of_different_sizes() -> None:
    check(
        chain(),
        Way(3, [["a"], ["b", "c", "d"]], devices=(1, 2), split=(1,), micro_batches=3),
        Way(3, [["a", "b"], ["c", "d"]], devices=(2, 1), split=(0,), micro_batches=2),
    )


def test_two_replicas_of_a_pipeline_with_a_split_stage() -> None:
    check(chain(), Way(6, [["a", "b"], ["c", "d"]], devices=(1, 2), split=(1,), micro_batches=2))


def test_split_and_replicate_on_the_same_devices() -> None:
    """The weights of one part are cut and those of the other whole; what goes between them is converted."""
    check(chain(), Way(2, [["a", "b"], ["c", "d"]], devices=2, split=(1,), config=COLOCATE))


def test_tied_weights_stay_tied_when_they_are_cut() -> None:
    check(
        tagger(),
        SPLIT_2,
        SPLIT_3,
        Way(2, [["embedding"], ["middle", "head"]], devices=2, split=(0, 1), config=COLOCATE),
    )


def test_tied_weights_over_two_split_stages() -> None:
    cut = [["embedding"], ["middle", "head"]]
    check(tagger(), Way(4, cut, devices=2, split=(0, 1), micro_batches=2))


def test_batch_normalisation_over_cut_batches_and_channels() -> None:
    check(Problem(partial(seeded, Normed), [batch_of(8, seed) for seed in range(3)]), SPLIT_2, SPLIT_3)


def test_parameters_of_every_form() -> None:
    """Channels last, a transposed tensor, no dimension, one element, and float32 beside float64."""
    batches = [{"image": draw(6, 2, 5, 5, seed=seed), "y": draw(6, 6, seed=seed + 9)} for seed in range(3)]
    check(Problem(partial(seeded, Mixture), batches), SPLIT_2, SPLIT_3, dtype=torch.float32)


def adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Makes its state at once, before there is a plan."""
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def test_an_optimizer_with_state_from_the_start() -> None:
    check(replace(tagger(), optimize=adagrad), SPLIT_2)


def test_a_recurrent_net() -> None:
    batches = [{**tokens, "labels": tokens["tokens"]} for tokens in (tokens_of(8, seed) for seed in range(3))]
    check(Problem(partial(seeded, Recurrent, 0.0), batches), SPLIT_2, SPLIT_3)


# ------------------------------------------------------------------------------------------------------ what ranks hold


@run_on(3)
def test_weights_are_shared_out(rank: int) -> None:
    """Each rank holds about a third; the whole model's state dict and gradients are whole on every rank."""
    problem = tagger(1)
    engine = start(problem, SPLIT_3)
    engine.forward_backward(problem.batches[0])
    model, whole = user_model(engine), problem.build()
    for path, parameter in whole.named_parameters():
        local = model.get_parameter(path)
        if parameter.dim() > 1:
            assert local.numel() <= parameter.numel() / 3 * 1.3, path
            assert local.grad is not None
            assert local.grad.shape == local.shape
        assert engine.gradients()[path].shape == parameter.shape
    state = engine.state_dict()
    assert_close(state, dict(whole.state_dict()), torch.float64)
    whole.load_state_dict({name: value * 2 if value.is_floating_point() else value for name, value in state.items()})
    engine.load_state_dict(whole.state_dict())
    assert_close(engine.state_dict(), dict(whole.state_dict()), torch.float64)


def steps_of_other_shapes(rank: int, problem: Problem, way: Way) -> list[float]:
    """Training on sequences of three lengths, with an evaluation after each step."""
    engine = start(problem, way)
    losses = []
    for batch in problem.batches:
        losses.append(engine.train_step(my_share(engine, rank, batch)).item())
        losses.append(engine.eval_step(my_share(engine, rank, batch)).item())
    return losses


def test_another_length_and_evaluation_use_the_weights_where_they_are() -> None:
    problem = Problem(
        partial(seeded, TiedTagger), [tokens_of(6, seed, length) for seed, length in enumerate((5, 3, 8))], token_mean
    )
    found = launch(2, steps_of_other_shapes, problem, SPLIT_2)
    expected = steps_of_other_shapes_plain(problem)
    for losses in found:
        assert_close(losses, expected, torch.float64)


def steps_of_other_shapes_plain(problem: Problem) -> list[float]:
    model, losses = problem.build(), []
    (optimizer,) = problem.optimize(model)
    assert problem.loss_fn is not None
    for batch in problem.batches:
        model.zero_grad()
        loss = problem.loss_fn(model, batch)
        total = loss.total / loss.count if isinstance(loss, epl.SumLoss) else loss
        total.backward()
        losses.append(total.item())
        optimizer.step()
        with torch.no_grad():
            after = problem.loss_fn(model.eval(), batch)
        losses.append((after.total / after.count if isinstance(after, epl.SumLoss) else after).item())
        model.train()
    return losses


# ------------------------------------------------------------------------------------------------ the other ways to run


@run_on(2)
def test_verify_passes_and_forward_passes_give_the_models_output(rank: int) -> None:
    problem = tagger(2)
    reference = problem.build()
    engine = start(problem, SPLIT_2)
    for batch in problem.batches:
        engine.train_step(batch)
        engine.verify(batch).check()
    outcome = plain(problem)
    assert_close(engine.state_dict(), outcome.state, torch.float64)
    reference.load_state_dict(engine.state_dict())
    with torch.no_grad():
        found = engine.model.eval()(tokens=problem.batches[0]["tokens"])
        expected = reference.eval()(problem.batches[0]["tokens"])
    assert_close(found, expected, torch.float64)


# ----------------------------------------------------------------------------------------------------------- randomness


def train_seeded(rank: int, problem: Problem, way: Way) -> Outcome:
    torch.manual_seed(5)
    return train(rank, problem, way)


@pytest.mark.parametrize("name", ["gpt2", *slow("bert", "t5")])
def test_dropout_draws_what_one_process_draws(name: str) -> None:
    """On cut values each rank takes its part of the mask of the whole; on whole values all draw the same."""
    case = CASES[name]
    batches = [case.batch(4, seed, dtype=torch.float64) for seed in range(2)]
    problem = Problem(partial(case.build, torch.float64, dropout=0.3), batches, case.loss_fn)
    (expected,) = launch(1, train_seeded, problem, Way(1))
    for outcome in launch(2, train_seeded, problem, SPLIT_2):
        assert_close(outcome, expected, torch.float64)


def checkpointed_bert() -> nn.Module:
    model: Any = CASES["bert"].build(torch.float64, dropout=0.3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def test_recomputed_segments_communicate_and_draw_again() -> None:
    """The segment's collectives run once more inside backward, in the same order on all ranks."""
    problem = Problem(checkpointed_bert, [CASES["bert"].batch(4, seed, dtype=torch.float64) for seed in range(2)])
    (expected,) = launch(1, train_seeded, problem, Way(1))
    for outcome in launch(2, train_seeded, problem, SPLIT_2):
        assert_close(outcome, expected, torch.float64)


def choose_otherwise(rank: int) -> None:
    """One rank chooses as if sending were free, for a batch of another size than the plan's."""
    engine = start(chain(1), SPLIT_2)
    if rank == 1:
        make.device_model = lambda _: replace(CPU, link=LinkModel(0.0, 1e30))
    engine.train_step(batch_of(9))


def test_ranks_that_choose_otherwise_are_told_before_they_wait_for_one_another() -> None:
    for said in launch_expecting_errors(2, choose_otherwise):
        assert "ranks [0, 1] share out stage 0, and chose different placements" in said


# --------------------------------------------------------------------------------------------------------------- errors


def start_with(rank: int, make_optimizer: Any) -> None:
    start(Problem(partial(seeded, Chain), [batch_of(4)], optimize=make_optimizer), SPLIT_2)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])]


def test_an_optimizer_that_looks_at_whole_weights_is_refused() -> None:
    for said in launch_expecting_errors(2, start_with, muon):
        assert "StrategyError: Muon looks at a whole weight" in said


def start_again(rank: int) -> None:
    engine = start(chain(1), SPLIT_2)
    model = user_model(engine)
    engine.close()
    again = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    again.train_step(batch_of(7))


def test_a_model_that_an_engine_has_cut_is_refused_by_the_next() -> None:
    """Its weights have the shapes of parts; where these happen to fit, it would be another model without a word."""
    for said in launch_expecting_errors(2, start_again):
        assert "RunError: an earlier engine has spread this model over the ranks" in said


@run_on(4)
def test_a_replica_without_samples_takes_part(rank: int) -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(3)])
    expected = plain(problem)
    engine = start(problem, replace(SPLIT_2, world=4))
    batch = problem.batches[0] if rank < 2 else {name: value[:0] for name, value in problem.batches[0].items()}
    assert_close([engine.train_step(batch).item()], expected.losses, torch.float64)
    assert_close(engine.state_dict(), expected.state, torch.float64)


class Closed(nn.Module):
    """Cannot be captured: it leaves the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.from_numpy(x.detach().numpy().copy())).sum()


def start_closed(rank: int) -> None:
    start(Problem(Closed, [torch.randn(4, 4)]), SPLIT_2)


def test_split_of_a_model_that_cannot_be_captured_is_refused() -> None:
    for said in launch_expecting_errors(2, start_closed):
        assert "StrategyError" in said or "CaptureError" in said
        assert "split(2" in said or "captured" in said
