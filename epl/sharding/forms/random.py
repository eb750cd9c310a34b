"""Random numbers for a part: drawn for the whole shape, of which this rank keeps its own.

Numbers are drawn in the order of memory, so the whole is laid out as the part is: dimensions in the order of its strides.
What torch drops is found by dropping from ones, which draws on every kind of device as torch itself does there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from epl.sharding.collectives import Collectives
from epl.sharding.forms.base import Cut, Form, Names, operator
from epl.sharding.placements import take_shard

__all__ = ["FORMS"]


def _laid_out_like(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor whose dimensions are in memory as those of the part are."""
    order = sorted(range(part.dim()), key=lambda dim: -part.stride(dim))
    places = [order.index(dim) for dim in range(part.dim())]
    return part.new_empty([shape[dim] for dim in order]).permute(places)


def dropout(ranks: Collectives, cut: Cut, *, p: float, train: bool | None = True, **tensors: torch.Tensor) -> Any:
    """``dropout``, ``dropout_`` (which names its tensor ``self``), and ``native_dropout``, which gives the mask too."""
    (part,) = tensors.values()
    noise = F.dropout(_laid_out_like(part, cut.output_shapes[0]).fill_(1), p)
    own = take_shard(noise, cut.outputs[0], ranks.size, ranks.rank)
    if len(cut.outputs) == 2:
        return part * own, own != 0
    return part.mul_(own) if "self" in tensors else part * own


def feature_dropout(ranks: Collectives, cut: Cut, *, input: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    """One draw for each channel of each sample."""
    samples, channels, *places = cut.output_shapes[0]
    noise = torch.feature_dropout(input.new_ones(samples, channels, *(1 for _ in places)), p, True)
    own = take_shard(noise.expand(cut.output_shapes[0]), cut.outputs[0], ranks.size, ranks.rank)
    return input * own


def _drawn(target: str) -> Form:
    """A new tensor of random numbers, which may take its shape from another, or replace what that holds."""

    def form(ranks: Collectives, cut: Cut, **arguments: Any) -> torch.Tensor:
        part = arguments.get("self")
        if part is not None:
            arguments["self"] = _laid_out_like(part, cut.output_shapes[0])
        if not isinstance(arguments.get("dtype"), torch.dtype):
            arguments.pop("dtype", None)  # the schema's own default is no torch.dtype
        whole = operator(target)(**arguments)
        own = take_shard(whole, cut.outputs[0], ranks.size, ranks.rank)
        return part.copy_(own) if part is not None and target.split(".")[1].endswith("_") else own.contiguous()

    return form


def bernoulli(ranks: Collectives, cut: Cut, *, self: torch.Tensor, **_: Any) -> torch.Tensor:
    """An element takes one draw, whatever its probability."""
    whole = _laid_out_like(self, cut.output_shapes[0]).fill_(0.5)
    take_shard(whole, cut.outputs[0], ranks.size, ranks.rank).copy_(self.detach())
    own = take_shard(torch.bernoulli(whole), cut.outputs[0], ranks.size, ranks.rank)
    return own


_DRAWN = """rand.default randn.default randint.default randint.low rand_like.default randn_like.default
randint_like.default bernoulli.p bernoulli_.float uniform_.default normal_.default exponential_.default"""

FORMS: Names = {
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "bernoulli": bernoulli,
    **{f"drawn.aten.{name}": _drawn(f"aten.{name}") for name in _DRAWN.split()},
}
