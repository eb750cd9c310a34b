"""Losses: a cut batch gives summands of the sum or the mean; cut classes need neither logits nor probabilities moved.

Source for cut classes: the vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Placement, Shard
from epl.sharding.rules.common import cut_with, table

__all__ = ["RULES"]

NONE, MEAN, SUM = 0, 1, 2  # how ATen writes a reduction


def _reduced(call: Call, used: Mapping[str, Placement | list[Placement]], kept: Shard) -> Option:
    """What a loss is if its elements are cut: a part of them, or a summand of their sum or mean."""
    reduction = call["reduction"]
    form = f"mean.{call.op.target}" if reduction == MEAN else ""
    return call.option(used, kept if reduction == NONE else PARTIAL, form=form)


def elementwise(call: Call) -> Iterator[Option]:
    """One loss for each element."""
    rank = max(len(kind.shape) for name, _ in call.refs for kind in call.types(name))
    for dim in range(rank):
        yield _reduced(call, cut_with(call, dim, rank), Shard(dim))


def classes(call: Call) -> Iterator[Option]:
    """``cross_entropy_loss`` and ``nll_loss``: samples; places in an image; classes."""
    rank, target = call.rank("self"), call.rank("target")
    channel = 1 if rank > 1 else 0
    has_probabilities = target == rank and call.type("target").is_differentiable
    for dim in range(rank):
        if dim != channel:
            kept = dim - (dim > channel)
            used = {"self": Shard(dim), "target": Shard(dim if has_probabilities else kept)}
            yield _reduced(call, used, Shard(kept))
    if "nll" in call.op.target:
        yield call.option({"self": Shard(channel)}, PARTIAL, form="nll_classes")
    elif not has_probabilities:
        yield call.option({"self": Shard(channel)}, WHOLE, form="cross_entropy_classes")


RULES: dict[str, Rule] = {
    **table(classes, "cross_entropy_loss nll_loss nll_loss_nd"),
    **table(
        elementwise,
        """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
        soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss""",
    ),
}
# No rule: ctc_loss and losses over pairs or triples of rows, which models rarely train with.
