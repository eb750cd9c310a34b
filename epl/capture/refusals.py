"""What a captured graph would silently change or ignore, found before or while forward runs under export.

- hooks on modules: export runs forward hooks once, at capture, and never runs backward hooks;
- hooks on parameters: they would see the gradient of one part of the batch, where one process shows them the whole;
- calls in forward that speak to autograd (hooks on activations, gradients inside forward): export drops them.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.nn as nn

from epl.capture.attributes import PlainAttributes
from epl.capture.checkpoints import replaced
from epl.errors import CaptureError, bulleted
from epl.lines import OWN, is_users

__all__ = ["PlainAttributes", "autograd_calls_refused", "refuse_hooks", "user_line", "user_line_of_stack"]

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GRADIENTS = "computes gradients inside forward, which a graph of forward operators cannot hold"
_HOOK = "puts a hook on a tensor, which a graph would not run"
# what is called -> what is wrong with it
_CALLS: tuple[tuple[Any, str, str], ...] = (
    (torch.autograd, "grad", _GRADIENTS),
    (torch.autograd, "backward", _GRADIENTS),
    (torch.Tensor, "backward", _GRADIENTS),
    (torch.Tensor, "register_hook", _HOOK),
    (torch.Tensor, "register_post_accumulate_grad_hook", _HOOK),
    (torch.Tensor, "retain_grad", "keeps the gradient of an activation, which a parallel step does not have"),
    (
        torch.autograd.graph.saved_tensors_hooks,
        "__enter__",
        "changes how autograd saves tensors, which a graph ignores",
    ),
)
# transformers' gradient checkpointing puts it on embeddings, so that gradients reach into reentrant checkpoints behind
# frozen ones; a captured graph has none of those. The second kind it leaves on models that give router logits or hidden
# states, at their first call: what such a hook puts aside is used within the same forward pass, and so it is in the graph
_HARMLESS_HOOKS = ("enable_input_require_grads.<locals>.make_inputs_require_grads", ".<locals>.output_capturing_hook")


def refuse_hooks(model: nn.Module) -> None:
    """Raise if a module or a parameter has hooks; lists each with where it was defined."""
    on_modules = [
        f"{path or 'the model'} has a {kind[1:-1].replace('_', ' ')}: {_place_of(hook)}"
        for path, module in model.named_modules()
        for kind in _MODULE_HOOKS
        for hook in getattr(module, kind, {}).values()
        if not (_is_own(hook) or getattr(hook, "__qualname__", "").endswith(_HARMLESS_HOOKS))
    ]
    if on_modules:
        raise CaptureError(bulleted("hooks would run at capture only, not at each step; remove them:", on_modules))
    on_parameters = [
        f"{path} has a {kind[1:-1].replace('_', ' ')}: {_place_of(hook)}"
        for path, parameter in model.named_parameters()
        for kind in _PARAMETER_HOOKS
        for hook in (getattr(parameter, kind, None) or {}).values()
        if not _is_own(hook)
    ]
    if on_parameters:
        raise CaptureError(
            bulleted(
                "hooks on parameters would see the gradients of parts of the batch, not of all of it; change gradients "
                "after engine.forward_backward instead:",
                on_parameters,
            )
        )


def _is_own(hook: Any) -> bool:
    """EPL's reducer is told by hooks when a gradient is there, and a hook keeps a spread model from being called."""
    code = getattr(inspect.unwrap(getattr(hook, "func", hook)), "__code__", None)
    return code is not None and code.co_filename.startswith(OWN)


def _place_of(function: Any) -> str:
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


@contextmanager
def autograd_calls_refused(is_inside: Callable[[], bool]) -> Iterator[None]:
    """While this is open, calls that export would drop without a word raise a CaptureError.

    Args:
        is_inside: True while a custom autograd function runs, which may do as it likes.
    """

    def refusing(owner: Any, name: str, fault: str) -> Callable[..., Any]:
        plain, shown = getattr(owner, name), owner.__name__ if name == "__enter__" else name

        def refuse(*args: Any, **kwargs: Any) -> Any:
            caller = inspect.currentframe()
            caller = caller.f_back if caller is not None else None
            if is_inside() or caller is None or not is_users(caller.f_code.co_filename):
                return plain(*args, **kwargs)
            raise CaptureError(
                f"forward {fault}: {shown} at {caller.f_code.co_filename}:{caller.f_lineno}. Leave it out of forward; a "
                "custom torch.autograd.Function may do it, and a model of one TaskGraph runs as it is."
            )

        return refuse

    with ExitStack() as stack:
        for owner, name, fault in _CALLS:
            stack.enter_context(replaced(owner, name, refusing(owner, name, fault)))
        yield


def user_line(error: BaseException | TracebackType | None) -> str:
    """The innermost line of an error's traceback that is neither torch's nor EPL's: ``file:line in f: code``."""
    trace = error.__traceback__ if isinstance(error, BaseException) else error
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    if not frames:
        return "(no line of the model)"
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}"


def user_line_of_stack(stack: str) -> str:
    """``file:line`` of the innermost line of a node's stack trace that is not torch's."""
    best = ""
    for line in stack.splitlines():
        text = line.strip()
        if text.startswith('File "'):
            file, _, rest = text[6:].partition('", line ')
            if is_users(file):
                best = f"{file}:{rest.split(',')[0]}"
    return best
