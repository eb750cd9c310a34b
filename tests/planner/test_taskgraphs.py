"""Operators go where the user put them, and the others where dataflow puts them; what cannot run as written is refused.

A mistake shows as a stage with too little or too much in it, a value that is sent where it need not be, or annotations
that have no effect and no message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.errors import StrategyError
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.taskgraphs import build_taskgraphs
from tests.program.staged import batch_of, staged

X = batch_of()
_STAGED = r".*staged\.py:\d+"


def captured(model: nn.Module, batch: Any = X) -> Graph:
    return capture(model, loss_step(None), flatten(batch)).graph


def built(forward: Callable[..., Any], num_stages: int = 3, **options: Any) -> Graph:
    return build_taskgraphs(captured(staged(forward, num_stages)), **options)


def places(graph: Graph) -> dict[str, list[int]]:
    """TaskGraphs of the operators of each kind."""
    found: dict[str, list[int]] = {}
    for op in graph.ops:
        found.setdefault(op.target.split(".")[1], []).append(op.task if op.task is not None else -1)
    return found


def test_an_untagged_operator_goes_to_the_latest_taskgraph_that_feeds_it() -> None:
    found = places(built(lambda m, x: m.c((m.a(x).tanh() + m.b(m.a(x)).relu()).sigmoid()).mean()))
    assert found["tanh"] == [0]
    assert found["relu"] == [1]
    assert found["add"] == [1]
    assert found["sigmoid"] == [1]
    assert found["mean"] == [2]


def test_what_nothing_feeds_goes_to_its_earliest_user() -> None:
    model = staged(lambda m, x: m.c(m.b(m.a(x)) + m.bias.exp()).mean() + m.bias.exp().sum())
    model.bias = nn.Parameter(torch.ones(6, dtype=torch.float64))
    assert places(build_taskgraphs(captured(model)))["exp"] == [1, 2]


def test_what_needs_only_the_batch_is_copied_to_each_user() -> None:
    graph = built(lambda m, x: m.c(m.b(m.a(x) * x.gt(0)) * x.gt(0)).mean())
    assert {edge.name for edge in graph.edges}.isdisjoint(op.name for op in graph.ops if "gt" in op.target)


def test_random_numbers_are_drawn_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        noise = torch.rand(6, dtype=x.dtype)
        return m.c(m.b(m.a(x) * noise) * noise).mean()

    assert len(places(built(forward))["rand"]) == 1


def test_taskgraphs_are_numbered_as_dataflow_reaches_them() -> None:
    """The head looks at the labels first; it is the last stage all the same."""
    graph = built(lambda m, x: (m.c(m.b(m.a(x))) - m.c(x)).pow(2).mean())
    assert [spec.name for spec in graph.tasks] == ["a", "b", "c"]


def test_independent_taskgraphs_keep_the_order_of_the_program() -> None:
    graph = built(lambda m, x: m.c(m.b(x) + m.a(x)).mean())
    assert [spec.name for spec in graph.tasks] == ["b", "a", "c"]


def test_results_of_one_operator_stay_with_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        parts = m.a(x).chunk(2, dim=1)
        with m.scopes[1]:
            first, second = parts
            y = torch.cat([second, first], dim=1)
        return m.c(m.b(y)).mean()

    assert set(places(built(forward)).get("getitem", [0])) == {0}


def test_what_nothing_needs_is_dropped_with_its_writes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        unused = m.a(x).exp()
        unused[:, 0] = 1
        return m.c(m.b(m.a(x))).mean()

    found = places(built(forward))
    assert "exp" not in found
    assert "fill_" not in found


def test_an_unannotated_model_is_one_taskgraph() -> None:
    graph = build_taskgraphs(captured(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0), _Mean()).double()))
    assert [spec.name for spec in graph.tasks] == ["model"]


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


# ------------------------------------------------------------------------------------------------ strategies in vain


def test_strategies_that_take_no_part_are_refused_by_name_all_at_once() -> None:
    with pytest.raises(StrategyError, match=rf"that the step needs(.|\n)*name='b'\) made at {_STAGED}(.|\n)*name='c'"):
        built(lambda m, x: m.a(x).mean())


def test_a_strategy_whose_work_nobody_needs_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.c(x)
        return m.b(m.a(x)).mean()

    with pytest.raises(StrategyError, match=r"take part in the loss(.|\n)*replicate\(1, name='c'\)"):
        built(forward)


def test_a_scope_in_forward_without_operators_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with epl.replicate(1, name="empty"):
            pass
        return m.b(m.a(x)).mean()

    with pytest.raises(StrategyError, match=r"replicate\(1, name='empty'\)"):
        built(forward, 2)


def test_a_strategy_of_an_unused_parameter_is_refused() -> None:
    model = staged(lambda m, x: m.b(m.a(x)).mean(), 2)
    model.extra = epl.replicate(1, name="extra")(nn.Parameter(torch.ones(2)))
    with pytest.raises(StrategyError, match=r"replicate\(1, name='extra'\)"):
        build_taskgraphs(captured(model))


def test_a_default_strategy_may_come_away_with_nothing() -> None:
    """``set_default_strategy`` at the top of a script, and a scope around everything."""

    def idle(m: Any, x: Tensor) -> Tensor:
        with m.scopes[0]:
            a = m.a(x)
        epl.set_default_strategy(epl.replicate(1, name="default"))
        with m.scopes[1]:
            return m.b(a).mean()

    def busy(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        epl.set_default_strategy(epl.replicate(1, name="default"))
        return m.b(a).mean()

    assert [spec.name for spec in built(idle, 2).tasks] == ["a", "b"]
    assert [spec.name for spec in built(busy, 2).tasks] == ["a", "b", "default"]


# ------------------------------------------------------------------------------------- other graphs of the same model


def test_another_graph_takes_the_plans_numbers_and_may_use_fewer() -> None:
    def forward(m: Any, x: Tensor, deep: bool) -> Tensor:
        y = m.a(x)
        return (m.c(m.b(y)) if deep else m.c(y)).mean()

    model = staged(forward)
    tasks = build_taskgraphs(captured(model, (X, True))).tasks
    graph = build_taskgraphs(captured(model, (X, False)), tasks=tasks)
    assert graph.tasks == tasks
    assert places(graph)["linear"] == [0, 2]


def test_another_graph_with_a_strategy_that_the_plan_does_not_know_is_refused() -> None:
    def forward(m: Any, x: Tensor, more: bool) -> Tensor:
        y = m.b(m.a(x))
        if more:
            with epl.replicate(1, name="more"):
                y = y.tanh()
        return y.mean()

    model = staged(forward, 2)
    tasks = build_taskgraphs(captured(model, (X, False))).tasks
    with pytest.raises(StrategyError, match=r"a batch of this kind enters replicate\(1, name='more'\).*does not know"):
        build_taskgraphs(captured(model, (X, True)), tasks=tasks)


def test_a_return_to_an_earlier_taskgraph_names_every_pair_of_modules() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(m.b(m.a(x)))).mean()

    with pytest.raises(StrategyError, match=r"module b in TaskGraph 1 \(b, .*feeds module a in TaskGraph 0 \(a, "):
        built(forward, 2)
    assert len(built(forward, 2, colocate=True).tasks) == 2
