"""Each optimizer of torch is known for what it is: one that may step parts of weights, or one that looks at whole ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from epl.runtime.optimizers import sees_whole_weights, state_factor

# The class, its options, and how many values it keeps for each of a weight.
BY_ELEMENT: list[tuple[type[Optimizer], dict[str, Any], float]] = [
    (torch.optim.SGD, {"lr": 0.1}, 0),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, 1),
    (torch.optim.Adam, {}, 2),
    (torch.optim.Adam, {"amsgrad": True}, 3),
    (torch.optim.Adam, {"decoupled_weight_decay": True}, 2),
    (torch.optim.AdamW, {"weight_decay": 0.1}, 2),
    (torch.optim.AdamW, {"fused": True}, 2),
    (torch.optim.NAdam, {}, 2),
    (torch.optim.RAdam, {}, 2),
    (torch.optim.Adamax, {}, 2),
    (torch.optim.Adadelta, {}, 2),
    (torch.optim.Adagrad, {}, 1),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
    (torch.optim.Rprop, {}, 2),
    (torch.optim.ASGD, {}, 1),
]
BY_WEIGHT: list[type[Optimizer]] = [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon]


def _make(kind: type[Optimizer], options: dict[str, Any]) -> Optimizer:
    return kind([nn.Parameter(torch.ones(3, 2))], **options)


@pytest.mark.parametrize(("kind", "options", "num_kept"), BY_ELEMENT)
def test_what_works_element_by_element_is_taken_without_a_warning(
    kind: type[Optimizer], options: dict[str, Any], num_kept: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not sees_whole_weights(_make(kind, options))
    assert state_factor([_make(kind, options)]) == num_kept


@pytest.mark.parametrize("kind", BY_WEIGHT)
def test_what_looks_at_whole_weights_is_found(kind: type[Optimizer]) -> None:
    assert sees_whole_weights(_make(kind, {}))


class Normed(Optimizer):
    """The user's own, which takes its options under other names, and divides by the norm of the weight's gradient."""

    def __init__(self, parameters: Any, *, rate: float = 0.1, **options: Any) -> None:
        super().__init__(parameters, {"lr": rate, **options})

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad / weight.grad.norm(), alpha=-group["lr"])


def test_an_optimizer_of_the_users_own_is_tried_whatever_its_options_are_called() -> None:
    assert sees_whole_weights(_make(Normed, {"rate": 0.5, "other": 1}))
    assert state_factor([_make(Normed, {})]) == 0
