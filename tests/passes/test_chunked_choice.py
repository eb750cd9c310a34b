"""When losses are computed in chunks, with which settings, and what is said where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epl.errors import PlanError
from epl.passes.chunked_loss import chunk_losses, why_not
from tests.passes.heads import CLASSES, Net, batch_of_tokens, chunk_of, in_chunks, is_chunked
from tests.program.local_run import Lowered, lower
from tests.program.staged import WIDTH, staged
from tests.runtime.problems import seeded


def _z_loss(m: Any, x: Tensor, t: Tensor) -> Tensor:
    logits = m(x).flatten(0, 1)
    return F.cross_entropy(logits, t.flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()


def _in_place(m: Any, x: Tensor, t: Tensor) -> Tensor:
    logits = m(x)
    logits /= 2
    return F.cross_entropy(logits.flatten(0, 1), t.flatten())


REFUSED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a gradient flows through": _z_loss,
    "aten.div_.Tensor": _in_place,
    "targets are probabilities": lambda m, x, t: F.cross_entropy((y := m(x).flatten(0, 1)), y.detach().softmax(-1)),
    "by a tensor": lambda m, x, t: F.cross_entropy((m(x) * m.bias.exp().sum()).flatten(0, 1), t.flatten()),
    "adds to its logits": lambda m, x, t: F.cross_entropy((m(x) + m.shift).flatten(0, 1), t.flatten()),
    "not from a linear layer": lambda m, x, t: F.cross_entropy(m(x).relu().flatten(0, 1), t.flatten()),
    "takes some of its classes": lambda m, x, t: F.cross_entropy(m(x)[..., :7].flatten(0, 1), t.flatten() % 7),
    "classes are not the results": lambda m, x, t: F.cross_entropy(m(x), t[:, :1].expand(-1, CLASSES)),
    "autograd is off": lambda m, x, t: F.cross_entropy(_quietly(m, x).flatten(0, 1), t.flatten()) + m(x).mean(),
    "not the result of log_softmax": lambda m, x, t: F.nll_loss(m(x).flatten(0, 1), t.flatten()),
    "are changed before it": lambda m, x, t: F.nll_loss(2 * m(x).flatten(0, 1).log_softmax(-1), t.flatten()),
}


def _all_refused(m: Any, batch: Any) -> Any:
    whole = m(batch[0])
    wanted = F.cross_entropy(whole.transpose(1, 2), batch[1])
    return wanted + sum(loss(m, *batch) for loss in REFUSED.values()), {"logits": whole}


def _quietly(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m(x)


def test_on_is_an_error_that_says_why_where_it_cannot_be_and_auto_leaves_it() -> None:
    lowered = lower(seeded(Net), batch_of_tokens(), _all_refused)
    (stage,) = lowered.stages
    assert chunk_losses(stage.stage, replace(lowered.plan, chunked_loss="auto")).graph is stage.stage.graph
    with pytest.raises(PlanError) as error:
        in_chunks(lowered)
    lines = str(error.value).splitlines()
    assert "set it to auto or off" in lines[0]
    reasons = ["a result of the step", *REFUSED]
    assert len(lines) == 1 + len(reasons)
    for line, why in zip(lines[1:], reasons, strict=True):
        assert why in line


def test_on_is_an_error_where_no_loss_is_a_cross_entropy() -> None:
    with pytest.raises(PlanError, match="it has no cross entropy"):
        in_chunks(lower(seeded(Net), batch_of_tokens(), lambda m, batch: m(batch[0]).square().mean()))


def _in_the_next_stage(m: Any, x: Tensor, t: Tensor) -> Tensor:
    logits = m.a(x)
    with m.scopes[1]:
        return F.cross_entropy(logits, t) + m.b(x).mean()


def test_logits_of_another_stage_stay_whole() -> None:
    batch = (torch.randn(4, WIDTH).double(), torch.arange(4))
    with pytest.raises(PlanError, match=r"stage 1 .*\n.*its logits come from another stage"):
        in_chunks(lower(staged(_in_the_next_stage, 2), batch))


class Large(nn.Module):
    """Logits of 64 MiB, from a weight of 2 MiB or, for few rows, one of 32 MiB."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8192, width), nn.Linear(width, 8192)

    def forward(self, tokens: Tensor, cap: bool = False) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(logits.relu() if cap else logits, tokens)


def large(num_rows: int, width: int, *, cap: bool = False, **options: Any) -> Lowered:
    lowered = lower(Large(width), (torch.zeros(num_rows, dtype=torch.int64), cap))
    return in_chunks(lowered, 0, **{"chunked": "auto", **options})


def test_auto_takes_what_saves_memory_and_says_so() -> None:
    lowered = large(2048, 64)
    assert is_chunked(lowered)
    assert chunk_of(lowered).rows == 256
    (note,) = lowered.stages[0].stage.notes
    assert "in chunks of 256 of 2,048 rows, with gradients made in forward: at the peak 192.0 MiB -> " in note


def test_auto_leaves_what_saves_little() -> None:
    assert not is_chunked(large(64, 64))
    assert not is_chunked(large(256, 64))  # one chunk
    assert not is_chunked(large(2048, 64, chunked="off"))


def test_chunks_are_about_equal() -> None:
    assert chunk_of(large(2049, 64)).rows == 228
    assert chunk_of(large(10_000, 8)).rows == 625


@pytest.mark.parametrize(("width", "in_flight", "in_forward"), [(1024, 1, True), (1024, 4, False), (16, 4, True)])
def test_micro_batches_that_wait_do_not_each_keep_a_large_gradient(
    width: int, in_flight: int, in_forward: bool
) -> None:
    assert chunk_of(large(2048, width, in_flight=in_flight)).in_forward == in_forward


def test_a_large_loss_that_cannot_be_in_chunks_is_named() -> None:
    lowered = large(2048, 64, cap=True)
    (line,) = why_not(lowered.stages[0].stage)
    assert "its logits are 64.0 MiB: its logits come from relu = aten.relu.default" in line
    assert lowered.stages[0].stage.notes == (f"{lowered.stages[0].stage.name}: {line}",)
