"""Each operator gets the strategy that the rules of precedence give it.

A mistake shows as an operator in the wrong stage: the numbers stay right, the plan is not what the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.loss import loss_step
from epl.scopes import reset_scopes, tag_of
from tests.zoo import CASES


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    reset_scopes()
    yield
    reset_scopes()


def strategies_of_ops(model: nn.Module, batch: Any) -> list[tuple[str, str | None]]:
    """(target, strategy's name) of each operator of the captured model."""
    graph = capture(model, loss_step(None), flatten(batch)).graph
    return [(op.target, None if op.tag is None else graph.strategies[op.tag].name) for op in graph.ops]


class _Layers(nn.Module):
    """relu, tanh, sigmoid, one after the other: each operator tells which module it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.relu, self.tanh = nn.ReLU(), nn.Tanh()
        self.call = epl.replicate(1, name="call")

    def forward(self, x: Tensor) -> Tensor:
        x = self.tanh(self.relu(x)) * self.scale
        return x.mean()


def test_an_unannotated_model_has_no_strategies() -> None:
    assert {name for _, name in strategies_of_ops(_Layers(), torch.ones(2))} == {None}


def test_the_innermost_construction_scope_wins() -> None:
    model = _Layers()
    epl.replicate(1, name="all")(model)
    epl.replicate(1, name="tanh")(model.tanh)
    found = dict(strategies_of_ops(model, torch.ones(2)))
    assert found["aten.relu.default"] == "all"
    assert found["aten.tanh.default"] == "tanh"
    assert found["aten.mean.default"] == "all"


def test_a_call_scope_wins_over_a_construction_scope() -> None:
    class Called(_Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(x)
            with self.call:
                x = self.tanh(x)
            return (x * self.scale).mean()

    model = Called()
    epl.replicate(1, name="all")(model)
    found = dict(strategies_of_ops(model, torch.ones(2)))
    assert [found[f"aten.{name}"] for name in ("relu.default", "tanh.default", "mean.default")] == [
        "all",
        "call",
        "all",
    ]


def test_a_construction_scope_wins_over_a_parameters_tag() -> None:
    model = _Layers()
    epl.replicate(1, name="parameter")(model.scale)
    assert dict(strategies_of_ops(model, torch.ones(2)))["aten.mul.Tensor"] == "parameter"
    epl.replicate(1, name="all")(model)
    assert dict(strategies_of_ops(model, torch.ones(2)))["aten.mul.Tensor"] == "all"


def test_a_parameters_tag_wins_over_the_default() -> None:
    epl.set_default_strategy(epl.replicate(1, name="default"))
    model = _Layers()
    epl.replicate(1, name="parameter")(model.scale)
    found = dict(strategies_of_ops(model, torch.ones(2)))
    assert found["aten.mul.Tensor"] == "parameter"
    assert found["aten.relu.default"] == "default"


def test_a_default_inside_forward_holds_to_its_end_and_no_longer() -> None:
    class Defaults(_Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(x)
            epl.set_default_strategy(self.call)
            with epl.replicate(1, name="scope"):
                x = self.tanh(x)
            return (x * self.scale).mean()

    model = Defaults()
    expected = [None, "scope", "call", "call"]
    for _ in range(2):
        assert [name for _, name in strategies_of_ops(model, torch.ones(2))] == expected
    assert tag_of(nn.Linear(2, 2)) is None


def test_a_scope_made_anew_at_each_call_is_a_taskgraph_of_its_own() -> None:
    class Loop(_Layers):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                with epl.replicate(1, name="loop"):
                    x = self.tanh(x)
            return (x * self.scale).mean()

    graph = capture(Loop(), loss_step(None), flatten(torch.ones(2))).graph
    assert [op.tag for op in graph.ops] == [0, 1, None, None]


def test_a_module_under_two_names_keeps_its_strategy_under_both() -> None:
    class Twice(_Layers):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.tanh

        def forward(self, x: Tensor) -> Tensor:
            return (self.again(self.relu(x)) * self.scale).mean()

    model = Twice()
    epl.replicate(1, name="tanh")(model.tanh)
    assert dict(strategies_of_ops(model, torch.ones(2)))["aten.tanh.default"] == "tanh"


def test_an_error_in_forward_leaves_the_scopes_clean() -> None:
    class Failing(_Layers):
        def forward(self, x: Tensor) -> Tensor:
            epl.set_default_strategy(epl.replicate(1))
            with self.call:
                raise ValueError("no")

    epl.replicate(1, name="a")(model := Failing())
    with pytest.raises(epl.CaptureError, match="forward fails: ValueError: no"):
        capture(model, loss_step(None), flatten(torch.ones(2)))
    assert tag_of(nn.Linear(2, 2)) is None
    with epl.replicate(1, name="b"):
        assert tag_of(nn.Linear(2, 2)) is not None


def test_a_scope_around_a_whole_hugging_face_model_has_all_its_operators() -> None:
    with epl.replicate(1, name="bert"):
        model = CASES["bert"].build()
    batch = CASES["bert"].batch(2)
    assert {name for _, name in strategies_of_ops(model, batch)} == {"bert"}
