"""Writing in place, where the writer, the reader and the owner of a memory may be in different stages.

One process has one memory; stages have none in common. A mistake shows as a reader that sees a value before a write that
came before it, or after one that came after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epl.errors import StrategyError
from tests.program.local_run import check_parity
from tests.program.staged import batch_of, staged

X = batch_of()


def on_views_of_a_value(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    v = a[:, :2]
    v += 1
    b = m.b(a)
    b[:, 0] = 0
    b[1] = b[1] * 2
    return m.c(b).mul_(2).pow(2).mean()


def with_an_argument_of_an_earlier_stage(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    b = m.b(a)
    b += a
    b.add_(1)
    return m.c(b).add_(b).add_(a).pow(2).mean()


def a_later_stage_changes_a_value_through_a_view(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    with m.scopes[1]:
        v = a[:, :2]
        v += 1
        b = m.b(a)
    return m.c(b + a).pow(2).mean()


def a_later_stage_changes_a_view_of_an_earlier_one(m: Any, x: Tensor) -> Tensor:
    v = m.a(x)[:, :2]
    with m.scopes[1]:
        v *= 2
    return m.c(m.b(torch.cat([v, v, v], dim=1))).pow(2).mean()


def the_owner_changes_a_value_after_another_stage_has_read_it(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    b = m.b(a * 1)
    with m.scopes[0]:
        a += 1
    return m.c(a + b).pow(2).mean()


def two_stages_change_a_value_in_turn(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    with m.scopes[1]:
        a *= 2
    b = m.b(a * 1)
    with m.scopes[2]:
        a += 3
        c = m.c((a + b) * 1)
        a *= 2
    return (c + a).pow(2).mean()


def three_stages_change_a_value_again_and_again(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    with m.scopes[1]:
        a *= 2
        b = m.b(a * 1)
        a *= 2
        b = b + m.b(a * 1)
    with m.scopes[2]:
        a += 3
        c = m.c(a + b)
    return (c + a).pow(2).mean()


def zeros_of_one_stage_are_filled_by_another(m: Any, x: Tensor) -> Tensor:
    with m.scopes[1]:
        z = torch.zeros_like(x)
    z[:, :3] = m.a(x)[:, :3]
    return m.c(m.b(z)).pow(2).mean()


def each_stage_fills_its_row(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(3, *x.shape, dtype=x.dtype)
    h = x
    for i, layer in enumerate((m.a, m.b, m.c)):
        h = layer(h)
        z[i] = h
    return z.pow(2).mean()


def a_gradient_enters_by_a_view(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[:, :3].copy_(m.a(x)[:, :3])
    return m.c(m.b(z)).pow(2).mean()


def without_gradient(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    with torch.no_grad():
        a.mul_(2)
    with m.scopes[1], torch.no_grad():
        a.mul_(2)
    return m.c(m.b(a)).pow(2).mean()


def one_of_several_results_is_changed(m: Any, x: Tensor) -> Tensor:
    values, places = m.a(x).sort(dim=1)
    with m.scopes[1]:
        values += 1
        b = m.b(values.gather(1, places))
    return m.c(b).add(places).pow(2).mean()


def the_batch_is_changed_between_uses(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0
    a = m.a(x * 1)
    x[:, 1] = 1
    b = m.b(a + x * 1)
    x.mul_(2)
    return m.c(b).add(x).pow(2).mean()


def the_batch_is_changed_by_activations(m: Any, x: Tensor) -> Tensor:
    a = m.a(x * 1)
    x += a.detach().mean()
    b = m.b(a * 2)
    x *= b.detach().mean()
    return m.c(b).add(x).pow(2).mean()


def a_mask_is_written_to_and_used_in_every_stage(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], dtype=x.dtype)
    mask[1:3] = 0
    return (m.c(m.b(m.a(x) * mask) * mask) * mask).pow(2).mean()


def a_constant_is_made_anew_at_each_step(m: Any, x: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=x.dtype)
    weights[0] += 1
    weights.mul_(2)
    return m.c(m.b(m.a(x) * weights)).pow(2).mean()


def activations_work_in_place(m: Any, x: Tensor) -> Tensor:
    a = F.relu_(m.a(x))
    b = F.dropout(F.leaky_relu_(m.b(a * 1)) * 1, 0.3, inplace=True)
    return m.c(b).pow(2).mean()


FORWARDS: list[Callable[..., Any]] = [
    value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_writing_in_place_gives_the_numbers_of_one_memory(forward: Callable[..., Any]) -> None:
    check_parity(staged(forward), X.clone(), num_stages=3)


def test_a_view_that_a_write_elsewhere_must_show_in_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        with m.scopes[1]:
            v = a[:, :2]
        with m.scopes[2]:
            a += 1
        return m.c(m.b(x)).mean() + a.mean() + v.sum()

    with pytest.raises(
        StrategyError, match=r"aten.add_.* changes memory in place in TaskGraph 2, and aten.sum.* out of place"
    ):
        check_parity(staged(forward), X)


# -------------------------------------------------------------------------------------------------- what a model keeps


def _with_state(forward: Callable[..., Any]) -> nn.Module:
    model = staged(forward)
    model.register_buffer("state", torch.zeros(6, dtype=torch.float64))
    return model


def a_buffer_changes_and_later_stages_read_it(m: Any, x: Tensor) -> Tensor:
    m.state.add_(1)
    return m.c(m.b(m.a(x) * m.state)).pow(2).mean() * m.state.sum()


def a_buffer_changes_through_a_view(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    v = m.state[:3]
    v += a.detach().mean()
    return m.c(m.b(a)).pow(2).mean() * m.state.sum()


def a_buffer_is_assigned_anew(m: Any, x: Tensor) -> Tensor:
    m.state = m.state * 0.9 + m.b(m.a(x)).detach().mean(dim=0)
    return m.c(m.b(m.a(x)) - m.state).pow(2).mean()


def a_buffer_is_read_before_its_write(m: Any, x: Tensor) -> Tensor:
    a = m.a(x * (m.state * 1))
    m.state += 1
    return m.c(m.b(a)).pow(2).mean() + m.state.mean() * a.sum()


def a_later_stage_has_the_buffer(m: Any, x: Tensor) -> Tensor:
    b = m.b(m.a(x))
    m.state += b.detach().mean(dim=0)
    return m.c(b).pow(2).mean()


@pytest.mark.parametrize(
    "forward",
    [
        a_buffer_changes_and_later_stages_read_it,
        a_buffer_changes_through_a_view,
        a_buffer_is_assigned_anew,
        a_buffer_is_read_before_its_write,
        a_later_stage_has_the_buffer,
    ],
    ids=lambda forward: forward.__name__,
)
def test_a_buffer_has_one_truth_and_the_plan_says_where(forward: Callable[..., Any]) -> None:
    lowered = check_parity(_with_state(forward), X.clone(), num_stages=3)
    state = next(entry for entry in lowered.plan.parameters if entry.path == "state")
    assert len(state.stages) == 1


def test_a_buffer_that_an_earlier_stage_reads_and_a_later_one_changes_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        b = m.b(m.a(x * m.state.sum()))
        m.state += b.detach().mean(dim=0)
        return m.c(b).mean()

    with pytest.raises(
        StrategyError, match=r"forward changes state that several TaskGraphs use(.|\n)*state is changed at"
    ):
        check_parity(_with_state(forward), X)


def test_a_buffer_that_two_stages_change_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        with m.scopes[0]:
            m.state += 1
        b = m.b(a)
        with m.scopes[1]:
            m.state += 1
        return m.c(b).mean()

    with pytest.raises(StrategyError, match=r"state is changed at .*used in TaskGraphs \[0, 1\]"):
        check_parity(_with_state(forward), X)
    check_parity(_with_state(forward), X, colocate=True)


def test_a_plain_tensor_that_forward_changes_keeps_its_changes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.counts[0].add_(1)
        return m.c(m.b(m.a(x) * m.counts[0])).pow(2).mean()

    model = staged(forward)
    model.counts = (torch.zeros((), dtype=torch.float64),)
    check_parity(model, X)
    assert model.counts[0] == 2, "one for each step, none for the capture"
