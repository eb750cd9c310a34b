"""Views and look-ups whose arguments speak of whole shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from epl.sharding.collectives import Collectives
from epl.sharding.forms.base import Cut, Form, Names, first_of, operator, shape_of

__all__ = ["FORMS"]


def reshape(ranks: Collectives, cut: Cut, *, self: torch.Tensor, **_: Any) -> torch.Tensor:
    """This rank's part in its new shape."""
    return self.reshape(shape_of(ranks, cut))


def cut_slice(
    ranks: Collectives, cut: Cut, *, self: torch.Tensor, dim: int, start: int | None = None, step: int = 1, **_: Any
) -> torch.Tensor:
    """A slice along a cut dimension: whole stretches of it, or one of every few."""
    whole, own = cut.input_shapes[0][dim], self.shape[dim]
    first = (start or 0) % max(1, whole) if (start or 0) < whole else whole
    if step > 1:
        return torch.ops.aten.slice.Tensor(self, dim, first, own, step)
    return self.narrow(dim, first * own // whole, shape_of(ranks, cut)[dim])


def sections(ranks: Collectives, cut: Cut, *, self: torch.Tensor, dim: int = 0, **_: Any) -> tuple[torch.Tensor, ...]:
    """This rank's part of each section."""
    sizes = [shape_of(ranks, cut, place)[dim] for place in range(len(cut.outputs))]
    return tuple(self.split(sizes, dim))


def embedding_rows(
    ranks: Collectives, cut: Cut, *, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, **_: Any
) -> torch.Tensor:
    """What this rank's rows give, and zeros for those of other ranks."""
    start = first_of(ranks, cut)[1]
    own = (indices >= start) & (indices < start + len(weight))
    padding = padding_idx - start if start <= padding_idx < start + len(weight) else -1
    rows = torch.ops.aten.embedding.default(weight, (indices - start).masked_fill(~own, 0), padding)
    return rows.masked_fill(~own.unsqueeze(-1), 0)


def gather(ranks: Collectives, cut: Cut, *, self: torch.Tensor, index: torch.Tensor, **_: Any) -> torch.Tensor:
    """What this rank has of it, and zeros for what others have."""
    dim, start = first_of(ranks, cut)
    own = (index >= start) & (index < start + self.shape[dim])
    return self.gather(dim, (index - start).masked_fill(~own, 0)).masked_fill(~own, 0)


def index_select(ranks: Collectives, cut: Cut, *, self: torch.Tensor, index: torch.Tensor, **_: Any) -> torch.Tensor:
    """The rows that this rank has, and zeros for those that others have."""
    dim, start = first_of(ranks, cut)
    own = (index >= start) & (index < start + self.shape[dim])
    shape = [-1 if other == dim else 1 for other in range(self.dim())]
    return self.index_select(dim, (index - start).masked_fill(~own, 0)).masked_fill(~own.view(shape), 0)


def index_rows(
    ranks: Collectives, cut: Cut, *, self: torch.Tensor, indices: tuple[torch.Tensor | None, ...], **_: Any
) -> torch.Tensor:
    """What one index finds among this rank's rows, and zeros for what others have; it may count from the end."""
    dim, start = first_of(ranks, cut)
    whole = cut.input_shapes[0][dim]
    place = indices[dim]
    assert place is not None
    place = torch.where(place < 0, place + whole, place)
    own = (place >= start) & (place < start + self.shape[dim])
    found = torch.ops.aten.index.Tensor(self, [None] * dim + [(place - start).masked_fill(~own, 0)])
    return found.masked_fill(~own.view(*own.shape, *[1] * (self.dim() - dim - 1)), 0)


def with_fewer_groups(target: str) -> Form:
    """A convolution of this rank's groups."""

    def form(ranks: Collectives, cut: Cut, *, weight: torch.Tensor, groups: int, **arguments: Any) -> torch.Tensor:
        unit = cut.input_shapes[1][0] // groups
        return operator(target)(weight=weight, groups=len(weight) // unit, **arguments)

    return form


def experts(
    ranks: Collectives, cut: Cut, *, input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """The rows of this rank's experts, which are next to each other, and zeros for those of others."""
    _dim, first = first_of(ranks, cut, 1)
    start = int(offs[first - 1]) if first else 0
    stop = int(offs[first + len(weight) - 1])
    own = offs[first : first + len(weight)] - start
    rows = operator("transformers.grouped_mm_fallback.default")(input[start:stop].contiguous(), weight, own)
    return F.pad(rows, (0, 0, start, len(input) - stop))


_CONVOLUTIONS = """conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding
conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input convolution.default"""

FORMS: Names = {
    "reshape": reshape,
    "slice": cut_slice,
    "sections": sections,
    "embedding_rows": embedding_rows,
    "gather": gather,
    "index_rows": index_rows,
    "index_select": index_select,
    "experts": experts,
    **{f"groups.aten.{name}": with_fewer_groups(f"aten.{name}") for name in _CONVOLUTIONS.split()},
}
