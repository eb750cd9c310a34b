"""Cross entropy of a linear layer, a few rows of logits at a time: neither they nor their gradient are ever there whole.

With logits z = f(x W' + b) of classes c, target t, class weights w (1 if there are none), m = max_c z and
Z = sum_c exp(z - m), label smoothing e and C classes, the loss of a row is

    (1 - e) w_t (log Z + m - z_t) + e / C sum_c w_c (log Z + m - z_c)

and its gradient with respect to z_c is  a p_c - (1 - e) w_t [c = t] - e / C w_c,  p_c = exp(z_c - m) / Z,
a = (1 - e) w_t + e / C sum_c w_c.  A chunk of logits becomes its own gradient in place, and that goes into the gradients
of x, W and b at once. Where ranks have a part of the classes each, m, Z, z_t and sum_c w_c z_c come from all of them.

Gradients are made in the forward pass, for an upstream gradient of 1, and scaled in the backward pass; or, where many
micro-batches would hold one of the weight's size each, in the backward pass from logits that are computed again.

Sources: FusedLinearCrossEntropy of Liger-Kernel (Hsu et al. 2024, section 3.2); for cut classes Megatron-LM (Shoeybi et
al. 2019, section 3); for short types, sums over chunks are kept in float32, as a matrix product keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from epl.errors import RunError
from epl.sharding.collectives import Collectives, LonelyRank
from epl.sharding.forms import Cut
from epl.sharding.forms.base import first_of, widened
from epl.sharding.forms.losses import check_targets

__all__ = ["MEAN", "NONE", "SHORT", "SUM", "ChunkedLoss", "Map"]

NONE, MEAN, SUM = 0, 1, 2  # how ATen writes a reduction
SHORT = (torch.float16, torch.bfloat16)


class Map(NamedTuple):
    """What happens to each logit: ``to`` a type, ``times`` a number, or ``tanh``; ``dtype`` is the result's."""

    kind: str
    dtype: torch.dtype
    number: float = 1.0


@dataclass(frozen=True)
class ChunkedLoss:
    """The function ``(x, weight, bias, target, class_weight) -> loss``; x is (rows, features), target is (rows,).

    Args:
        rows: Rows of logits in a chunk.
        dtype: Type that the linear layer computes in.
        maps: What happens to logits before the loss, in order.
        result: Type of the loss.
        reduction: ``NONE``, ``MEAN`` or ``SUM``.
        ignored: The target that does not count.
        smoothing: Label smoothing.
        num_classes: Of all ranks.
        is_flipped: True if the weight is (features, classes), as in ``x @ weight``.
        in_forward: True if gradients are made in the forward pass.
        is_part: True if other ranks have other rows of the same mean.
        cut: How the logits are cut over classes, if they are.
        argmax_after: Give the largest class of each row too, of the logits after so many maps; None: do not.
    """

    rows: int
    dtype: torch.dtype
    maps: tuple[Map, ...]
    result: torch.dtype
    reduction: int
    ignored: int
    smoothing: float
    num_classes: int
    is_flipped: bool = False
    in_forward: bool = False
    is_part: bool = False
    cut: Cut | None = None
    argmax_after: int | None = None

    def bind(self, ranks: Collectives) -> Callable[..., Any]:
        """The function that a stage calls."""
        return partial(_run, self, ranks)


def _run(loss: ChunkedLoss, ranks: Collectives, *tensors: Tensor | None) -> Any:
    # inside an autograd function gradients are off, so whether they are wanted is asked here
    value, best = _Chunked.apply(loss, ranks, torch.is_grad_enabled(), *tensors)
    return value if loss.argmax_after is None else (value, best)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, ranks: Collectives, wanted: bool, *tensors: Any) -> tuple[Any, Any]:
        needs = tuple(wanted and need for need in ctx.needs_input_grad[3:6])
        ctx.loss, ctx.ranks, ctx.needs = loss, ranks, needs
        ctx.set_materialize_grads(False)
        with torch.autocast(tensors[0].device.type, enabled=False):  # types are as the graph has them
            call = _Call(loss, ranks, tensors)
            sums = _Gradients(call, needs if loss.in_forward else (False,) * 3)
            for chunk in call.chunks():
                chunk.measure()
                if any(sums.needs):
                    sums.add(chunk, call.share[chunk.rows])
        if loss.in_forward:
            ctx.save_for_backward(*sums.found(), call.kept.any())
        elif any(needs):
            ctx.save_for_backward(*tensors, call.highest, call.powers, call.count)
        if call.best is not None:
            ctx.mark_non_differentiable(call.best)
        return call.loss_value(), call.best

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: the gradient would be taken for a constant
            raise RunError("a loss in chunks has no second derivative; set loss.chunked to off for this model")
        given = upstream[0]
        if given is None or not any(ctx.needs):
            return (None,) * 8
        if ctx.loss.in_forward:
            *gradients, is_any = ctx.saved_tensors
            # where no row counts there is no gradient, even if the loss, and what comes back, is not a number
            given = given.masked_fill(~is_any, 0)
            # in place: a second gradient of the weight's size is what this is to avoid
            found = [None if gradient is None else gradient.mul_(given) for gradient in gradients]
        else:
            *tensors, highest, powers, count = ctx.saved_tensors
            with torch.autocast(given.device.type, enabled=False):
                call = _Call(ctx.loss, ctx.ranks, tensors, count)
                share = (call.share * given.to(call.share.dtype)).masked_fill(~call.kept, 0)
                sums = _Gradients(call, ctx.needs)
                for chunk in call.chunks():
                    chunk.measured(highest[chunk.rows], powers[chunk.rows])
                    sums.add(chunk, share[chunk.rows])
                found = sums.found()
        return (None, None, None, *found, None, None)


class _Call:
    """The tensors of one call, and what is known of each row."""

    def __init__(self, loss: ChunkedLoss, ranks: Collectives, tensors: Sequence[Any], count: Tensor | None = None):
        self.loss, self.ranks = loss, ranks
        self.holders = LonelyRank() if loss.cut is None else ranks  # of the classes
        self.x, weight, bias, self.target, class_weight = tensors
        self.weight = weight.to(loss.dtype)
        self.bias = None if bias is None else bias.to(loss.dtype)
        self.kinds = (self.x.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.matrix = self.weight.t() if loss.is_flipped else self.weight  # (classes, features)
        wide = loss.maps[-1].dtype if loss.maps else loss.dtype
        wide = torch.float32 if wide in SHORT else wide
        start = first_of(ranks, loss.cut)[1] if loss.cut is not None else 0
        self.kept = self.target != loss.ignored
        target = self.target.masked_fill(~self.kept, 0)
        check_targets(target, loss.num_classes)
        self.counts = self.kept.to(wide)
        if class_weight is not None:
            class_weight = class_weight.to(wide)
            self.counts = class_weight[target].masked_fill(~self.kept, 0)
        self.place = target - start
        self.own: Tensor | None = None  # rows whose target is among this rank's classes
        if loss.cut is not None:
            own = (self.place >= 0) & (self.place < self.matrix.shape[0])
            self.own, self.place = own, self.place.masked_fill(~own, 0)
        # weights of this rank's classes, and their sum over all
        self.spread = self.x.new_ones(self.matrix.shape[0], dtype=wide) if loss.smoothing else None
        self.all_spread: Any = loss.num_classes
        if class_weight is not None and loss.smoothing:
            self.spread, self.all_spread = class_weight.narrow(0, start, self.matrix.shape[0]), class_weight.sum()
        self.count = self._count() if count is None else count
        share = self.kept.to(wide)
        # rows that do not count have no gradient, even if none counts and the loss is not a number
        self.share = (share / self.count).masked_fill(~self.kept, 0) if loss.reduction == MEAN else share
        rows = self.target.shape[0]
        self.losses, self.highest, self.powers = (self.counts.new_empty(rows) for _ in range(3))
        self.best = None if loss.argmax_after is None else self.target.new_empty(rows, dtype=torch.int64)

    def _count(self) -> Tensor:
        count = self.counts.sum()
        return self.ranks.all_reduce(count) if self.loss.is_part and self.loss.reduction == MEAN else count

    def chunks(self) -> Iterator[_Chunk]:
        """The chunks, in order; each has its logits."""
        rows = self.target.shape[0]
        for start in range(0, rows, self.loss.rows):
            yield _Chunk(self, slice(start, min(start + self.loss.rows, rows)))

    def loss_value(self) -> Tensor:
        """The loss, after all chunks."""
        if self.loss.reduction == NONE:
            return self.losses.to(self.loss.result)
        total = self.losses.sum()
        return (total / self.count if self.loss.reduction == MEAN else total).to(self.loss.result)


class _Chunk:
    """Some rows: logits, then the powers ``exp(z - m)``, then the gradient of the logits, in the same memory."""

    def __init__(self, call: _Call, rows: slice) -> None:
        self.call, self.rows = call, rows
        self.x = call.x[rows].to(call.loss.dtype)
        values = F.linear(self.x, call.matrix, call.bias)
        self._kept: list[Any] = []  # for each map: the type before it, or its result
        for number, step in enumerate(call.loss.maps):
            self._note_best(number, values)
            before = values.dtype
            if step.kind == "to":
                values = values.to(step.dtype)
            else:
                values = (values * step.number if step.kind == "times" else values.tanh()).to(step.dtype)
            self._kept.append(values if step.kind == "tanh" else before)
        self._note_best(len(call.loss.maps), values)
        self._dtype = values.dtype
        values = widened(values)
        is_needed = bool(self._kept) and values is self._kept[-1]
        self.values = values.clone() if is_needed else values

    def _note_best(self, number: int, values: Tensor) -> None:
        if number == self.call.loss.argmax_after and self.call.best is not None:
            self.call.best[self.rows] = values.argmax(-1)

    def measure(self) -> None:
        """Find the rows' losses; logits become powers."""
        call, rows, ranks = self.call, self.rows, self.call.holders
        smoothing = call.loss.smoothing
        highest = ranks.all_reduce(self.values.amax(-1), "max")
        self.values.sub_(highest.unsqueeze(-1))
        picked = self.values.gather(-1, call.place[rows].unsqueeze(-1)).squeeze(-1)
        parts = [picked if call.own is None else picked.masked_fill(~call.own[rows], 0)]
        if smoothing:
            assert call.spread is not None
            parts.append(self.values @ call.spread)
        parts.append(self.values.exp_().sum(-1))
        parts = ranks.all_reduce(torch.stack(parts))
        log_sum = parts[-1].log()
        losses = call.counts[rows] * (log_sum - parts[0])
        if smoothing:
            smooth = call.all_spread * log_sum - parts[1]
            losses = (1 - smoothing) * losses + smoothing / call.loss.num_classes * smooth
        call.losses[rows] = losses.masked_fill(~call.kept[rows], 0)
        call.highest[rows], call.powers[rows] = highest, parts[-1]

    def measured(self, highest: Tensor, powers: Tensor) -> None:
        """The same with what is known from the forward pass: ranks need not meet again."""
        self.values.sub_(highest.unsqueeze(-1)).exp_()
        self.call.powers[self.rows] = powers

    def gradient(self, share: Tensor) -> Tensor:
        """Powers become the gradient of what the linear layer has given, for rows that count so much."""
        call, rows, smoothing = self.call, self.rows, self.call.loss.smoothing
        picked = share * call.counts[rows] * (1 - smoothing)
        smooth = share * (smoothing / call.loss.num_classes)
        found = self.values.mul_(((picked + smooth * call.all_spread) / call.powers[rows]).unsqueeze(-1))
        if smoothing:
            assert call.spread is not None
            found.addr_(smooth, call.spread, alpha=-1)
        if call.own is not None:
            picked = picked.masked_fill(~call.own[rows], 0)
        found.scatter_add_(-1, call.place[rows].unsqueeze(-1), -picked.unsqueeze(-1))
        found = found.to(self._dtype)
        for step in reversed(call.loss.maps):
            kept = self._kept.pop()
            if step.kind == "tanh":
                found = torch.ops.aten.tanh_backward.default(found, kept)
            elif step.kind == "times":
                found = found.mul_(step.number).to(kept)
            else:
                found = found.to(kept)
        return found


class _Gradients:
    """Sums over chunks; None where no gradient is needed."""

    def __init__(self, call: _Call, needs: Sequence[bool]) -> None:
        self.call, self.needs = call, needs
        need_x, need_weight, need_bias = needs
        long = torch.float32 if call.loss.dtype in SHORT else call.loss.dtype
        self.x = torch.empty_like(call.x) if need_x else None
        self.weight = call.weight.new_zeros(call.weight.shape, dtype=long) if need_weight else None
        self.bias = call.bias.new_zeros(call.bias.shape, dtype=long) if need_bias and call.bias is not None else None

    def add(self, chunk: _Chunk, share: Tensor) -> None:
        """Add a chunk's part."""
        gradient = chunk.gradient(share)
        if self.x is not None:
            self.x[chunk.rows] = gradient @ self.call.matrix
        if self.weight is not None:
            left, right = (chunk.x.t(), gradient) if self.call.loss.is_flipped else (gradient.t(), chunk.x)
            if self.weight.dtype == gradient.dtype:
                self.weight.addmm_(left, right)
            else:
                self.weight.add_(left @ right)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))

    def found(self) -> list[Tensor | None]:
        """The gradients, each in its tensor's type."""
        given = zip((self.x, self.weight, self.bias), self.call.kinds, strict=True)
        return [None if gradient is None else gradient.to(kind) for gradient, kind in given]
