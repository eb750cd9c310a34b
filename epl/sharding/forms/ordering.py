"""The largest along a cut dimension: each rank finds its own, and all choose among those.

The gradient of what was chosen goes to the rank that had it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epl.sharding.collectives import Collectives
from epl.sharding.forms.base import Cut, Form, Names, first_of, sizes_of, widened

__all__ = ["FORMS"]

Chosen = tuple[torch.Tensor, torch.Tensor]  # values and places, both with the dimension that was chosen along


def topk(ranks: Collectives, cut: Cut, *, self: torch.Tensor, k: int, largest: bool, sorted: bool, **_: Any) -> Chosen:
    """The largest k of each rank's largest k."""
    dim, _start = first_of(ranks, cut)
    return _choose(ranks, cut, self, k, lambda some: some.topk(min(k, some.shape[dim]), dim, largest, sorted))


def _choose(
    ranks: Collectives, cut: Cut, own: torch.Tensor, count: int, choose: Callable[[torch.Tensor], Chosen]
) -> Chosen:
    """``count`` values along the cut dimension, of all ranks' and with their places in the whole."""
    dim, start = first_of(ranks, cut)
    values, places = choose(own.detach())
    shapes = [(*values.shape[:dim], min(count, size), *values.shape[dim + 1 :]) for size in sizes_of(ranks, cut)]
    all_values = torch.cat(ranks.all_gather(values.contiguous(), shapes), dim)
    all_places = torch.cat(ranks.all_gather((places + start).contiguous(), shapes), dim)
    _, best = choose(all_values)
    found = all_places.gather(dim, best)
    return _Chosen.apply(own, all_values, best, found - start, dim), found  # type: ignore[return-value]


class _Chosen(torch.autograd.Function):
    """The ``best`` of all ranks' values; ``places`` are counted from this rank's first."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, values: torch.Tensor, best: torch.Tensor, places: torch.Tensor, dim: int
    ) -> torch.Tensor:
        ctx.dim, ctx.shape = dim, own.shape
        ctx.save_for_backward(places)
        # made here: what forward returns as it was given must not be changed in place by the model
        return values.gather(dim, best)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        elsewhere = (places < 0) | (places >= ctx.shape[ctx.dim])
        own = gradients[0].new_zeros(ctx.shape)
        own.scatter_add_(ctx.dim, places.masked_fill(elsewhere, 0), gradients[0].masked_fill(elsewhere, 0))
        return own, None, None, None, None


def _best(name: str) -> Form:
    """``max.dim`` and ``min.dim`` (values and places), ``argmax`` and ``argmin`` (places only)."""
    find = torch.max if "max" in name else torch.min

    def form(ranks: Collectives, cut: Cut, *, self: torch.Tensor, keepdim: bool = False, **_: Any) -> Any:
        dim, _start = first_of(ranks, cut)
        found = _choose(ranks, cut, self, 1, lambda some: find(some, dim, keepdim=True))
        values, places = (each if keepdim else each.squeeze(dim) for each in found)
        return places if name.startswith("arg") else (values, places)

    return form


def _extreme(sign: int) -> Form:
    """``amax`` and ``max`` of everything, and with -1 their opposites; equal values share the gradient."""

    def form(
        ranks: Collectives, cut: Cut, *, self: torch.Tensor, dim: Any = (), keepdim: bool = False, **_: Any
    ) -> torch.Tensor:
        dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        found = sign * _Extreme.apply(sign * self, dims or tuple(range(self.dim())), ranks)  # type: ignore[operator]
        return found.reshape(cut.output_shapes[0])

    return form


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dims: tuple[int, ...], ranks: Collectives) -> torch.Tensor:
        highest = ranks.all_reduce(own.amax(dims, keepdim=True), "max")
        equal = own == highest
        ctx.save_for_backward(equal, ranks.all_reduce(equal.sum(dims, keepdim=True)))
        return highest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        equal, count = ctx.saved_tensors
        return equal * (gradients[0] / count), None, None


def logsumexp(ranks: Collectives, cut: Cut, *, self: torch.Tensor, dim: Any, **_: Any) -> torch.Tensor:
    """The logarithm of the sum of all ranks' exponentials."""
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    found = _LogSum.apply(widened(self), dims or tuple(range(self.dim())), ranks)
    return cut.typed(found.reshape(cut.output_shapes[0]), self)  # type: ignore[union-attr]


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dims: tuple[int, ...], ranks: Collectives) -> torch.Tensor:
        highest = ranks.all_reduce(own.amax(dims, keepdim=True), "max")
        powers = (own - highest).exp()
        total = ranks.all_reduce(powers.sum(dims, keepdim=True))
        ctx.save_for_backward(powers / total)
        return highest + total.log()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (shares,) = ctx.saved_tensors
        return shares * gradients[0], None, None


FORMS: Names = {
    "topk": topk,
    "logsumexp": logsumexp,
    **{f"best.aten.{name}": _best(name) for name in ("max.dim", "min.dim", "argmax.default", "argmin.default")},
    **{f"extreme.aten.{name}.default": _extreme(1 if "max" in name else -1) for name in ("amax", "amin", "max", "min")},
}
