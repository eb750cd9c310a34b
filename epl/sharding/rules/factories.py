"""New tensors: they come out cut for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import broadcast_cuts, table

__all__ = ["RULES"]


def filled(call: Call) -> Iterator[Option]:
    """``zeros``, ``full``: any part of it is made like the whole."""
    for dim in range(len(call.results[0].shape)):
        yield call.option({}, Shard(dim), sizes="size")


def like(call: Call) -> Iterator[Option]:
    """``zeros_like``: cut as the other is; what the other holds does not matter."""
    yield from broadcast_cuts(call, ["self"])
    yield call.option({"self": PARTIAL}, WHOLE)


def new(call: Call) -> Iterator[Option]:
    """``new_zeros``: the other tensor only lends its type."""
    yield from filled(call)
    yield call.option({"self": PARTIAL}, WHOLE)
    made = call.results[0].sizes
    for source, size in enumerate(call.shape("self")):
        yield call.option({"self": Shard(source)}, WHOLE)
        for dim in range(len(made)):
            if made[dim] == size:
                yield call.option({"self": Shard(source)}, Shard(dim), sizes="size")


RULES: dict[str, Rule] = {
    **table(filled, "zeros ones full empty.memory_format"),
    **table(like, "zeros_like ones_like full_like empty_like"),
    **table(new, "new_zeros new_ones new_full new_empty"),
}
# No rule: arange, eye, linspace and scalar_tensor. They are made whole, and taking a part of what is whole is free.
