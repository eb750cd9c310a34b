"""What each rank really holds when states, gradients and weights are shared out, and which weights can be lent.

A mistake shows as a rank that keeps more than its part, in the bytes of the tensors themselves.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.errors import EplError
from epl.planner.units import units_of
from tests.marks import slow
from tests.nets import Deep
from tests.ranks import launch

WIDTH, DEPTH = 128, 6


class Held(NamedTuple):
    """Bytes on one rank after a step."""

    states: int  # of the optimizer
    gradients: int
    weights: int
    bucket: int  # the largest shard, half a unit on two ranks
    activations: int  # the most of them in a step
    communication: int


def _bytes(tensors: Any) -> int:
    """Of the memory of tensors; what they share counts once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def _held(rank: int, config: dict[str, Any]) -> Held:
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = Deep(WIDTH, DEPTH)
    optimizer = torch.optim.Adam(model.parameters())
    engine = epl.parallelize(model, optimizer)
    batch = torch.ones(4, WIDTH)
    for _ in range(2):
        engine.train_step(batch)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    shards = [unit.shard_bytes for unit in units_of(engine.plan, rank)]
    weights = _bytes(model.parameters())
    held = (_bytes(states), sum(gradient.nbytes for gradient in gradients), weights, max(shards, default=0))
    measured = engine.memory_report(batch).ranks[rank].measured
    assert measured is not None
    return Held(*held, measured.largest("activations"), measured.largest("communication"))


@pytest.mark.parametrize("world", [2, *slow(3, 4)])
def test_each_rank_holds_its_part_of_what_its_level_shares_out(world: int) -> None:
    plain = launch(world, _held, {})[0]
    part = 1 / world
    for level in ("v0", "v1", "v2"):
        for held in launch(world, _held, {"zero.level": level}):
            assert held.states <= plain.states * part + 2 * held.bucket
            assert held.gradients <= plain.gradients * part + held.bucket
            expected = plain.weights * (part if level == "v2" else 1)
            assert expected <= held.weights <= expected + held.bucket
        total = sum(held.states for held in launch(world, _held, {"zero.level": level}))
        assert plain.states * 0.99 <= total <= plain.states * 1.01, "the parts are the whole"


@pytest.mark.parametrize("config", [{"zero.level": "v2"}, *slow({"zero.level": "v2", "pipeline.num_micro_batch": 2})])
def test_lent_weights_are_not_kept_from_forward_to_backward(config: dict[str, Any]) -> None:
    """A kept copy of each layer would be six units; the one that forward used last is still there for backward."""
    plain = launch(2, _held, {})[0]
    for held in launch(2, _held, config):
        assert held.activations <= plain.activations + 2 * held.bucket


# -------------------------------------------------------------------------------------------------------------- refusals


class Writing(nn.Module):
    """Its forward changes a weight that takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return (self.a(x) * self.scale).square().mean()


def _written(rank: int, config: dict[str, Any]) -> tuple[str, Tensor | None]:
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = Writing()
    engine = epl.parallelize(model, torch.optim.SGD(model.a.parameters(), lr=0.1))
    try:
        for _ in range(2):
            engine.train_step(torch.ones(4, 8))
    except EplError as error:
        return f"{type(error).__name__}: {error}", None
    return "", engine.state_dict()["scale"]


@pytest.mark.parametrize("config", [{"zero.level": "v2"}, {"offload.level": "disk"}])
def test_a_forward_that_writes_to_a_lent_weight_is_refused(config: dict[str, Any]) -> None:
    for text, _ in launch(2, _written, config):
        words = (
            r"StrategyError: forward changes the weight scale in place, at .*test_lending\.py.*zero.level 'v1' or less"
        )
        assert re.search(words, text, re.DOTALL), text


@pytest.mark.parametrize("config", [{"zero.level": "v1"}, *slow({"zero.level": "v0"}, {})])
def test_a_weight_that_stays_may_be_written_to(config: dict[str, Any]) -> None:
    for text, scale in launch(2, _written, config):
        assert not text
        assert scale is not None
        assert torch.equal(scale, torch.full((8,), 0.25))


def _changed(rank: int, config: dict[str, Any]) -> list[float]:
    """The user sets a weight by engine.load_state_dict between steps; the next step sees it."""
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = Deep(WIDTH, DEPTH)
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch = torch.ones(4, WIDTH)
    losses = [float(engine.train_step(batch))]
    state = engine.state_dict()
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    losses.append(float(engine.train_step(batch)))
    engine.load_state_dict(state)
    losses.append(float(engine.train_step(batch)))
    return losses


@pytest.mark.parametrize(
    "config", [{"zero.level": "v2"}, *slow({"zero.level": "v1"}, {"zero.level": "v2", "offload.level": "disk"})]
)
def test_loaded_weights_are_those_of_the_next_step(config: dict[str, Any]) -> None:
    for first, zero, again in launch(2, _changed, config):
        assert first > 0
        assert zero == 0
        assert again == first
