"""Weights under split that are made of others at each step: the originals are cut, and what they make with them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.runtime.odd_nets import draw
from tests.runtime.problems import Problem, Way, check, seeded


class Parametrized(nn.Module):
    """Weights that are made of directions and lengths, or divided by their largest singular value; uneven sections."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(2, 12, 3, padding=1))
        self.grouped = weight_norm(nn.Conv1d(12, 12, 3, padding=1, groups=4), dim=2)
        self.wide, self.narrow = weight_norm(nn.Linear(24, 13), dim=1), spectral_norm(nn.Linear(12, 13))
        self.head = weight_norm(nn.Linear(13, 1), dim=None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wide, narrow = self.grouped(torch.tanh(self.first(x))).flatten(1).split([24, 12], dim=-1)
        return nn.functional.mse_loss(self.head(self.wide(wide) * self.narrow(narrow)).squeeze(-1), y)


def test_weights_that_are_made_of_others() -> None:
    batches = [{"x": draw(7, 2, 3, seed=seed), "y": draw(7, seed=seed + 9)} for seed in range(3)]
    problem = Problem(partial(seeded, Parametrized), batches)
    check(problem, *(Way(size, [[""]], 1, size, split=(0,)) for size in (2, 3)))
