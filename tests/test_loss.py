"""What a step's result means: one loss, or a sum and a count, and what goes with it; anything else is refused in words.

A mistake shows as a loss that is divided by the wrong number, or as a metric that is the first batch's for ever.
"""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

import epl
from epl.batch import flatten
from epl.errors import CaptureError, RunError
from epl.loss import Step, loss_step, output_step

X = torch.tensor([1.0, 2.0, 3.0])
LOSS = torch.tensor(2.0)
Output = namedtuple("Output", ["loss", "logits"])


def parts_of(result: Any) -> dict[str, Any]:
    return dict(loss_step(lambda model, batch: result).run(None, X))


@pytest.mark.parametrize(
    "result",
    [
        LOSS,
        SimpleNamespace(loss=LOSS, logits=X),
        {"loss": LOSS, "logits": X},
        SequenceClassifierOutput(loss=LOSS, logits=X),
        Output(LOSS, X),
        LOSS.view(1),
        LOSS.view(1, 1),
    ],
    ids=["tensor", "object", "dict", "model output", "named tuple", "one element", "one element of two dimensions"],
)
def test_a_loss_is_found_in_all_that_has_one(result: Any) -> None:
    parts = parts_of(result)
    assert list(parts) == ["loss"]
    assert parts["loss"].shape == ()
    assert parts["loss"] == LOSS


def test_without_a_loss_function_the_model_is_called_by_the_kind_of_the_batch() -> None:
    def model(*args: Tensor, **kwargs: Tensor) -> Tensor:
        return sum([*args, *kwargs.values()], torch.zeros(()))

    for batch in (LOSS, (LOSS, LOSS), {"a": LOSS, "b": LOSS, "c": LOSS}):
        count = 1 if isinstance(batch, Tensor) else len(batch)
        assert dict(loss_step(None).run(model, batch))["loss"] == count * LOSS


def test_aux_keeps_tensors_and_plain_values_by_name() -> None:
    aux = {"logits": X, "n": 3, "on": True, "rate": 0.5, "name": "a", "nothing": None}
    parts = parts_of((LOSS, aux))
    assert parts == {"loss": LOSS, **{f"aux.{key}": value for key, value in aux.items()}}


@pytest.mark.parametrize("count", [torch.tensor(3), torch.tensor([3]), 3, 3.0], ids=repr)
def test_a_sum_loss_gives_total_and_count(count: Any) -> None:
    parts = parts_of(epl.SumLoss(X.sum().view(1), count))
    assert list(parts) == ["total", "count"]
    assert parts["total"].shape == ()
    assert float(parts["count"]) == 3
    assert list(parts_of((epl.SumLoss(X.sum(), count), {"x": X}))) == ["total", "count", "aux.x"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (X, r"loss_fn is a tensor of shape \(3,\); a loss is one number.*SumLoss"),
        (None, "loss_fn returned a NoneType without a loss"),
        (2.0, "loss_fn returned a float without a loss"),
        ((LOSS, X), r"loss_fn returned a tuple without a loss.*\(loss, dict of tensors\)"),
        ({"logits": X}, "loss_fn returned a dict without a loss"),
        (SimpleNamespace(loss=None), "returned a SimpleNamespace without a loss"),
        (SimpleNamespace(loss=X), r"loss_fn's \.loss is a tensor of shape \(3,\)"),
        (torch.tensor(2), "loss_fn is of type torch.int64; a loss is a tensor of floating-point numbers"),
        (torch.tensor(2j), "loss_fn is of type torch.complex64"),
        (epl.SumLoss(2.0, 1), "SumLoss.total is of type float"),  # type: ignore[arg-type]
        (epl.SumLoss(X, 1), r"SumLoss.total is a tensor of shape \(3,\)"),
        (epl.SumLoss(LOSS, X), r"SumLoss.count is a tensor of shape \(3,\); it is one number"),
        (epl.SumLoss(LOSS, True), "SumLoss.count is a bool; it is a number"),
        (epl.SumLoss(LOSS, None), "SumLoss.count is a NoneType"),  # type: ignore[arg-type]
        (epl.SumLoss(LOSS, torch.ones((), requires_grad=True)), "SumLoss.count requires a gradient.*detach it"),
        ((LOSS, {"nested": {"x": X}}), r"aux\['nested'\] is a dict; aux is a dict of tensors and plain values"),
        ((LOSS, {"list": [X]}), r"aux\['list'\] is a list"),
    ],
)
def test_what_is_no_loss_is_refused_in_words(result: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        parts_of(result)


def test_messages_say_whether_the_model_or_the_loss_function_is_meant() -> None:
    with pytest.raises(CaptureError, match=r"the model returned a tuple.*pass loss_fn="):
        loss_step(None).run(lambda x: (x, x), X)


def test_an_output_step_gives_every_tensor_and_the_structure_to_build_it_again() -> None:
    step = output_step()
    output = {"logits": X, "hidden": (LOSS, X), "n": 3}
    parts = step.run(lambda x: output, X)
    assert [role for role, _ in parts] == ["out.logits", "out.hidden.0", "out.hidden.1"]
    assert step.structure == flatten(output).structure
    assert step.structure is not None
    assert step.structure.unflatten(value for _, value in parts) == output


def test_an_output_that_cannot_be_taken_apart_is_refused_with_its_place() -> None:
    with pytest.raises(RunError, match=r"0\.x is a object; what goes into a model or comes out of it"):
        output_step().run(lambda x: [{"x": object()}], X)
    with pytest.raises(RunError, match="the model's output is a object"):
        output_step().run(lambda x: object(), X)


def test_an_output_loses_its_cache_of_keys_and_values() -> None:
    step = output_step()
    parts = step.run(lambda x: SequenceClassifierOutput(logits=X, hidden_states=object()), X)  # type: ignore[arg-type]
    assert [role for role, _ in parts] == ["out.logits"]
    assert step.structure is not None
    assert step.structure.type is SequenceClassifierOutput


def test_a_step_knows_its_loss_function() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return model(batch).sum()

    assert loss_step(loss_fn).loss_fn is loss_fn
    assert isinstance(output_step(), Step)
