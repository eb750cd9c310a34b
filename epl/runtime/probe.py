"""Notice that gradients were scaled rank by rank, which makes another update than one process would.

``torch.nn.utils.clip_grad_norm_`` in a loop of the user's (or of a trainer) sees what this rank holds of the gradients, a
stage of a pipeline or a part of weights that are cut, and scales them by the norm of that: each rank by another factor,
without a word. `Engine.clip_grad_norm_` takes the norm of the whole. Two elements of one gradient tell a factor from other
changes, such as clipping by value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn as nn

from epl.lines import warn
from epl.runtime.world import World

__all__ = ["ScaleProbe"]

_UNIT = 10**9  # factors travel as whole numbers of billionths
_UNKNOWN = -1


class ScaleProbe:
    """Remembers two elements of a gradient when backward has left it, and looks at them again before the next step.

    Args:
        world: The ranks.
        is_spread: True if ranks hold different weights; else there is nothing to look for.
    """

    def __init__(self, world: World, *, is_spread: bool) -> None:
        self._world, self._is_spread = world, is_spread
        self._watched: tuple[torch.Tensor, torch.Tensor, list[float]] | None = None
        self._has_warned = False

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember a gradient as it is now."""
        if not self._is_spread:
            return
        gradients = (p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse and p.grad.numel() > 1)
        gradient = next(gradients, None)
        self._watched = None
        if gradient is not None:
            places = gradient.detach().flatten()[:64].abs().topk(2).indices
            self._watched = (gradient, places, gradient.detach().flatten()[places].tolist())

    def warn_if_scaled(self, factors: Sequence[int]) -> None:
        """Warn on rank 0, once, if the gradients of some ranks were scaled by another factor than those of others.

        Args:
            factors: Every rank's, as of `factor`.
        """
        factors = [number for number in factors if number > 0]
        apart = max(factors, default=0) - min(factors, default=0)
        if self._world.rank == 0 and apart > _UNIT // 10**5 and not self._has_warned:
            self._has_warned = True
            each = ", ".join(f"{number / _UNIT:.3g}" for number in sorted(set(factors)))
            warn(
                f"between backward and the step, gradients were scaled by another factor on each rank: {each}. If that "
                "was torch.nn.utils.clip_grad_norm_, it saw what each rank holds by itself, and the update is not "
                "that of one process: call engine.clip_grad_norm_(max_norm) instead (and give a Trainer of transformers "
                "max_grad_norm=0)."
            )

    def factor(self) -> int:
        """By what the gradient was multiplied since, in billionths; unknown if it was changed in another way."""
        if self._watched is None:
            return _UNKNOWN
        gradient, places, before = self._watched
        self._watched = None
        now = gradient.detach().flatten()[places].tolist()
        ratios = [new / old if old else math.nan for new, old in zip(now, before, strict=True)]
        same = abs(ratios[0] - ratios[1]) <= 1e-5 * abs(ratios[0])  # not if one is not a number
        return round(ratios[0] * _UNIT) if same and 0 < ratios[0] < 10**6 else _UNKNOWN
