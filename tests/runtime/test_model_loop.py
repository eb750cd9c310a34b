"""``engine.model`` in loops that know nothing of pipelines: what people have written already.

A mistake shows as gradients that are scaled twice or not at all, or as an output that is another replica's.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.utils.generic import ModelOutput

import epl
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch, launch_expecting_errors
from tests.runtime.odd_nets import Chain, Predictor, Unused, batch_of, draw
from tests.runtime.problems import Problem, Way, my_share, seeded, start, user_model
from tests.zoo import CASES, annotate

HALVES = [["a", "b"], ["c", "d"]]
SPLIT = Way(2, [[""]], devices=2, split=(0,), micro_batches=2)
WAYS = [Way(2, micro_batches=2), Way(2, HALVES, micro_batches=2), Way(4, HALVES), SPLIT]
IDS = ["data", "pipeline", "both", "split"]


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]


def scaled_loop(model: nn.Module, optimizer: Any, batches: list[Any]) -> list[float]:
    """Two batches to an update, each loss divided by two, as accumulating loops do; gradients are clipped by value."""
    losses = []
    for i, batch in enumerate(batches):
        loss = model(**batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def sum_loop(model: nn.Module, optimizer: Any, batches: list[Any]) -> list[float]:
    """Two losses are added before one backward; gradients are zeroed, not dropped; one call's loss is thrown away."""
    losses = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad(set_to_none=False)
        model(**first)
        loss = model(**first) * 0.5 + model(**second) ** 2
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def run_loop(rank: int, loop: Any, problem: Problem, way: Way) -> Trained:
    engine = start(problem, way)
    [optimizer] = problem.optimize(user_model(engine))
    losses = loop(engine.model, optimizer, [my_share(engine, rank, batch) for batch in problem.batches])
    return Trained(losses, engine.state_dict())


@pytest.mark.parametrize("loop", [scaled_loop, sum_loop])
@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_loops_written_for_plain_models_give_the_plain_weights(loop: Any, way: Way) -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(4)])
    model = problem.build()
    [optimizer] = problem.optimize(model)
    expected = Trained(loop(model, optimizer, problem.batches), model.state_dict())
    for trained in launch(way.world, run_loop, loop, problem, way):
        assert_close(trained, expected, torch.float64)


def call_positionally(rank: int, problem: Problem) -> list[float]:
    engine = start(problem, Way(2))
    x, y, extra = (value.tensor_split(2)[rank] for value in problem.batches[0])
    calls: list[Any] = [engine.model(x, y, extra), engine.model(x, y=y, extra=extra), engine.model(x, y)]
    return [loss.item() for loss in calls]


def test_positional_arguments_and_keywords_mix() -> None:
    x, y = batch_of(4).values()
    problem = Problem(partial(seeded, Unused), [(x, y, draw(4, 6, seed=3))])
    model = problem.build()
    expected = [model(*problem.batches[0]).item(), model(*problem.batches[0]).item(), model(x, y).item()]
    for losses in launch(2, call_positionally, problem):
        assert_close(losses, expected, torch.float64)


class Asked(NamedTuple):
    losses: list[float]
    gradient: Tensor
    names: list[str]
    state: dict[str, Tensor]


def ask(rank: int, problem: Problem, way: Way) -> Asked:
    """A loop written for models that return an output class; names and tensors of the model as it is seen there."""
    engine = start(problem, way)
    model = engine.model
    outputs = [model(**my_share(engine, rank, batch)) for batch in problem.batches]
    losses = [outputs[0].loss, outputs[1]["loss"], outputs[2][0]]
    torch.stack(losses).sum().backward()
    gradient = engine.gradients()["a.weight"]
    assert gradient is not None
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    names = [name for name, _ in model.named_parameters()]
    return Asked([loss.item() for loss in losses], gradient, names, model.state_dict())


@pytest.mark.parametrize("way", WAYS[:2], ids=IDS[:2])
def test_a_loss_can_be_asked_for_and_names_are_those_of_a_plain_output_and_model(way: Way) -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(3)])
    model = problem.build()
    losses = [model(**batch) for batch in problem.batches]
    torch.stack(losses).sum().backward()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    gradient = model.get_parameter("a.weight").grad
    assert gradient is not None
    expected = Asked([loss.item() for loss in losses], gradient, [], state)
    for asked in launch(2, ask, problem, way):
        assert asked.names == names
        assert_close(asked._replace(names=[]), expected, torch.float64)


class OnePair(nn.Module):
    """It takes one argument: a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, pair: list[Tensor]) -> Tensor:
        x, y = pair
        return F.mse_loss(self.a(x), y)


def call_with_list(rank: int, pair: list[Tensor]) -> float:
    epl.init(epl.Config({"run.print_plan": False}))
    return epl.parallelize(seeded(OnePair)).model([tensor.tensor_split(2)[rank] for tensor in pair]).item()


def test_one_argument_that_is_a_container_stays_one_argument() -> None:
    pair = list(batch_of(4).values())
    assert_close(launch(2, call_with_list, pair), [seeded(OnePair)(pair).item()] * 2, torch.float64)


def backward_twice(rank: int, problem: Problem) -> None:
    loss = start(problem, Way(2)).model(**problem.batches[0])
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_of_one_loss_is_an_error() -> None:
    for error in launch_expecting_errors(2, backward_twice, Problem(partial(seeded, Chain), [batch_of(4)])):
        assert "RunError: backward was called twice on one loss; call the model again" in error


# ------------------------------------------------------------------------------------------------------- forward only


class Looked(NamedTuple):
    kind: str
    keys: list[str]
    output: dict[str, Tensor]
    requires_grad: bool
    training: bool


def look(rank: int, problem: Problem, way: Way) -> list[Looked]:
    """Forward passes in eval mode with gradients on, and in training mode with gradients off."""
    engine = start(problem, way)
    batch = my_share(engine, rank, problem.batches[0])
    found = []
    for training in (False, True):
        engine.model.train(training)
        with torch.set_grad_enabled(not training):
            output = engine.model(**batch)
        tensors = dict(output) if isinstance(output, ModelOutput) else {"": output}
        found.append(
            Looked(
                type(output).__name__,
                list(tensors),
                tensors,
                any(tensor.requires_grad for tensor in tensors.values()),
                user_model(engine).training,
            )
        )
    return found


@pytest.mark.parametrize("name", ["bert", *slow("t5", "vit")])
@pytest.mark.parametrize("num_stages", [2, *slow(1)])
def test_forward_passes_return_the_models_own_output_for_this_replicas_batch(name: str, num_stages: int) -> None:
    """Per-sample tensors are whole again whatever the micro-batches, and every rank of a replica has them."""
    case = CASES[name]
    batch: Any = case.batch(6, dtype=torch.float64)
    problem = Problem(partial(case.build, torch.float64), [batch])
    way = Way(2, case.stages[2] if num_stages > 1 else [], micro_batches=2)
    model = problem.build()
    for rank, found in enumerate(launch(2, look, problem, way)):
        half = {key: value.tensor_split(way.num_replicas)[rank % way.num_replicas] for key, value in batch.items()}
        expected = model(**half)
        for looked, training in zip(found, (False, True), strict=True):
            assert looked.kind == type(expected).__name__
            assert looked.keys == list(expected.keys())
            assert_close(looked.output, dict(expected), case.accuracy(torch.float64))
            assert not looked.requires_grad
            assert looked.training is training


def test_outputs_of_a_model_without_a_loss() -> None:
    """The loss function is for training; a forward pass is the model's own."""
    from tests.runtime.odd_nets import predictor_loss

    problem = Problem(partial(seeded, Predictor), [batch_of(5)], predictor_loss)
    expected = problem.build()(**problem.batches[0])
    for rank, found in enumerate(launch(2, look, problem, Way(2, micro_batches=2))):
        for looked in found:
            assert_close(looked.output[""], expected.tensor_split(2)[rank], torch.float64)


def small_gpt2() -> nn.Module:
    """With its cache on, as the class has it by default, its output holds one in eval mode."""
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def logits_of(rank: int, batch: dict[str, Tensor]) -> Tensor:
    epl.init(epl.Config({"run.print_plan": False}))
    model = annotate(small_gpt2(), [["transformer.wte", "transformer.h.0"], ["transformer.h.1"]])
    return epl.parallelize(model).model(**batch).logits


def test_a_forward_pass_needs_no_labels_and_no_optimizer_and_leaves_out_a_cache() -> None:
    batch = {"input_ids": torch.arange(12).reshape(2, 6)}
    for logits in launch(2, logits_of, batch):
        assert_close(logits, small_gpt2()(**batch).logits, torch.float32)


# ------------------------------------------------------------------------------------------------------------ clipping


def clip_in_loop(rank: int, way: Way, how: str) -> list[str]:
    """Three steps, with gradients clipped in one of three ways; what was warned of."""
    problem = Problem(partial(seeded, Chain), [batch_of(8, seed) for seed in range(3)])
    engine = start(problem, way)
    model, [optimizer] = engine.model, problem.optimize(user_model(engine))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in problem.batches:
            optimizer.zero_grad()
            model(**my_share(engine, rank, batch)).backward()
            if how == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            elif how == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            else:
                engine.clip_grad_norm_(0.01)
            optimizer.step()
    return [str(warning.message) for warning in seen]


def test_clipping_a_stage_by_its_own_norm_is_warned_of() -> None:
    """Torch's own function cannot know the other stages; where there are none, or by value, it is right."""
    pipeline = Way(2, HALVES)
    for way in (pipeline, SPLIT):
        [message], none = launch(2, clip_in_loop, way, "norm")
        assert "call engine.clip_grad_norm_(max_norm) instead" in message
        assert none == []
    for way, how in ((pipeline, "value"), (SPLIT, "engine"), (pipeline, "engine"), (Way(2), "norm")):
        assert launch(2, clip_in_loop, way, how) == [[], []]
