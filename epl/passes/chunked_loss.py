"""The pass "losses in chunks": a last linear layer and its cross entropy become one operator that has few logits at a time.

    linear = aten.linear(x, weight)                    view_rows = aten.reshape(x, (-1, features))
    view = aten.view(linear, (-1, classes))      ->    loss = loss.chunked(view_rows, weight, None, target, None)
    loss = aten.cross_entropy_loss(view, target)

Whether that saves memory is estimated from shapes alone, those of all ranks together where devices share out the classes:
they meet once for each chunk, so all of them must come to the same number of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from epl.errors import PlanError, bulleted
from epl.ir.graph import Op
from epl.ir.types import TensorType
from epl.passes.chunked_operator import NONE, SHORT, ChunkedLoss
from epl.passes.chunked_rewrite import fused_argmax, rewrite
from epl.passes.loss_heads import Head, Refusal, find_heads
from epl.planner.plan import Plan
from epl.stage.stage import Stage
from epl.units import size_text

__all__ = ["chunk_losses", "why_not"]

# Matrix products of 128 rows take 1.15 times as long as those of 256, which are as fast as those of 512.
MIN_ROWS = 256  # [measured: 1 core of an x86 server, 2,048 rows, width 512, 32,000 classes, float32, 2026-11-30]
MOST_CHUNKS = 16  # more would only make small what is small by then
MAX_CHUNK_BYTES = 256 * 2**20  # but a chunk of very many rows is not small
MIN_SAVED_BYTES = 8 * 2**20  # less is not worth another order of sums
MIN_SAVED_SHARE = 0.2


def chunk_losses(stage: Stage, plan: Plan) -> Stage:
    """The stage with its cross entropies in chunks, where the plan wants that; notes say where, and where it cannot be.

    Raises:
        PlanError: the plan wants it wherever it can be done, and the stage's loss cannot.
    """
    if plan.chunked_loss == "off":
        return stage
    found = list(find_heads(stage))
    heads = [head for head in found if isinstance(head, Head)]
    if plan.chunked_loss == "on" and not heads and _has_loss(stage):
        raise PlanError(_refused(stage, [head for head in found if isinstance(head, Refusal)]))
    notes = [f"{stage.name}: {line}" for line in why_not(stage)]
    for head in heads:
        sizes = _sizes(stage, plan, head)
        if plan.chunked_loss == "on" or sizes.is_worth_it:
            stage = rewrite(stage, head, _operator(stage, head, sizes))
            notes.append(f"{stage.name}: {head.loss.name} {sizes}")
    return replace(stage, notes=(*stage.notes, *notes))


def why_not(stage: Stage) -> list[str]:
    """A line for each large cross entropy whose logits are there as a whole because it cannot be done otherwise."""
    return [
        f"{_place(refusal.loss)} is not computed in chunks, and its logits are {size_text(size_bytes)}: {refusal.why}"
        for refusal in find_heads(stage)
        if isinstance(refusal, Refusal) and (size_bytes := _logits_bytes(stage, refusal.loss)) >= MIN_SAVED_BYTES
    ]


def _has_loss(stage: Stage) -> bool:
    return any(output.role in ("loss", "total") for output in stage.graph.outputs)


def _refused(stage: Stage, refusals: list[Refusal]) -> str:
    lines = [f"{_place(refusal.loss)}: {refusal.why}" for refusal in refusals]
    return bulleted(
        f"loss.chunked is on, and no loss of {stage.name} can be computed in chunks; set it to auto or off, or mend this:",
        lines or ["it has no cross entropy"],
    )


def _place(loss: Op) -> str:
    return f"{loss.name}{f' at {loss.source}' if loss.source else ''}"


def _logits_bytes(stage: Stage, loss: Op) -> int:
    kind = stage.graph.type_of(loss.reads[0])
    return kind.size_bytes if isinstance(kind, TensorType) else 0


# ------------------------------------------------------------------------------------------------------------ estimates


@dataclass(frozen=True)
class _Sizes:
    """What a loss holds, plain and in chunks, on one rank.

    Args:
        rows: Rows of logits.
        chunk_rows: Those of a chunk.
        row_bytes: A row of logits in the type that the loss computes in.
        kept_rows: How many rows of logits plain PyTorch keeps for the backward pass, as a multiple of ``rows``.
        gradient_bytes: Gradients of the layer's argument and of its weight.
        sum_bytes: What else there is while the weight's gradient is made: sums of short types are kept in float32.
        num_in_flight: Most micro-batches held at once.
        in_forward: True if gradients are made in the forward pass.
        is_whole_too: True if a metric needs all logits for a while.
    """

    rows: int
    chunk_rows: int
    row_bytes: int
    kept_rows: int
    gradient_bytes: int
    sum_bytes: int
    num_in_flight: int
    in_forward: bool
    is_whole_too: bool

    @property
    def plain_bytes(self) -> int:
        """Logarithms of probabilities for each micro-batch, and two gradients beside those of the last."""
        logits = self.rows * self.row_bytes
        others = (self.num_in_flight - 1) * self.kept_rows * logits
        return others + max((self.kept_rows + 2) * logits, logits + self.gradient_bytes)

    @property
    def chunked_bytes(self) -> int:
        """Gradients, of each micro-batch if they are made in the forward pass, and a chunk with what becomes of it."""
        gradients = self.gradient_bytes * (self.num_in_flight if self.in_forward else 1)
        chunked = gradients + self.sum_bytes + (self.kept_rows + 1) * self.chunk_rows * self.row_bytes
        return max(chunked, 2 * self.rows * self.row_bytes) if self.is_whole_too else chunked

    def __str__(self) -> str:
        where = "forward" if self.in_forward else "backward"
        return (
            f"in chunks of {self.chunk_rows:,} of {self.rows:,} rows, with gradients made in {where}: at the peak "
            f"{size_text(self.plain_bytes)} -> {size_text(self.chunked_bytes)}"
            f"{', and the logits once more as a whole for a metric' if self.is_whole_too else ''}"
        )

    @property
    def is_worth_it(self) -> bool:
        saved = self.plain_bytes - self.chunked_bytes
        return saved >= max(MIN_SAVED_BYTES, MIN_SAVED_SHARE * self.plain_bytes)


def _sizes(stage: Stage, plan: Plan, head: Head) -> _Sizes:
    graph = stage.graph
    logits, weight, x = (_tensor(stage, name) for name in (head.ref, head.weight, head.x))
    dim = min(1, len(logits.shape) - 1)
    rows = prod(size for place, size in enumerate(logits.sizes) if place != dim)
    num_ranks = stage.num_ranks if _cuts_classes(head) else 1
    num_classes, features = -(-_all_classes(head, logits.sizes[dim]) // num_ranks), x.sizes[-1]
    row_bytes = num_classes * max(4, logits.dtype.itemsize)
    elements = num_classes * features if head.weight in graph.needs_grad else 0
    of_weight = elements * weight.dtype.itemsize
    of_rows = rows * features * x.dtype.itemsize if head.x in graph.needs_grad else 0
    kept_rows = 1 + sum(step.kind == "tanh" for step in head.maps)
    # In float16 a gradient that is scaled only later may be too small to be written down; what a recompute segment makes
    # in the forward pass is thrown away.
    dtype = _tensor(stage, head.linear.name).dtype
    may_be_forward = (
        head.arguments["reduction"] != NONE
        and head.linear.segment is None
        and head.loss.segment is None
        and torch.float16 not in (dtype, weight.dtype, x.dtype)
    )
    others = stage.num_in_flight - 1
    best = None if _cuts_classes(head) else fused_argmax(graph, head)
    return _Sizes(
        rows=rows,
        chunk_rows=plan.chunk_rows or (_rows(rows, row_bytes) if logits.is_static else MIN_ROWS),
        row_bytes=row_bytes,
        kept_rows=kept_rows,
        gradient_bytes=of_weight + of_rows,
        sum_bytes=4 * elements if dtype in SHORT else 0,
        num_in_flight=stage.num_in_flight,
        # micro-batches that wait for their backward pass may keep gradients that are small beside what they save
        in_forward=may_be_forward and 8 * others * of_weight <= others * kept_rows * rows * row_bytes,
        is_whole_too=any(op.target != "aten.sym_size.int" and op is not best for op in head.metrics),
    )


def _tensor(stage: Stage, name: str) -> TensorType:
    kind = stage.graph.type_of(name)
    assert isinstance(kind, TensorType)
    return kind


def _rows(rows: int, row_bytes: int) -> int:
    """Rows of a chunk: enough for fast products, few beside all; chunks are about equal."""
    most = max(MIN_ROWS, min(rows // MOST_CHUNKS, MAX_CHUNK_BYTES // row_bytes))
    num_chunks = max(1, -(-rows // most))
    return max(1, -(-rows // num_chunks))


def _cuts_classes(head: Head) -> bool:
    return head.form is not None and head.form.form == "cross_entropy_classes"


def _all_classes(head: Head, own: int) -> int:
    if head.form is None or not _cuts_classes(head):
        return own
    shape = head.form.cut.input_shapes[0]
    return shape[min(1, len(shape) - 1)]


def _operator(stage: Stage, head: Head, sizes: _Sizes) -> ChunkedLoss:
    logits, result = _tensor(stage, head.ref), _tensor(stage, head.loss.name)
    given = head.arguments
    reduction, ignored, smoothing = given["reduction"], given["ignore_index"], given.get("label_smoothing", 0.0)
    assert isinstance(reduction, int)
    assert isinstance(ignored, int)
    assert isinstance(smoothing, (int, float))
    return ChunkedLoss(
        rows=sizes.chunk_rows,
        dtype=_tensor(stage, head.linear.name).dtype,
        maps=head.maps,
        result=result.dtype,
        reduction=reduction,
        ignored=ignored,
        smoothing=float(smoothing),
        num_classes=_all_classes(head, logits.sizes[min(1, len(logits.shape) - 1)]),
        is_flipped=head.is_flipped,
        in_forward=sizes.in_forward,
        is_part=head.form is not None and not _cuts_classes(head),
        cut=head.form.cut if head.form is not None and _cuts_classes(head) else None,
    )
