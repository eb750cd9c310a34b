"""Normalisation and softmax with statistics over all ranks."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from epl.sharding.collectives import Collectives
from epl.sharding.forms.base import Cut, Names, sum_over_ranks, widened

__all__ = ["FORMS"]


def batch_norm(
    ranks: Collectives, cut: Cut, *, input: torch.Tensor, momentum: float, eps: float, **arguments: Any
) -> torch.Tensor:
    """Mean and variance of all ranks' values: first the mean, then the squares around it, which loses no digits."""
    count = prod(cut.input_shapes[0]) // cut.input_shapes[0][1]
    dims = [dim for dim in range(input.dim()) if dim != 1]
    values = widened(input)
    average = sum_over_ranks(ranks, values.sum(dims, keepdim=True)) / count
    centred = values - average
    variance = sum_over_ranks(ranks, centred.square().sum(dims, keepdim=True)) / count
    _keep(arguments["running_mean"], average, momentum)
    _keep(arguments["running_var"], variance * (count / max(1, count - 1)), momentum)
    made = centred * (variance + eps).rsqrt()
    weight, bias = arguments["weight"], arguments["bias"]
    shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
    made = made if weight is None else made * weight.view(shape)
    return cut.typed(made if bias is None else made + bias.view(shape), input)


def _keep(kept: torch.Tensor | None, seen: torch.Tensor, momentum: float) -> None:
    if kept is not None:
        with torch.no_grad():
            kept.lerp_(seen.flatten().to(kept.dtype), momentum)


def group_norm(ranks: Collectives, cut: Cut, *, input: torch.Tensor, num_groups: int, **arguments: Any) -> torch.Tensor:
    """This rank's groups."""
    unit = cut.input_shapes[0][1] // num_groups
    return torch.ops.aten.group_norm.default(input=input, num_groups=input.shape[1] // unit, **arguments)


def weight_norm(ranks: Collectives, cut: Cut, *, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's part of each direction, by the length of the whole direction."""
    directions = widened(v)
    summed = [other for other in range(v.dim()) if dim == -1 or other != dim % v.dim()]
    lengths = sum_over_ranks(ranks, directions.square().sum(summed, keepdim=dim != -1)).sqrt()
    return cut.typed(directions * (g / lengths), v)


def softmax(
    ranks: Collectives, cut: Cut, *, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    """Softmax along the cut dimension."""
    given = self if dtype is None else self.to(dtype)
    powers = _below_highest(ranks, given, dim).exp()
    return cut.typed(powers / sum_over_ranks(ranks, powers.sum(dim, keepdim=True)), given)


def log_softmax(
    ranks: Collectives, cut: Cut, *, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    """Its logarithm, which is exact where the softmax itself is too small for a number."""
    given = self if dtype is None else self.to(dtype)
    lower = _below_highest(ranks, given, dim)
    return cut.typed(lower - sum_over_ranks(ranks, lower.exp().sum(dim, keepdim=True)).log(), given)


def _below_highest(ranks: Collectives, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Values less the highest of all ranks, whose exponentials are numbers."""
    values = widened(tensor)
    return values - ranks.all_reduce(values.detach().amax(dim, keepdim=True), "max")


FORMS: Names = {
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "weight_norm": weight_norm,
    "softmax": softmax,
    "log_softmax": log_softmax,
}
