"""Experts cut over the ranks that replicate the rest: what travels, and that the numbers are those of one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.errors import StrategyError
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.taskgraphs import build_taskgraphs
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import tokens_of
from tests.runtime.problems import Outcome, Problem, Way, check, plain, seeded
from tests.runtime.training import share_of
from tests.zoo import CASES

COLOCATE = {"cluster.colocate_split_and_replicate": True}
VOCABULARY, HIDDEN = 11, 6
EXPERTS = [["embedding", "gate", "head"], ["moe.experts"]]


class Model(nn.Module):
    """A token model with one layer of experts; its balancing loss is added."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.gate = nn.Linear(HIDDEN, HIDDEN)
        self.moe = epl.nn.MoE(HIDDEN, 8, **{"num_experts": 8, "balance_weight": 0.5, **options})
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        x = torch.tanh(self.gate(self.embedding(tokens)))
        output, loss, _ = self.moe(x)
        logits = self.head(x + self.drop(output))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + loss


def problem(size: int = 8, **options: Any) -> Problem:
    return Problem(partial(seeded, Model, **options), [tokens_of(size, seed) for seed in range(3)])


def plan_of(num_devices: int, experts: Callable[[Model], nn.Module] = lambda model: model.moe.experts) -> Plan:
    epl.init(epl.Config(COLOCATE))
    epl.set_default_strategy(epl.replicate(num_devices))
    model = seeded(Model)
    epl.split(num_devices)(experts(model))  # type: ignore[arg-type]
    batch = flatten({"tokens": tokens_of(8)["tokens"]})
    graph = build_taskgraphs(capture(model, loss_step(None), batch).graph, colocate=True)
    return make_plan(graph, Cluster((num_devices,)), epl.Config(COLOCATE))


# ------------------------------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_experts_take_two_all_to_alls_forward_and_two_backward(num_devices: int) -> None:
    (split,) = plan_of(num_devices).splits
    lines = [line for line in split.communication if "once a step" not in line]
    assert sum(int(line.split()[0]) for line in lines if re.search(r"all_to_all of (?!the gradient)", line)) == 2
    assert sum(int(line.split()[0]) for line in lines if "all_to_all of the gradient" in line) == 2
    large = [line for line in lines if "all_to_all" not in line and not re.search(r", \d B \(", line)]
    assert not large, "nothing else travels but single numbers"


def test_the_layer_as_a_whole_may_be_split() -> None:
    plan = plan_of(2, lambda model: model.moe)
    assert {entry.path: entry.placement for entry in plan.parameters}["moe.experts.weight_in"] == "S(0)"


def test_every_device_keeps_its_share_of_the_experts_and_all_of_the_rest() -> None:
    placements = {entry.path: (entry.placement, entry.gradient) for entry in plan_of(4).parameters}
    for path, place in placements.items():
        assert place == (("S(0)", "R") if "experts" in path else ("R", "P")), path


def test_fewer_experts_than_devices_are_refused() -> None:
    with pytest.raises(
        StrategyError,
        match=r"on 16 devices.*8 along dimension 0 are not one for each device: take at least 16",
    ):
        plan_of(16)


# ----------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("world", [2, *slow(3, 4, 8)])
def test_experts_over_the_ranks_that_replicate_the_rest(world: int) -> None:
    check(problem(), Way(world, EXPERTS, devices=world, split=(1,), config=COLOCATE))


def test_experts_with_data_parallelism_and_micro_batches() -> None:
    way = Way(4, EXPERTS, devices=2, split=(1,), config=COLOCATE)
    check(problem(), way, Way(4, EXPERTS, devices=2, split=(1,), micro_batches=2, config=COLOCATE))


@pytest.mark.parametrize("options", [{"num_prototypes": 2, "top_k": 1}, *slow({"top_k": 1}, {"capacity_factor": 0.3})])
def test_kinds_of_routing(options: dict[str, Any]) -> None:
    check(problem(5, **options), Way(2, EXPERTS, devices=2, split=(1,), config=COLOCATE))


def test_experts_in_a_pipeline() -> None:
    """Stages on devices of their own, in which everything is split; and the layer as a whole."""
    cut = [["embedding", "gate"], ["moe", "head"]]
    check(
        problem(),
        Way(3, cut, devices=(1, 2), split=(1,), micro_batches=2),
        Way(2, [["embedding", "gate", "head"], ["moe"]], devices=2, split=(1,), config=COLOCATE),
    )


# ------------------------------------------------------------------------------------- models that bring their own experts

LAYER = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate")
REST = [
    "model.embed_tokens",
    *(f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYER),
    "model.norm",
    "lm_head",
]


def mixtral_with_split_experts(count: int) -> nn.Module:
    model = CASES["mixtral"].build(torch.float64)
    experts = [module for path, module in model.named_modules() if path.endswith("mlp.experts")]
    epl.split(count, placements={"*.experts.*": "S(0)"})(*experts)
    return model


@pytest.mark.parametrize("count", [2, *slow(4)])
def test_experts_of_mixtral_are_cut_over_the_ranks(count: int) -> None:
    """Unmodified: each rank keeps some experts, beside replicated attention, alone and in two replicas."""
    case = CASES["mixtral"]
    batches = [case.batch(4, seed=seed, dtype=torch.float64) for seed in range(2)]
    given = Problem(partial(mixtral_with_split_experts, count), batches, case.loss_fn)
    way = Way(count, [REST], devices=count, config=COLOCATE)
    check(given, way, Way(2 * count, [REST], devices=count, micro_batches=2, config=COLOCATE))


@pytest.mark.slow
def test_experts_of_mixtral_in_a_pipeline() -> None:
    """Each stage is split, its experts by expert; attention as the search finds best."""
    case = CASES["mixtral"]
    batches = [case.batch(4, seed=seed, dtype=torch.float64) for seed in range(2)]
    given = Problem(mixtral_in_two_stages, batches, case.loss_fn)
    check(given, Way(4, micro_batches=2))


def mixtral_in_two_stages() -> nn.Module:
    model = CASES["mixtral"].build(torch.float64)
    for stage, paths in enumerate(CASES["mixtral"].stages[2]):
        modules = [model.get_submodule(path) for path in paths]
        experts = any(path.endswith("experts") for module in modules for path, _ in module.named_modules())
        epl.split(2, f"stage_{stage}", placements={"*.experts.*": "S(0)"} if experts else None)(*modules)
    return model


class Idle(Model):
    """All tokens look alike to the gate, so that most experts get none."""

    def __init__(self) -> None:
        super().__init__(top_k=1, capacity_factor=16.0)
        with torch.no_grad():
            self.embedding.weight.fill_(0.5)


def test_experts_without_tokens() -> None:
    idle = Problem(partial(seeded, Idle), [tokens_of(6, seed) for seed in range(2)])
    check(idle, Way(4, EXPERTS, devices=4, split=(1,), config=COLOCATE))
    gradients = plain(idle).gradients["moe.experts.weight_in"]
    assert (gradients.flatten(1).abs().sum(1) == 0).sum() >= 4, "most experts get no token here"


@pytest.mark.slow
def test_a_last_batch_that_does_not_divide() -> None:
    batches = [tokens_of(8), tokens_of(5, 1), tokens_of(1, 2)]
    uneven = Problem(partial(seeded, Model), batches)
    ways = (Way(4, EXPERTS, devices=count, split=(1,), config=COLOCATE) for count in (4, 2))
    check(uneven, *ways)


def train_seeded(rank: int, given: Problem, way: Way) -> Outcome:
    from tests.runtime.problems import train

    torch.manual_seed(7)
    return train(rank, given, way)


def test_dropout_beside_experts_draws_what_one_process_draws() -> None:
    given = problem(6, dropout=0.4)
    (expected,) = launch(1, train_seeded, given, Way(1))
    for outcome in launch(2, train_seeded, given, Way(2, EXPERTS, devices=2, split=(1,), config=COLOCATE)):
        assert_close(outcome, expected, torch.float64)


def counts_of(rank: int, batch: dict[str, Tensor]) -> list[int]:
    epl.init(epl.Config({**COLOCATE, "run.print_plan": False}))
    epl.set_default_strategy(epl.replicate(2))
    model = seeded(Model, capacity_factor=0.5)
    epl.split(2)(model.moe.experts)  # type: ignore[arg-type]

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        output, loss, dropped = model.moe(model.embedding(batch["tokens"]))
        return output.square().mean() + loss, {"dropped": dropped}

    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn)
    mine = share_of(batch, rank // 2, 2)
    return engine.train_step(mine)[1]["dropped"].tolist()


def test_the_count_of_dropped_tokens_is_that_of_one_process() -> None:
    batch = {"tokens": tokens_of(7)["tokens"]}
    model = seeded(Model, capacity_factor=0.5)
    expected = model.moe(model.embedding(batch["tokens"])).dropped.tolist()  # type: ignore[operator]
    assert sum(expected) > 0
    assert launch(4, counts_of, batch) == [expected] * 4
