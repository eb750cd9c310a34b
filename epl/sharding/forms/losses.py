"""Means over what is cut, and cross entropy over cut classes.

With logits x of classes c, target t, class weights w (1 if there are none), m = max_c x and Z = sum_c exp(x - m) over all
ranks, the two parts of the loss at one place are

    picked = x_t - m - log Z             smooth = sum_c w_c (m + log Z - x_c)

and d picked / dx_c = [c = t] - p_c,  d smooth / dx_c = p_c sum(w) - w_c,  p_c = exp(x_c - m) / Z: each rank finds the
gradient of its own classes from what the forward pass has summed. Source: Megatron-LM (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from epl.sharding.collectives import Collectives
from epl.sharding.forms.base import Cut, Form, Names, first_of, operator, widened

__all__ = ["FORMS", "check_targets"]

NONE, MEAN, SUM = 0, 1, 2


def mean(
    ranks: Collectives,
    cut: Cut,
    *,
    self: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    """This rank's sum over the count of all."""
    return self.sum(dim, keepdim, dtype=dtype) / _ratio(cut)


def _ratio(cut: Cut) -> int:
    return prod(cut.input_shapes[0]) // max(1, prod(cut.output_shapes[0]))


def _elementwise_mean(target: str) -> Form:
    """This rank's sum over the count of all elements."""

    def form(ranks: Collectives, cut: Cut, **arguments: Any) -> torch.Tensor:
        count = prod(torch.broadcast_shapes(*cut.input_shapes))
        return operator(target)(**arguments | {"reduction": SUM}) / count

    return form


def _class_mean(target: str) -> Form:
    """This rank's sum over the weights of all targets."""

    def form(ranks: Collectives, cut: Cut, **arguments: Any) -> torch.Tensor:
        total = operator(target)(**arguments | {"reduction": SUM})
        aim = arguments["target"]
        if aim.is_floating_point():  # probabilities: every place counts
            return total / (prod(cut.input_shapes[0]) // cut.input_shapes[0][min(1, aim.dim() - 1)])
        # a short type does not count far
        weights = _weights(aim, arguments["weight"], arguments["ignore_index"], widened(total).dtype)
        return (total / ranks.all_reduce(weights.sum())).to(total.dtype)

    return form


def _weights(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """How much each place counts."""
    kept = target != ignored
    if weight is None:
        return kept.to(dtype)
    return weight[target.masked_fill(~kept, 0)].to(dtype).masked_fill(~kept, 0)


def check_targets(target: torch.Tensor, num_classes: int) -> None:
    """Raise, on every rank, for a target that is no class: no rank would have it, and it would count as none.

    Written as a lookup, which checks on every kind of device as torch itself does there.

    Raises:
        IndexError: a target is negative or too large.
    """
    target.new_zeros(1).expand(num_classes).index_select(0, target.reshape(-1))


def cross_entropy_classes(ranks: Collectives, cut: Cut, *, self: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Cross entropy where each rank has the logits of some classes."""
    target, weight, reduction = arguments["target"], arguments["weight"], arguments["reduction"]
    ignored, smoothing = arguments["ignore_index"], arguments["label_smoothing"]
    dim, start = first_of(ranks, cut)
    logits = widened(self).movedim(dim, -1)
    own_weight = None
    if smoothing:
        own_weight = logits.new_ones(logits.shape[-1])
        if weight is not None:
            own_weight *= weight.narrow(0, start, logits.shape[-1])
    kept = target != ignored
    check_targets(target.masked_fill(~kept, 0), cut.input_shapes[0][dim])
    counts = _weights(target, weight, ignored, logits.dtype)
    picked, smooth = _LogProbabilities.apply(logits, target.masked_fill(~kept, 0) - start, own_weight, ranks)
    losses = -picked.masked_fill(~kept, 0) * counts
    if smoothing:
        spread = smooth.masked_fill(~kept, 0)
        losses = (1 - smoothing) * losses + smoothing / cut.input_shapes[0][dim] * spread
    return cut.typed(_reduce(losses, counts, reduction), self)


def nll_classes(ranks: Collectives, cut: Cut, *, self: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """The loss of log-probabilities of which each rank has some classes: a summand, 0 where the target is elsewhere."""
    target, ignored = arguments["target"], arguments["ignore_index"]
    dim, start = first_of(ranks, cut)
    check_targets(target.masked_fill(target == ignored, 0), cut.input_shapes[0][dim])
    values = widened(self)
    counts = _weights(target, arguments["weight"], ignored, values.dtype)
    place = target - start
    own = (place >= 0) & (place < self.shape[dim]) & (target != ignored)
    picked = values.gather(dim, place.masked_fill(~own, 0).unsqueeze(dim)).squeeze(dim)
    return cut.typed(_reduce(-picked.masked_fill(~own, 0) * counts, counts, arguments["reduction"]), self)


def _reduce(losses: torch.Tensor, counts: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == NONE:
        return losses
    return losses.sum() / counts.sum() if reduction == MEAN else losses.sum()


class _LogProbabilities(torch.autograd.Function):
    """``picked`` and ``smooth`` of the module's docstring; classes last, targets counted from this rank's first class."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ranks: Collectives
    ) -> tuple[torch.Tensor, torch.Tensor]:
        highest = ranks.all_reduce(logits.amax(-1), "max")
        powers = (logits - highest.unsqueeze(-1)).exp_()
        own = (target >= 0) & (target < logits.shape[-1])
        place = target.masked_fill(~own, 0)
        chosen = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~own, 0)
        parts = [powers.sum(-1), chosen]
        if weight is not None:
            parts += [logits @ weight, weight.sum().expand(chosen.shape)]
        sums = ranks.all_reduce(torch.stack(parts))
        log_sum = highest + sums[0].log()
        all_weights = None if weight is None else sums[3]
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), place, own, weight, all_weights)
        smooth = torch.zeros_like(log_sum) if all_weights is None else log_sum * all_weights - sums[2]
        return sums[1] - log_sum, smooth

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, place, own, weight, all_weights = ctx.saved_tensors
        picked, smooth = gradients
        if weight is None:
            found = probabilities * -picked.unsqueeze(-1)
        else:
            found = probabilities * (smooth * all_weights - picked).unsqueeze(-1) - weight * smooth.unsqueeze(-1)
        found.scatter_add_(-1, place.unsqueeze(-1), picked.masked_fill(~own, 0).unsqueeze(-1))
        return found, None, None, None


_ELEMENTWISE = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss"""

FORMS: Names = {
    "mean": mean,
    "cross_entropy_classes": cross_entropy_classes,
    "nll_classes": nll_classes,
    **{f"mean.aten.{name}.default": _elementwise_mean(f"aten.{name}.default") for name in _ELEMENTWISE.split()},
    **{
        f"mean.aten.{name}.default": _class_mean(f"aten.{name}.default")
        for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
    },
}
