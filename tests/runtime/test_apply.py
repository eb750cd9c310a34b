"""Optimizers that step their weights in groups come to the same weights, in less memory.

A mistake shows as weights that differ, a counter that runs ahead, or a hook that is called once for each group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import epl
from epl.errors import RunError, StrategyError
from epl.runtime.updates import simulate_updates
from tests.ranks import launch
from tests.runtime.training import Job, check_parity

GROUPS = {"optimizer.num_apply_group": 3, "run.print_plan": False}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = list(model.parameters())
    return [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.05, "weight_decay": 0.1}]


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(two_groups(model), lr=0.01),
    "adamw foreach": lambda model: torch.optim.AdamW(two_groups(model), lr=0.01, foreach=True),
    "adamw fused": lambda model: torch.optim.AdamW(two_groups(model), lr=0.01, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(two_groups(model), lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, lr_decay=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


def train(make: Callable[[nn.Module], Optimizer], config: dict[str, Any]) -> tuple[list[torch.Tensor], Optimizer]:
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine = epl.parallelize(model, optimizer, loss_fn=loss_fn)
    engine.prepare(torch.ones(4, 6, dtype=torch.float64))
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # made after the steps were wrapped
    for seed in range(5):
        engine.train_step(torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        scheduler.step()
    engine.close()
    return [parameter.detach() for parameter in model.parameters()], optimizer


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_comes_to_the_same_weights_and_counts_each_step_once(name: str) -> None:
    plain, _ = train(MAKERS[name], {})
    grouped, optimizer = train(MAKERS[name], GROUPS)
    assert all(torch.equal(one, other) for one, other in zip(plain, grouped, strict=True))
    counts = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert counts <= {5.0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6


def test_ranks_that_share_out_weights_step_them_in_groups() -> None:
    check_parity(Job("mlp", world=2, split=2, config={"optimizer.num_apply_group": 2}))


def test_hooks_of_the_user_run_once_and_a_loop_of_the_user_steps_in_groups_too() -> None:
    epl.init(epl.Config(GROUPS))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    sizes: list[int] = []
    plain = optimizer.step
    optimizer.step = lambda: (sizes.append(sum(len(g["params"]) for g in optimizer.param_groups)), plain())[1]  # type: ignore[method-assign]
    engine = epl.parallelize(model, optimizer, loss_fn=loss_fn)
    engine.forward_backward(torch.ones(4, 6, dtype=torch.float64))
    optimizer.step()
    assert calls == ["before", "after"]
    assert len(sizes) == 3
    assert sum(sizes) == 6
    with pytest.raises(RunError, match=r"num_apply_group is 3, and AdamW\.step was given a closure"):
        optimizer.step(lambda: torch.zeros(()))
    engine.close()
    optimizer.step()
    assert len(sizes) == 4


def test_what_looks_at_all_weights_at_once_is_refused() -> None:
    epl.init(epl.Config(GROUPS))
    model = net()
    engine = epl.parallelize(model, torch.optim.LBFGS(model.parameters()), loss_fn=loss_fn)
    with pytest.raises(StrategyError, match="num_apply_group is 3, and LBFGS looks at all weights at once"):
        engine.train_step(torch.ones(4, 6, dtype=torch.float64))


def test_temporaries_of_an_optimizer_that_steps_many_weights_at_once_are_bounded() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    parameters = dict(layers.named_parameters())

    def temporaries(num_groups: int) -> int:
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
        live = peak = 0
        for change in simulate_updates([optimizer], parameters, parameters.keys(), num_groups).later.changes:
            live += change.size_bytes if change.kind == "temporary" else 0
            peak = max(peak, live)
        return peak

    assert temporaries(4) <= temporaries(1) / 3


def ranks_train(rank: int) -> None:
    train(MAKERS["adamw foreach"], GROUPS)


def test_replicas_step_in_groups() -> None:
    launch(2, ranks_train)
