"""What a step computes, as named parts: the loss (or a sum and a count), and what goes with it.

The same functions run under capture, in the opaque fallback and in the plain reference of ``verify``, so all three read
a model's result in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from epl.batch import Structure, call_model, flatten
from epl.errors import CaptureError, RunError

__all__ = ["LossFunction", "Parts", "Step", "SumLoss", "loss_step", "output_step"]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # what .item() gives while a model is captured
LossFunction = Callable[[Any, Any], Any]
Parts = list[tuple[str, Any]]


@dataclass(frozen=True)
class SumLoss:
    """A loss given as a sum and a count: its gradient is that of sum(total) / sum(count) over the global batch.

    This is exact however unequal the parts are: tokens of micro-batches, samples of replicas.

    Args:
        total: Sum of the losses, a tensor of one element that carries the gradient.
        count: What to divide by in the end, a tensor of one element or a number.

    Example:
        >>> loss = SumLoss(torch.tensor(6.0), torch.tensor(3))
    """

    total: torch.Tensor
    count: torch.Tensor | float


@dataclass
class Step:
    """A function of (model, batch) that gives named parts.

    Args:
        run: The function.
        structure: Structure of the model's output, filled when a step that gives it has run.
        loss_fn: The user's function, if there is one.
    """

    run: Callable[[Any, Any], Parts]
    structure: Structure | None = None
    loss_fn: LossFunction | None = None


def loss_step(loss_fn: LossFunction | None) -> Step:
    """A step that computes the loss: ``loss_fn(model, batch)``, or the model's own."""

    def run(model: Any, batch: Any) -> Parts:
        result = call_model(model, batch) if loss_fn is None else loss_fn(model, batch)
        return _loss_parts(result, "the model" if loss_fn is None else "loss_fn")

    return Step(run, loss_fn=loss_fn)


def output_step() -> Step:
    """A step that gives the model's whole output, leaf by leaf, under ``out.PATH``.

    Fields of an output class that are neither tensors nor plain values are left out: Hugging Face models return a cache
    of keys and values unless told not to, which no training or evaluation loop looks at.
    """
    step = Step(lambda model, batch: [])

    def run(model: Any, batch: Any) -> Parts:
        flat = flatten(_without_caches(call_model(model, batch)), "the model's output", refuse_lists=False)
        step.structure = flat.structure
        return [(f"out.{path}", tensor) for path, tensor in zip(flat.paths, flat.tensors, strict=True)]

    step.run = run
    return step


def _without_caches(output: Any) -> Any:
    if not isinstance(output, Mapping):
        return output
    kept = {key: value for key, value in output.items() if _is_plain(value)}
    if len(kept) == len(output):
        return output
    return type(output)(**kept) if is_dataclass(output) else kept


def _is_plain(value: Any) -> bool:
    try:
        flatten(value, "the model's output", refuse_lists=False)
    except RunError:
        return False
    return True


def _loss_parts(result: Any, source: str) -> Parts:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, aux = result
        return [*_loss_parts(loss, source), *((f"aux.{key}", _aux(value, key)) for key, value in aux.items())]
    if isinstance(result, SumLoss):
        return [("total", _scalar(result.total, "SumLoss.total")), ("count", _count(result.count))]
    if isinstance(result, torch.Tensor):
        return [("loss", _scalar(result, source))]
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"{source} returned a {type(result).__name__} without a loss. Return a tensor of one element, an object with "
            "a .loss, epl.SumLoss(total, count), or (loss, dict of tensors); or pass "
            "loss_fn=lambda model, batch: ... to epl.parallelize."
        )
    return [("loss", _scalar(loss, f"{source}'s .loss"))]


def _scalar(loss: Any, source: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"{source} is of type {kind}; a loss is a tensor of floating-point numbers")
    if loss.numel() != 1:
        raise CaptureError(
            f"{source} is a tensor of shape {tuple(loss.shape)}; a loss is one number. Take its mean, or return "
            "epl.SumLoss(loss.sum(), loss.numel())."
        )
    return loss.reshape(()) if loss.ndim else loss


def _count(count: Any) -> Any:
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise CaptureError(f"SumLoss.count is a tensor of shape {tuple(count.shape)}; it is one number")
        if count.requires_grad:
            raise CaptureError(
                "SumLoss.count requires a gradient, and is used for dividing only; detach it, or make it part of the total"
            )
        return count.reshape(()) if count.ndim else count
    if isinstance(count, bool) or not isinstance(count, (int, float, *_SYMBOLIC)):
        raise CaptureError(f"SumLoss.count is a {type(count).__name__}; it is a number or a tensor of one element")
    return count


def _aux(value: Any, key: Any) -> Any:
    if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None), *_SYMBOLIC)):
        raise CaptureError(
            f"aux[{key!r}] is a {type(value).__name__}; aux is a dict of tensors and plain values. Flatten it, or leave it "
            "out."
        )
    return value
