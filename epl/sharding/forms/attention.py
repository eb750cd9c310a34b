"""Attention on some of the heads, samples or rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from epl.sharding.collectives import Collectives
from epl.sharding.forms.base import Cut, Names, first_of
from epl.sharding.placements import Replicated, take_shard

__all__ = ["FORMS"]

HEADS = -3


def attention(
    ranks: Collectives, cut: Cut, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """Attention with the keys that belong to this rank's queries; what it drops, one process would drop."""
    grouped = arguments["enable_gqa"]
    if grouped and _heads_are_cut(cut) and isinstance(cut.inputs[1], Replicated):
        heads = _heads_of_keys(ranks, cut, query)
        key, value, grouped = key.index_select(HEADS, heads), value.index_select(HEADS, heads), False
    mask, causal, scale = arguments["attn_mask"], arguments["is_causal"], arguments["scale"]
    dropped = arguments["dropout_p"]
    if not dropped:
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    if grouped:
        times = query.shape[HEADS] // key.shape[HEADS]
        key, value = key.repeat_interleave(times, HEADS), value.repeat_interleave(times, HEADS)
    shape = (*cut.output_shapes[0][:-1], key.shape[-2])
    noise = F.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), dropped)
    weights = _weights(query, key, _added(query, key, mask, causal), scale)
    return (weights * take_shard(noise, cut.inputs[0], ranks.size, ranks.rank)) @ value


def _heads_are_cut(cut: Cut) -> bool:
    return getattr(cut.inputs[0], "dim", None) == len(cut.input_shapes[0]) + HEADS


def _heads_of_keys(ranks: Collectives, cut: Cut, query: torch.Tensor) -> torch.Tensor:
    """For each of this rank's heads of queries, the head of keys that it shares with its neighbours."""
    dim, start = first_of(ranks, cut)
    group = cut.input_shapes[0][dim] // cut.input_shapes[1][dim]
    return torch.arange(start, start + query.shape[dim], device=query.device) // group


def _added(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """The mask as numbers to be added to the scores."""
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))


def _weights(query: torch.Tensor, key: torch.Tensor, added: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """Softmax of the scores; a row that may see nothing has weights of 0, as torch's has."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if added is None:
        return scores.softmax(-1)
    scores = scores + added
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


FORMS: Names = {"attention": attention}
