"""Order along a dimension: sorts, running sums, the largest. The other dimensions are cut freely."""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import WHOLE, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import dims_of, linear_in, passed_on, table

__all__ = ["RULES"]


def ordered(call: Call) -> Iterator[Option]:
    """The result has a place for each place of the argument, or as many as it asks for."""
    dim = call.dim("dim")
    yield from passed_on(call, {other: other for other in range(call.rank("self")) if other != dim})


def running_sum(call: Call) -> Iterator[Option]:
    yield from ordered(call)
    yield from linear_in(call, "self")


def difference(call: Call) -> Iterator[Option]:
    """``diff``: what is put before and after goes with the rest."""
    dim = call.dim("dim")
    names = [name for name in ("self", "prepend", "append") if call.has(name)]
    for other in range(call.rank("self")):
        if other != dim:
            yield call.option({name: Shard(other) for name in names}, Shard(other))
    yield from linear_in(call, *names)


def topk(call: Call) -> Iterator[Option]:
    """The largest of all are among the largest of each rank."""
    yield from ordered(call)
    if call.rank("self"):
        yield call.option({"self": Shard(call.dim("dim"))}, WHOLE, form="topk")


def best(call: Call) -> Iterator[Option]:
    """``max`` and ``argmax`` along a dimension, and their opposites: the best of the best."""
    if call["dim"] is None or not call.rank("self"):
        return
    dim, kept = call.dim("dim"), bool(call["keepdim"])
    others = {other: other - (other > dim and not kept) for other in range(call.rank("self")) if other != dim}
    yield from passed_on(call, others)
    yield call.option({"self": Shard(dim)}, WHOLE, form=f"best.{call.op.target}")


def turned(call: Call) -> Iterator[Option]:
    """``flip`` and ``roll``: the dimensions that are not turned."""
    gone = dims_of(call, "dims")  # all of them for a roll without dims
    yield from passed_on(call, {dim: dim for dim in range(call.rank("self")) if dim not in gone})
    yield from linear_in(call, "self")


def triangle(call: Call) -> Iterator[Option]:
    """``tril`` and ``triu``: matrices beside each other."""
    yield from passed_on(call, {dim: dim for dim in range(call.rank("self") - 2)})
    yield from linear_in(call, "self")


def halves(call: Call) -> Iterator[Option]:
    """``glu``: both halves are cut."""
    dim = call.dim("dim")
    yield from passed_on(call, {other: other for other in range(call.rank("self")) if other != dim})
    yield call.option({"self": Shard(dim, repeats=2)}, Shard(dim))


RULES: dict[str, Rule] = {
    **table(ordered, "sort sort.stable argsort argsort.stable cumprod logcumsumexp cummax cummin"),
    **table(running_sum, "cumsum cumsum_"),
    **table(difference, "diff"),
    **table(topk, "topk"),
    **table(best, "max.dim min.dim argmax argmin"),
    **table(turned, "flip roll"),
    **table(triangle, "tril triu tril_ triu_"),
    **table(halves, "glu"),
}
