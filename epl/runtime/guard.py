"""Refuse what a model that is spread over the ranks cannot do by itself, and would do wrong without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from epl.errors import RunError

__all__ = ["CUT", "Guard", "is_whole"]

CUT = "_epl_cut"  # on a tensor of which this rank holds a part: its shape is no longer that of the model's code


def is_whole(tensor: torch.Tensor) -> bool:
    """False for what this rank has a part of, or nothing: then it is one NaN, expanded."""
    if hasattr(tensor, CUT):
        return False
    is_expanded = tensor.numel() > 1 and not any(tensor.stride())
    return not (is_expanded and tensor.is_floating_point() and bool(tensor.detach()[(0,) * tensor.ndim].isnan()))


class Guard:
    """Refuses calls of the model and of its ``state_dict()``: in place of weights of other ranks it has nothing to give.

    It knows nothing of ranks, so that a model with it can be copied; a copy that is made while it is open stays open.
    """

    def __init__(self) -> None:
        self._is_open = False

    def put_on(self, model: nn.Module) -> None:
        """For good: the model stays as it is."""
        model.register_state_dict_pre_hook(self.refuse_state_dict)
        model.register_forward_pre_hook(self.refuse_call)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it lasts nothing is refused: EPL looks up names, or captures the model."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def refuse_state_dict(self, *_: Any) -> None:
        """The hook before ``state_dict()``."""
        if not self._is_open:
            raise RunError(
                "the model's weights are spread over the ranks, and its own state_dict() would have this rank's parts of "
                "them. Call engine.state_dict() on all ranks."
            )

    def refuse_call(self, *_: Any) -> None:
        """The hook before ``forward``."""
        if not self._is_open:
            raise RunError(
                "the model's weights are spread over the ranks, and this rank cannot run the model by itself. Call "
                "engine.model or engine.eval_step on all ranks, or load engine.state_dict() into a new model."
            )
