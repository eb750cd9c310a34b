"""Small models of a few stages whose forward is one function: what a test is about stands in the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import epl

__all__ = ["WIDTH", "Staged", "batch_of", "staged"]

WIDTH = 6


class Staged(nn.Module):
    """Stages ``a``, ``b``, ``c``, ..., each a layer under a strategy of its own, which is in ``scopes``."""

    def __init__(self, forward: Callable[..., Any], layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.scopes = [epl.replicate(1, name=name) for name, _ in zip("abcd", layers, strict=False)]
        for scope, layer in zip(self.scopes, layers, strict=True):
            self.add_module(scope.name, scope(layer))
        self.steps = (forward,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps[0](self, *args, **kwargs)


def staged(forward: Callable[..., Any], num_stages: int = 3, layers: Sequence[nn.Module] = ()) -> Any:
    """A model in float64 with ``forward(model, *batch)``; stages that ``layers`` does not give are linear."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rest = [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages - len(layers))]
        return Staged(forward, [*layers, *rest]).double()


def batch_of(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, the same at each call."""
    return torch.randn(shape or (4, WIDTH), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
