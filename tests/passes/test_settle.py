"""Buffers that forward changes, in models whose micro-batches do not go one after another.

A mistake shows as a value of a later micro-batch: in a loss, in what a stage receives, or in what is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epl
from tests.marks import slow
from tests.ranks import launch

AUTO = {"gradient_checkpoint.type": "auto", "gradient_checkpoint.extra_compute": 5.0}
WIDTH = 6


class Net(nn.Module):
    """Counts in a buffer, uses the count, and uses it again in the second stage."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("n", torch.zeros(()))
        self.steps = (forward,)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps[0](self, x)


def counter(m: Any, x: Tensor) -> Tensor:
    m.n.add_(0.25)
    return F.mse_loss(m.b((m.a(x) + m.n).tanh().exp()), x)


def counter_that_is_kept(m: Any, x: Tensor) -> Tensor:
    m.n.add_(0.25)
    return F.mse_loss(m.b(m.a(x).tanh()) * m.n, x)


def counter_in_both_stages(m: Any, x: Tensor) -> Tensor:
    m.n.add_(0.25)
    return F.mse_loss(m.b((m.a(x) + m.n).tanh()) + m.n, x)


def counter_in_a_marked_segment(m: Any, x: Tensor) -> Tensor:
    m.n.add_(0.25)
    h: Any = checkpoint(lambda y: (m.a(y) * m.n).tanh().exp(), x, use_reentrant=False)
    return F.mse_loss(m.b(h), x)


def statistics_that_are_used(m: Any, x: Tensor) -> Tensor:
    h = m.norm(m.a(x).tanh())
    return F.mse_loss(m.b((h + m.norm.running_mean).exp()), x)


def counted_on_a_copy(m: Any, x: Tensor) -> Tensor:
    before = m.n.clone()
    m.n.mul_(0.5).add_(1.0)
    return F.mse_loss(m.b((m.a(x) * before + m.n).tanh().exp()), x)


FORWARDS = [
    counter,
    counter_that_is_kept,
    counter_in_both_stages,
    counter_in_a_marked_segment,
    statistics_that_are_used,
    counted_on_a_copy,
]


def train(rank: int, place: int, num_stages: int, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and the gradients of the second."""
    epl.init(epl.Config({"run.print_plan": False, "pipeline.num_micro_batch": 4, **config}))
    torch.manual_seed(0)
    model = Net(FORWARDS[place]).double()
    if num_stages > 1:
        epl.replicate(1, name="s0")(model.a, model.norm)
        epl.replicate(1, name="s1")(model.b)
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses: list[float] = []
    for seed in range(2):
        engine.zero_grad()
        x = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        losses.append(engine.forward_backward(x).item())
    return losses, {name: value for name, value in engine.gradients().items() if value is not None}


def check(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("place", range(len(FORWARDS)), ids=[forward.__name__ for forward in FORWARDS])
@pytest.mark.parametrize("config", [{}, AUTO], ids=["kept", "again"])
def test_waiting_micro_batches_read_what_they_have_changed_themselves(place: int, config: dict[str, Any]) -> None:
    expected = train(0, place, 1, {})
    check(train(0, place, 1, {"pipeline.strategy": "PreferForward", **config}), expected)


@pytest.mark.parametrize("place", slow(0, 1, 2, 3, 4, 5))
@pytest.mark.parametrize("schedule", ["PreferBackwardOptimizer", *slow("PreferForward", "PreferBackward")])
def test_stages_get_what_their_micro_batch_has_made(place: int, schedule: str) -> None:
    expected = train(0, place, 1, {})
    for found in launch(2, train, place, 2, {"pipeline.strategy": schedule, **AUTO}):
        check(found, expected)
