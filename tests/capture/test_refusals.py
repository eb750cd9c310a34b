"""What a graph would silently drop or freeze is refused with the user's line.

A mistake shows as training that goes on with a hook that never runs, or with the first random number for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.errors import CaptureError
from epl.loss import loss_step
from tests.program.local_run import check_parity
from tests.program.staged import batch_of, staged
from tests.zoo import CASES

X = batch_of()
LINE = rf"{__file__}:\d+"


def captured(model: nn.Module, loss_fn: Any = None) -> Captured:
    return capture(model, loss_step(loss_fn), flatten(X))


def plain() -> Any:
    return staged(lambda m, x: m.b(m.a(x)).mean(), 2)


# -------------------------------------------------------------------------------------------------------------- hooks


HOOKS: list[tuple[str, str]] = [
    ("register_forward_hook", "forward hook"),
    ("register_forward_pre_hook", "forward pre hook"),
    ("register_full_backward_hook", "backward hook"),
    ("register_full_backward_pre_hook", "backward pre hook"),
]


@pytest.mark.parametrize(("method", "text"), HOOKS)
def test_a_hook_on_a_module_is_refused_with_its_line(method: str, text: str) -> None:
    model = plain()

    def hook(*_: Any) -> None:
        """Does nothing."""

    handle = getattr(model.a, method)(hook)
    with pytest.raises(CaptureError, match=rf"hooks would run at capture only(.|\n)*a has a {text}: .*hook at {LINE}"):
        captured(model)
    handle.remove()
    assert not captured(model).is_opaque


def test_all_hooks_are_named_at_once() -> None:
    model = plain()
    model.a.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"the model has a forward pre hook(.|\n)*a has a forward hook"):
        captured(model)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(method: str) -> None:
    """It would see the gradient of each micro-batch, where one process shows it the whole."""
    model = plain()
    getattr(model.a.weight, method)(lambda gradient: None)
    with pytest.raises(CaptureError, match=rf"see the gradients of parts of the batch(.|\n)*a\.weight has a .*{LINE}"):
        captured(model)


# ---------------------------------------------------------------------------------------------------- calls in forward


def a_hook_on_an_activation(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    a.register_hook(lambda gradient: gradient * 3)
    return m.b(a).mean()


def a_gradient_that_is_kept(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    a.retain_grad()
    return m.b(a).mean()


def a_gradient_inside(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    energy = m.b(a).pow(2).sum()
    (force,) = torch.autograd.grad(energy, a, create_graph=True)
    return force.pow(2).mean() + energy


def a_backward_inside(m: Any, x: Tensor) -> Tensor:
    m.b(m.a(x)).sum().backward()
    return m.b(m.a(x)).mean()


def saved_tensors_elsewhere(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.b(m.a(x)).mean()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (a_hook_on_an_activation, "puts a hook on a tensor, which a graph would not run: register_hook"),
        (a_gradient_that_is_kept, "keeps the gradient of an activation, .*: retain_grad"),
        (a_gradient_inside, "computes gradients inside forward, .*: grad"),
        (a_backward_inside, "computes gradients inside forward, .*: backward"),
        (saved_tensors_elsewhere, "changes how autograd saves tensors, which a graph ignores: saved_tensors_hooks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_speaks_to_autograd_in_forward_is_refused_with_its_line(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=rf"forward {message} at {LINE}"):
        captured(staged(forward, 2))


def test_the_calls_work_again_after_a_capture() -> None:
    before = torch.autograd.grad, torch.Tensor.backward, torch.Tensor.register_hook
    with pytest.raises(CaptureError):
        captured(staged(a_gradient_inside, 2))
    assert (torch.autograd.grad, torch.Tensor.backward, torch.Tensor.register_hook) == before


# ----------------------------------------------------------------------------------------------------- random numbers


GENERATOR, PYTHON, OLD = np.random.default_rng(0), random.Random(0), np.random.RandomState(0)
draw_early = random.random

DRAWS: list[tuple[str, Callable[[], Any], str]] = [
    ("random", lambda: random.random(), "random"),
    ("random, bound early", draw_early, "random"),
    ("random.choice", lambda: random.choice([1.0, 2.0]), "random"),
    ("a Random object", lambda: PYTHON.uniform(0, 1), "a random.Random"),
    ("numpy", lambda: np.random.rand(), "numpy.random"),
    ("a numpy generator", lambda: GENERATOR.random(), "a numpy.Generator"),
    ("an old numpy generator", lambda: OLD.rand(), "a numpy.RandomState"),
]


@pytest.mark.parametrize(("draw", "name"), [draw[1:] for draw in DRAWS], ids=[draw[0] for draw in DRAWS])
def test_random_numbers_that_torch_does_not_draw_are_refused(draw: Callable[[], Any], name: str) -> None:
    model = staged(lambda m, x: m.b(m.a(x)).mean() * float(draw()), 2)
    states = random.getstate(), PYTHON.getstate(), repr(GENERATOR.bit_generator.state), repr(OLD.get_state())
    with pytest.raises(CaptureError, match=rf"forward draws numbers from {name}; a graph would repeat"):
        captured(model)
    now = random.getstate(), PYTHON.getstate(), repr(GENERATOR.bit_generator.state), repr(OLD.get_state())
    assert now == states, "the draw of the capture does not count"


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = staged(lambda m, x: m.b(m.a(x)).mean(), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * random.random()


def test_the_message_shows_the_lines_that_may_draw() -> None:
    with pytest.raises(CaptureError, match=rf"Candidates:\n  - {LINE}: return self\.a\(x\) \* random\.random\(\)"):
        captured(Draws())


# ---------------------------------------------------------------------------------------------------------- attributes


def counting(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return m.b(m.a(x)).mean() * m.count


def appending(m: Any, x: Tensor) -> Tensor:
    m.history.append(1)
    return m.b(m.a(x)).mean() * len(m.history)


def counting_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.table["n"] = m.table.get("n", 0) + 1
    return m.b(m.a(x)).mean() * m.table["n"]


def counting_in_an_object(m: Any, x: Tensor) -> Tensor:
    m.config.steps += 1
    return m.b(m.a(x)).mean()


def starting_differently(m: Any, x: Tensor) -> Tensor:
    scale = 1 if m.started else 3
    m.started = True
    return m.b(m.a(x)).mean() * scale


class Config:
    steps = 0

    def __init__(self) -> None:
        self.steps = 0
        self.kind: str | None = None


def with_attributes(forward: Callable[..., Any]) -> Any:
    model = staged(forward, 2)
    model.count, model.started, model.history, model.table, model.config = 0, False, [], {}, Config()
    model.a.config = model.config
    return model


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (counting, "count: 0 became 1"),
        (appending, r"history\[0\]: nothing became 1"),
        (counting_in_a_dict, r"table\['n'\]: nothing became 1"),
        (counting_in_an_object, "config.steps: 0 became 1"),
        (starting_differently, "started: False became True"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_attributes_that_change_at_each_step_are_refused_and_put_back(forward: Callable[..., Any], line: str) -> None:
    model = with_attributes(forward)
    with pytest.raises(CaptureError, match=rf"a graph would keep the first value(.|\n)*- {line}"):
        captured(model)
    assert (model.count, model.started, model.history, model.table, model.config.steps) == (0, False, [], {}, 0)


def test_attributes_that_are_set_once_stay_set() -> None:
    """Hugging Face's classifiers note in their config which kind of problem the labels are of."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if m.config.kind is None:
            m.config.kind, m.width, m.sizes = "regression", x.shape[1], [1, 2]
        return m.b(m.a(x)).mean() * m.width

    model = with_attributes(forward)
    check_parity(model, X)
    assert (model.config.kind, model.width, model.sizes) == ("regression", 6, [1, 2])


def test_tensors_left_in_attributes_are_named_in_a_warning_and_taken_away() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.last = m.a(x)
        m.history.append(m.last.mean())
        return m.b(m.last).mean()

    model = with_attributes(forward)
    with pytest.warns(UserWarning, match=r"forward leaves tensors in attributes \(history\[0\], last\)"):
        captured(model)
    assert model.history == []
    assert not hasattr(model, "last")


def test_a_buffer_or_parameter_that_changes_its_form_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.state = torch.zeros(x.shape[0] + 1)
        m.register_parameter("late", nn.Parameter(torch.ones(2)))
        return m.b(m.a(x)).mean()

    model = with_attributes(forward)
    model.register_buffer("state", torch.zeros(2))
    with pytest.raises(
        CaptureError, match=r"what the model is made of(.|\n)*late: a parameter was(.|\n)*state: a tensor"
    ):
        captured(model)
    assert "late" not in dict(model.named_parameters())
    assert model.state.shape == (2,)


def test_hooks_that_transformers_leaves_after_a_first_call_are_part_of_the_graph():
    model: Any = CASES["mixtral"].build(torch.float64)
    model.config.output_router_logits = True
    batch = CASES["mixtral"].batch(2, dtype=torch.float64)
    without = model(**batch).loss  # leaves the hooks; the balancing loss is computed from what they put aside
    assert any(module._forward_hooks for module in model.modules())
    check_parity(model, batch)
    model.config.output_router_logits = False
    assert not torch.equal(model(**batch).loss, without)
