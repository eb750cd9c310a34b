"""Recurrent networks under split: the operator is cut over the batch or runs whole, its neighbours are cut over anything.

Each step needs the states of all hidden units, so a rank that had some of them would gather the others at every step.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.marks import slow
from tests.ranks import launch
from tests.runtime.odd_nets import draw
from tests.runtime.problems import Problem, Way, check, seeded, start
from tests.runtime.test_split_uneven import adamw

FEATURES, HIDDEN, VOCABULARY = 6, 10, 23
KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def ways(size: int) -> list[Way]:
    """The whole model split; in one part of a batch, and in two."""
    return [Way(size, [[""]], count, size, split=(0,)) for count in (1, 2)]


class Series(nn.Module):
    """A recurrent network alone: its output and its last states are what is asked for."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.cells = KINDS[kind](FEATURES, HIDDEN, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(HIDDEN * directions, 1)
        self.is_batch_first = options.get("batch_first", False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x if self.is_batch_first else x.transpose(0, 1)
        made, states = self.cells(x)
        states = states if isinstance(states, tuple) else (states,)
        total = self.head(made).mean(1 if self.is_batch_first else 0).squeeze(-1)
        return F.mse_loss(total + sum(state.square().mean((0, 2)) for state in states), y)


def series(kind: str, **options: Any) -> Problem:
    batches = [{"x": draw(8, 5, FEATURES, seed=seed), "y": draw(8, seed=seed + 9)} for seed in range(3)]
    return Problem(partial(seeded, Series, kind, **options), batches, optimize=adamw)


class Reader(nn.Module):
    """Embedding, a recurrent network of two layers and two directions with states to begin with, and a head."""

    def __init__(self, kind: str, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.cells = KINDS[kind](FEATURES, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.first = nn.Parameter(torch.randn(4, 1, hidden))
        self.head = nn.Linear(2 * hidden, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = self.first.expand(-1, tokens.shape[0], -1).contiguous()
        states = (first, first.tanh()) if isinstance(self.cells, nn.LSTM) else first
        made, _ = self.cells(self.embedding(tokens), states)
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


def reader(kind: str, size: int = 8, length: int = 5, hidden: int = HIDDEN) -> Problem:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(VOCABULARY, (2, size, length), generator=generator) for _ in range(3)]
    batches = [{"tokens": tokens, "labels": labels} for tokens, labels in drawn]
    return Problem(partial(seeded, Reader, kind, hidden), batches, optimize=adamw)


@pytest.mark.parametrize("size", [2, *slow(3, 4, 8)])
@pytest.mark.parametrize("kind", ["gru", *slow("lstm", "rnn")])
def test_a_net_of_embedding_cells_and_head(kind: str, size: int) -> None:
    check(reader(kind), *ways(size))


def test_fewer_samples_than_ranks() -> None:
    """Then the cells run whole on every rank."""
    check(reader("lstm", size=2), ways(3)[0])


def choices(rank: int, problem: Problem, way: Way) -> tuple[str, ...]:
    (split,) = start(problem, way).plan.splits
    return split.choices


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cells_that_take_long_are_cut_over_the_batch(kind: str, size: int) -> None:
    problem, way = reader(kind, 15, 64, 96), ways(size)[0]
    for lines in launch(size, choices, problem, way):
        assert any(f"cells {kind}: S(0)" in line for line in lines), lines
    check(problem, way)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_layers_and_directions_and_orders_of_dimensions(kind: str, size: int) -> None:
    for num_layers, bidirectional, batch_first in product((1, 2), (False, True), (False, True)):
        options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
        check(series(kind, **options), ways(size)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_parts_of_the_net_are_split(kind: str) -> None:
    check(
        reader(kind),
        Way(3, [["embedding"], ["cells", "head"]], 2, (1, 2), split=(1,)),
        Way(3, [["embedding", "cells"], ["head"]], 2, (1, 2), split=(1,)),
        Way(4, [["embedding"], ["cells"], ["head"]], 1, (1, 2, 1), split=(1,)),
    )


@pytest.mark.slow
def test_projected_states() -> None:
    """``proj_size``: outputs and states of different widths."""
    batches = series("lstm").batches
    check(Problem(partial(seeded, Projected), batches, optimize=adamw), *ways(3))


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(FEATURES, HIDDEN, num_layers=2, proj_size=3, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made, (last, kept) = self.cells(x)
        return F.mse_loss(made.sum((1, 2)) + last.mean((0, 2)) * kept.mean((0, 2)), y)
