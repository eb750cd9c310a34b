"""Shared and offloaded states under what users do: odd weights, odd batches, odd loops. The numbers are one process's.

A mistake shows as the table of the tensors that differ; a hang, where a rank waits for a weight that another one skips.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import epl
from epl.errors import EplError
from tests.marks import slow
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, Frozen, Mixture, Tagger, batch_of, draw, tokens_of
from tests.runtime.problems import Problem, Way, check, my_share, seeded, start
from tests.runtime.training import Job, check_parity

LEVELS = ("v0", "v1", "v2")
DISK: dict[str, Any] = {"zero.level": "v2", "offload.level": "disk"}
HALVES = [["a", "b"], ["c", "d"]]


def ways(world: int = 2, cut: list[list[str]] | None = None, micro_batches: int = 2, config: Any = None) -> list[Way]:
    """Each level, and all in files."""
    settings = [{"zero.level": level} for level in LEVELS]
    return [Way(world, cut or [], micro_batches, config={**each, **(config or {})}) for each in [*settings, DISK]]


def chain(batches: Sequence[Any] | None = None, **options: Any) -> Problem:
    return Problem(partial(seeded, Chain), batches or [batch_of(8, seed) for seed in range(3)], **options)


class Rare(nn.Module):
    """A layer that forward uses only where the batch says so, and one that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rare, self.idle = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, flag: Tensor) -> Tensor:
        z = torch.tanh(self.a(x))
        if flag.sum() > 0:
            z = z + self.rare(z)
        return F.mse_loss(self.b(z), y)


def _flagged(seed: int, *flags: float) -> dict[str, Tensor]:
    """One flag for each quarter of the batch."""
    return {**batch_of(8, seed), "flag": torch.tensor(flags, dtype=torch.float64).repeat_interleave(2)}


def momentum(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)]


def test_weights_that_some_ranks_or_all_leave_unused() -> None:
    """With weight decay and momentum, no gradient and a gradient of zero are not the same."""
    batches = [_flagged(0, 1, 1, 0, 0), _flagged(1, 0, 0, 0, 0), _flagged(2, 0, 0, 0, 1), _flagged(3, 1, 1, 1, 1)]
    example = [_flagged(9, 1, 1, 1, 1)]
    problem = Problem(partial(seeded, Rare), [*example, *batches], optimize=momentum)
    check(problem, *ways(), num_parts=4)


class Single(nn.Module):
    """One parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x * self.scale, y)


class Small(nn.Module):
    """Weights with fewer elements than there are ranks, and one of an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 1), nn.Linear(1, 37), nn.Linear(37, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.5, 0.1]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.c(torch.tanh(self.b(self.a(x)))) * self.scale
        return F.mse_loss(z + self.shift.repeat(3), y)


@pytest.mark.parametrize("case", [(Small, 4), *slow((Single, 4), (Single, 3), (Small, 2), (Small, 3))])
def test_weights_smaller_than_the_number_of_ranks(case: tuple[type[nn.Module], int]) -> None:
    make, world = case
    problem = Problem(partial(seeded, make), [batch_of(12, seed) for seed in range(3)], optimize=momentum)
    check(problem, *ways(world, micro_batches=1))


@pytest.mark.slow
def test_two_types_no_dimensions_and_strides_of_their_own() -> None:
    batches = [{"image": draw(8, 2, 5, 5, seed=seed), "y": draw(8, 6, seed=seed + 9)} for seed in range(3)]
    check(Problem(partial(seeded, Mixture), batches), *ways(), dtype=torch.float32)


@pytest.mark.parametrize("cut", slow(HALVES, []))
def test_frozen_weights_have_no_gradient(cut: list[list[str]]) -> None:
    problem = Problem(partial(seeded, Frozen, "b", "d.bias"), [batch_of(8, seed) for seed in range(3)])
    check(problem, *ways(4 if cut else 2, cut))


@pytest.mark.parametrize("level", ["v2", *slow("v0", "v1")])
@pytest.mark.parametrize("stages", [2, *slow(1)])
def test_tied_weights_in_one_stage_and_over_stages(level: str, stages: int) -> None:
    check_parity(Job("tied", world=4, num_stages=stages, micro_batches=2, config={"zero.level": level}))


# ----------------------------------------------------------------------------------------------------------- optimizers


def groups(model: Any) -> list[Optimizer]:
    """Two optimizers, one with groups."""
    first = [{"params": [model.a.weight, model.b.weight], "lr": 0.1}, {"params": [model.a.bias], "weight_decay": 0.5}]
    rest = [model.b.bias, *model.c.parameters(), *model.d.parameters()]
    return [torch.optim.AdamW(first, lr=0.01, eps=1e-3), torch.optim.SGD(rest, lr=0.1, momentum=0.9, nesterov=True)]


def one(kind: Any, **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    return partial(_one, kind, options)


def _one(kind: Any, options: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    return [kind(model.parameters(), **options)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "groups": groups,
    "adagrad": one(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),  # its state is made by __init__
    "momentum": momentum,
    "amsgrad": one(torch.optim.AdamW, lr=0.01, amsgrad=True, eps=1e-3),
    "rmsprop": one(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, eps=1e-3),
    "adadelta": one(torch.optim.Adadelta, lr=1.0, eps=1e-3),
    "rprop": one(torch.optim.ASGD, lr=0.1),
    "adamax": one(torch.optim.Adamax, lr=0.01, eps=1e-3),
    "foreach": one(torch.optim.Adam, lr=0.01, eps=1e-3, foreach=True),
    "fused": one(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("name", ["adagrad", *slow(*(name for name in OPTIMIZERS if name != "adagrad"))])
def test_optimizers_that_work_element_by_element(name: str) -> None:
    problem = chain(optimize=OPTIMIZERS[name])
    check(problem, *ways(2, micro_batches=1))


def _error_of(rank: int, way: Way, problem: Problem) -> str:
    try:
        engine = start(problem, way)
        engine.train_step(my_share(engine, rank, problem.batches[0]))
    except EplError as error:
        return f"{type(error).__name__}: {error}"
    return "it went well"


def matrices(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Muon([weight for weight in model.parameters() if weight.ndim == 2], lr=0.1)]


@pytest.mark.parametrize(
    ("name", "optimize"),
    [("Adafactor", one(torch.optim.Adafactor)), ("LBFGS", one(torch.optim.LBFGS)), ("Muon", matrices)],
)
def test_optimizers_that_look_at_whole_weights_are_refused(name: str, optimize: Any) -> None:
    for text in launch(2, _error_of, Way(2, config={"zero.level": "v0"}), chain(optimize=optimize)):
        assert re.search(rf"StrategyError: {name} looks at (a whole weight|all weights).*leave zero.level out", text), (
            text
        )


# -------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("cut", [[], *slow(HALVES)])
def test_uneven_batches_and_replicas_without_a_sample(cut: list[list[str]]) -> None:
    problem = chain([batch_of(size, seed) for seed, size in enumerate((8, 5, 1, 3, 8))])
    check(problem, *ways(4, cut, micro_batches=2))


def test_micro_batches_of_other_sizes_on_other_ranks_bring_the_same_weights() -> None:
    """Five samples are 2 and 1 on one rank, 1 and 1 on the other: one that brought a unit more than the other hung."""
    way = Way(2, micro_batches=2, config={"zero.level": "v2"})
    check(chain([batch_of(size, seed) for seed, size in enumerate((8, 5, 3, 5))]), way)


@pytest.mark.parametrize("level", slow("v2", "v1"))
def test_sequences_of_other_lengths_in_later_steps(level: str) -> None:
    check_parity(Job("gpt2", world=2, micro_batches=2, lengths=(8, 5, 11), config={"zero.level": level}))


# ------------------------------------------------------------------------------------------------------- odd models


class Opaque(Chain):
    """It leaves torch for a moment, so it runs without a graph."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(x.numpy()), y)


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_graph_shares_states_and_gradients_but_not_weights() -> None:
    problem = Problem(partial(seeded, Opaque), [batch_of(8, seed) for seed in range(3)], optimize=momentum)
    levels = [Way(2, micro_batches=2, config={"zero.level": level}) for level in ("v0", "v1")]
    check(problem, *levels)
    for text in launch(2, _error_of, Way(2, config={"zero.level": "v2"}), problem):
        assert re.search("StrategyError: zero.level='v2' needs the model as a graph.*'v1'", text, re.DOTALL), text


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> epl.SumLoss:
    logits = model(batch["tokens"]).flatten(0, 1)
    labels = batch["labels"].flatten()
    return epl.SumLoss(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())


def test_sparse_gradients_are_refused_or_made_dense() -> None:
    problem = Problem(partial(seeded, Tagger, sparse=True), [tokens_of(8, seed) for seed in range(3)], token_loss)
    for text in launch(2, _error_of, Way(2, config={"zero.level": "v1"}), problem):
        assert re.search("StrategyError: embedding.weight has sparse gradients, and zero.level 'v1'", text), text
    check(problem, *ways(2, config={"communication.sparse_as_dense": True}))
