"""What a graph knows of its values: where they live, what they need before them, where gradients flow.

These decide what crosses between stages and in which order. A mistake shows as a gradient that is never sent, or as a
write that another stage does not see.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epl.ir.graph import Buffer, Edge, Graph, Input, Op, Output, Parameter, Ref, StrategySpec
from epl.ir.text import parse, to_text
from epl.ir.types import ListType, TensorType
from epl.ir.verify import violations

F32, I64 = TensorType(torch.float32, (2,)), TensorType(torch.int64, (2,))
X, B = Input("x", F32, "x"), Buffer("b", F32, "b")
W = Parameter("w", F32, "w")
TASKS = (StrategySpec("replicate", 1, "first"), StrategySpec("replicate", 1, "second"))


def op(name: str, *reads: str, target: str = "aten.f.default", **fields: object) -> Op:
    return Op(name, F32, target, tuple(map(Ref, reads)), **fields)  # type: ignore[arg-type]


def graph(*ops: Op, loss: str | None = None) -> Graph:
    outputs = (Output("aux.y", Ref(loss)),) if loss else ()
    return Graph((X,), (W,), (B,), (), ops, outputs)


def test_a_view_lives_where_what_it_views_lives() -> None:
    roots = graph(op("a", "x"), op("v", "a", views=("a",)), op("u", "v", views=("v",)), op("c", "u")).storage_roots
    assert roots == {"x": "x", "w": "w", "b": "b", "a": "a", "v": "a", "u": "a", "c": "c"}


def test_results_of_one_operator_share_memory_only_if_they_are_views() -> None:
    def picked(views: tuple[str, ...]) -> dict[str, str]:
        many = Op("many", ListType((F32, F32)), "aten.f.default", (Ref("x"),), views=views)
        picks = [Op(name, F32, "python.getitem", (Ref("many"), i)) for name, i in (("p", 0), ("q", 1), ("again", 0))]
        return graph(many, *picks).storage_roots

    assert [picked(())[name] for name in ("p", "q", "again")] == ["p", "q", "p"]
    assert [picked(("x",))[name] for name in ("p", "q", "again")] == ["x", "x", "x"]


def test_a_write_to_a_view_is_a_write_to_its_root() -> None:
    write = op("w1", "v", "x", writes=("v",), views=("v",))
    found = graph(op("a", "x"), op("v", "a", views=("a",)), write).written
    assert found == {"a": (write,)}


def test_a_reader_runs_after_earlier_writers_and_not_after_later_ones() -> None:
    found = graph(
        op("before", "b"), op("w1", "b", "x", writes=("b",), views=("b",)), op("between", "b"),
        op("w2", "b", writes=("b",), views=("b",)), op("after", "b"), op("other", "x"),
    ).feeders  # fmt: skip
    assert found == {
        "before": (), "w1": (), "between": ("w1",), "w2": ("w1",), "after": ("w1", "w2"), "other": (),
    }  # fmt: skip


def test_what_the_batch_alone_decides_is_known_before_the_step() -> None:
    found = graph(
        op("a", "x"), op("b1", "b"), op("c", "w"), op("d", "a", random=0), op("e", "a", "c"), op("g", "a", "b1"),
        Op("h", F32, "function.call_0", ((Ref("x"),),)),
    ).known_from_batch  # fmt: skip
    assert found == {"x", "b", "a", "b1", "g"}


def test_what_forward_changes_is_not_known_before_the_step() -> None:
    found = graph(op("w1", "b", writes=("b",), views=("b",)), op("a", "b"), op("c", "x")).known_from_batch
    assert found == {"x", "c"}


def test_a_gradient_that_is_written_into_a_view_reaches_every_name_of_the_memory() -> None:
    found = graph(
        op("z", "x"), op("v", "z", views=("z",)), op("y", "w", "x"), op("s", "v", "y", writes=("v",), views=("v",))
    ).needs_grad
    assert {"z", "v", "s", "y", "w"} <= found


def test_writing_without_gradients_does_not_take_them_away() -> None:
    found = graph(op("y", "w"), op("s", "y", writes=("y",), views=("y",), grad=False)).needs_grad
    assert "s" in found


def test_what_is_written_to_and_not_returned_takes_no_gradient() -> None:
    found = graph(op("y", "w", "b", writes=("b",))).needs_grad  # as a batch norm does with its running statistics
    assert "y" in found
    assert "b" not in found


@pytest.mark.parametrize("target", ["aten.detach.default", "aten.argmax.default"])
def test_gradients_end_at_detached_and_at_whole_numbers(target: str) -> None:
    kind = F32 if "detach" in target else I64
    assert "d" not in graph(op("y", "w"), Op("d", kind, target, (Ref("y"),))).needs_grad


def test_edges_are_what_one_taskgraph_makes_and_another_uses() -> None:
    found = replace(
        graph(op("a", "x", "w", task=0), op("c", "a", "x", task=1), op("d", "c", "a", task=1), loss="d"), tasks=TASKS
    )
    assert found.edges == (Edge("a", 0, 1),)
    first, second = found.taskgraphs
    assert (first.takes, first.gives) == (("x", "w"), ("a",))
    assert (second.takes, second.gives) == (("a", "x"), ("d",))
    assert [leaf.name for leaf in found.parameters_of(0)] == ["w"]
    assert found.parameters_of(1) == ()


def test_writing_to_another_taskgraphs_memory_is_a_violation_unless_they_share_devices() -> None:
    broken = replace(
        graph(op("a", "x", task=0), op("s", "a", writes=("a",), views=("a",), task=1), loss="s"), tasks=TASKS
    )
    (line,) = violations(broken)
    assert line == "s = aten.f.default in TaskGraph 1 changes a of TaskGraph 0 in place"
    assert violations(broken, colocated=True) == []


def test_using_what_its_owner_changes_later_is_a_violation() -> None:
    broken = replace(
        graph(op("a", "x", task=0), op("c", "a", task=1), op("s", "a", writes=("a",), views=("a",), task=0), loss="c"),
        tasks=TASKS,
    )
    assert "changes in place later" in "\n".join(violations(broken))


def test_a_default_strategy_survives_the_text_form() -> None:
    specs = (StrategySpec("replicate", 1, "it's", 'a "b".py:3', is_default=True), StrategySpec("split", 2, "s"))
    found = replace(graph(op("a", "x", tag=0)), strategies=specs)
    assert parse(to_text(found)) == found


@pytest.mark.parametrize("text", ["cpu:bfloat16", "cpu:", "cpu:bfloat16,cuda:"])
def test_every_field_of_an_operator_survives_the_text_form(text: str) -> None:
    fields: dict[str, object] = {"task": 1, "tag": 0, "module": "a.b", "source": "/x y/z.py:3", "random": 2}
    fields |= {"writes": ("x",), "views": ("x",), "segment": 4, "grad": False, "autocast": text}
    found = graph(op("a", "x", **fields))
    assert parse(to_text(found)) == found
