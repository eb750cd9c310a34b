"""Whatever crosses from stage to stage, in whatever order it is used, the numbers are those of the whole model.

A mistake shows as a gradient that one of several users did not add to, or a value that came from the wrong stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epl
from epl.errors import StrategyError
from tests.program.local_run import check_parity
from tests.program.staged import WIDTH, batch_of, staged

X = batch_of()


def skips_a_stage_and_uses_the_input_late(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    return (m.c(m.b(a)) + a * 2 + x).pow(2).mean()


def is_used_by_three_later_stages(m: Any, x: Tensor) -> Tensor:
    h = a = m.a(x).tanh()
    for layer in (m.b, m.c, m.d):
        h = layer(h).tanh() + a
    return h.pow(2).mean()


def lists_cross(m: Any, x: Tensor) -> Tensor:
    p, q, r = m.a(x).chunk(3, dim=1)
    s, t = m.b(torch.cat([q, p, r], dim=1)).split([2, 4], dim=1)
    return m.c(torch.cat([s, t], dim=1) + torch.cat([p, q, r], dim=1)).pow(2).mean() + r.sum()


def single_numbers_masks_and_indices_cross(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    mean, mask, places = a.mean(), a > 0, a.argmax(dim=1)
    b = m.b(a) * mean
    c = m.c(torch.where(mask, b, -b)) + mean
    return F.cross_entropy(c, places) + c.gather(1, places[:, None]).mean()


def views_cross(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    b = m.b(a.expand(3, *a.shape)).transpose(0, 1)
    c = m.c(b.permute(2, 0, 1).contiguous().permute(1, 2, 0)) + a[:, None]
    return c[:, ::2].pow(2).mean() + a.t().sum() + b.flip(0).mean()


def complex_numbers_cross(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    z = torch.complex(a, a * 2)
    y = torch.fft.fft(m.b(z.real) + z.imag)
    return (m.c(y.abs()) + z.abs() + y.real).pow(2).mean()


def numbers_taken_out_of_tensors_cross(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    count = int((x > 0).sum().item())
    largest = a.detach().abs().max().item()
    return (m.c(m.b(a) * count) / largest).pow(2).mean()


def values_of_unknown_size_cross(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    places, chosen = (a > 0).nonzero(), a[a > 0]
    c = m.c(m.b(a))
    return c[places[:, 0], places[:, 1]].pow(2).mean() + chosen.pow(2).sum()


def a_loop_over_numbers(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    lengths = (x.abs().sum(dim=1).long() % 3 + 1).tolist()
    rows = [m.b(a[i : i + 1].repeat(length, 1)).sum(dim=0) for i, length in enumerate(lengths)]
    return m.c(torch.stack(rows)).pow(2).mean()


def tokens_go_to_experts(m: Any, x: Tensor) -> Tensor:
    a, expert = m.a(x), x.argmax(dim=1)
    out = torch.zeros_like(a)
    for k in range(WIDTH):
        places = torch.where(expert == k)[0]
        if places.numel():
            out.index_add_(0, places, m.b(a[places]) * k)
    return m.c(out).pow(2).sum()


def a_branch_on_an_activation(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    a = a * 2 if a.sum() > 0 else a * 3
    return m.c(m.b(a)).pow(2).mean()


def a_later_strategy_runs_first(m: Any, x: Tensor) -> Tensor:
    """The head looks at the labels before the first stage has run: dataflow, not the program, orders stages."""
    target = m.c(x.relu() * 2)
    return (m.c(m.b(m.a(x))) - target).pow(2).mean()


def two_branches_meet(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x) * m.b(x)).pow(2).mean()


FORWARDS: list[Callable[..., Any]] = [
    skips_a_stage_and_uses_the_input_late,
    lists_cross,
    single_numbers_masks_and_indices_cross,
    views_cross,
    complex_numbers_cross,
    numbers_taken_out_of_tensors_cross,
    values_of_unknown_size_cross,
    a_loop_over_numbers,
    tokens_go_to_experts,
    a_branch_on_an_activation,
    a_later_strategy_runs_first,
    two_branches_meet,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_stages_agree_with_the_whole(forward: Callable[..., Any]) -> None:
    check_parity(staged(forward), X, num_stages=3)


def test_a_value_goes_to_three_later_stages() -> None:
    lowered = check_parity(staged(is_used_by_three_later_stages, 4), X, num_stages=4)
    first = lowered.stages[0].program
    assert [transfer.stage for transfer in first.sends if transfer.value == first.sends[0].value] == [1, 2, 3]


def test_plain_values_and_containers_cross_without_being_sent() -> None:
    """None, ints and strings are Python's: they are in the code of each stage, and no message."""

    def forward(m: Any, x: Tensor, mask: Tensor | None, depth: int, mode: str) -> Tensor:
        extras = {"h": m.a(x), "mask": mask, "seen": (depth,)}
        extras = {**extras, "h": m.b(extras["h"]) / (depth + 1), "seen": (*extras["seen"], depth)}
        h = extras["h"] if extras["mask"] is None else extras["h"] * extras["mask"]
        return F.mse_loss(m.c(h) * len(extras["seen"]), x, reduction=mode)

    for mask in (None, (X > 0).double()):
        lowered = check_parity(staged(forward), (X, mask, 2, "sum"), num_stages=3)
        assert [len(stage.program.takes) for stage in lowered.stages] == [0, 1, 1]


def test_the_batch_is_not_sent_and_what_is_made_of_it_alone_neither() -> None:
    """Masks and positions cost less to compute twice than to send."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = (x > 0).double()
        return (m.c((m.b(m.a(x) * mask)) * mask) * mask).mean()

    lowered = check_parity(staged(forward), X)
    assert [len(stage.program.takes) for stage in lowered.stages] == [0, 1, 1]
    assert all("aten_gt_Scalar(" in stage.code.source for stage in lowered.stages)


def test_aux_comes_from_the_stage_that_makes_it_even_if_it_is_an_input() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        a = m.a(x)
        loss = m.c(m.b(a)).pow(2).mean()
        numbers = {"n": 3, "share": (x > 0).double().mean().item()}
        return loss, {"x": x, "a": a, "sum": x.sum(), "weight": m.b.weight, **numbers}

    lowered = check_parity(staged(forward), X)
    parts = [stage.program.parts for stage in lowered.stages]
    assert "aux.a" in parts[0]
    assert "aux.weight" in parts[1]
    assert "loss" in parts[2]


def test_a_sum_loss_crosses_as_total_and_count() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return epl.SumLoss(m.b(m.a(x)).pow(2).sum(), (x > 0).sum())

    check_parity(staged(forward, 2), X)


# --------------------------------------------------------------------------------------------------------- parameters


def test_a_weight_tied_over_three_stages_gets_the_sum_of_its_gradients() -> None:
    model = staged(lambda m, x: m.c(m.b(m.a(x)).relu()).pow(2).mean())
    model.b.weight = model.c.weight = model.a.weight
    lowered = check_parity(model, X)
    tied = next(entry for entry in lowered.plan.parameters if entry.path == "a.weight")
    assert (tied.stages, tied.aliases) == ((0, 1, 2), ("b.weight", "c.weight"))


def test_an_untagged_module_works_in_the_stages_that_use_it() -> None:
    model = staged(lambda m, x: m.c(m.shared(m.b(m.shared(m.a(x))).relu())).pow(2).mean())
    model.shared = nn.Linear(WIDTH, WIDTH).double()
    lowered = check_parity(model, X)
    shared = next(entry for entry in lowered.plan.parameters if entry.path == "shared.weight")
    assert shared.stages == (0, 1)


def test_a_module_used_twice_in_different_stages_is_refused_unless_they_share_devices() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.c(m.b(m.a(m.b(m.a(x)))).relu()).pow(2).mean()

    with pytest.raises(StrategyError, match=r"returns to an earlier TaskGraph.*\n.*module b in .* feeds module a in"):
        check_parity(staged(forward), X)
    check_parity(staged(forward), X, colocate=True, num_stages=1)


def test_a_stage_without_parameters_passes_gradients_on() -> None:
    lowered = check_parity(staged(lambda m, x: m.c(m.b(m.a(x))).pow(2).mean(), layers=[nn.Linear(6, 6), nn.ReLU()]), X)
    assert lowered.stages[1].program.needs_backward


@pytest.mark.parametrize(
    ("frozen", "backward"), [("b", [1, 1, 1]), ("a", [0, 1, 1]), ("ab", [0, 0, 1]), ("c", [1, 1, 1])]
)
def test_frozen_stages_run_backward_only_where_a_gradient_must_pass(frozen: str, backward: list[int]) -> None:
    model = staged(lambda m, x: m.c(m.b(m.a(x)).relu()).pow(2).mean())
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    lowered = check_parity(model, X)
    assert [int(stage.program.needs_backward) for stage in lowered.stages] == backward


def test_a_parameter_without_a_say_in_the_loss_gets_no_gradient() -> None:
    model = staged(lambda m, x: m.c(m.b(m.a(x)).detach()).pow(2).mean())
    check_parity(model, X)
    assert model.c.weight.grad is not None
    assert model.a.weight.grad is None
