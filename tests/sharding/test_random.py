"""What is drawn for a part is what one process draws there, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epl.sharding.placements import Shard, join_shards, take_shard
from epl.sharding.rules import options_of
from tests.sharding.checks import call_on_shards
from tests.sharding.samples import Sample, case, const
from tests.sharding.threads import SEED, run_ranks

DRAWS = (
    case("dropout", const(5, 7, 3), 0.3, True),
    case("dropout", const(5, 7).float(), 0.1, True),
    case("dropout_", const(5, 101), 0.5, True),
    case("native_dropout", const(5, 7), 0.3, True),
    case("feature_dropout", const(5, 7, 3, 2), 0.3, True),
    case("rand", [5, 101]),
    case("randn", [5, 101]),
    case("randint", 1000, [5, 7]),
    case("rand_like", const(5, 7)),
    case("randn_like", const(7, 5).t()),
    case("bernoulli", const(5, 7)),
    case("bernoulli.p", const(5, 7), 0.3),
    case("normal_", const(5, 101), 2.0, 3.0),
    case("uniform_", const(5, 7), -1.0, 1.0),
)
LAYOUTS = {
    "transposed": const(7, 5, 3).transpose(0, 1),
    "channels last": const(5, 4, 7, 6).contiguous(memory_format=torch.channels_last),
    "permuted": const(4, 5, 6).permute(2, 0, 1),
}


def _drawn(sample: Sample, seed: int) -> Any:
    torch.manual_seed(seed)
    given = [tensor.clone() for tensor in sample.tensors]
    made = sample.operator(**sample.arguments(given))
    return made[0] if isinstance(made, tuple) else made


def _agrees(sample: Sample) -> None:
    whole = _drawn(sample, SEED)
    options = [option for option in options_of(sample.call) if any(isinstance(out, Shard) for out in option.outputs)]
    assert options
    for option in options:
        for size in (2, 3):
            place = option.outputs[0]
            assert isinstance(place, Shard)
            if (place.num_units(whole.shape[place.dim]) or 0) < size:
                continue
            parts = run_ranks(size, lambda ranks, option=option: call_on_shards(sample, option, ranks))
            first = [part[0] if isinstance(part, tuple) else part for part in parts]
            assert torch.equal(join_shards(first, place), whole), str(place)


@pytest.mark.parametrize("sample", DRAWS, ids=str)
def test_ranks_together_draw_what_one_process_draws(sample: Sample):
    _agrees(sample)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_dropped_does_not_depend_on_the_cut_of_a_layout(layout: str):
    """torch draws in the order of memory: a part that is laid out in another way would lose other elements."""
    _agrees(case("dropout", LAYOUTS[layout], 0.4, True))


def test_ranks_drop_different_elements_of_equal_parts():
    """A form that drew for the part alone would drop the same places on all ranks."""
    sample = case("dropout", torch.ones(8, 50), 0.5, True)
    (option,) = (option for option in options_of(sample.call) if option.outputs == (Shard(0),))
    first, second = run_ranks(2, lambda ranks: call_on_shards(sample, option, ranks))
    assert not torch.equal(first, second)


def test_a_whole_value_needs_no_form():
    """On it every rank draws all numbers from an equal seed."""
    sample = case("dropout", const(8, 50), 0.5, True)
    assert not options_of(sample.call)[0].form


def test_dropped_attention_is_that_of_one_process():
    query, key = const(2, 6, 5, 4), const(2, 3, 7, 4)
    sample = case("scaled_dot_product_attention", query, key, key, None, 0.5, enable_gqa=True)
    whole = _drawn(sample, SEED)
    assert not torch.allclose(whole, _drawn(sample, SEED + 1))
    for option in options_of(sample.call)[1:]:
        parts = run_ranks(2, lambda ranks, option=option: call_on_shards(sample, option, ranks))
        torch.testing.assert_close(join_shards(parts, option.outputs[0]), whole, rtol=1e-9, atol=1e-9)


def test_shards_of_a_sample_are_its_parts():
    sample = case("neg", const(5, 7))
    (option,) = (option for option in options_of(sample.call) if option.outputs == (Shard(1),))
    parts = run_ranks(3, lambda ranks: call_on_shards(sample, option, ranks))
    assert torch.equal(parts[2], -take_shard(sample.tensors[0], Shard(1), 3, 2))
