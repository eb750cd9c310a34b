"""``optimizer.num_apply_group``: the user's optimizer steps its weights group by group, so that its temporaries stay small.

An optimizer that updates all weights at once (``foreach=True``, the default on GPUs) makes temporaries of the size of all
weights; in n groups they are an n-th. The groups are runs of about equal size, the last first. Each weight is stepped once,
by the same optimizer with the same state, so the numbers are the same; the user's step hooks run once.

Source: EPL's apply groups (``runtime/optimizer_helper.py`` there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from epl.errors import RunError, StrategyError

__all__ = ["apply_in_groups", "refuse_groups", "step_in_groups"]

_ALL_AT_ONCE = ("LBFGS",)  # their update of a weight depends on the other weights
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)  # of an instance; torch has no public way to list them


def apply_in_groups(optimizers: Sequence[Optimizer], count: int) -> Callable[[], None]:
    """From here on ``step()`` of each optimizer goes group by group; gives a function that undoes this.

    Args:
        optimizers: The user's.
        count: Groups; 1 for no change.
    """
    undo = [_wrap(optimizer, count) for optimizer in optimizers] if count > 1 else []

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


def refuse_groups(optimizers: Sequence[Optimizer], count: int) -> None:
    """Refuse what cannot be stepped in groups.

    Raises:
        StrategyError: an optimizer looks at all weights at once.
    """
    wrong = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer).__name__ in _ALL_AT_ONCE]
    if wrong and count > 1:
        raise StrategyError(
            f"optimizer.num_apply_group is {count}, and {wrong[0]} looks at all weights at once to change any of them; set "
            "it to 1, or use an optimizer that steps each weight by itself (SGD, Adam, AdamW, ...)"
        )


def _wrap(optimizer: Optimizer, count: int) -> Callable[[], None]:
    plain, was_set = optimizer.step, "step" in vars(optimizer)  # schedulers of learning rates set it, too

    @wraps(plain)  # with the mark of a scheduler, which looks for it
    def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise RunError(
                f"optimizer.num_apply_group is {count}, and {type(optimizer).__name__}.step was given a closure, which "
                "would run once for each group; set it to 1, or compute the loss before step()"
            )
        step_in_groups(optimizer, plain, count)

    mine = optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # a method: schedulers unwrap one

    def undo() -> None:
        if vars(optimizer).get("step") is not mine:
            return  # wrapped once more since then
        if was_set:
            optimizer.step = plain  # type: ignore[method-assign]
        else:
            del optimizer.step

    return undo


def step_in_groups(optimizer: Optimizer, step: Callable[[], Any], count: int) -> None:
    """Step the weights that have a gradient, in ``count`` groups of about equal size.

    Args:
        optimizer: The optimizer.
        step: Its step.
        count: Groups.
    """
    whole = [list(group["params"]) for group in optimizer.param_groups]
    parts = _parts([(place, weight) for place, group in enumerate(whole) for weight in group], count)
    try:
        for number, part in enumerate(reversed(parts)):
            for place, group in enumerate(optimizer.param_groups):
                group["params"] = [weight for at, weight in part if at == place]
            with _hooks(optimizer, first=number == 0, last=number == len(parts) - 1):
                step()
    finally:
        for group, weights in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = weights


def _parts(weights: list[tuple[int, torch.Tensor]], count: int) -> list[list[tuple[int, torch.Tensor]]]:
    """At most ``count`` runs with about the same number of elements; those without a gradient count nothing."""
    sizes = [weight.numel() if weight.grad is not None else 0 for _, weight in weights]
    total, done = sum(sizes), 0
    parts: list[list[tuple[int, torch.Tensor]]] = [[]]
    for weight, size in zip(weights, sizes, strict=True):
        if parts[-1] and size and done >= total * len(parts) / count:
            parts.append([])
        parts[-1].append(weight)
        done += size
    return parts


@contextmanager
def _hooks(optimizer: Optimizer, *, first: bool, last: bool) -> Iterator[None]:
    """The user's hooks before the step run with the first group only, those after it with the last."""
    kept = {name: getattr(optimizer, name) for name in _HOOKS}
    for name, runs in zip(_HOOKS, (first, last), strict=True):
        if not runs:
            setattr(optimizer, name, type(kept[name])())
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optimizer, name, hooks)
