"""The search for placements is exact: nothing that could be chosen is better.

The reference tries everything: for each combination of options it adds up operators and conversions, one by one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cost.devices import DeviceModel, device_model
from epl.errors import PlanError
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.split import SplitChoice
from epl.planner.split_items import Edge, Item, Problem, SplitGroup
from epl.planner.split_problem import split_problem
from epl.planner.split_solve import conversion_of, conversion_s, solve
from epl.planner.taskgraphs import build_taskgraphs
from epl.sharding.options import WHOLE, Option
from epl.sharding.placements import Shard

GPU = device_model("A100-80GB")
# Links so slow that bytes decide, and so fast that computing does: the best choices differ.
SLOW = replace(GPU, link=replace(GPU.link, bandwidth_bytes_per_s=1e9))
FAST = replace(GPU, operator_s=0.0, link=replace(GPU.link, latency_s=0.0, bandwidth_bytes_per_s=1e13))
DEVICES = {"slow links": SLOW, "usual links": GPU, "fast links": FAST}
MOST = 50_000  # combinations


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x))).square().sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query, self.key, self.value)
        q, k, v = (part(x).unflatten(-1, (4, 64)).transpose(1, 2) for part in parts)  # 4 heads
        return (x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))).sum()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5000, 64), nn.Linear(64, 5000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(x)).flatten(0, 1), x.flatten())


class Blocks(nn.Module):
    """Three alike, each with a sum around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


class Changed(nn.Module):
    """The hidden value is read, changed in place, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        before = hidden.sum()
        hidden.mul_(2.0)
        return self.second(hidden).sum() + before


class Thrice(nn.Module):
    """An embedding that three matrices take."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.first, self.second, self.third = (nn.Linear(256, 1024, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        return (self.first(embedded) * self.second(embedded) * self.third(embedded)).sum()


FEATURES, TOKENS = (16, 32, 256), (16, 32)
MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, FEATURES),
    "attention": (Attention, FEATURES),
    "tagger": (Tagger, TOKENS),
    "blocks": (Blocks, FEATURES),
    "changed": (Changed, FEATURES),
    "thrice": (Thrice, TOKENS),
}


def graph_of(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Graph:
    with torch.device("meta"):
        model = epl.split(2)(make())
        batch: Any = torch.zeros(shape, dtype=torch.long if shape == TOKENS else torch.float32)
    step = loss_step(lambda module, x: module(x))
    return build_taskgraphs(capture(model, step, flatten(batch)).graph)


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return {name: graph_of(make, shape) for name, (make, shape) in MODELS.items()}


def problem_of(graph: Graph, num_ranks: int = 2, device: DeviceModel = GPU, *, micro_batches: int = 1) -> Problem:
    return split_problem(graph, frozenset({0}), SplitGroup(num_ranks, device, micro_batches))


# ------------------------------------------------------------------------------------------------------- the reference


def groups_of(problem: Problem) -> dict[Hashable, list[Item]]:
    found: dict[Hashable, list[Item]] = {}
    for item in problem.items:
        found.setdefault(item.group, []).append(item)
    return found


def num_combinations(problem: Problem) -> int:
    return math.prod(len(items[0].options) for items in groups_of(problem).values())


def edge_s(problem: Problem, edge: Edge, option_of: Callable[[int], Option]) -> float:
    """Seconds of all that stands on an edge, each conversion once; infinite if a use cannot have it like this."""
    made = option_of(edge.maker).outputs[edge.result]
    conversions = {conversion_of(edge, made, use, option_of(use.item)) for use in edge.uses}
    return (
        math.inf if None in conversions else sum(conversion_s(problem, edge, c) for c in conversions if c is not None)
    )


def best_of_all(problem: Problem) -> float:
    """Seconds of the best of all combinations, one axis of an array for each group that has a choice."""
    groups = groups_of(problem)
    axes = [group for group, items in groups.items() if len(items[0].options) > 1]
    times, sizes = np.zeros([1] * len(axes)), np.zeros([1] * len(axes))
    for group, items in groups.items():
        times = times + _along(axes, [group], sum(np.array(item.times_s) for item in items))
        sizes = sizes + _along(axes, [group], sum(np.array(item.sizes_bytes) for item in items))
    for edge in problem.edges:
        times = times + _edge_array(problem, edge, axes)
    memory_bytes = problem.group.device.memory_bytes
    return float(np.where(sizes <= memory_bytes, times, np.inf).min())


def _edge_array(problem: Problem, edge: Edge, axes: Sequence[Hashable]) -> np.ndarray:
    items = problem.items
    involved = list(dict.fromkeys(items[place].group for place in (edge.maker, *(use.item for use in edge.uses))))
    options = {items[place].group: items[place].options for place in (edge.maker, *(use.item for use in edge.uses))}
    counts = [len(options[group]) for group in involved]
    costs = np.zeros(counts)
    for places in product(*map(range, counts)):
        chosen = dict(zip(involved, places, strict=True))

        def option_of(index: int, chosen: dict[Hashable, int] = chosen) -> Option:
            return items[index].options[chosen[items[index].group]]

        costs[places] = edge_s(problem, edge, option_of)
    return _along(axes, involved, costs)


def _along(axes: Sequence[Hashable], groups: Sequence[Hashable], values: Any) -> np.ndarray:
    """Values by the options of some groups as an array with an axis for every group that has a choice."""
    kept = [group for group in groups if group in axes]
    squeezed = np.asarray(values).reshape([size for size in np.shape(values) if size > 1])
    order = sorted(range(len(kept)), key=lambda place: axes.index(kept[place]))
    shape = [1] * len(axes)
    for place in order:
        shape[axes.index(kept[place])] = squeezed.shape[place]
    return squeezed.transpose(order).reshape(shape)


def some_options(problem: Problem, seed: int, keep: Callable[[Item], bool] = lambda item: False) -> Problem:
    """The problem with fewer options for each group, drawn at random, so that all combinations can be tried.

    Args:
        problem: The problem.
        seed: Another one draws others.
        keep: Items that keep all their options.
    """
    draw = random.Random(seed)
    groups = groups_of(problem)
    kept = {group: list(range(len(items[0].options))) for group, items in groups.items()}
    while math.prod(map(len, kept.values())) > MOST:
        group = draw.choice([group for group, at in kept.items() if len(at) > 1 and not keep(groups[group][0])])
        kept[group].remove(draw.choice(kept[group][1:]))  # everything whole, the first, can always be had
    items = tuple(
        replace(
            item,
            options=tuple(item.options[place] for place in kept[item.group]),
            times_s=tuple(item.times_s[place] for place in kept[item.group]),
            sizes_bytes=tuple(item.sizes_bytes[place] for place in kept[item.group]),
        )
        for item in problem.items
    )
    return replace(problem, items=items)


def assert_best(problem: Problem) -> None:
    assert num_combinations(problem) <= MOST
    found, best = solve(problem), best_of_all(problem)
    assert best * (1 - 1e-9) <= found.time_s <= best * (1 + 1.1e-3)  # the solver stops at a thousandth


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_no_other_combination_is_better(graphs: dict[str, Graph], name: str, device: DeviceModel) -> None:
    problem = problem_of(graphs[name], 2, device)
    for seed in range(1 if num_combinations(problem) <= MOST else 8):
        assert_best(some_options(problem, seed))


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_no_other_combination_is_better_on_more_ranks(graphs: dict[str, Graph], num_ranks: int) -> None:
    for name in ("mlp", "tagger"):
        assert_best(some_options(problem_of(graphs[name], num_ranks, SLOW), num_ranks))


@pytest.mark.parametrize("name", ["mlp", "tagger"])
def test_no_other_combination_that_fits_is_better(graphs: dict[str, Graph], name: str) -> None:
    """The memory has room for the smallest choice only; what is small would otherwise stay whole."""
    problem = problem_of(graphs[name], 2, SLOW)
    least = sum(min(item.sizes_bytes) for item in problem.items)
    tight = replace(problem, group=replace(problem.group, device=replace(SLOW, memory_bytes=int(least))))
    assert_best(some_options(tight, 0, keep=lambda item: item.kind == "stored"))
    assert solve(tight).size_bytes == least


# ---------------------------------------------------------------------------------------- what may be chosen, and is


def choice_of(problem: Problem) -> SplitChoice:
    return SplitChoice(problem, solve(problem))


def test_items_of_repeated_blocks_decide_alike(graphs: dict[str, Graph]) -> None:
    choice = choice_of(problem_of(graphs["blocks"]))
    stored, options = choice.stored, choice.options
    for layer in (1, 3):
        assert len({stored[f"p_model_blocks_{block}_{layer}_weight"] for block in range(3)}) == 1
    for names in (("gelu", "gelu_1", "gelu_2"), ("linear", "linear_2", "linear_4")):
        assert len({options[name] for name in names}) == 1


def test_layers_within_a_block_decide_for_themselves(graphs: dict[str, Graph]) -> None:
    """A block in a Sequential names its layers by number too; taken for repeated blocks, both matrices of a feed-forward
    net were cut along the same dimension, and one of them gathered at each use: 4 to 20 times as slow."""
    choice = choice_of(problem_of(graphs["blocks"]))
    assert choice.stored["p_model_blocks_0_1_weight"] == Shard(0)
    assert choice.stored["p_model_blocks_0_3_weight"] == Shard(1)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_stored_cut(graphs: dict[str, Graph], name: str, num_ranks: int) -> None:
    """On fast links too, where it would be quicker to have them whole: that is what split is asked for."""
    stored = choice_of(problem_of(graphs[name], num_ranks, FAST)).stored
    matrices = [leaf for leaf in graphs[name].parameters if len(leaf.type.shape) == 2]
    assert matrices
    assert all(isinstance(stored[leaf.name], Shard) for leaf in matrices)


def test_a_small_weight_may_stay_whole(graphs: dict[str, Graph]) -> None:
    problem = problem_of(graphs["mlp"])
    ways = {
        item.name: [option.outputs[0] for option in item.options] for item in problem.items if item.kind == "stored"
    }
    assert ways["p_model_second_bias"] == [WHOLE, Shard(0)]
    assert WHOLE not in ways["p_model_second_weight"]
    assert choice_of(problem).stored["p_model_second_bias"] == WHOLE


def test_everything_whole_can_always_be_had(graphs: dict[str, Graph]) -> None:
    """The first option of each operator: so no graph is without a plan."""
    for graph in graphs.values():
        for item in problem_of(graph, 8).items:
            assert item.kind == "stored" or item.options[0].is_whole


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_value_used_three_times_alike_is_converted_once(graphs: dict[str, Graph], device: DeviceModel) -> None:
    problem = problem_of(graphs["thrice"], 2, device)
    choice = choice_of(problem)
    (edge,) = (edge for edge in problem.edges if edge.value == "embedding")
    conversions = choice.conversions(edge)
    assert len(conversions) == 3
    assert len(set(conversions)) == 1
    options = choice.solution.options
    others = sum(edge_s(problem, other, lambda index: options[index]) for other in problem.edges if other is not edge)
    operators = sum(
        item.times_s[item.options.index(option)] for item, option in zip(problem.items, options, strict=True)
    )
    once = conversion_s(problem, edge, conversions[0])
    assert once > 0
    assert choice.solution.time_s == pytest.approx(operators + others + once, rel=1e-9)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_value_changed_in_place_is_not_converted_before(graphs: dict[str, Graph], device: DeviceModel) -> None:
    """A converted value is another one: the change would be lost on it, or on the one that it came from."""
    problem = problem_of(graphs["changed"], 2, device)
    fixed = {problem.items[use.item].name: edge.value for edge in problem.edges for use in edge.fixed}
    assert fixed == {"sum_1": "linear", "mul_": "linear"}
    choice = choice_of(problem)
    for edge in problem.edges:
        for use, conversion in zip(edge.uses, choice.conversions(edge), strict=True):
            assert conversion.is_nothing or use not in edge.fixed


def test_a_use_that_must_take_what_is_made_cannot_be_converted(graphs: dict[str, Graph]) -> None:
    problem = problem_of(graphs["changed"])
    (edge,) = (edge for edge in problem.edges if edge.fixed)
    use = edge.uses[0]
    cut = next(option for option in problem.items[use.item].options if option.inputs[use.place] == Shard(2))
    assert conversion_of(edge, WHOLE, use, cut) is None
    assert conversion_of(edge, Shard(2), use, cut) is not None


@pytest.mark.parametrize("name", MODELS)
def test_solving_twice_gives_the_same(graphs: dict[str, Graph], name: str) -> None:
    """Each rank solves for itself; two that differed would wait for one another for ever."""
    again = graph_of(*MODELS[name])
    assert solve(problem_of(graphs[name], 4)) == solve(problem_of(again, 4))


def test_what_is_summed_once_a_step_is_shared_by_its_micro_batches(graphs: dict[str, Graph]) -> None:
    """A weight that is used whole on a cut batch costs an all-reduce a step, however many micro-batches there are."""
    costs = []
    for micro_batches in (1, 8):
        problem = problem_of(graphs["mlp"], micro_batches=micro_batches)
        (edge,) = (edge for edge in problem.edges if edge.value == "p_model_first_bias")
        use = edge.uses[0]
        batch = next(option for option in problem.items[use.item].options if option.outputs[0] == Shard(0))
        conversion = conversion_of(edge, WHOLE, use, batch)
        assert conversion is not None
        costs.append(conversion_s(problem, edge, conversion))
    assert costs[0] == pytest.approx(8 * costs[1])


def test_weights_that_do_not_fit_are_refused(graphs: dict[str, Graph]) -> None:
    small = replace(GPU, memory_bytes=2**20)
    with pytest.raises(PlanError, match=r"a split over 2 devices does not fit: .* GiB of weights, .* are missing"):
        solve(problem_of(graphs["mlp"], 2, small))
