"""Put something in place of the user's ``optimizer.step``, and take it away again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from epl.errors import RunError

__all__ = ["replace_step"]


def replace_step(
    optimizer: Optimizer, run: Callable[[Callable[[], Any]], Any], reason: str, consequence: str
) -> Callable[[], None]:
    """From here on ``optimizer.step()`` calls ``run`` with the step there was; gives a function that undoes this.

    Args:
        optimizer: The user's.
        run: What is called.
        reason: Which setting is why ``step`` takes no closure: for the error if it is given one.
        consequence: What would be wrong with one, and what to do.
    """
    plain, was_set = optimizer.step, "step" in vars(optimizer)  # schedulers of learning rates set it, too

    @wraps(plain)  # with the mark of a scheduler, which looks for it
    def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise RunError(f"{reason}, and {type(optimizer).__name__}.step was given a closure, {consequence}")
        return run(plain)

    mine = optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # a method: schedulers unwrap one

    def undo() -> None:
        if vars(optimizer).get("step") is not mine:
            return  # wrapped once more since then
        if was_set:
            optimizer.step = plain  # type: ignore[method-assign]
        else:
            del optimizer.step

    return undo
