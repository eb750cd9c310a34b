"""Scopes mark what is made or called inside them, refuse what contradicts itself, and leave torch as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.errors import StrategyError
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.taskgraphs import build_taskgraphs
from epl.scopes import reset_scopes, tag_of


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    reset_scopes()


def _graph(model: nn.Module, *batch: torch.Tensor) -> Graph:
    captured = capture(model, loss_step(lambda m, b: m(*b).sum()), flatten(batch))
    return build_taskgraphs(captured.graph)


def _task_of(graph: Graph, target: str) -> list[str]:
    return [graph.tasks[op.task or 0].name for op in graph.ops if op.target.startswith(target)]


def test_modules_made_in_a_scope_carry_its_strategy_and_others_none() -> None:
    with epl.replicate(1, name="a") as strategy:
        inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    outer = nn.Linear(2, 2)
    assert all(tag_of(module).strategy is strategy for module in inner.modules())  # type: ignore[union-attr]
    assert tag_of(outer) is None


def test_a_deep_copied_layer_belongs_to_the_scope_that_its_copies_are_registered_in() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with epl.replicate(1, name="late") as strategy:
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert tag_of(layer) is None
    assert all(tag_of(module).strategy is strategy for module in encoder.modules())  # type: ignore[union-attr]
    assert tag_of(copy.deepcopy(encoder)).strategy is strategy  # type: ignore[union-attr]


def test_torch_is_untouched_outside_scopes_and_after_an_error_inside_one() -> None:
    before = nn.Module.__init__
    with epl.replicate(1):
        assert nn.Module.__init__ is not before
    with pytest.raises(ZeroDivisionError), epl.replicate(1):
        raise ZeroDivisionError
    assert nn.Module.__init__ is before
    assert tag_of(nn.Linear(1, 1)) is None


def test_nesting_is_refused_with_both_creation_lines() -> None:
    outer, inner = epl.replicate(1, name="outer"), epl.split(1, name="inner")
    with (
        outer,
        pytest.raises(StrategyError, match=r"inner.*test_scopes.py:\d+ is entered inside.*outer.*test_scopes.py"),
    ):
        inner.__enter__()
    with outer:
        pass  # left cleanly: it can be entered again


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_a_device_count_that_is_no_positive_int_is_refused(count: object) -> None:
    with pytest.raises(StrategyError, match="device_count must be an int of at least 1"):
        epl.replicate(count)  # type: ignore[arg-type]


def test_only_replicate_can_be_the_default_strategy() -> None:
    with pytest.raises(StrategyError, match="only replicate"):
        epl.set_default_strategy(epl.split(1))
    with epl.replicate(1), pytest.raises(StrategyError, match="leave the scope first"):
        epl.set_default_strategy(epl.replicate(1))


def test_each_default_opens_a_taskgraph_for_what_is_made_after_it() -> None:
    epl.set_default_strategy(epl.replicate(1, name="first"))
    one = nn.Linear(4, 4)
    epl.set_default_strategy(epl.replicate(1, name="second"))
    model = nn.Sequential(one, nn.Linear(4, 4))
    reset_scopes()
    assert _task_of(_graph(model, torch.ones(2, 4)), "aten.linear") == ["first", "second"]


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(1, name="built"):
            self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.again = epl.replicate(1, name="again")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        with self.again:
            x = torch.relu(self.two(x))
        x = x.cos()
        with self.again:
            return x.sin()


def test_call_scopes_mark_what_runs_inside_and_a_strategy_entered_again_is_the_same_taskgraph() -> None:
    graph = _graph(_Calls(), torch.ones(2, 4))
    assert [spec.name for spec in graph.tasks] == ["built", "again"]
    assert _task_of(graph, "aten.linear") == ["built", "again"]
    assert _task_of(graph, "aten.sin") == ["again"]


class _CallWins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(1, name="first"):
            self.one = nn.Linear(4, 4)
        with epl.replicate(1, name="built"):
            self.two = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        with epl.replicate(1, name="called"):
            x = self.two(x)
        return x


def test_a_call_scope_goes_before_a_construction_scope() -> None:
    with pytest.raises(StrategyError, match="built"):  # nothing is left of it: said, not ignored
        _graph(_CallWins(), torch.ones(2, 4))


def test_a_strategy_called_with_modules_marks_them_whatever_they_carried() -> None:
    with epl.replicate(1, name="old"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    new = epl.replicate(1, name="new")
    assert new(model[1]) is model[1]
    assert _task_of(_graph(model, torch.ones(2, 4)), "aten.linear") == ["old", "new"]
    with pytest.raises(StrategyError, match="it takes modules or one parameter"):
        new("head")  # type: ignore[call-overload]


class _BareParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(1, name="body"):
            self.body = nn.Linear(4, 4)
        with epl.replicate(1, name="head"):
            self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) @ self.weight


def test_a_parameter_made_in_a_scope_takes_the_operators_that_use_it_along() -> None:
    graph = _graph(_BareParameter(), torch.ones(2, 4))
    assert _task_of(graph, "aten.matmul") == ["head"]
