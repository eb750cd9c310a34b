"""Real models in mixed precision: as near to float32 as torch.autocast brings them, in one stage and in several.

A mistake shows as a value of another type than a stage makes room for, as a number that overflows, or as a gradient that
is farther from float32 than rounding makes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epl.batch import flatten
from epl.capture.capture import capture
from epl.loss import loss_step
from epl.passes.precision import is_weight_cast, mixed_precision
from tests.marks import slow
from tests.passes.mixed import Mixed, gradients
from tests.program.local_run import Lowered, lower_captured, run_stages
from tests.zoo import CASES, annotate

LARGE = ("mixtral", "gpt2", "llama", "bart", "vit", "unet", "mlp", "none_int")
# Operators that autocast on a CPU leaves alone, and on a GPU does not, may come out nearer here or farther; measured on
# these models: between 0.8 and 1.1 times autocast's distance. A missing cast of a loss or a sum makes it several times.
FACTOR = 1.5
HALVES = [torch.bfloat16, torch.float16]


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of all gradients as one vector, relative to its length."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - gradient).square().sum()) for name, gradient in theirs.items())
    return (apart / sum(float(gradient.square().sum()) for gradient in theirs.values())) ** 0.5


def _plain(model: nn.Module, batch: Any, loss_fn: Any, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = dict(loss_step(loss_fn).run(model, batch))["loss"]
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in LARGE), *slow(*LARGE)])
def test_mixed_models_are_as_near_to_float32_as_with_autocast(name: str) -> None:
    case = CASES[name]
    model, batch = case.build(), case.batch(3)
    exact, exact_gradients = _plain(model, batch, case.loss_fn, None)
    for dtype in HALVES:
        ours = Mixed(model, batch, loss_step(case.loss_fn), dtype)
        loss, found = ours.step()
        theirs, their_gradients = _plain(model, batch, case.loss_fn, dtype)
        assert loss.dtype == torch.float32
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        # two losses that round differently are each about as far from the exact one
        assert abs(loss - exact) <= FACTOR * abs(theirs - exact) + torch.finfo(dtype).eps / 8 * exact
        assert _distance(found, exact_gradients) <= FACTOR * _distance(their_gradients, exact_gradients)


@pytest.mark.parametrize("name", ["bert", *slow("mixtral", "gpt2", "t5", "vit")])
def test_every_use_of_a_weight_has_a_cast_of_its_own_before_it(name: str) -> None:
    case = CASES[name]
    ours = Mixed(case.build(dropout=0.1), case.batch(3), loss_step(case.loss_fn))
    casts = [op for op in ours.casts() if is_weight_cast(ours.graph, op)]
    assert casts
    place = {op.name: number for number, op in enumerate(ours.graph.ops)}
    new = {op.name for op in ours.casts()}
    for cast in casts:
        (reader,) = ours.graph.readers[cast.name]
        assert all(op.name in new for op in ours.graph.ops[place[cast.name] : place[reader.name]])
    for op in ours.ops("linear"):
        assert set(ours.dtypes(op)) == {torch.bfloat16}


@pytest.mark.parametrize("name", ["t5", *slow("bert", "mixtral", "unet", "resnet")])
def test_stages_compute_what_the_whole_mixed_model_computes(name: str) -> None:
    """What crosses is received into memory of the declared type."""
    case = CASES[name]
    model, batch = case.build(), case.batch(3)
    whole = _lowered(model, batch, case.loss_fn)
    expected = run_stages(whole, batch)
    theirs = gradients(model)
    annotate(model, case.stages[3])
    cut = _lowered(model, batch, case.loss_fn)
    assert cut.plan.num_stages == 3
    for weight in model.parameters():
        weight.grad = None
    ran = run_stages(cut, batch)
    assert torch.equal(ran.parts["loss"], expected.parts["loss"])
    # gradients of a low-precision value with readers in several stages are added up in another order
    assert _distance(gradients(model), theirs) < torch.finfo(torch.bfloat16).eps


def _lowered(model: nn.Module, batch: Any, loss_fn: Any) -> Lowered:
    captured = capture(model, loss_step(loss_fn), flatten(batch))
    return lower_captured(model, replace(captured, graph=mixed_precision(captured.graph, torch.bfloat16)))
