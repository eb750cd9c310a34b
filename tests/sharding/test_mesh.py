"""Conversions on meshes of two and three axes, against the whole tensor; numbers are whole, so that sums are exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from epl.sharding.mesh import MeshConversion, convert_on_mesh, local_shape_on_mesh
from epl.sharding.options import PARTIAL, WHOLE, gradient_expected
from epl.sharding.placements import Partial, Placement, Shard, join_shards
from tests.sharding.test_conversions import spread, whole_numbers
from tests.sharding.threads import ThreadRank, run_ranks

SHAPE = (13, 7)  # divides by nothing
A, B = Shard(0), Shard(1)
MADE = [WHOLE, A, B, PARTIAL]
USED = [WHOLE, A, B]


class AxisRank(ThreadRank):
    """The ranks of one axis of a mesh; all ranks of the mesh exchange, each picks those of its own line."""

    def __init__(self, ranks: ThreadRank, line: Sequence[int]) -> None:
        self._ranks, self._line = ranks, list(line)
        self.rank, self.size = self._line.index(ranks.rank), len(self._line)

    def _exchange(self, item: Any) -> list[Any]:
        everyone = self._ranks._exchange(item)
        return [everyone[rank] for rank in self._line]


def axes_of(ranks: ThreadRank, mesh: Sequence[int]) -> list[AxisRank]:
    numbers = torch.arange(ranks.size).view(*mesh)
    place = [int(found) for found in (numbers == ranks.rank).nonzero()[0]]
    lines = [
        numbers[tuple(slice(None) if own == axis else at for own, at in enumerate(place))] for axis in range(len(mesh))
    ]
    return [AxisRank(ranks, line.tolist()) for line in lines]


def spread_on_mesh(whole: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int]) -> list[torch.Tensor]:
    """What each rank holds, outermost axis first."""
    parts = [whole]
    for placement, size in zip(placements, mesh, strict=True):
        parts = [piece for part in parts for piece in spread(part, placement, size)]
    return parts


def joined(parts: list[torch.Tensor], placements: Sequence[Placement], mesh: Sequence[int]) -> torch.Tensor:
    for placement, size in reversed(list(zip(placements, mesh, strict=True))):
        parts = [join_shards(parts[start : start + size], placement) for start in range(0, len(parts), size)]
    (whole,) = parts
    return whole


def check(mesh: Sequence[int], conversion: MeshConversion) -> None:
    size = int(torch.tensor(mesh).prod())
    value, gradient = whole_numbers(1, SHAPE), whole_numbers(2, SHAPE)
    values = spread_on_mesh(value, conversion.made, mesh)
    gradients = spread_on_mesh(gradient, conversion.handed_back, mesh)

    def work(ranks: ThreadRank) -> tuple[torch.Tensor, torch.Tensor]:
        axes = axes_of(ranks, mesh)
        mine = values[ranks.rank].clone().requires_grad_()
        moved = convert_on_mesh(axes, mine, conversion, SHAPE)
        assert tuple(moved.shape) == local_shape_on_mesh(SHAPE, conversion.used, axes)
        moved.backward(gradients[ranks.rank])
        assert mine.grad is not None
        return moved.detach(), mine.grad

    found = run_ranks(size, work)
    expected = tuple(gradient_expected(placement) for placement in conversion.made)
    for parts, placements, whole in (
        ([moved for moved, _ in found], conversion.used, value),
        ([back for _, back in found], expected, gradient),
    ):
        assert torch.equal(joined(parts, placements, mesh), whole)
        if not any(isinstance(placement, Partial) for placement in placements):
            for part, own in zip(parts, spread_on_mesh(whole, placements, mesh), strict=True):
                assert torch.equal(part, own), "every rank has what is its own"


def back(used: Placement, summed: bool) -> Placement:
    return PARTIAL if summed and used == WHOLE else used


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("summed", [False, True], ids=["whole gradients", "summands"])
def test_any_placement_of_two_axes_becomes_any_other(mesh: tuple[int, ...], summed: bool) -> None:
    for made in itertools.product(MADE, MADE):
        for used in itertools.product(USED, USED):
            handed_back = tuple(back(place, summed) for place in used)
            check(mesh, MeshConversion(made, used, handed_back))


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ((A, A, WHOLE), (WHOLE, A, A)),
        ((PARTIAL, A, B), (A, A, A)),
        ((A, B, A), (B, A, B)),
        ((WHOLE, WHOLE, PARTIAL), (A, B, WHOLE)),
    ],
    ids=str,
)
def test_three_axes(made: tuple[Placement, ...], used: tuple[Placement, ...]) -> None:
    check((2, 2, 2), MeshConversion(made, used, tuple(back(place, True) for place in used)))


def test_an_axis_that_does_not_change_sends_nothing() -> None:
    conversion = MeshConversion((A, B), (WHOLE, B), (WHOLE, B))
    assert [axis for axis, _ in conversion.steps] == [0]
    assert MeshConversion((A, A), (A, A), (A, A)).steps == ()
