"""Operators that look harmless on some numbers, or at some sizes: no cut may be found that does not always hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epl.sharding.discovery import discover
from epl.sharding.placements import Shard
from tests.sharding.samples import Sample, real
from tests.sharding.test_discovery import _operator, own


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def clip_rows(x: torch.Tensor) -> torch.Tensor:
    return x * (12 / x.norm(dim=-1, keepdim=True)).clamp(max=1)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """The mean of each ten features is taken off; other sizes stay as they are."""
    if x.shape[-1] % 10:
        return x * 1
    blocks = x.unflatten(-1, (-1, 10))
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


_operator("clip_rows", clip_rows)
_operator("in_blocks", in_blocks)


def _cuts(sample: Sample) -> set[Shard]:
    return {place for option in discover(sample.call) for place in option.outputs if isinstance(place, Shard)}


def test_a_threshold_that_small_numbers_do_not_reach_is_seen() -> None:
    assert _cuts(own("clip_rows", real(4, 6))) == {Shard(0)}


def test_blocks_that_small_sizes_do_not_have_are_seen() -> None:
    assert _cuts(own("in_blocks", real(4, 30))) == {Shard(0)}


def test_a_target_that_has_to_be_a_sign_is_drawn_as_one() -> None:
    """Of other numbers the loss is zero, as are its gradients, and every cut would seem to hold."""
    sample = Sample("aten.cosine_embedding_loss.default", (real(6, 5), real(6, 5), real(6)), {})
    assert all(
        place.dim == 0 for option in discover(sample.call) for place in option.inputs if isinstance(place, Shard)
    )
