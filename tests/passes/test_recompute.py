"""What automatic recompute puts into segments, and what it keeps out of them.

A mistake shows as a collective that one rank repeats, or as work that is done again for nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.passes.recompute import recompute
from epl.planner.make import make_plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.lower import LoweredStage, lower_stage
from epl.stage.saved import memory_of
from tests.marks import slow
from tests.zoo import CASES, annotate

AUTO = {"gradient_checkpoint.type": "auto", "gradient_checkpoint.extra_compute": 1.0}


def graph_of(name: str, *, split: int = 0, stages: int = 1) -> Graph:
    case = CASES[name]
    model = case.build(torch.float64)
    if split:
        epl.split(split)(model)
    if stages > 1:
        annotate(model, case.stages[stages])
    batch = flatten(case.batch(8, dtype=torch.float64))
    return build_taskgraphs(capture(model, loss_step(case.loss_fn), batch).graph, colocate=stages > 1)


def lowered(graph: Graph, world: int, config: dict[str, Any]) -> LoweredStage:
    return lower_stage(graph, make_plan(graph, Cluster((world,)), epl.Config(config)), 0)


@pytest.mark.parametrize("name", ["bert", *slow("resnet")])
@pytest.mark.parametrize("num_ranks", [2, *slow(3)])
def test_what_talks_to_other_ranks_is_in_no_segment(name: str, num_ranks: int) -> None:
    stage = lowered(graph_of(name, split=num_ranks), num_ranks, AUTO).stage
    _, about = memory_of(stage, num_ranks, 0)
    together = [op for op, each in zip(stage.graph.ops, about, strict=True) if each.meets_others]
    assert together
    assert not [op.name for op in together if op.segment is not None]
    assert any(op.segment is not None for op in stage.graph.ops)


@pytest.mark.parametrize("last", [0, 1])
def test_taskgraphs_after_the_last_one_keep_everything(last: int) -> None:
    config = {**AUTO, "gradient_checkpoint.end_taskgraph": last, "cluster.colocate_split_and_replicate": True}
    ops = lowered(graph_of("gpt2", stages=2), 1, config).stage.graph.ops
    assert {op.task for op in ops if op.segment is not None} == set(range(last + 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Calls(TorchDispatchMode):
    """Counts operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_last_product_of_a_segment_does_not_run_again() -> None:
    """It keeps what it takes and not what it makes, so computing again ends before it."""

    def count(config: dict[str, Any]) -> Counter[str]:
        epl.init(epl.Config({"run.print_plan": False, **config}))
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(6)))
        engine = epl.parallelize(model, loss_fn=lambda m, x: m(x).pow(2).mean())
        x = torch.randn(256, 16)
        engine.forward_backward(x)
        engine.zero_grad()
        with Calls() as calls:
            engine.forward_backward(x)
        return calls.counts

    plain, again = count({}), count(AUTO)
    segments = again["gelu"] - plain["gelu"]
    assert segments > 0
    assert again["addmm"] - plain["addmm"] < 2 * segments


def test_without_auto_the_pass_changes_nothing() -> None:
    stage = lowered(graph_of("bert"), 1, {}).stage
    plan = make_plan(graph_of("bert"), Cluster((1,)), epl.Config())
    assert recompute(stage, plan) is stage
