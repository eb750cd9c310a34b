"""Every line of the table of conversions, on ranks as threads, against the whole tensor.

Numbers are whole, so that sums are exact whatever their order, and a mistake shows to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from epl.sharding.collectives import Collectives, LonelyRank
from epl.sharding.conversions import Conversion, Move, convert, move
from epl.sharding.options import PARTIAL, WHOLE, gradient_expected
from epl.sharding.placements import Partial, Placement, Shard, join_shards, take_shard
from tests.sharding.threads import ThreadRank, run_ranks

SHAPE = (5, 7, 20)  # divides by none of 2, 3, 4 but in the last dimension, whose units do not
A, B = Shard(0), Shard(1)
UNITS, STRETCHES, BOTH = Shard(2, unit=4), Shard(2, repeats=4), Shard(2, unit=2, repeats=2)
SIZES = (2, 3, 4)


class Line(NamedTuple):
    """A line of the table: the value's move, the gradient that is handed back, and the collectives both ways."""

    made: Placement
    used: Placement
    handed_back: Placement
    forward: str
    backward: str

    @property
    def conversion(self) -> Conversion:
        return Conversion.of(self.made, self.used, self.handed_back)

    def __str__(self) -> str:
        return f"{self.made}->{self.used},{self.handed_back}".replace(" ", "")


TABLE = [
    Line(WHOLE, WHOLE, WHOLE, "", ""),
    Line(WHOLE, WHOLE, PARTIAL, "", "all_reduce"),
    *(Line(WHOLE, cut, cut, "", "all_gather") for cut in (A, B, UNITS, STRETCHES, BOTH)),
    *(Line(cut, WHOLE, WHOLE, "all_gather", "") for cut in (A, B, UNITS, STRETCHES, BOTH)),
    *(Line(cut, WHOLE, PARTIAL, "all_gather", "reduce_scatter") for cut in (A, B, UNITS, STRETCHES, BOTH)),
    Line(PARTIAL, WHOLE, WHOLE, "all_reduce", ""),
    Line(PARTIAL, WHOLE, PARTIAL, "all_reduce", "all_reduce"),
    *(Line(PARTIAL, cut, cut, "reduce_scatter", "all_gather") for cut in (A, B, UNITS, STRETCHES, BOTH)),
    *(
        Line(one, other, other, "all_to_all", "all_to_all")
        for one, other in ((A, B), (B, A), (A, UNITS), (BOTH, B), (A, STRETCHES), (STRETCHES, A))
    ),
    Line(WHOLE, PARTIAL, WHOLE, "", ""),
    # beside the table: what is as it should be, a cut as a summand, and a dimension that is cut elsewhere
    Line(A, A, A, "", ""),
    Line(BOTH, BOTH, BOTH, "", ""),
    Line(PARTIAL, PARTIAL, WHOLE, "", ""),
    *(Line(cut, PARTIAL, WHOLE, "", "") for cut in (A, UNITS, BOTH)),
    Line(UNITS, BOTH, BOTH, "all_gather", "all_gather"),
    Line(STRETCHES, UNITS, UNITS, "all_gather", "all_gather"),
]


@dataclass
class Counted:
    """A rank that notes what it does with the others."""

    ranks: Collectives
    done: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        self.done.append("all_reduce")
        return self.ranks.all_reduce(tensor, operation)

    def all_gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self.done.append("all_gather")
        assert tensor.is_contiguous()
        return self.ranks.all_gather(tensor, shapes)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        self.done.append("reduce_scatter")
        assert all(piece.is_contiguous() for piece in pieces)
        return self.ranks.reduce_scatter(pieces)

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self.done.append("all_to_all")
        assert all(piece.is_contiguous() for piece in pieces)
        return self.ranks.all_to_all(pieces, shapes)


class Outcome(NamedTuple):
    """Of one rank."""

    value: torch.Tensor
    gradient: torch.Tensor
    forward: list[str]
    backward: list[str]


def whole_numbers(seed: int, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    return torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def spread(whole: torch.Tensor, placement: Placement, size: int) -> list[torch.Tensor]:
    """What each rank holds; summands are all different, and none of them is the whole."""
    if not isinstance(placement, Partial):
        return [take_shard(whole, placement, size, rank).clone() for rank in range(size)]
    summands = [whole_numbers(100 + rank, whole.shape) for rank in range(size - 1)]
    return [*summands, whole - sum(summands)]


def run(line: Line, size: int, value: torch.Tensor, gradient: torch.Tensor) -> list[Outcome]:
    values, gradients = spread(value, line.made, size), spread(gradient, line.handed_back, size)

    def work(ranks: ThreadRank) -> Outcome:
        counted = Counted(ranks)
        mine = values[ranks.rank].requires_grad_()
        moved = convert(counted, mine, line.conversion, SHAPE)
        forward = list(counted.done)
        moved.backward(gradients[ranks.rank])
        assert mine.grad is not None
        return Outcome(moved.detach(), mine.grad, forward, counted.done[len(forward) :])

    return run_ranks(size, work)


def assert_holds(parts: list[torch.Tensor], placement: Placement, whole: torch.Tensor) -> None:
    """The ranks hold the whole as the placement says; if each is to have all of it, then each has."""
    assert torch.equal(join_shards(parts, placement), whole)
    for rank, part in enumerate(parts):
        if not isinstance(placement, Partial):
            assert torch.equal(part, take_shard(whole, placement, len(parts), rank)), f"rank {rank}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("line", TABLE, ids=str)
def test_a_value_and_its_gradient_arrive_as_the_table_says(line: Line, size: int) -> None:
    value, gradient = whole_numbers(1), whole_numbers(2)
    outcomes = run(line, size, value, gradient)
    assert_holds([outcome.value for outcome in outcomes], line.used, value)
    assert_holds([outcome.gradient for outcome in outcomes], gradient_expected(line.made), gradient)
    for outcome in outcomes:
        assert outcome.forward == ([line.forward] if line.forward else [])
        assert outcome.backward == ([line.backward] if line.backward else [])


@pytest.mark.parametrize("line", TABLE, ids=str)
def test_the_kind_of_a_move_is_the_collective_that_it_takes(line: Line) -> None:
    for change, name in ((line.conversion.value, line.forward), (line.conversion.gradient, line.backward)):
        assert change.kind == name or (not name and change.kind in ("nothing", "slice", "zero"))


@pytest.mark.parametrize("line", TABLE, ids=str)
def test_only_what_leaves_both_as_they_are_is_nothing(line: Line) -> None:
    """What is nothing has no operator in the program: if it had work to do, it would be lost without a word."""
    same = line.made == line.used and line.handed_back == gradient_expected(line.made)
    assert line.conversion.is_nothing == same


@pytest.mark.parametrize("placement", [WHOLE, PARTIAL, A, BOTH], ids=str)
def test_a_move_to_where_it_is_gives_the_tensor_itself(placement: Placement) -> None:
    tensor = whole_numbers(1)
    assert move(LonelyRank(), tensor, Move(placement, placement), SHAPE) is tensor


@pytest.mark.parametrize("line", TABLE, ids=str)
def test_a_group_of_one_keeps_what_it_has(line: Line) -> None:
    value, gradient = whole_numbers(1).requires_grad_(), whole_numbers(2)
    moved = convert(LonelyRank(), value, line.conversion, SHAPE)
    moved.backward(gradient)
    assert value.grad is not None
    assert torch.equal(moved, value)
    assert torch.equal(value.grad, gradient)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("made", [WHOLE, PARTIAL, A, BOTH], ids=str)
@pytest.mark.parametrize("used", [WHOLE, PARTIAL, B, BOTH], ids=str)
def test_a_move_does_not_change_what_it_moves(made: Placement, used: Placement, size: int) -> None:
    """The maker's tensor may have other users."""
    parts = spread(whole_numbers(1), made, size)
    before = [part.clone() for part in parts]
    run_ranks(size, lambda ranks: move(ranks, parts[ranks.rank], Move(made, used), SHAPE))
    assert all(torch.equal(part, kept) for part, kept in zip(parts, before, strict=True))


@pytest.mark.parametrize("line", [line for line in TABLE if line.forward or line.backward], ids=str)
def test_values_that_are_not_contiguous_travel_as_well(line: Line) -> None:
    """A transposed result, and the gradient of a sum, which has strides of 0."""
    size = 3
    values = [part.transpose(0, 2).contiguous().transpose(0, 2) for part in spread(whole_numbers(1), line.made, size)]

    def work(ranks: ThreadRank) -> tuple[torch.Tensor, torch.Tensor]:
        mine = values[ranks.rank].requires_grad_()
        moved = convert(ranks, mine, line.conversion, SHAPE)
        moved.sum().backward()
        assert mine.grad is not None
        return moved.detach(), mine.grad

    found = run_ranks(size, work)
    assert_holds([value for value, _ in found], line.used, whole_numbers(1))
    ones = torch.full(SHAPE, float(size) if isinstance(line.handed_back, Partial) else 1.0).double()
    assert_holds([gradient for _, gradient in found], gradient_expected(line.made), ones)
