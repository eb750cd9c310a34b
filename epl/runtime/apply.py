"""``optimizer.num_apply_group``: the user's optimizer steps its weights group by group, so that its temporaries stay small.

An optimizer that updates all weights at once (``foreach=True``, the default on GPUs) makes temporaries of the size of all
weights; in n groups they are an n-th. The groups are runs of about equal size, the last first. Each weight is stepped once,
by the same optimizer with the same state, so the numbers are the same; the user's step hooks run once.

With ``offload.level`` states have a home outside of memory or of the device, and come from there group by group; then no
group is larger than 64 MiB of weights, unless it is one weight.

Source: EPL's apply groups (``runtime/optimizer_helper.py`` there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from epl.errors import StrategyError
from epl.runtime.state_home import StateHome
from epl.runtime.stepping import replace_step

__all__ = ["apply_in_groups", "refuse_groups", "step_in_groups"]

_MOST_BYTES = 64 << 20  # of a group's weights, when its states come from their home

_ALL_AT_ONCE = ("LBFGS",)  # their update of a weight depends on the other weights
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)  # of an instance; torch has no public way to list them


def apply_in_groups(optimizers: Sequence[Optimizer], count: int, home: StateHome | None = None) -> Callable[[], None]:
    """From here on ``step()`` of each optimizer goes group by group; gives a function that undoes this.

    Args:
        optimizers: The user's.
        count: Groups; 1 for no change, unless there is a home.
        home: Where the states live between steps; None for beside the weights. It may lead to more groups.
    """
    undo = [_wrap(optimizer, count, home) for optimizer in optimizers] if count > 1 or home is not None else []

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


def refuse_groups(optimizers: Sequence[Optimizer], count: int, offload: str = "") -> None:
    """Refuse what cannot be stepped in groups.

    Args:
        optimizers: The user's.
        count: Groups.
        offload: ``offload.level``, if that offloads their states.

    Raises:
        StrategyError: an optimizer looks at all weights at once.
    """
    wrong = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer).__name__ in _ALL_AT_ONCE]
    if wrong and (offload or count > 1):
        reason, cure = _reason(count, offload)
        raise StrategyError(
            f"{reason}, and {wrong[0]} looks at all weights at once to change any of them; {cure}, or use an optimizer "
            "that steps each weight by itself (SGD, Adam, AdamW, ...)"
        )


def _reason(count: int, offload: str) -> tuple[str, str]:
    """Why the step goes in groups, and what to do against that."""
    if not offload:
        return f"optimizer.num_apply_group is {count}", "set it to 1"
    return f"offload.level is {offload}, so that states come and go by groups of weights", 'set it to ""'


def _wrap(optimizer: Optimizer, count: int, home: StateHome | None) -> Callable[[], None]:
    reason, cure = _reason(count, home.level if home else "")
    undo_step = replace_step(
        optimizer,
        lambda plain: step_in_groups(optimizer, plain, count, home),
        reason,
        f"which would run once for each group; {cure}, or compute the loss before step()",
    )

    def undo() -> None:
        if home is not None:
            home.leave(optimizer)
        undo_step()

    return undo


def step_in_groups(optimizer: Optimizer, step: Callable[[], Any], count: int, home: StateHome | None = None) -> None:
    """Step the weights that have a gradient, in ``count`` groups of about equal size, or more if there is a home.

    Args:
        optimizer: The optimizer.
        step: Its step.
        count: Groups.
        home: Where the states live between steps; None for beside the weights.
    """
    whole = [list(group["params"]) for group in optimizer.param_groups]
    weights = [(place, weight) for place, group in enumerate(whole) for weight in group]
    parts = _parts(weights, count, None if home is None else _MOST_BYTES)[::-1]
    try:
        for number, part in enumerate(parts):
            for place, group in enumerate(optimizer.param_groups):
                group["params"] = [weight for at, weight in part if at == place]
            last = number == len(parts) - 1
            coming = [] if last else [weight for _, weight in parts[number + 1]]
            states = home.around(optimizer, [weight for _, weight in part], coming) if home else nullcontext()
            with states, _hooks(optimizer, first=number == 0, last=last):
                step()
    finally:
        for group, weights_of_group in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = weights_of_group


def _parts(
    weights: list[tuple[int, torch.Tensor]], count: int, most_bytes: int | None
) -> list[list[tuple[int, torch.Tensor]]]:
    """Runs with about the same number of elements: at most ``count``, and more where one would exceed ``most_bytes``.

    Weights without a gradient count nothing.
    """
    sizes = [weight.numel() if weight.grad is not None else 0 for _, weight in weights]
    total, done, due, held_bytes = sum(sizes), 0, 1, 0
    parts: list[list[tuple[int, torch.Tensor]]] = [[]]
    for (place, weight), size in zip(weights, sizes, strict=True):
        is_due = done >= total * due / count
        is_full = most_bytes is not None and held_bytes + size * weight.itemsize > most_bytes
        if held_bytes and size and (is_due or is_full):
            parts.append([])
            due, held_bytes = due + is_due, 0
        parts[-1].append((place, weight))
        done, held_bytes = done + size, held_bytes + size * weight.itemsize
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
