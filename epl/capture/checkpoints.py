"""``torch.utils.checkpoint`` calls run plainly, inside a context of the caller's choice.

Capture marks what runs in a checkpoint as a recompute segment, since export dissolves the call without a word. The plain
reference of ``verify`` runs it as it is, so that its random numbers are drawn once.

Models bind ``checkpoint`` early (Hugging Face: a functools.partial), so what is replaced is what it calls: a private
generator for the form that is not reentrant (torch 2.13; there is no public hook), an autograd function for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

__all__ = ["checkpoints_plain", "replaced"]

# (context_fn of the call, None if it has none) -> what its function runs in
Around = Callable[[Any], AbstractContextManager[Any]]


@contextmanager
def checkpoints_plain(around: Around) -> Iterator[None]:
    """While this is open, a checkpointed function runs as if it were called directly, inside ``around(context_fn)``."""
    noop = torch_checkpoint.noop_context_fn

    def unrecorded(_: Any, __: bool = True, context_fn: Any = noop, *___: Any, **____: Any) -> Iterator[None]:
        with around(None if context_fn is noop else context_fn):
            yield

    def reentrant(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        # this form gives no gradients unless a tensor among its arguments asks for one
        wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with around(None), torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch_checkpoint, "_checkpoint_without_reentrant_generator", unrecorded))
        stack.enter_context(replaced(torch_checkpoint.CheckpointFunction, "apply", staticmethod(reentrant)))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While this is open, ``owner.name`` is ``value``; an inherited attribute is inherited again afterwards."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
