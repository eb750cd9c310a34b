"""Plain training in one process, and how close another training must come to it.

This is the yardstick, so it has nothing of EPL in it: a loop that anyone can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo import Batch, Case

__all__ = ["Reference", "assert_close", "cut_batch", "loss_of", "make_optimizer", "reference_steps"]

# Relative to a tensor's largest value. Plans sum in different orders: over three steps of the zoo's models that made
# at most 3e-14 and 3e-6 when it was measured. A wrong factor or a lost term is off by 1e-2 or more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# A gradient that is zero in exact arithmetic (a key's bias in attention) is rounding noise. No tensor is asked to be
# closer than the tolerance times this part of the largest one.
NOISE = 1e-3


class Reference(NamedTuple):
    """What training in one process gave."""

    losses: list[float]  # of each step
    norms: list[float]  # the gradient's norm over all parameters, of each step
    gradients: dict[str, Tensor]  # of the last step, by parameter
    state: dict[str, Tensor]  # after the last step: parameters and buffers


def reference_steps(
    case: Case,
    dtype: torch.dtype,
    batches: Sequence[Batch],
    steps: int,
    num_parts: int | None = None,
    optimizer: str = "adamw",
) -> Reference:
    """Train a fresh model for ``steps`` steps, over and over the batches; with ``num_parts``, gradients of a batch's
    parts are added up, each weighed by its share of the samples."""
    model = case.build(dtype)
    updates = make_optimizer(model, optimizer)
    losses, norms = [], []
    for step in range(steps):
        batch = batches[step % len(batches)]
        updates.zero_grad()
        loss = 0.0
        for part in cut_batch(batch, num_parts or 1):
            weighed = loss_of(case, model, part) * (num_samples(part) / num_samples(batch))
            weighed.backward()
            loss += weighed.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        losses.append(loss)
        norms.append(torch.nn.utils.get_total_norm(gradients.values()).item())
        updates.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Reference(losses, norms, gradients, state)


def make_optimizer(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Build "adamw" or "sgd" with a rate of 1e-2, for the reference and for what is compared with it."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2)
    assert kind == "adamw", f"unknown optimizer {kind!r}"
    # With the usual eps of 1e-8, Adam makes a full step of a gradient that is mere rounding noise, either way.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def loss_of(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    """Compute the loss of a batch in whichever of the three ways the case has."""
    if case.loss_fn is not None:
        return case.loss_fn(model, batch)
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    return output if isinstance(output, Tensor) else output.loss


def cut_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Cut a batch's tensors along dimension 0 as ``torch.tensor_split`` does; parts without samples are left out."""
    parts = [_part(batch, i, num_parts) for i in range(num_parts)]
    return [part for part in parts if num_samples(part)]


def num_samples(batch: Batch) -> int:
    return next(value.size(0) for value in _leaves(batch) if isinstance(value, Tensor))


def _part(value: Any, i: int, num_parts: int) -> Any:
    if isinstance(value, Tensor):
        return value.tensor_split(num_parts)[i]
    if isinstance(value, dict):
        return {key: _part(item, i, num_parts) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_part(item, i, num_parts) for item in value)
    return value


def _leaves(batch: Batch) -> Iterator[Any]:
    yield from batch.values() if isinstance(batch, dict) else batch


def assert_close(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    """Assert that two nests of tensors and numbers agree to the tolerance of ``dtype``, else name the worst tensor.

    Args:
        actual, expected: a tensor, a number, or a dict or sequence of those. Same names, shapes and dtypes are wanted.
        dtype: ``torch.float64`` or ``torch.float32``; ``Case.accuracy`` knows what a model can do.
    """
    ours, theirs = dict(_named(actual)), dict(_named(expected))
    assert ours.keys() == theirs.keys(), _describe_names(ours.keys(), theirs.keys())
    for name, tensor in ours.items():
        mine, other = (tensor.dtype, tuple(tensor.shape)), (theirs[name].dtype, tuple(theirs[name].shape))
        assert mine == other, f"{name or 'the value'} is {mine}, expected {other}"
    largest = max((_size(tensor) for tensor in theirs.values()), default=0.0)
    wrong = {}
    for name, tensor in ours.items():
        allowed = TOLERANCE[dtype] * max(_size(theirs[name]), NOISE * largest)
        difference = _size(tensor.double() - theirs[name].double())
        if not difference <= allowed < float("inf"):  # written so that NaN and infinity are never within
            wrong[name] = (difference, allowed)
    assert not wrong, _describe_worst(wrong, ours, theirs)


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _named(item, f"{name}[{i}]")
    else:
        yield name, value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _size(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def _describe_names(ours: Any, theirs: Any) -> str:
    return f"names differ: missing {sorted(theirs - ours)}, unexpected {sorted(ours - theirs)}"


def _describe_worst(wrong: dict[str, tuple[float, float]], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    def badness(name: str) -> float:
        difference, allowed = wrong[name]
        return float("inf") if difference != difference or not allowed else difference / allowed

    worst = sorted(wrong, key=badness, reverse=True)
    lines = [f"{len(wrong)} of {len(ours)} tensors differ; the worst is {worst[0] or 'the value'}"]
    for name in worst[:5]:
        difference, allowed = wrong[name]
        place = (ours[name].double() - theirs[name].double()).abs().flatten().nan_to_num(torch.inf).argmax()
        got, wanted = ours[name].flatten()[place].item(), theirs[name].flatten()[place].item()
        lines.append(f"  {name}: off by {difference:.3g}, allowed {allowed:.3g}; got {got:.9g}, expected {wanted:.9g}")
    return "\n".join(lines)
