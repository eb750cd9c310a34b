"""What each rank does in a step: drawn for one pipeline, and checked for every model of the zoo, cut and schedule.

Order is the whole protocol between ranks: a send without its receive, or two values in different orders at the two ends,
is a hang or a wrong number on a cluster. Here it is a line of text.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from epl.batch import flatten
from epl.capture.convert import convert
from epl.capture.export import export
from epl.cluster import Cluster
from epl.config import Config
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.instructions import Backward, FinishReduce, Forward, Free, PostReceive, Program, Send, StartReduce
from epl.program.lower import LoweredStage, lower_stage, lower_step
from epl.schedule import SCHEDULE_NAMES, Kind, forward_only, generate
from tests.marks import slow
from tests.program.local_run import lower
from tests.program.staged import batch_of, staged
from tests.zoo import CASES, annotate

X = batch_of()


def skipping(m: Any, x: Tensor) -> Tensor:
    a = m.a(x)
    return (m.c(m.b(a)) + a).mean()


def programs(stages: Sequence[LoweredStage], plan: Plan, schedule: str, num_micro_batches: int) -> list[Program]:
    actions = generate(schedule, plan.num_stages, num_micro_batches)
    return [
        lower_step(plan, stage.ranks[0][0], actions, [stages[stage.index].program] * num_micro_batches)
        for stage in plan.stages
    ]


def test_the_instructions_of_three_stages_with_a_skip() -> None:
    """a -> b -> c, and a -> c. A receive is posted one action ahead of the action that waits for it.

    What was sent forward has arrived when its gradient comes back.
    """
    lowered = lower(staged(skipping), X)
    found = [str(program).splitlines() for program in programs(lowered.stages, lowered.plan, "PreferBackward", 2)]
    assert found == [
        [
            "0F0", "SEND 0F0 linear->1, linear->2", "RECV 0B0 linear<-1, linear<-2",
            "0F1", "SEND 0F1 linear->1, linear->2", "RECV 0B1 linear<-1, linear<-2",
            "0B0", "FORGET 0F0 -> stage 1", "FORGET 0F0 -> stage 2", "FORGET 0F1 -> stage 1", "FREE 0B0",
            "START_REDUCE", "0B1", "FORGET 0F1 -> stage 2", "FREE 0B1", "FINISH_REDUCE",
        ],
        [
            "RECV 1F0 linear<-0", "RECV 1F1 linear<-0", "1F0", "SEND 1F0 linear_1->2",
            "RECV 1B0 linear_1<-2", "1F1", "SEND 1F1 linear_1->2", "RECV 1B1 linear_1<-2",
            "1B0", "FORGET 1F0 -> stage 2", "SEND 1B0 linear->0", "FREE 1B0",
            "START_REDUCE", "1B1", "FORGET 1F1 -> stage 2", "SEND 1B1 linear->0", "FREE 1B1", "FINISH_REDUCE",
        ],
        [
            "RECV 2F0 linear<-0, linear_1<-1", "2F0", "RECV 2F1 linear<-0, linear_1<-1",
            "2B0", "SEND 2B0 linear->0, linear_1->1", "FREE 2B0", "2F1",
            "START_REDUCE", "2B1", "SEND 2B1 linear->0, linear_1->1", "FREE 2B1", "FINISH_REDUCE",
        ],
    ]  # fmt: skip


def test_a_forward_pass_only_has_no_backward_and_no_reduction() -> None:
    lowered = lower(staged(skipping), X)
    stage = lowered.stages[1].program
    program = lower_step(lowered.plan, 1, forward_only(3, 2), [stage, stage], train=False)
    assert {type(instruction) for instruction in program.instructions} == {PostReceive, Forward, Send, Free}


def test_frozen_stages_have_no_backward_and_send_none() -> None:
    model = staged(skipping)
    for name in ("a", "b"):
        model.get_submodule(name).requires_grad_(False)
    lowered = lower(model, X)
    for program in programs(lowered.stages, lowered.plan, "PreferBackward", 2)[:2]:
        assert not [each for each in program.instructions if isinstance(each, Backward)]
        assert program.instructions[-2:] == (StartReduce(), FinishReduce())
    last = programs(lowered.stages, lowered.plan, "PreferBackward", 2)[2]
    assert not [each for each in last.instructions if isinstance(each, Send)]


def test_without_samples_a_rank_still_takes_part_in_the_reduction() -> None:
    lowered = lower(staged(skipping), X)
    assert lower_step(lowered.plan, 0, ((), (), ()), []).instructions == (StartReduce(), FinishReduce())


# ------------------------------------------------------------------------------------------- every model of the zoo


def graphs_of(name: str) -> list[Graph]:
    """The case's graph for each of its cuts; annotations have no say in an export, so one serves them all."""
    case = CASES[name]
    model, flat = case.build(), flatten(case.batch(2))
    exported = export(model, loss_step(case.loss_fn), flat.structure, flat.tensors)
    cut_models = (annotate(model, cut) for cut in case.stages.values())
    return [build_taskgraphs(convert(exported, cut, flat.paths).graph) for cut in cut_models]


def messages(program: Program, rank: int) -> tuple[dict[Any, list[str]], dict[Any, list[str]]]:
    """What a rank sends and what it receives, in order, for each (from, to, direction)."""
    sent: dict[Any, list[str]] = defaultdict(list)
    received: dict[Any, list[str]] = defaultdict(list)
    for each in program.instructions:
        if not isinstance(each, (Send, PostReceive)):
            continue
        for transfer in each.transfers:
            ends = (rank, transfer.peer) if isinstance(each, Send) else (transfer.peer, rank)
            found = sent if isinstance(each, Send) else received
            found[(*ends, each.action.kind)].append(f"{each.action.micro_batch} {transfer.value} {transfer.type}")
    return sent, received


def check_messages(graph: Graph, plan: Plan, replica: int, schedule: str) -> None:
    """What the ranks of one replica send is what they receive, in the same order."""
    ranks = [stage.ranks[replica][0] for stage in plan.stages]
    stages = [lower_stage(graph, plan, rank).program for rank in ranks]
    sent: dict[Any, list[str]] = {}
    received: dict[Any, list[str]] = {}
    actions = generate(schedule, plan.num_stages, 5)
    for rank, stage in zip(ranks, stages, strict=True):
        out, into = messages(lower_step(plan, rank, actions, [stage] * 5), rank)
        sent |= out
        received |= into
    assert sent == received
    assert any(kind is Kind.BACKWARD for *_, kind in sent)


LARGE = ("bart", "mixtral", "vit", "llama", "bert", "gpt2", "resnet")


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in LARGE), *slow(*LARGE)])
def test_every_send_has_its_receive_in_the_same_order(name: str) -> None:
    for graph in graphs_of(name):
        plan = make_plan(graph, Cluster((2 * len(graph.tasks),)), Config())
        for replica, schedule in itertools.product(range(plan.num_replicas), SCHEDULE_NAMES):
            check_messages(graph, plan, replica, schedule)


@pytest.mark.parametrize("name", ["t5", "unet", "tied"])
def test_a_receive_is_posted_before_its_action_and_never_twice(name: str) -> None:
    graph = graphs_of(name)[-1]
    plan = make_plan(graph, Cluster((len(graph.tasks),)), Config())
    stages = [lower_stage(graph, plan, rank) for rank in range(plan.world_size)]
    for program in programs(stages, plan, "PreferBackwardOptimizer", 6):
        order = [each for each in program.instructions if isinstance(each, (PostReceive, Forward, Backward))]
        posted = [each.action for each in order if isinstance(each, PostReceive)]
        assert len(posted) == len(set(posted))
        for action in posted:
            runs = [place for place, each in enumerate(order) if each.action == action]
            assert isinstance(order[runs[0]], PostReceive)
            assert len(runs) == 2
