"""A graph's text form parses back to the same graph, and a broken graph is reported whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epl.batch import flatten
from epl.capture.capture import capture
from epl.errors import GraphError
from epl.ir.graph import Graph, Input, Op, Output, Ref, StrategySpec
from epl.ir.text import parse, to_text
from epl.ir.types import ListType, TensorType, parse_type
from epl.ir.verify import verify, violations
from epl.loss import loss_step
from epl.planner.taskgraphs import build_taskgraphs
from tests.zoo import CASES, annotate

F32 = TensorType(torch.float32, (2,))


@pytest.mark.parametrize("name", ["bert", "t5", "resnet", "none_int"])
def test_the_text_of_a_real_model_parses_back_to_the_same_graph(name: str) -> None:
    case = CASES[name]
    model = annotate(case.build(), case.stages[2])
    captured = capture(model, loss_step(case.loss_fn), flatten(case.batch(2)))
    for graph in (captured.graph, build_taskgraphs(captured.graph)):
        assert parse(to_text(graph)) == graph


ODD = (
    None, True, -3, 1.5, float("inf"), float("-inf"), 2j, "a  # 'b' c", torch.float16, torch.strided,
    torch.channels_last, torch.device("cpu"), (1, (Ref("x"), None)), (),
)  # fmt: skip


def _graph(*ops: Op, outputs: tuple[Output, ...] = ()) -> Graph:
    return Graph((Input("x", F32, "x"),), (), (), (), ops, outputs)


@pytest.mark.parametrize("constant", ODD, ids=repr)
def test_odd_constants_survive_the_text_form(constant: object) -> None:
    op = Op("y", F32, "aten.f.default", (Ref("x"), constant), (("key", constant),), module="a'b", source="c d.py:3")  # type: ignore[arg-type]
    graph = _graph(op, outputs=(Output("aux.z", constant),))  # type: ignore[arg-type]
    assert parse(to_text(graph)) == graph


@pytest.mark.parametrize(
    "line", ["y =", "y = aten.f(x)", "y = aten.f(x)  # 'f31[2]'", "task(kind='a', wrong=1)", "what(1)"]
)
def test_text_that_is_no_graph_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(GraphError, match="line 2 is not an item of a graph"):
        parse(f"x = input('f32[2]', path='x')\n{line}\n")


@pytest.mark.parametrize("text", ["f32[4, 16]", "i64[]", "bf16[?, 3]", "int", "list(f32[2], list(b8[], i64[1]))"])
def test_types_parse_back(text: str) -> None:
    assert str(parse_type(text)) == text


def test_a_broken_graph_is_reported_with_all_that_is_wrong() -> None:
    graph = _graph(
        Op("y", F32, "aten.f.default", (Ref("z"),), writes=("x",)),
        Op("z", F32, "aten.f.default", (Ref("nothing"),)),
        Op("z", F32, "aten.f.default", (Ref("x"),), task=4),
        outputs=(Output("loss", Ref("y")), Output("loss", Ref("gone"))),
    )
    found = "\n".join(violations(replace(graph, tasks=(StrategySpec("replicate", 0, "a"),))))
    for part in (
        "the name z is given 2 times", "uses z before it is made", "uses nothing which nothing makes", "touches x",
        "is in TaskGraph 4; the graph has 1", "is in TaskGraph None", "device_count 0", "output loss is given 2 times",
        "the output loss is gone", "one number is needed",
    ):  # fmt: skip
        assert part in found
    with pytest.raises(GraphError, match="after a pass breaks"):
        verify(replace(graph, tasks=(StrategySpec("replicate", 0, "a"),)), after="a pass")


def test_a_gradient_flows_through_differentiable_operators_only() -> None:
    parameter = parse("w = parameter('f32[2]', path='w', trainable=True, aliases=())\n").parameters
    ops = (
        Op("a", F32, "aten.mul.Tensor", (Ref("w"), Ref("x"))),
        Op("b", TensorType(torch.int64, (2,)), "aten.argmax.default", (Ref("a"),)),
        Op("c", F32, "aten.detach.default", (Ref("a"),)),
        Op("d", F32, "aten.mul.Tensor", (Ref("a"), Ref("x")), grad=False),
        Op("e", ListType((F32, F32)), "aten.chunk.default", (Ref("a"),)),
        Op("f", F32, "aten.relu.default", (Ref("x"),)),
    )
    graph = replace(_graph(*ops), parameters=parameter)
    assert graph.needs_grad == {"w", "a", "e"}
