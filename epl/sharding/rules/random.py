"""Random operators: a part holds the numbers that one process would have drawn there.

Ranks seed their generators equally before each random operator, so whole values need nothing. For cut ones a form draws
for the whole shape and keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import broadcast_cuts, linear_in, table

__all__ = ["RULES"]


def dropout(call: Call) -> Iterator[Option]:
    """Elements; a whole mask, equal on all ranks, is linear."""
    name = "self" if call.has("self") else "input"
    yield from broadcast_cuts(call, form="" if call["train"] is False or not call["p"] else "dropout")
    if len(call.results) == 1:
        yield from linear_in(call, name)


def feature_dropout(call: Call) -> Iterator[Option]:
    """Whole channels of samples."""
    yield from broadcast_cuts(call, form="feature_dropout" if call["train"] and call["p"] else "")
    yield from linear_in(call, "input")


def drawn(call: Call) -> Iterator[Option]:
    """New tensors of random numbers."""
    for dim in range(len(call.results[0].shape)):
        yield call.option({}, Shard(dim), form=f"drawn.{call.op.target}")


def drawn_like(call: Call) -> Iterator[Option]:
    """Random numbers in the shape of another tensor, which they may replace."""
    yield from broadcast_cuts(call, ["self"], form=f"drawn.{call.op.target}")
    if not call.op.target.split(".")[1].endswith("_"):
        yield call.option({"self": PARTIAL}, WHOLE)


def bernoulli(call: Call) -> Iterator[Option]:
    """A draw for each element, with its own probability."""
    yield from broadcast_cuts(call, form="bernoulli")


RULES: dict[str, Rule] = {
    **table(dropout, "dropout dropout_ native_dropout"),
    **table(feature_dropout, "feature_dropout"),
    **table(drawn, "rand randn randint randint.low"),
    **table(drawn_like, "rand_like randn_like randint_like bernoulli.p bernoulli_.float uniform_ normal_ exponential_"),
    **table(bernoulli, "bernoulli"),
}
# No rule: multinomial and randperm, whose numbers depend on each other, and alpha_dropout.
