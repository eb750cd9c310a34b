"""Under replicate(k) beside split, every operator works on its part of the batch, in real models, too."""

from __future__ import annotations

import pytest
import torch

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.batch_cuts import batch_cuts
from epl.planner.make import make_plan
from epl.planner.taskgraphs import build_taskgraphs
from tests.marks import slow
from tests.zoo import CASES, annotate

COLOCATE = {"cluster.colocate_split_and_replicate": True}
LARGE = ("bart", "t5", "bert", "llama", "mixtral", "gpt2")
NAMES = [name for name, case in CASES.items() if 2 in case.stages and name not in LARGE]
MASKS = {"bert": "bert index", "t5": "encoder index", "bart": "model.encoder index"}  # of padding, looked up by sample


def graph_of(name: str) -> Graph:
    """The first half of the model under replicate, the second under split."""
    case = CASES[name]
    model = case.build(torch.float64)
    replicated, split = case.stages[2]
    annotate(model, [replicated], [2])
    annotate(model, [split], [2], epl.split)
    batch = flatten(case.batch(4, dtype=torch.float64))
    return build_taskgraphs(capture(model, loss_step(case.loss_fn), batch).graph, colocate=True)


@pytest.mark.parametrize("name", [*NAMES, *slow(*LARGE)])
def test_nothing_that_could_work_on_a_part_of_the_batch_runs_whole(name: str) -> None:
    graph = graph_of(name)
    plan = make_plan(graph, Cluster((2,)), epl.Config(COLOCATE))
    whole = [line.rpartition(": ")[2] for line in plan.splits[0].choices if "whole on every rank" in line]
    assert whole == ([MASKS[name]] if name in MASKS else [])
    weights = {leaf.path for leaf in graph.parameters_of(0)}
    for entry in plan.parameters:
        if entry.path in weights and entry.trainable:
            assert (entry.placement, entry.gradient) == ("R", "P"), entry.path


def test_operators_that_need_no_batch_are_not_cut() -> None:
    graph = graph_of("llama")
    cut = batch_cuts(graph)
    positions = [op.name for op in graph.ops if op.target.startswith("aten.arange")]
    assert positions
    assert not cut.keys() & set(positions)
