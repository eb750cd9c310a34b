"""Attention: batch and heads; queries of grouped heads with the keys that they share; rows of queries.

Source: Megatron-LM (Shoeybi et al. 2019) for heads; grouped-query attention as in Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import WHOLE, Call, Option, Rule
from epl.sharding.placements import Placement, Shard
from epl.sharding.rules.common import table

__all__ = ["RULES"]


def attention(call: Call) -> Iterator[Option]:
    """``query[..., h, l, e]``, ``key[..., h, s, e]``, ``value[..., h, s, v]``, ``attn_mask`` fits ``[..., h, l, s]``."""
    rank = call.rank("query")
    if call.rank("key") != rank or call.rank("value") != rank:
        return
    form = "attention" if call["dropout_p"] else ""  # drawn for all heads
    group = _group(call)
    for dim in range(rank - 2):
        size = call.shape("query")[dim]
        if dim == rank - 3 and group > 1:
            yield from _grouped_heads(call, dim, group, form)
        elif call.shape("key")[dim] == call.shape("value")[dim] == size:
            names = {name: Shard(dim) for name in ("query", "key", "value")}
            yield call.option({**names, "attn_mask": _mask(call, Shard(dim))}, Shard(dim), form=form)
    if not call["is_causal"]:  # which keys a row sees depends on its place
        rows = Shard(rank - 2)
        yield call.option({"query": rows, "attn_mask": _mask(call, rows)}, rows, form=form)


def _group(call: Call) -> int:
    """Heads of queries for each head of keys."""
    heads = call.rank("query") - 3
    return call.shape("query")[heads] // max(1, call.shape("key")[heads]) if call["enable_gqa"] and heads >= 0 else 1


def _grouped_heads(call: Call, dim: int, group: int, form: str) -> Iterator[Option]:
    units = Shard(dim, unit=group)
    names: dict[str, Placement] = {"query": units, "key": Shard(dim), "value": Shard(dim)}
    yield call.option({**names, "attn_mask": _mask(call, units)}, units, form=form)
    single = Shard(dim)  # fewer heads of keys than ranks: each rank keeps them all and uses those of its queries
    yield call.option({"query": single, "attn_mask": _mask(call, single)}, single, form="attention")


def _mask(call: Call, cut: Shard) -> Placement:
    """How a mask goes with queries that are cut so."""
    if not call.has("attn_mask"):
        return WHOLE
    shape = call.shape("attn_mask")
    own = cut.dim - (call.rank("query") - len(shape))
    return Shard(own, cut.unit) if own >= 0 and shape[own] != 1 else WHOLE


RULES: dict[str, Rule] = table(attention, "scaled_dot_product_attention")
