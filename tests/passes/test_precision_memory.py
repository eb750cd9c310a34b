"""Memory in a mixed graph is what it was: who writes to a value changes that value, and not a cast of it.

A mistake shows as a change in place that nobody sees, or as a type that torch refuses.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tests.passes.mixed import WIDTH, Mixed, mixed, numbers

LOW, FULL = torch.bfloat16, torch.float32
X = numbers()


def one(ours: Mixed, target: str) -> Any:
    (op,) = ours.ops(target)
    return op


def test_what_is_written_to_keeps_its_type() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h += x
        total = torch.zeros(4, WIDTH)
        total.index_add_(0, torch.arange(4), m.b(x))
        return F.mse_loss(h, total)

    ours = mixed(forward)
    assert ours.dtypes(one(ours, ".add_.")) == [LOW, FULL]
    assert ours.dtypes(one(ours, "index_add_")) == [FULL, torch.long, FULL]
    values = ours.run()
    assert values[one(ours, ".add_.").name].dtype == LOW
    assert values[one(ours, "index_add_").name].dtype == FULL
    ours.step()


def test_values_put_into_a_low_tensor_become_low() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.index_copy_(0, torch.tensor([1]), x[:1])
        return h.square().mean()

    ours = mixed(forward)
    assert ours.dtypes(one(ours, "index_copy_")) == [LOW, torch.long, LOW]
    loss, _ = ours.step()
    expected = torch.cat([ours.model.a(X)[[0]], X[:1], ours.model.a(X)[2:]]).square().mean()
    assert torch.allclose(loss, expected, rtol=2e-2)


def test_running_statistics_are_float32_and_the_input_is_not() -> None:
    ours = mixed(lambda m, x: m.norm(m.a(x)).float().square().mean())
    op = one(ours, "batch_norm")
    assert ours.dtypes(op) == [LOW, FULL, FULL, FULL, FULL]
    plain = copy.deepcopy(ours.model)
    ours.step()
    with torch.autocast("cpu", dtype=LOW):
        plain.norm(plain.a(X))
    assert torch.equal(ours.model.norm.running_mean, plain.norm.running_mean)  # type: ignore[arg-type]
    assert ours.model.norm.running_mean.dtype == FULL  # type: ignore[union-attr]


def test_buffers_that_forward_writes_are_written() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.memory.copy_(m.a(x).detach())
        return F.mse_loss(m.b(m.memory), x)

    ours = mixed(forward)
    ours.run()
    expected = F.linear(X.to(LOW), ours.model.a.weight.to(LOW), ours.model.a.bias.to(LOW)).float()  # type: ignore[union-attr, operator]
    assert torch.equal(ours.model.memory, expected.detach())  # type: ignore[arg-type]


def test_a_type_that_was_the_value_itself_still_is_when_it_is_changed() -> None:
    """``h.float()`` of a float32 tensor is that tensor: what is written to it, h has."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.float().mul_(3.0)
        return h.square().mean()

    ours = mixed(forward)
    loss, _ = ours.step()
    exact = (3 * ours.model.a(X)).square().mean()  # type: ignore[operator]
    assert torch.allclose(loss, exact, rtol=2e-2)


class TripledInPlace(Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def test_a_custom_function_changes_what_it_was_given() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1.0
        TripledInPlace.apply(h)
        return h.square().mean()

    ours = mixed(forward)
    loss, _ = ours.step()
    assert torch.allclose(loss, (3 * ours.model.a(X)).square().mean(), rtol=2e-2)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", [-3.4028234663852886e38, -1e9])
def test_masks_are_not_filled_with_what_low_precision_cannot_hold(fill: float, dtype: torch.dtype) -> None:
    """Torch refuses such a number in masked_fill, and makes it infinite in where, after which a row may be nan."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = torch.ones(4, WIDTH, dtype=torch.bool)
        scores = m.a(x).masked_fill(mask, fill) + torch.where(mask, m.b(x), fill)
        again = m.b(x) * 1.0
        again.masked_fill_(mask, fill)
        return scores.softmax(-1).mean() + again.softmax(-1).mean()

    ours = mixed(forward, dtype=dtype)
    loss, found = ours.step()
    assert torch.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in found.values())
