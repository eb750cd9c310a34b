"""What each rank holds of a tensor: the parts fit together, whatever the sizes, the units and the repeats."""

from __future__ import annotations

import pytest
import torch

from epl.errors import PlanError
from epl.sharding.options import PARTIAL, WHOLE
from epl.sharding.placements import Placement, Shard, join_shards, local_shape, parse_placement, take_shard

NUM_RANKS = 3
CUTS = (Shard(0), Shard(1), Shard(2), Shard(1, unit=4), Shard(1, repeats=3), Shard(1, unit=2, repeats=3))
PLACEMENTS = (WHOLE, PARTIAL, *CUTS)


def _shape(placement: Placement, size: int) -> tuple[int, ...]:
    """A shape with ``size`` units in each stretch of the dimension that is cut."""
    shape = [2, 3, 4]
    if isinstance(placement, Shard):
        shape[placement.dim] = size * placement.unit * placement.repeats
    return tuple(shape)


@pytest.mark.parametrize("placement", [*PLACEMENTS, Shard(11, 64, 3)], ids=str)
def test_a_placement_survives_its_text(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (WHOLE, "R"),
        (PARTIAL, "P"),
        (Shard(0), "S(0)"),
        (Shard(1, unit=64), "S(1, unit=64)"),
        (Shard(2, repeats=3), "S(2, repeats=3)"),
        (Shard(2, unit=64, repeats=3), "S(2, unit=64, repeats=3)"),
    ],
)
def test_the_text_is_short_and_says_all(placement: Placement, text: str) -> None:
    assert str(placement) == text


@pytest.mark.parametrize(
    "text",
    ["", "r", "S", "S()", "S(-1)", "S(a)", "S(0", "S(0, unit=0)", "S(0, repeats=0)", "S(0, repeats=2, unit=2)", "R "],
)
def test_other_text_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(PlanError, match=r"is not a placement: R \(whole\), P \(partial sums\) or S\(0\)"):
        parse_placement(text)


@pytest.mark.parametrize(
    ("shard", "size", "num_ranks", "expected"),
    [
        (Shard(0), 7, 3, (3, 2, 2)),
        (Shard(0), 30_522, 4, (7631, 7631, 7630, 7630)),
        (Shard(0), 2, 3, (1, 1, 0)),
        (Shard(0, unit=64), 768, 5, (192, 192, 128, 128, 128)),
        (Shard(0, repeats=3), 21, 2, (4, 3)),
        (Shard(0, unit=64, repeats=3), 3 * 768, 5, (192, 192, 128, 128, 128)),
    ],
)
def test_the_first_ranks_hold_a_unit_more(shard: Shard, size: int, num_ranks: int, expected: tuple[int, ...]) -> None:
    assert shard.sizes(size, num_ranks) == expected
    assert sum(expected) * shard.repeats == size


@pytest.mark.parametrize("size", [5, 7, 101])
@pytest.mark.parametrize("shard", CUTS, ids=str)
def test_parts_follow_one_another_and_keep_units_together(shard: Shard, size: int) -> None:
    whole = size * shard.unit * shard.repeats
    spans = [shard.span(whole, NUM_RANKS, rank) for rank in range(NUM_RANKS)]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] * shard.repeats == whole
    assert all(stop % shard.unit == 0 for _, stop in spans)
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= shard.unit


def test_a_dimension_without_a_whole_number_of_units_is_not_cut() -> None:
    assert Shard(0, unit=64).num_units(100) is None
    assert Shard(0, repeats=3).num_units(100) is None
    assert Shard(0, unit=5, repeats=2).num_units(100) == 10


@pytest.mark.parametrize("size", [5, 7, 101])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_parts_join_to_the_whole(placement: Placement, size: int) -> None:
    whole = torch.arange(torch.Size(_shape(placement, size)).numel()).view(_shape(placement, size))
    parts = [take_shard(whole, placement, NUM_RANKS, rank) for rank in range(NUM_RANKS)]
    assert torch.equal(join_shards(parts, placement), whole)


@pytest.mark.parametrize("size", [5, 7, 101])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_what_is_joined_is_taken_apart_again(placement: Placement, size: int) -> None:
    """The other way round: parts that are all different, so that a swap of ranks or stretches would show."""
    shape = _shape(placement, size)
    shapes = [local_shape(shape, placement, NUM_RANKS, rank) for rank in range(NUM_RANKS)]
    parts = [torch.rand([each or 0 for each in local]) for local in shapes]
    whole = join_shards(parts, placement)
    assert tuple(whole.shape) == shape
    for rank, part in enumerate(parts):
        taken = take_shard(whole, placement, NUM_RANKS, rank)
        assert tuple(taken.shape) == shapes[rank]
        if isinstance(placement, Shard):
            assert torch.equal(taken, part)


def test_of_a_row_of_stretches_each_rank_takes_a_part_of_every_one() -> None:
    """Queries, keys and values beside one another: a cut straight across would give one rank all the queries."""
    queries_keys_values = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
    parts = [take_shard(queries_keys_values, Shard(0, repeats=3), 2, rank).tolist() for rank in range(2)]
    assert parts == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]


def test_a_part_of_one_stretch_shares_memory_with_the_whole() -> None:
    whole = torch.zeros(5, 4)
    take_shard(whole, Shard(0), 2, 1).fill_(1.0)
    assert whole.sum(1).tolist() == [0.0, 0.0, 0.0, 4.0, 4.0]


def test_summands_keep_the_type_of_their_elements() -> None:
    """Counts of 8 bits would be added up as 64, and be of another type than the graph says."""
    parts = [torch.ones(3, dtype=torch.int8)] * 2
    assert join_shards(parts, PARTIAL).dtype == torch.int8


def test_sizes_known_at_run_time_only_may_stay_beside_a_cut() -> None:
    assert local_shape((None, 7), Shard(1), 3, 0) == (None, 3)
    assert local_shape((None, 7), WHOLE, 3, 0) == (None, 7)
