"""What a stage takes in memory is found without running it on real memory, to the byte.

A mistake shows as a number that differs from the one written out by hand, or from what torch.profiler sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epl.capture.allocations import memory_profile, read_profile
from epl.stage.simulate import StageProfile, simulate
from tests.program.local_run import Lowered, lower
from tests.program.staged import batch_of, staged

ROW = 6 * 8  # bytes of one sample: six numbers of eight bytes
VALUE = 4 * ROW  # of a batch of four samples
WEIGHT, BIAS = 6 * ROW, ROW


def profile_of(lowered: Lowered, stage: int = 0) -> StageProfile:
    """The profile of one stage of a lowered model."""
    low = lowered.stages[stage]
    return simulate(low.stage, low.code, lowered.captured.functions)


def _chain(model: Any, x: Tensor) -> Tensor:
    return model.b(torch.relu(model.a(x))).sum()


def test_a_chain_of_layers_takes_what_is_counted_by_hand() -> None:
    """relu keeps its result; the results of the layers are dropped, since no one needs them in backward."""
    profile = profile_of(lower(staged(_chain, 2), batch_of(), colocate=True))
    loss = 8
    assert profile.problem == ""
    assert profile.kept_bytes == VALUE + loss
    assert profile.forward_peak_bytes == 2 * VALUE + loss  # relu's result, the layer's behind it, and the sum
    assert sum(profile.gradients.values()) == 2 * (WEIGHT + BIAS)
    # all that is left after backward is the gradients, and the loss, which is reported
    assert profile.curve()[-1] == 2 * (WEIGHT + BIAS) + loss


def test_the_simulation_is_deterministic() -> None:
    lowered = lower(staged(_chain, 2), batch_of(), colocate=True)
    assert profile_of(lowered) == profile_of(lowered)


def _in_segments(model: Any, x: Tensor) -> Tensor:
    for layer in (model.a, model.b, model.c):
        x = checkpoint(lambda x, layer=layer: torch.tanh(torch.tanh(torch.tanh(layer(x)))), x, use_reentrant=False)
    return x.sum()


def _without_segments(model: Any, x: Tensor) -> Tensor:
    for layer in (model.a, model.b, model.c):
        x = torch.tanh(torch.tanh(torch.tanh(layer(x))))
    return x.sum()


def test_what_is_computed_again_is_not_kept() -> None:
    """Of each segment its input is kept, and the three results of tanh are not."""
    all_kept = profile_of(lower(staged(_without_segments), batch_of(), colocate=True))
    again = profile_of(lower(staged(_in_segments), batch_of(), colocate=True))
    assert all_kept.kept_bytes == 9 * VALUE + 8
    assert again.kept_bytes <= 4 * VALUE + 8
    assert again.gradients == all_kept.gradients
    assert again.backward_peak_bytes < all_kept.backward_peak_bytes


def _with_numbers(model: Any, x: Tensor) -> Tensor:
    hidden = model.a(x)
    return (model.b(hidden) * hidden.detach().mean().item()).square().mean()


def test_stages_of_a_pipeline_give_and_take_values_numbers_and_gradients() -> None:
    lowered = lower(staged(_with_numbers, 2), batch_of())
    first, second = profile_of(lowered, 0), profile_of(lowered, 1)
    assert not first.problem
    assert not second.problem
    (given,) = (size for size in first.given.values() if size.size_bytes)
    assert (given.size_bytes, given.is_kept, given.is_copied) == (VALUE, False, False)
    assert [change.size_bytes for change in second.backward if change.kind == "returned"] == [VALUE]
    assert set(first.gradients.values()) == {WEIGHT, BIAS}


def _branching(model: Any, x: Tensor) -> Tensor:
    x = model.a(x)
    return x.sum() if x.detach().abs().mean().item() < 100 else x.prod()


def test_a_branch_on_data_is_predicted_with_stand_ins() -> None:
    profile = profile_of(lower(staged(_branching, 1), batch_of(), colocate=True))
    assert profile.problem == ""
    assert set(profile.gradients.values()) == {WEIGHT, BIAS}


def test_what_cannot_run_without_data_is_not_predicted_and_says_why() -> None:
    lowered = lower(staged(_chain, 2), batch_of(), colocate=True)
    low = lowered.stages[0]

    def needs_data(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("there is no data here\nand more of that")

    code = replace(low.code, targets=tuple((name, "function.call_0") for name, _ in low.code.targets))
    profile = simulate(low.stage, code, {"function.call_0": needs_data})
    assert profile.problem == "not predicted: RuntimeError: there is no data here"
    assert profile.curve() == []


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 20, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def test_what_a_convolution_takes_for_itself_is_found_from_a_few_samples() -> None:
    """Twelve samples are predicted from trials with four and with eight; the truth is what the profiler sees."""
    model, x = _Images(), torch.randn(12, 3, 20, 20)
    predicted = max(profile_of(lower(model, x, colocate=True)).curve())
    model(x).backward()  # the first call makes buffers that stay
    model.zero_grad()
    with memory_profile() as profiled:
        model(x).backward()
    live = peak = 0
    for allocation in read_profile(profiled, "epl ")[0]:
        live += allocation.size_bytes
        peak = max(peak, live)
    assert 0.98 * peak <= predicted <= 1.05 * peak
