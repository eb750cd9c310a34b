"""What users do to weights, optimizers and buffers between steps counts when weights are shared out or stored elsewhere."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.errors import EplError
from tests.ranks import launch

LEVELS: list[dict[str, Any]] = [
    {"zero.level": "v0"},
    {"zero.level": "v2"},
    {"zero.level": "v1", "offload.level": "disk"},
]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) - 1).square().mean()


def _batch(step: int) -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _half(weights: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def _new_memory(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data = weight.data * 0.5


def _trained(rank: int, config: dict[str, Any], how: str) -> list[float]:
    """Losses of three steps with an edit after the second one; an evaluation before and after it."""
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = _Net().double()
    engine = epl.parallelize(model) if how == "own" else None
    optimizer = _adamw(model.parameters())
    engine = engine or epl.parallelize(model, optimizer)
    edit = {"half": _half, "memory": _new_memory, "own": _half}[how]
    losses: list[float] = []
    for step in range(3):
        mine = _batch(step).chunk(2)[rank]
        engine.zero_grad()
        losses.append(float(engine.forward_backward(mine)))
        optimizer.step()
        losses.append(float(engine.eval_step(mine)))
        if step == 1:
            edit(list(model.parameters()))
            losses.append(float(engine.eval_step(mine)))
    return losses


def _plain(
    num_steps: int, make: Callable[[Any], torch.optim.Optimizer], after: Callable[..., list[float]]
) -> list[float]:
    """Losses of plain training; ``after`` gives more of them after each step."""
    model = _Net().double()
    optimizer = make(model.parameters())
    losses: list[float] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(_batch(step))
        loss.backward()
        optimizer.step()
        losses += [loss.item(), *after(model, step)]
    return losses


def _evaluated(model: _Net, step: int) -> list[float]:
    losses = [model(_batch(step)).item()]
    if step == 1:
        _half(list(model.parameters()))
        losses.append(model(_batch(step)).item())
    return losses


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


@pytest.mark.parametrize("how", ["half", "memory", "own"])
@pytest.mark.parametrize("config", LEVELS)
def test_weights_that_the_user_changes_are_those_of_the_next_call(config: dict[str, Any], how: str) -> None:
    expected = _plain(3, _adamw, _evaluated)
    for losses in launch(2, _trained, config, how):
        assert losses == pytest.approx(expected, rel=1e-9)


class _Shares(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shared", self.first.weight.detach())


class _Hooked(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class _DecaysMatrices(torch.optim.SGD):
    """Decays what has more than one dimension, if a group says so."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.ndim > 1:
                    weight.grad.add_(weight.detach(), alpha=group.get("matrix_decay", 0.0))
        super().step(closure)


def _refused(rank: int, config: dict[str, Any], what: str) -> str:
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = {"buffer": _Shares, "hook": _Hooked}.get(what, _Net)().float()
    groups = [{"params": list(model.parameters()), "matrix_decay": 0.5}]
    made = _DecaysMatrices(groups, lr=0.1) if what == "decay" else torch.optim.SGD(model.parameters(), lr=0.1)
    engine = epl.parallelize(model, made)
    batch = _batch(0).float()
    try:
        engine.train_step(batch)
        if what == "closure":
            made.step(lambda: engine.forward_backward(batch))
        if what == "replaced":
            model.first.bias = nn.Parameter(torch.zeros(12))
            engine.train_step(batch)
        if what == "module":
            model.first = copy.deepcopy(model.first)
            engine.train_step(batch)
        if what == "closed":
            engine.close()
            model.state_dict()
    except (EplError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it went well"


@pytest.mark.parametrize(
    ("what", "config", "words"),
    [
        ("buffer", {"zero.level": "v1"}, "StrategyError: the buffer shared uses the memory of first.weight"),
        ("hook", {"zero.level": "v0"}, "StrategyError: .*hook"),
        ("decay", {"zero.level": "v0"}, "StrategyError: _DecaysMatrices looks at a whole weight"),
        ("closure", {"amp.level": "O1", "amp.dtype": "fp16"}, "RunError: amp.dtype is 'fp16', and SGD.step was given"),
        ("replaced", {"zero.level": "v2"}, "RunError: first.bias was replaced"),
        ("module", {"zero.level": "v1"}, r"RunError: first\.\w+ was replaced"),
        ("closed", {"zero.level": "v1"}, "RunError: .*engine.state_dict()"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(what: str, config: dict[str, Any], words: str) -> None:
    for text in launch(2, _refused, config, what):
        assert re.search(words, text, re.DOTALL), text


def _resumed(rank: int, config: dict[str, Any]) -> list[float]:
    """Two steps; then a whole state of the optimizer, as one process has it, is loaded, and two more follow."""
    plain = _Net().double()
    theirs = _adam(plain.parameters())
    for step in range(2):
        theirs.zero_grad()
        plain(_batch(step)).backward()
        theirs.step()
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = _Net().double()
    optimizer = _adam(model.parameters())
    engine = epl.parallelize(model, optimizer)
    engine.train_step(_batch(9).chunk(2)[rank])
    engine.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return [float(engine.train_step(_batch(step).chunk(2)[rank])) for step in range(2, 5)]


@pytest.mark.parametrize("config", LEVELS)
def test_whole_states_may_be_loaded_into_optimizers_of_pieces(config: dict[str, Any]) -> None:
    expected = _plain(5, _adam, lambda *_: [])
    for losses in launch(2, _resumed, config):
        assert losses == pytest.approx(expected[2:], rel=1e-9)
