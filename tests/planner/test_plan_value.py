"""A plan is a value: it says what was annotated, survives JSON, and refuses what cannot be carried out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.errors import ClusterError, PlanError, StrategyError
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.table import plan_table
from epl.planner.taskgraphs import build_taskgraphs


def _graph(counts: tuple[int, ...] = (1, 1), kind: str = "replicate") -> Graph:
    layers = [nn.Linear(4, 4) for _ in counts]
    for place, (layer, count) in enumerate(zip(layers, counts, strict=True)):
        getattr(epl, kind)(count, name=f"stage_{place}")(layer)
    model = nn.Sequential(*layers)
    return build_taskgraphs(capture(model, loss_step(lambda m, x: m(x).sum()), flatten(torch.ones(2, 4))).graph)


def _plan(devices: str, counts: tuple[int, ...] = (1, 1), **settings: object) -> Plan:
    config = epl.Config({key.replace("__", "."): value for key, value in settings.items()})
    return make_plan(_graph(counts), Cluster.from_spec(devices), config)


def test_a_plan_survives_json() -> None:
    plan = _plan("1x4", pipeline__num_micro_batch=4)
    assert Plan.from_json(plan.to_json()) == plan


def test_stages_take_the_devices_replica_by_replica_and_columns_follow() -> None:
    plan = _plan("1x4")
    assert [stage.ranks for stage in plan.stages] == [((0,), (2,)), ((1,), (3,))]
    assert [plan.place_of(rank) for rank in range(4)] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert [plan.ranks_of_column(column) for column in range(plan.num_columns)] == [(0, 1), (2, 3)]
    assert plan.ranks_of_stages((0, 1)) == (0, 1, 2, 3)


def test_stages_of_two_devices_share_the_batch_out_over_them() -> None:
    plan = _plan("2x4", (2, 2))
    assert [stage.ranks for stage in plan.stages] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert (plan.num_replicas, plan.num_columns) == (2, 4)
    assert plan.ranks_of_replica(1) == (4, 5, 6, 7)


def test_one_device_holds_all_taskgraphs_whatever_they_ask_for() -> None:
    plan = _plan("1x1", (1, 2))
    assert plan.num_stages == 1
    assert plan.stages[0].taskgraphs == (0, 1)


def test_devices_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ClusterError, match="3 devices are not divisible by 2"):
        _plan("1x3")


def test_stages_of_different_device_counts_share_out_one_batch() -> None:
    plan = _plan("1x3", (1, 2))
    assert plan.num_shares == 1
    assert [stage.index for stage in plan.sharded_stages] == [1]
    assert _plan("1x4", (2, 2)).sharded_stages == ()


def test_a_weight_tied_over_different_device_counts_is_whole_and_summed_once_a_step() -> None:
    plan = _plan("1x3", (1, 2))
    entry = replace(plan.parameters[0], stages=(0, 1))
    with pytest.raises(PlanError, match=r"tied over stages \[0, 1\] with \[1, 2\] devices"):
        replace(plan, parameters=(entry,))
    assert replace(plan, parameters=(replace(entry, gradient="P"),)).parameters


def test_split_needs_a_graph() -> None:
    graph = _graph((2,), "split")
    with pytest.raises(StrategyError, match=r"split\(2, .* needs the model as a graph"):
        make_plan(graph, Cluster.from_spec("1x2"), epl.Config(), is_opaque=True)
    assert make_plan(graph, Cluster.from_spec("1x2"), epl.Config()).stages[0].device_count == 2


def test_text_that_is_no_plan_is_refused() -> None:
    fields = json.loads(_plan("1x2").to_json())
    for text in ("{}", "not json", json.dumps({**fields, "extra": 1})):
        with pytest.raises(PlanError, match="this is not a plan"):
            Plan.from_json(text)


def test_a_plan_written_by_hand_is_checked() -> None:
    plan = _plan("1x2")
    with pytest.raises(PlanError, match=r"each of 0..2 is needed once"):
        replace(plan, world_size=3)
    with pytest.raises(PlanError, match="at least 1 is needed"):
        replace(plan, num_micro_batches=0)
    with pytest.raises(PlanError, match="rank 7 has no stage"):
        plan.place_of(7)


def test_everything_that_is_wrong_with_a_plan_is_said_at_once() -> None:
    plan = _plan("1x2")
    fields = json.loads(plan.to_json())
    fields |= {"num_micro_batches": 0, "max_buckets": 0, "schedule": "Zigzag", "reduce_method": "median"}
    fields["stages"][1] |= {"index": 5, "kind": "shard", "taskgraphs": [0]}
    fields["parameters"][0]["stages"] = [7]
    fields["edges"][0]["target"] = 0
    fields["peak_in_flight"] = [1]
    with pytest.raises(PlanError, match="this plan cannot be carried out") as caught:
        Plan.from_json(json.dumps(fields))
    for part in (
        "num_micro_batches is 0", "max_buckets is 0", "schedule is 'Zigzag'", "reduce_method is 'median'",
        "numbered [0, 5]", "of kind 'shard'", "hold the TaskGraphs [0, 0]", "is in stages [7]; there are 2",
        "goes from stage 0 to 0", "1 numbers for 2 stages",
    ):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("field", ["stages", "num_replicas", "num_micro_batches"])
def test_a_field_of_the_wrong_type_is_refused(field: str) -> None:
    fields = json.loads(_plan("1x2").to_json())
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps({**fields, field: "two"}))


def test_the_table_shows_stages_ranks_sizes_and_what_crosses() -> None:
    table = plan_table(_plan("1x4", pipeline__num_micro_batch=4))
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[0] == (
        "EPL plan for 4 ranks: 2 replicas of 2 stages, 4 micro-batches, schedule PreferBackward, bubble 20%"
    )
    assert lines[2:] == [
        "0 stage_0 replicate(1) {0} {2} 20 80 B 2 -",
        "1 stage_1 replicate(1) {1} {3} 20 80 B 1 from 0: linear f32[2, 4] = 32 B",
    ]


def test_a_model_that_returns_to_an_earlier_taskgraph_is_refused_with_both_modules() -> None:
    first, second = epl.replicate(1, name="first"), epl.replicate(1, name="second")
    model = nn.Sequential(first(nn.Linear(4, 4)), second(nn.Linear(4, 4)), first(nn.Linear(4, 4)))
    graph = capture(model, loss_step(lambda m, x: m(x).sum()), flatten(torch.ones(2, 4))).graph
    with pytest.raises(StrategyError, match=r"module 1 in TaskGraph 1 \(second.*feeds module 2 in TaskGraph 0 \(first"):
        build_taskgraphs(graph)
    assert len(build_taskgraphs(graph, colocate=True).tasks) == 2
