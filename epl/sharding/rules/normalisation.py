"""Normalisation and softmax: what is normalised together stays together, except where ranks share their statistics."""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import PARTIAL, Call, Option, Rule
from epl.sharding.placements import Placement, Shard
from epl.sharding.rules.common import passed_on, table

__all__ = ["RULES"]

STATISTICS = ("weight", "bias", "running_mean", "running_var")  # one for each channel


def over_last(call: Call) -> Iterator[Option]:
    """``layer_norm`` and ``rms_norm``: the dimensions before those that are normalised."""
    for dim in range(call.rank("input") - len(call["normalized_shape"])):
        yield call.option({"input": Shard(dim)}, Shard(dim))


def batch_norm(call: Call) -> Iterator[Option]:
    """Channels; or anything else, with statistics over all ranks while training."""
    yield _channels(call, 1)
    for dim in range(call.rank("input")):
        if dim != 1:
            yield call.option({"input": Shard(dim)}, Shard(dim), form="batch_norm" if call["training"] else "")


def _channels(call: Call, unit: int, form: str = "") -> Option:
    names: dict[str, Placement] = {name: Shard(0, unit) for name in STATISTICS if call.has(name)}
    return call.option({"input": Shard(1, unit), **names}, Shard(1, unit), form=form)


def group_norm(call: Call) -> Iterator[Option]:
    """Samples, or groups of channels."""
    yield call.option({"input": Shard(0)}, Shard(0))
    unit = call.shape("input")[1] // call["num_groups"]
    yield _channels(call, unit, form="group_norm")


def instance_norm(call: Call) -> Iterator[Option]:
    """Channels, or samples where no statistics are kept of them."""
    yield _channels(call, 1)
    if not (call["use_input_stats"] and call.has("running_mean")):
        yield call.option({"input": Shard(0)}, Shard(0))


def softmax(call: Call) -> Iterator[Option]:
    """Other dimensions; or the one itself, with maximum and sum over all ranks."""
    dim = call.dim("dim")
    yield from passed_on(call, {other: other for other in range(call.rank("self")) if other != dim})
    if call.rank("self"):
        name = "log_softmax" if "log" in call.op.target else "softmax"
        yield call.option({"self": Shard(dim)}, Shard(dim), form=name)


def weight_norm(call: Call) -> Iterator[Option]:
    """Rows of directions and their lengths; or what is summed up in a length, over all ranks. Linear in lengths."""
    rank, lengths = call.rank("v"), call.shape("g")
    kept = -1 if call["dim"] == -1 else call["dim"] % rank  # -1: one length for all
    fits = len(lengths) in (0, rank) and all(size == 1 for dim, size in enumerate(lengths) if dim != kept)
    for dim in range(rank) if fits else ():
        if dim == kept:
            yield call.option({"v": Shard(dim), "g": Shard(dim)}, Shard(dim))
        else:
            yield call.option({"v": Shard(dim)}, Shard(dim), form="weight_norm")
    yield call.option({"g": PARTIAL}, PARTIAL)


RULES: dict[str, Rule] = {
    **table(over_last, "layer_norm rms_norm"),
    **table(batch_norm, "batch_norm"),
    **table(group_norm, "group_norm"),
    **table(instance_norm, "instance_norm"),
    **table(weight_norm, "_weight_norm"),
    **table(softmax, "softmax.int log_softmax.int _softmax _log_softmax"),
}
