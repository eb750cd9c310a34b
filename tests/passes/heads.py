"""A small net before a linear layer, losses of all kinds on it, and stages with losses in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epl.passes.chunked_operator import ChunkedLoss
from epl.program.lower import lower_stage
from tests.program.local_run import Lowered

__all__ = [
    "CLASSES",
    "LENGTH",
    "LOSSES",
    "SIZE",
    "Net",
    "batch_of_tokens",
    "chunk_of",
    "in_chunks",
    "is_chunked",
    "loss_of",
]

SIZE, LENGTH, WIDTH, CLASSES = 3, 6, 8, 13
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Features of tokens, and a weight in either orientation."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.flipped = nn.Parameter(torch.randn(WIDTH, CLASSES))
        self.bias = nn.Parameter(torch.randn(CLASSES))
        self.register_buffer("class_weight", torch.rand(CLASSES) + 0.5)
        self.register_buffer("shift", torch.randn(1, CLASSES))

    def features(self, tokens: Tensor) -> Tensor:
        return self.body(self.embedding(tokens)).tanh()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def batch_of_tokens(seed: int = 0) -> Batch:
    """Tokens and labels; some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(CLASSES, (SIZE, LENGTH), generator=generator) for _ in range(2))
    return tokens, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, -100)


def _flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), **options)


def _masked(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(m(x)[t >= 0], t[t >= 0])


def _positions(m: Any, x: Tensor, t: Tensor) -> Tensor:
    logits = m(x).flatten(0, 1)
    places = torch.arange(0, logits.shape[0], 2)
    return F.cross_entropy(logits.index_select(0, places), t.flatten()[places])


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mean": lambda m, x, t: _flat(m(x), t),
    "sum": lambda m, x, t: _flat(m(x), t, reduction="sum") / 7,
    "none": lambda m, x, t: (_flat(m(x), t, reduction="none") * torch.arange(t.numel())).sum(),
    "none of an image": lambda m, x, t: F.cross_entropy(m(x).transpose(1, 2), t, reduction="none").square().mean(),
    "another label that does not count": lambda m, x, t: _flat(m(x), t.clamp(min=0), ignore_index=3),
    "class weights": lambda m, x, t: _flat(m(x), t, weight=m.class_weight),
    "class weights, sum": lambda m, x, t: _flat(m(x), t, weight=m.class_weight, reduction="sum"),
    "smoothing": lambda m, x, t: _flat(m(x), t, label_smoothing=0.2),
    "smoothing and class weights": lambda m, x, t: _flat(m(x), t, label_smoothing=0.2, weight=m.class_weight),
    "classes second": lambda m, x, t: F.cross_entropy(m(x).transpose(1, 2), t),
    "classes second, an image": lambda m, x, t: F.cross_entropy(m(x).permute(0, 2, 1).unsqueeze(-1), t.unsqueeze(-1)),
    "classes moved": lambda m, x, t: F.cross_entropy(m(x).movedim(-1, 1).contiguous(), t),
    "shifted": lambda m, x, t: _flat(m(x)[:, :-1].contiguous(), t[:, 1:]),
    "last token": lambda m, x, t: F.cross_entropy(m(x)[:, -1], t[:, -1]),
    "one sample": lambda m, x, t: F.cross_entropy(m(x)[0], t[0]),
    "masked": _masked,
    "positions": _positions,
    "time first": lambda m, x, t: _flat(m(x).transpose(0, 1), t.t()),
    "scaled": lambda m, x, t: _flat(m(x) * 0.5 / 3, t),
    "capped": lambda m, x, t: _flat(torch.tanh(m(x) / 3.0) * 3.0, t),
    "tanh": lambda m, x, t: _flat(m(x).tanh(), t),
    "log_softmax": lambda m, x, t: F.nll_loss(m(x).log_softmax(-1).flatten(0, 1), t.flatten()),
    "log_softmax, weights": lambda m, x, t: F.nll_loss(m(x).flatten(0, 1).log_softmax(1), t.flatten(), m.class_weight),
    "log_softmax, image": lambda m, x, t: F.nll_loss(m(x).transpose(1, 2).log_softmax(1), t),
    "matmul": lambda m, x, t: _flat(m.features(x) @ m.flipped, t),
    "matmul and bias": lambda m, x, t: _flat(m.features(x) @ m.flipped + m.bias, t),
    "tied by a transpose": lambda m, x, t: _flat(m.features(x) @ m.embedding.weight.t(), t),
    "mm": lambda m, x, t: F.cross_entropy(torch.mm(m.features(x).view(-1, WIDTH), m.flipped), t.view(-1)),
    "addmm": lambda m, x, t: F.cross_entropy(torch.addmm(m.bias, m.features(x).view(-1, WIDTH), m.flipped), t.view(-1)),
    "a buffer added": lambda m, x, t: _flat(m.features(x) @ m.flipped + m.shift, t),
    "a sum of two": lambda m, x, t: _flat(m(x), t) + 0.1 * _flat(m.features(x) @ m.flipped, t, reduction="sum"),
}


def loss_of(*names: str) -> Callable[[Any, Batch], Any]:
    """Some of ``LOSSES`` as ``epl.parallelize`` takes them: a weighted sum, and what each of them is."""

    def loss_fn(model: Any, batch: Batch) -> Any:
        parts = {name: LOSSES[name](model, *batch) for name in names}
        total = sum((number + 1) * loss for number, loss in enumerate(parts.values()))
        return total, {name: loss.detach() for name, loss in parts.items()}

    return loss_fn


def in_chunks(lowered: Lowered, rows: int = 4, *, chunked: str = "on", in_flight: int = 1, **changes: Any) -> Lowered:
    """The same stages with losses in chunks of so many rows."""
    peak = (in_flight,) * lowered.plan.num_stages
    plan = replace(lowered.plan, chunked_loss=chunked, chunk_rows=rows, peak_in_flight=peak, **changes)
    stages = tuple(lower_stage(lowered.graph, plan, stage.ranks[0][0]) for stage in plan.stages)
    return replace(lowered, plan=plan, stages=stages)


def is_chunked(lowered: Lowered) -> bool:
    """True if a loss is computed in chunks, and no layer's logits are there as a whole."""
    targets = [op.target for stage in lowered.stages for op in stage.stage.graph.ops]
    is_plain = any("cross_entropy" in target or "nll_loss" in target for target in targets)
    return any(target.startswith("loss.chunked") for target in targets) and not is_plain


def chunk_of(lowered: Lowered) -> ChunkedLoss:
    """What is in the place of the loss."""
    (function,) = (each for stage in lowered.stages for each in stage.functions.values())
    assert isinstance(function, ChunkedLoss)
    return function
