"""Scaled losses under float16: gradients are divided again, and a step that overflows on any rank is skipped by all.

The user's ``optimizer.step()`` is what is skipped, so that loops of one's own are covered, too. Whether a gradient is
infinite is agreed on when backward has left it, by all ranks together: no rank steps alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.config import Config
from epl.runtime.loss_scale import LossScale
from epl.runtime.stepping import replace_step
from epl.runtime.world import World

__all__ = ["Scaling"]


class Scaling:
    """The loss scale of one engine.

    Args:
        world: The ranks.
        scale: The scale; None where losses are not scaled.
    """

    def __init__(self, world: World, scale: LossScale | None) -> None:
        self._world, self.scale = world, scale
        self._last_overflows = False  # a gradient of the last backward was infinite
        self._overflows = False  # one since the last step was
        self._is_pending = False  # there are gradients that no step has used
        self._optimizers: tuple[Optimizer, ...] = ()
        self._skipping: set[Optimizer] = set()  # those with such gradients; they may step in turn
        self._skipped: set[Optimizer] = set()  # those of them that have skipped since the last backward

    @staticmethod
    def of(world: World, config: Config) -> Scaling:
        """As the settings say: only float16 needs it."""
        is_scaled = bool(config.amp.level) and config.amp.dtype == "fp16"
        return Scaling(world, LossScale(config.amp.loss_scale) if is_scaled else None)

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped."""
        return 0 if self.scale is None else self.scale.num_skipped

    @property
    def factor(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self.scale is None else self.scale.scale

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide these gradients by the factor, and agree on whether any of them, on any rank, is not finite."""
        if self.scale is None:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found = torch.zeros(1, dtype=torch.float64)
        with torch.no_grad():
            for gradient in gradients:
                dense = gradient.coalesce().values() if gradient.is_sparse else gradient
                if dense.numel() and not torch.isfinite(torch.linalg.vector_norm(dense, float("inf"))):
                    found += 1
                gradient.mul_(1.0 / self.factor)
        self._last_overflows = bool(self._world.sum_numbers(found).item())

    def note(self) -> None:
        """The gradients that were unscaled last are for the next step."""
        if not self._is_pending:
            self._overflows = False
        self._is_pending = True
        self._overflows |= self._last_overflows
        self._skipping -= self._skipped
        self._skipped.clear()
        if self._last_overflows:
            self._skipping.update(self._optimizers)

    def forget(self) -> None:
        """The gradients for the next step were dropped."""
        self._is_pending = self._overflows = False
        self._skipping.clear()
        self._skipped.clear()

    def skip_overflows(self, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        """From here on ``step()`` does nothing after an overflow, and the scale adapts; gives a function that undoes it."""
        self._optimizers = tuple(optimizers)
        undo = [self._wrap(optimizer) for optimizer in optimizers] if self.scale is not None else []

        def undo_all() -> None:
            for each in undo:
                each()

        return undo_all

    def _wrap(self, optimizer: Optimizer) -> Callable[[], None]:
        def step(plain: Callable[[], Any]) -> Any:
            self._settle()
            if optimizer in self._skipping:
                self._skipped.add(optimizer)
                return None
            return plain()

        return replace_step(
            optimizer,
            step,
            "amp.dtype is 'fp16'",
            "whose gradients may overflow too late to skip the step; compute the loss before step(), or use bf16",
        )

    def _settle(self) -> None:
        """Once for the gradients of a step, whichever optimizer comes first."""
        if self._is_pending and self.scale is not None:
            self._is_pending = False
            self.scale.update(self._overflows)
