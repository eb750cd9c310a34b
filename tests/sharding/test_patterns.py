"""Dimensions that go together are cut at the same places, and what does not fit them is not offered.

The calls are written by hand, as the rules of ``epl.sharding.rules`` would give them.
"""

from __future__ import annotations

from collections.abc import Mapping

from epl.sharding.options import PARTIAL, WHOLE, Option
from epl.sharding.patterns import Patterns, Slots
from epl.sharding.placements import Placement, Shard

Shapes = Mapping[str, tuple[int, ...]]

BERT: Shapes = {"w": (768, 768), "x": (2, 8, 768), "y": (2, 8, 768), "heads": (2, 8, 12, 64)}
FEATURES = Option((WHOLE, Shard(0)), (Shard(2),))
INSIDE = Option((Shard(2), Shard(1)), (PARTIAL,))
BATCH = Option((Shard(0), WHOLE), (Shard(0),))
HEADS = Option((Shard(2, unit=64),), (Shard(2),))


def tied(
    num_ranks: int,
    shapes: Shapes,
    *calls: tuple[tuple[str, ...], tuple[str, ...], list[Option]],
    fixed: Mapping[str, Placement] | None = None,
) -> tuple[Patterns, list[Slots]]:
    """Patterns of calls, each with its inputs, its outputs and its options."""
    slots = [Slots(inputs, outputs, shapes) for inputs, outputs, _ in calls]
    patterns = Patterns(num_ranks, fixed or {}, shapes)
    patterns.tie([(slot, options) for slot, (_, _, options) in zip(slots, calls, strict=True)])
    return patterns, slots


def test_features_seen_as_heads_are_cut_in_heads() -> None:
    """The weight that makes them too, though nothing about its own call says so."""
    patterns, (linear, view) = tied(
        5,
        BERT,
        (("x", "w"), ("y",), [FEATURES, BATCH]),
        (("y",), ("heads",), [HEADS, Option((Shard(0),), (Shard(0),))]),
    )
    assert patterns.concrete(linear, FEATURES) == Option((WHOLE, Shard(0, unit=64)), (Shard(2, unit=64),))
    assert patterns.concrete(view, HEADS) == Option((Shard(2, unit=64),), (Shard(2),))
    (shard,) = patterns.shards_of("w", BERT["w"])
    assert shard.sizes(768, 5) == (192, 192, 128, 128, 128)


def test_a_batch_too_small_for_the_ranks_is_not_cut() -> None:
    patterns, (linear,) = tied(3, BERT, (("x", "w"), ("y",), [BATCH, FEATURES]))
    assert patterns.concrete(linear, BATCH) is None
    assert patterns.concrete(linear, FEATURES) is not None


FUSED: Shapes = {
    "w": (2304, 768),
    "x": (2, 8, 768),
    "qkv": (2, 8, 2304),
    **dict.fromkeys("qkv", (2, 8, 768)),
    **{f"{name}_heads": (2, 8, 12, 64) for name in "qkv"},
}


def test_fused_queries_keys_and_values_are_three_stretches() -> None:
    chunk = Option((Shard(2, repeats=3),), (Shard(2),) * 3)
    views = [((name,), (f"{name}_heads",), [HEADS]) for name in "qkv"]
    patterns, (linear, chunks, *_) = tied(
        4, FUSED, (("x", "w"), ("qkv",), [FEATURES]), (("qkv",), tuple("qkv"), [chunk]), *views
    )
    assert patterns.concrete(linear, FEATURES) == Option(
        (WHOLE, Shard(0, unit=64, repeats=3)), (Shard(2, unit=64, repeats=3),)
    )
    assert patterns.concrete(chunks, chunk) == Option((Shard(2, unit=64, repeats=3),), (Shard(2, unit=64),) * 3)
    assert list(patterns.shards_of("w", FUSED["w"])) == [Shard(0, unit=64, repeats=3)]


def test_an_operator_between_the_matrix_and_its_stretches_is_cut_like_them() -> None:
    """The stretches are learnt from a later call, so they have to reach back."""
    shapes = {**FUSED, "active": FUSED["qkv"]}
    chunk = Option((Shard(2, repeats=3),), (Shard(2),) * 3)
    gelu = Option((Shard(2),), (Shard(2),))
    patterns, (_, active, _) = tied(
        4,
        shapes,
        (("x", "w"), ("qkv",), [FEATURES]),
        (("qkv",), ("active",), [gelu]),
        (("active",), tuple("qkv"), [chunk]),
    )
    assert patterns.concrete(active, gelu) == Option((Shard(2, repeats=3),), (Shard(2, repeats=3),))


GROUPED: Shapes = {
    "wq": (512, 512),
    "wk": (128, 512),
    "x": (2, 16, 512),
    "q": (2, 16, 512),
    "k": (2, 16, 128),
    "q_heads": (2, 16, 8, 64),
    "k_heads": (2, 16, 2, 64),
    "k_all": (2, 16, 8, 64),
    "scores": (2, 8, 16, 16),
}
REPEAT = Option((Shard(2),), (Shard(2, unit=4),))  # each key head serves four query heads
SCORES = Option((Shard(2), Shard(2)), (Shard(1),))


def _grouped(num_ranks: int) -> tuple[Patterns, list[Slots]]:
    return tied(
        num_ranks,
        GROUPED,
        (("x", "wq"), ("q",), [FEATURES]),
        (("x", "wk"), ("k",), [FEATURES]),
        (("q",), ("q_heads",), [HEADS]),
        (("k",), ("k_heads",), [HEADS]),
        (("k_heads",), ("k_all",), [REPEAT]),
        (("q_heads", "k_all"), ("scores",), [SCORES]),
    )


def test_query_heads_are_cut_even_if_there_are_fewer_key_heads_than_ranks() -> None:
    """2 key heads on 4 ranks: the option that would tie the 8 query heads to them is dropped, not the cut in 4."""
    patterns, (linear_q, _, view_q, _, repeat, scores) = _grouped(4)
    assert patterns.concrete(linear_q, FEATURES) == Option((WHOLE, Shard(0, unit=64)), (Shard(2, unit=64),))
    assert patterns.concrete(view_q, HEADS) is not None
    assert patterns.concrete(scores, SCORES) == SCORES
    assert patterns.concrete(repeat, REPEAT) is None


def test_query_heads_are_cut_in_the_groups_of_their_key_heads_where_these_are_enough() -> None:
    """Else a rank would have queries whose keys are on another one."""
    patterns, (linear_q, linear_k, _, _, repeat, scores) = _grouped(2)
    assert patterns.concrete(linear_k, FEATURES) == Option((WHOLE, Shard(0, unit=64)), (Shard(2, unit=64),))
    assert patterns.concrete(linear_q, FEATURES) == Option((WHOLE, Shard(0, unit=256)), (Shard(2, unit=256),))
    assert patterns.concrete(repeat, REPEAT) == REPEAT
    assert patterns.concrete(scores, SCORES) == Option((Shard(2, unit=4), Shard(2, unit=4)), (Shard(1, unit=4),))


def test_what_costs_no_atoms_is_joined_first() -> None:
    """The sum of two values of 12 rows stands last; views in 4 and in 6 stretches, before it, cannot both be had."""
    shapes = {"a": (12,), "b": (4, 3), "c": (12,), "d": (6, 2), "sum": (12,)}
    fours, sixes = Option((Shard(0, unit=3),), (Shard(0),)), Option((Shard(0, unit=2),), (Shard(0),))
    rows = Option((Shard(0), Shard(0)), (Shard(0),))
    patterns, (first, second, last) = tied(
        4, shapes, (("a",), ("b",), [fours]), (("c",), ("d",), [sixes]), (("a", "c"), ("sum",), [rows])
    )
    assert patterns.concrete(last, rows) == Option((Shard(0, unit=3),) * 2, (Shard(0, unit=3),))
    assert patterns.concrete(first, fours) == fours
    assert patterns.concrete(second, sixes) is None


def test_an_option_that_would_tear_a_unit_is_dropped() -> None:
    """Heads of 64 and rows of 48: only units of 192 suit both, and 12 ranks cannot share 4 of them. The first stays."""
    shapes = {**BERT, "odd": (2, 8, 16, 48)}
    odd = Option((Shard(2, unit=48),), (Shard(2),))
    patterns, (view, other) = tied(12, shapes, (("y",), ("heads",), [HEADS]), (("y",), ("odd",), [odd]))
    assert patterns.concrete(view, HEADS) is not None
    assert patterns.concrete(other, odd) is None


def test_two_dimensions_of_a_class_are_not_cut_in_two_ways_at_once() -> None:
    """A square matrix that is multiplied with itself: rows and columns are one class, so no option cuts both."""
    shapes = {"a": (6, 6), "b": (6, 6)}
    transpose = Option((Shard(0),), (Shard(1),))
    both = Option((Shard(0),), (Shard(1, repeats=2),))
    patterns, (first, second) = tied(2, shapes, (("a",), ("b",), [transpose]), (("a",), ("b",), [both]))
    assert patterns.concrete(first, transpose) == transpose
    assert patterns.concrete(second, both) is None


def test_an_option_of_dimensions_that_nothing_cuts_is_not_offered() -> None:
    patterns, (linear,) = tied(2, BERT, (("x", "w"), ("y",), [FEATURES]))
    assert patterns.concrete(linear, INSIDE) is None
    assert list(patterns.shards_of("x", BERT["x"])) == []


def test_a_given_placement_stays_as_it_is() -> None:
    """A weight that a plan has cut in single rows is not cut in heads for the sake of another batch."""
    calls = ((("x", "w"), ("y",), [FEATURES]), (("y",), ("heads",), [HEADS]))
    free, _ = tied(2, BERT, *calls)
    assert free.shard("w", 0, BERT["w"]) == Shard(0, unit=64)
    patterns, (linear, view) = tied(2, BERT, *calls, fixed={"w": Shard(0)})
    assert patterns.shard("w", 0, BERT["w"]) == Shard(0)
    assert patterns.concrete(linear, FEATURES) == FEATURES
    assert patterns.concrete(view, HEADS) is None


def test_a_given_placement_in_units_is_followed_by_what_hangs_on_it() -> None:
    patterns, (linear,) = tied(2, BERT, (("x", "w"), ("y",), [FEATURES]), fixed={"w": Shard(0, unit=128)})
    assert patterns.concrete(linear, FEATURES) == Option((WHOLE, Shard(0, unit=128)), (Shard(2, unit=128),))
