"""Placements and conversions on a mesh of several axes: on each axis a placement, outermost first.

On a mesh of 2 x 4, ``(S(0), R)`` cuts a tensor in two along the first axis, and all ranks of a row of four hold the same
half; ``(S(0), S(0))`` cuts each half in four; ``(P, S(1))`` is a sum over the first axis of tensors cut along the second.

A conversion goes axis by axis by the table of :mod:`epl.sharding.conversions`, each over the ranks of one axis alone, and
its backward pass goes the same way back. Only where axes cut the same dimension does the order matter: what is cut last
is joined first.

Source: the mesh placements of GSPMD (Xu et al. 2021) and of Alpa (Zheng et al. 2022, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epl.sharding.collectives import Collectives
from epl.sharding.conversions import Conversion, convert
from epl.sharding.options import WHOLE
from epl.sharding.placements import Placement, Shard, local_shape

__all__ = ["MeshConversion", "convert_on_mesh", "local_shape_on_mesh"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class MeshConversion:
    """What happens on an edge, on a mesh.

    Args:
        made: How the value is made, for each axis.
        used: How it is used.
        handed_back: How its gradient comes back.

    Example:
        >>> rows, columns = (Shard(0), WHOLE), (WHOLE, Shard(1))
        >>> [(axis, step.value.kind) for axis, step in MeshConversion(rows, columns, columns).steps]
        [(0, 'all_gather'), (1, 'slice')]
    """

    made: Placements
    used: Placements
    handed_back: Placements

    @property
    def steps(self) -> tuple[tuple[int, Conversion], ...]:
        """(axis, conversion over its ranks), in the order in which they are carried out.

        Axes that share a cut dimension with another are joined from the innermost to the outermost, and cut again from
        the outermost to the innermost; the others go straight from one placement to the other.
        """
        found: list[tuple[int, Conversion]] = []
        made = list(self.made)
        for axis in reversed(range(len(made))):
            if self._is_tangled(axis) and isinstance(made[axis], Shard):
                found.append((axis, Conversion.of(made[axis], WHOLE, WHOLE)))
                made[axis] = WHOLE
        for axis, source in enumerate(made):
            conversion = Conversion.of(source, self.used[axis], self.handed_back[axis])
            if not conversion.is_nothing:
                found.append((axis, conversion))
        return tuple(found)

    def _is_tangled(self, axis: int) -> bool:
        """True if this axis or another one changes, and both cut one dimension before or after."""
        return any(
            other != axis and self._dims(axis) & self._dims(other) and (self._changes(axis) or self._changes(other))
            for other in range(len(self.made))
        )

    def _dims(self, axis: int) -> set[int]:
        return {place.dim for place in (self.made[axis], self.used[axis]) if isinstance(place, Shard)}

    def _changes(self, axis: int) -> bool:
        return self.made[axis] != self.used[axis]


def local_shape_on_mesh(
    shape: Sequence[int], placements: Placements, ranks: Sequence[Collectives], *, but: int | None = None
) -> tuple[int, ...]:
    """The shape of what a rank holds; with ``but``, as if that axis did not cut."""
    found = tuple(shape)
    for axis, (placement, of_axis) in enumerate(zip(placements, ranks, strict=True)):
        if axis != but:
            found = local_shape(found, placement, of_axis.size, of_axis.rank)
    return found


def convert_on_mesh(
    ranks: Sequence[Collectives], tensor: torch.Tensor, conversion: MeshConversion, shape: Sequence[int]
) -> torch.Tensor:
    """Change the placement of a value on a mesh, and of its gradient on the way back.

    Args:
        ranks: For each axis, the ranks that differ from this one in their place on that axis alone.
        tensor: What this rank holds of the value.
        conversion: From which placements to which.
        shape: The shape of the whole value.
    """
    now = list(conversion.made)
    for axis, step in conversion.steps:
        whole = local_shape_on_mesh(shape, tuple(now), ranks, but=axis)
        tensor = convert(ranks[axis], tensor, step, whole)
        now[axis] = step.value.target
    return tensor
