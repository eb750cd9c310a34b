"""What goes between groups of different sizes: each receiver gets what is its own, once, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import pytest
import torch

from epl.sharding.options import WHOLE
from epl.sharding.pieces import Piece, Side, pieces_between
from epl.sharding.placements import Placement, Shard, take_shard

SHAPE = (7, 12)
PLACEMENTS: list[Placement] = [WHOLE, Shard(0), Shard(1), Shard(1, unit=3)]
COUNTS = (1, 2, 3, 4)


def at(tensor: torch.Tensor, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    for dim, start, size in spans:
        tensor = tensor.narrow(dim, start, size)
    return tensor


def sides() -> list[Side]:
    return [Side(count, placement) for count, placement in itertools.product(COUNTS, PLACEMENTS)]


@pytest.mark.parametrize("source", sides(), ids=lambda side: f"{side.num_ranks} {side.placement}")
def test_the_pieces_of_any_side_make_up_any_other(source: Side) -> None:
    whole = torch.arange(prod(SHAPE)).view(SHAPE)
    held = [take_shard(whole, source.placement, source.num_ranks, rank) for rank in range(source.num_ranks)]
    for target in sides():
        pieces = pieces_between(SHAPE, source, target)
        for rank in range(target.num_ranks):
            expected = take_shard(whole, target.placement, target.num_ranks, rank)
            received, times = torch.zeros_like(expected), torch.zeros_like(expected)
            for piece in (each for each in pieces if each.target == rank):
                part = at(held[piece.source], piece.taken)
                assert tuple(part.shape) == piece.shape
                at(received, piece.put).copy_(part)
                at(times, piece.put).add_(1)
            assert torch.equal(received, expected), target
            assert (times == 1).all(), "no element comes twice"
            assert tuple(expected.shape) == target.local_shape(SHAPE, rank)


def sent(pieces: Sequence[Piece]) -> int:
    return sum(prod(piece.shape) for piece in pieces)


def test_only_what_is_needed_travels() -> None:
    size = prod(SHAPE)
    cut, whole = Side(3, Shard(0)), Side(1, WHOLE)
    assert sent(pieces_between(SHAPE, cut, whole)) == size
    assert sent(pieces_between(SHAPE, whole, cut)) == size, "and not three times the whole"
    assert sent(pieces_between(SHAPE, cut, Side(2, Shard(1)))) == size
    assert sent(pieces_between(SHAPE, Side(4, WHOLE), whole)) == size, "one of four that have it sends it"
    assert sent(pieces_between(SHAPE, cut, cut)) == size
    assert all(piece.source == piece.target for piece in pieces_between(SHAPE, cut, cut))


def test_a_number_goes_to_each_receiver_once() -> None:
    assert [(piece.source, piece.target) for piece in pieces_between((), Side(2, WHOLE), Side(3, WHOLE))] == [
        (0, 0),
        (0, 2),
        (1, 1),
    ]
