"""Reductions: the dimensions that stay are cut freely; sums over a cut dimension come out as summands."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import cut_with, dims_of, linear_in, passed_on, table

__all__ = ["RULES"]


def _kept(call: Call) -> dict[int, int]:
    """Where the dimensions that are not reduced come out."""
    gone, rank = dims_of(call), call.rank("self")
    kept = [dim for dim in range(rank) if dim not in gone]
    return {dim: dim if call["keepdim"] else place for place, dim in enumerate(kept)}


def reducing(call: Call) -> Iterator[Option]:
    """Any reduction, over whole dimensions."""
    yield from passed_on(call, _kept(call))


def summing(call: Call) -> Iterator[Option]:
    """``sum``: the sum of sums."""
    yield from reducing(call)
    yield from linear_in(call, "self")
    for dim in dims_of(call):
        yield call.option({"self": Shard(dim)}, PARTIAL)


def counting(call: Call) -> Iterator[Option]:
    """``count_nonzero``: the sum of counts, but not linear."""
    yield from reducing(call)
    for dim in dims_of(call):
        yield call.option({"self": Shard(dim)}, PARTIAL)


def averaging(call: Call) -> Iterator[Option]:
    """``mean``: the sum of sums, each divided by the count of all."""
    yield from reducing(call)
    yield from linear_in(call, "self")
    for dim in dims_of(call):
        yield call.option({"self": Shard(dim)}, PARTIAL, form="mean")


def extreme(call: Call) -> Iterator[Option]:
    """``amax`` and ``amin``, and ``max`` and ``min`` of everything: ranks compare their own."""
    yield from reducing(call)
    for dim in dims_of(call) if call.type("self").dtype != torch.bool else ():
        yield call.option({"self": Shard(dim)}, WHOLE, form=f"extreme.{call.op.target}")


def log_sum(call: Call) -> Iterator[Option]:
    """``logsumexp``: ranks add up their own exponentials."""
    yield from reducing(call)
    for dim in dims_of(call):
        yield call.option({"self": Shard(dim)}, WHOLE, form="logsumexp")


def histogram(call: Call) -> Iterator[Option]:
    """``histc``: counts add up where the bins do not depend on the values."""
    if call["min"] != call["max"]:
        for dim in range(call.rank("self")):
            yield call.option({"self": Shard(dim)}, PARTIAL)


def similarity(call: Call) -> Iterator[Option]:
    """``cosine_similarity``: of rows along one dimension, broadcast against each other."""
    rank = max(call.rank("x1"), call.rank("x2"))
    gone = call["dim"] % rank
    for dim in range(rank):
        if dim != gone:
            used = cut_with(call, dim, rank)
            yield call.option(used, Shard(dim - (dim > gone)))


def row_distance(call: Call) -> Iterator[Option]:
    """``pairwise_distance``: of the last dimension."""
    rank = max(call.rank("x1"), call.rank("x2"))
    for dim in range(rank - 1):
        yield call.option(cut_with(call, dim, rank), Shard(dim))


RULES: dict[str, Rule] = {
    **table(summing, "sum sum.dim_IntList"),
    **table(counting, "count_nonzero count_nonzero.dim_IntList"),
    **table(averaging, "mean mean.dim"),
    **table(extreme, "amax amin max min"),
    **table(log_sum, "logsumexp"),
    **table(histogram, "histc"),
    **table(similarity, "cosine_similarity"),
    **table(row_distance, "pairwise_distance"),
    # products, norms and variances over a cut dimension would each need a form of their own; sums are what models cut
    **table(
        reducing,
        """prod.dim_int all.dim all.dims any.dim any.dims var.dim var.correction std.dim std.correction var_mean.correction
        norm.ScalarOpt_dim linalg_vector_norm nansum median.dim""",
    ),
}
