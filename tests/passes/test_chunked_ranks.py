"""Losses in chunks where ranks have a part of the classes each, or a part of the rows.

A mistake shows as a loss that is of one rank's classes, or as ranks that wait for one another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epl.passes.chunked_operator import MEAN, NONE, SUM, ChunkedLoss
from epl.sharding.forms import FORMS, Cut
from epl.sharding.options import WHOLE
from epl.sharding.placements import Shard, take_shard
from tests.parity import assert_close
from tests.sharding.threads import ThreadRank, run_ranks

ROWS, WIDTH, CLASSES = 10, 4, 13
CUT = Cut((Shard(1), WHOLE), (WHOLE,), ((ROWS, CLASSES), (ROWS,)), ((),))


class Counting(ThreadRank):
    """Counts its meetings."""

    meetings = 0

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        self.meetings += 1
        return super().all_reduce(tensor, operation)


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).double() for shape in ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::4] = -100
    return x, weight, bias, target, torch.rand(CLASSES, generator=generator).double() + 0.5


def plain(reduction: str, smoothing: float, class_weight: Tensor | None) -> list[Tensor]:
    x, weight, bias, target, _ = tensors()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    options: dict[str, Any] = {"weight": class_weight, "label_smoothing": smoothing, "reduction": reduction}
    loss = F.cross_entropy(F.linear(*leaves), target, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def chunked(**options: Any) -> ChunkedLoss:
    given = {"rows": 3, "dtype": torch.float64, "maps": (), "result": torch.float64, "ignored": -100}
    return ChunkedLoss(**{"num_classes": CLASSES, **given, **options})


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize(
    ("reduction", "smoothing", "is_weighted"),
    [(MEAN, 0.0, False), (MEAN, 0.2, True), (MEAN, 0.2, False), (SUM, 0.0, True), (NONE, 0.2, True)],
)
def test_ranks_that_share_out_the_classes_come_to_the_loss_of_all(
    num_ranks: int, in_forward: bool, reduction: int, smoothing: float, is_weighted: bool
) -> None:
    """13 classes divide by no number of ranks."""
    loss = chunked(reduction=reduction, smoothing=smoothing, in_forward=in_forward and reduction != NONE, cut=CUT)

    def work(ranks: ThreadRank) -> list[Tensor]:
        x, weight, bias, target, class_weight = tensors()
        own = [take_shard(tensor, Shard(0), num_ranks, ranks.rank).clone() for tensor in (weight, bias)]
        leaves = [tensor.requires_grad_() for tensor in (x, *own)]
        value = loss.bind(ranks)(*leaves, target, class_weight if is_weighted else None)
        return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]

    found = run_ranks(num_ranks, work)
    name = {NONE: "none", MEAN: "mean", SUM: "sum"}[reduction]
    expected = plain(name, smoothing, tensors()[-1] if is_weighted else None)
    for values in found:
        assert_close({"loss": values[0]}, {"loss": expected[0]}, torch.float64)
    parts = list(zip(*found, strict=True))
    joined = [sum(parts[1]), torch.cat(parts[2]), torch.cat(parts[3])]
    assert_close(joined, expected[1:], torch.float64)


@pytest.mark.parametrize("in_forward", [True, False])
def test_ranks_that_share_out_the_classes_meet_twice_in_each_chunk_and_not_in_backward(in_forward: bool) -> None:
    loss = chunked(reduction=MEAN, smoothing=0.2, in_forward=in_forward, cut=CUT)

    def work(ranks: ThreadRank) -> tuple[int, int]:
        counting = Counting(ranks.rank, ranks.size, ranks._meeting, ranks._baton, ranks._board)
        x, weight, bias, target, _ = tensors()
        own = [take_shard(tensor, Shard(0), 2, ranks.rank).clone().requires_grad_() for tensor in (weight, bias)]
        value = loss.bind(counting)(x.requires_grad_(), *own, target, None)
        before = counting.meetings
        value.backward()
        return before, counting.meetings

    assert run_ranks(2, work) == [(8, 8), (8, 8)]  # four chunks


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_ranks_that_share_out_the_rows_divide_by_the_count_of_all(in_forward: bool, is_weighted: bool) -> None:
    """The first rank has seven rows and the second three, and other numbers of them count."""
    loss = chunked(reduction=MEAN, smoothing=0.0, in_forward=in_forward, is_part=True)
    spans = (slice(0, 7), slice(7, ROWS))

    def work(ranks: ThreadRank) -> list[Tensor]:
        x, weight, bias, target, class_weight = tensors()
        leaves = [tensor.requires_grad_() for tensor in (x[spans[ranks.rank]].clone(), weight, bias)]
        value = loss.bind(ranks)(*leaves, target[spans[ranks.rank]], class_weight if is_weighted else None)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    parts = list(zip(*run_ranks(2, work), strict=True))
    joined = [sum(parts[0]), torch.cat(parts[1]), sum(parts[2]), sum(parts[3])]
    assert_close(joined, plain("mean", 0.0, tensors()[-1] if is_weighted else None), torch.float64)


@pytest.mark.parametrize("label", [-1, CLASSES, CLASSES + 7])
@pytest.mark.parametrize("way", ["chunks", "cross_entropy_classes", "nll_classes"])
def test_a_label_that_is_no_class_is_an_error_on_every_rank(label: int, way: str) -> None:
    """No rank has it among its classes, so it would count as one that fits none of them."""
    loss = chunked(reduction=MEAN, smoothing=0.0, in_forward=True, cut=CUT)

    def work(ranks: ThreadRank) -> bool:
        x, weight, bias, target, _ = tensors()
        target[1] = label
        own = [take_shard(tensor, Shard(0), ranks.size, ranks.rank) for tensor in (weight, bias)]
        try:
            if way == "chunks":
                loss.bind(ranks)(x, *own, target, None)
            else:
                options = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}
                FORMS[way](ranks, CUT, self=F.linear(x, *own), target=target, **options)
        except IndexError:
            return True
        return False

    assert run_ranks(3, work) == [True] * 3
