"""What one rank of a split stage runs: local shapes, each conversion once and in its place, whole values going out.

Ranks are threads that run the generated code on their shards; every call tells the shapes that come of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.cluster import Cluster
from epl.config import Config
from epl.cost.devices import device_model
from epl.ir.graph import Graph, Op, Ref
from epl.ir.types import ListType, TensorType, Type
from epl.loss import LossFunction, loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.split import SplitChoice, choose_split
from epl.planner.split_items import Item, Problem, SplitGroup
from epl.planner.split_solve import Solution, find
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.lower import LoweredStage, lower_stage
from epl.sharding.collectives import Collectives
from epl.sharding.local import Exchange, LocalForm
from epl.sharding.options import Option
from epl.sharding.placements import Partial, join_shards, local_shape, parse_placement, take_shard
from epl.stage.codegen import resolve
from epl.stage.shards import ShardedStage, shard_stage
from tests.parity import assert_close
from tests.sharding.threads import ThreadRank, run_ranks
from tests.zoo import CASES, Case, annotate

NUM_RANKS = 2


@dataclass(frozen=True)
class Split:
    """A model of the zoo under ``split``, as each of its first ranks runs it."""

    model: nn.Module
    batch: Any
    loss_fn: LossFunction | None
    captured: Captured
    graph: Graph
    plan: Plan

    @property
    def stage_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.graph.ops if op.task in self.plan.stages[0].taskgraphs)

    @property
    def choice(self) -> SplitChoice:
        stage = self.plan.stages[0]
        group = SplitGroup(stage.device_count, device_model(self.plan.device_kind), self.plan.num_micro_batches)
        return choose_split(self.graph, frozenset(stage.taskgraphs), group)

    def sharded(self, position: int) -> ShardedStage:
        return shard_stage(self.graph, self.choice, self.stage_ops, position)


def split_of(case: Case, num_ranks: int = NUM_RANKS, *, more: bool = False) -> Split:
    """All of a model in one split stage; or, with ``more``, its second half on a device of its own."""
    model, batch = case.build(torch.float64), case.batch(4, dtype=torch.float64)
    first, second = case.stages[2] if more else ([""], [])
    annotate(model, [first], (num_ranks,), epl.split)
    annotate(model, [second] if second else [], (1,))
    captured = capture(model, loss_step(case.loss_fn), flatten(batch))
    graph = build_taskgraphs(captured.graph)
    cluster = Cluster((num_ranks + more,), device_kind="A100-80GB")
    return Split(model, batch, case.loss_fn, captured, graph, make_plan(graph, cluster, Config()))


def by_lot(problem: Problem, seed: int) -> Solution | None:
    """Options that hardly anything but chance decides: conversions of all kinds, which the best choice has few of."""

    def time_s(item: Item, option: Option) -> float:
        return random.Random(f"{seed} {item.label} {option}").random()

    items = (replace(item, times_s=tuple(time_s(item, option) for option in item.options)) for item in problem.items)
    return find(replace(problem, items=tuple(items)))


@cache
def named(name: str) -> Split:
    """Built once; the choices of its ranks are made in each test, under the same solver."""
    return split_of(CASES[name.split()[0]])


@pytest.fixture(params=["mlp as chosen", "mlp by lot", "bert as chosen", "bert by lot"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Split:
    if request.param.endswith("by lot"):
        monkeypatch.setattr("epl.planner.split.find", partial(by_lot, seed=4))
    return named(request.param)


# -------------------------------------------------------------------------------------------------------------- running


@dataclass
class Ran:
    """What one rank's code has done."""

    calls: list[tuple[str, list[tuple[int, ...]]]]
    results: tuple[Any, ...]
    held: dict[str, Tensor]


def run(split: Split, lowered: LoweredStage, ranks: Collectives) -> Ran:
    calls: list[tuple[str, list[tuple[int, ...]]]] = []
    functions: dict[str, Callable[..., Any]] = {}
    for _, target in lowered.code.targets:
        plain = lowered.functions[target].bind(ranks) if target in lowered.functions else resolve(target)
        functions[target] = _telling(target, plain, calls)
    held = {name: _shard_of(split, name, ranks) for name in lowered.program.held}
    inputs = [flatten(split.batch).tensors[place] for place in lowered.program.inputs]
    results = lowered.code.compile(functions)(*held.values(), *inputs, lambda draw: None)
    return Ran(calls, results, held)


def _telling(target: str, plain: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        items = result if isinstance(result, (tuple, list)) else [result]
        calls.append((target, [tuple(item.shape) for item in items if isinstance(item, Tensor)]))
        return result

    return call


def _shard_of(split: Split, name: str, ranks: Collectives) -> Tensor:
    if name in split.captured.constants:
        return split.captured.constants[name]
    graph = split.graph
    path = next(leaf.path for leaf in (*graph.parameters, *graph.buffers) if leaf.name == name)
    whole = {**dict(split.model.named_parameters()), **dict(split.model.named_buffers())}[path].detach()
    shard = take_shard(whole, parse_placement(_entry(split, path).placement), ranks.size, ranks.rank).clone()
    return shard.requires_grad_(whole.is_floating_point() and _entry(split, path).trainable)


def _entry(split: Split, path: str) -> Any:
    return next(entry for entry in split.plan.parameters if entry.path == path)


def run_all(split: Split, num_ranks: int = NUM_RANKS) -> tuple[list[LoweredStage], list[Ran]]:
    lowered = [lower_stage(split.graph, split.plan, rank) for rank in range(num_ranks)]

    def work(ranks: ThreadRank) -> Ran:
        ran = run(split, lowered[ranks.rank], ranks)
        if not lowered[0].program.gives:
            ran.results[-1].backward()
        return ran

    return lowered, run_ranks(num_ranks, work)


def _shapes(kind: Type) -> list[tuple[int | None, ...]]:
    items = kind.items if isinstance(kind, ListType) else (kind,)
    return [item.shape for item in items if isinstance(item, TensorType)]


# ------------------------------------------------------------------------------------------------------------- the code


def test_declared_types_are_those_of_real_shards(split: Split) -> None:
    """A local shape that was forgotten (of a view, an expand) would make code that runs on nothing but one rank."""
    for lowered, ran in zip(*run_all(split), strict=True):
        expected = [(op.target, _shapes(op.type)) for op in lowered.code.ops if not op.target.startswith("python.")]
        assert [call for call in ran.calls if not call[0].startswith("python.")] == expected


def test_ranks_come_to_the_loss_and_the_gradients_of_the_whole(split: Split) -> None:
    assert_gradients(split)


def assert_gradients(split: Split) -> None:
    _, runs = run_all(split)
    loss = dict(loss_step(split.loss_fn).run(split.model, split.batch))["loss"]
    split.model.zero_grad()
    loss.backward()
    for ran in runs:
        assert_close({"loss": ran.results[-1].detach()}, {"loss": loss.detach()}, torch.float64)
    found: dict[str, Tensor] = {}
    for leaf in split.graph.parameters:
        entry = _entry(split, leaf.path)
        parts = [ran.held[leaf.name].grad for ran in runs]
        placement = Partial() if entry.gradient == "P" else parse_placement(entry.placement)
        found[leaf.path] = join_shards([part for part in parts if part is not None], placement)
    parameters = dict(split.model.named_parameters())
    assert_close(found, {path: parameters[path].grad for path in found}, torch.float64)


class Normed(nn.Module):
    """A normalisation before a feed-forward net; a large batch is best cut, and a small one not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


@pytest.mark.parametrize("sizes", [(1, 4096), (4096, 1)], ids=str)
def test_gradients_are_summed_once_whatever_graph_the_plan_was_made_with(sizes: tuple[int, int]) -> None:
    """A plan made with one size, and a step with another, where the weights would be used in another way.

    If each rank has a summand of a gradient that the plan takes for whole, the ranks drift apart; the other way round, it
    is counted once for each rank.
    """
    torch.manual_seed(0)
    model = epl.split(NUM_RANKS)(Normed().double())
    first, second = (_captured(model, torch.rand(size, 64, dtype=torch.float64)) for size in sizes)
    plan = make_plan(build_taskgraphs(first.graph), Cluster((NUM_RANKS,)), Config())
    batch = torch.rand(sizes[1], 64, dtype=torch.float64)
    assert_gradients(Split(model, batch, _mean_square, second, build_taskgraphs(second.graph), plan))


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _captured(model: nn.Module, batch: Tensor) -> Captured:
    return capture(model, loss_step(_mean_square), flatten(batch))


def test_ranks_run_the_same_operators_in_the_same_order(split: Split) -> None:
    """Collectives meet by their order."""
    one, other = (split.sharded(position) for position in range(NUM_RANKS))
    assert [(op.name, op.target) for op in one.ops] == [(op.name, op.target) for op in other.ops]
    assert one.functions == other.functions


def test_each_conversion_is_made_once(split: Split) -> None:
    sharded, choice = split.sharded(0), split.choice
    exchanges = [(op.reads, sharded.functions[op.target]) for op in sharded.ops if op.target.startswith("exchange.")]
    assert len(set(exchanges)) == len(exchanges)
    expected = sum(
        not conversion.is_nothing
        for edge in choice.problem.edges
        if not choice.sums_later(edge)
        for conversion in set(choice.conversions(edge))
    )
    assert len(exchanges) == expected > 0


def test_a_conversion_stands_right_before_the_first_that_needs_it(split: Split) -> None:
    """Earlier, it would keep memory; later, it would be too late."""
    ops = split.sharded(0).ops
    made = set(split.graph.leaves)
    for place, op in enumerate(ops):
        assert made.issuperset(op.reads), op.name
        made.add(op.name)
        if op.target.startswith("exchange."):
            users = (later for later in ops[place + 1 :] if not later.target.startswith("exchange."))
            user = next(users, None)
            assert user is None or op.name in user.reads


def test_every_use_takes_the_value_as_its_option_says(split: Split) -> None:
    """By the types in the code: what an operator reads has the shape that its option asks for."""
    sharded, choice = split.sharded(0), split.choice
    kinds = {op.name: op.type for op in sharded.ops}
    whole = {op.name: op for op in split.stage_ops}
    for op in sharded.ops:
        if op.name not in whole or op.target.startswith(("python.", "form.")):
            continue
        reads = [(mine, theirs) for mine, theirs in zip(op.reads, whole[op.name].reads, strict=False) if mine in kinds]
        placements = dict(zip(whole[op.name].reads, choice.options[op.name].inputs, strict=False))
        for mine, theirs in reads:
            shapes = [
                local_shape(shape, placements[theirs], NUM_RANKS, 0) for shape in _shapes(split.graph.type_of(theirs))
            ]
            assert _shapes(kinds[mine]) == shapes, op.name


def test_local_forms_and_exchanges_are_bound_by_name(split: Split) -> None:
    sharded = split.sharded(0)
    used = [op.target for op in sharded.ops if op.target.startswith(("exchange.", "form."))]
    assert sorted(used) == sorted(sharded.functions)
    for target, function in sharded.functions.items():
        assert isinstance(function, Exchange if target.startswith("exchange.") else LocalForm)


# ------------------------------------------------------------------------------------------------- what leaves a stage


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_what_goes_to_another_stage_is_placed_as_the_plan_says(name: str) -> None:
    split = split_of(CASES[name], more=True)
    lowered, runs = run_all(split)
    given = lowered[0].program.gives
    assert given
    placements = {edge.value: parse_placement(edge.placement_at_source) for edge in split.plan.edges}
    expected = _values(split, given)
    for rank, ran in enumerate(runs):
        for value, sent, whole in zip(ran.results, given, expected, strict=False):
            part = take_shard(whole.detach(), placements[sent], NUM_RANKS, rank)
            assert_close({sent: value.detach()}, {sent: part}, torch.float64)


def _values(split: Split, names: Sequence[str]) -> list[Tensor]:
    """Values of the plain graph, which one rank computes alone."""
    alone = make_plan(split.graph, Cluster((1,)), Config())
    lowered = lower_stage(split.graph, alone, 0)
    leaves = {leaf.name: leaf.path for leaf in (*split.graph.parameters, *split.graph.buffers)}
    state = {**dict(split.model.named_parameters()), **dict(split.model.named_buffers())}
    held = [
        state[leaves[name]].detach() if name in leaves else split.captured.constants[name]
        for name in lowered.program.held
    ]
    values: dict[str, Any] = dict(zip(lowered.program.held, held, strict=True))
    values |= dict(zip((leaf.name for leaf in split.graph.inputs), flatten(split.batch).tensors, strict=True))
    for op in lowered.code.ops:
        values[op.name] = resolve(op.target)(*_filled(op.args, values), **dict(_filled(op.kwargs, values)))
    return [values[name] for name in names]


def _filled(argument: Any, values: dict[str, Any]) -> Any:
    if isinstance(argument, tuple):
        return tuple(_filled(item, values) for item in argument)
    return values[argument.name] if isinstance(argument, Ref) else argument
