"""Split over sizes that do not divide: 101 tokens, 3 heads of 10 features, 50 inner features, 7 samples.

A mistake shows as a row of the vocabulary that is looked up on no rank or on two, a label that is passed over on one rank
and counted on another, or a head that is torn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import epl
from epl.sharding.placements import Shard, local_shape, parse_placement
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.problems import Outcome, Problem, Way, check, plain, seeded, start, train, user_model

VOCABULARY = 101  # a prime
WIDTH, HEADS, INNER = 30, 3, 50
IGNORED = -1


class Block(nn.Module):
    """Attention over one matrix of queries, keys and values, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Speaker(nn.Module):
    """A language model of two blocks."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def mean_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"].flatten(), ignore_index=IGNORED)


def counted_loss(model: Any, batch: Any) -> epl.SumLoss:
    """For parts of a batch, which have different numbers of labels."""
    labels = batch["labels"].flatten()
    total = F.cross_entropy(model(batch["tokens"]), labels, ignore_index=IGNORED, reduction="sum")
    return epl.SumLoss(total, (labels != IGNORED).sum())


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2, eps=1e-3)]  # eps as in tests/parity.py


def spoken(size: int, seed: int, length: int = 9) -> dict[str, Tensor]:
    """Every token of the vocabulary, its last one too, is seen and asked for; a third of the labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCABULARY, (2, size, length), generator=generator)
    tokens[0, :2] = torch.tensor([0, VOCABULARY - 1])
    labels[0, :2] = torch.tensor([VOCABULARY - 1, 0])
    labels[torch.rand(size, length, generator=generator) < 0.3] = IGNORED
    labels[1] = IGNORED  # a sample without labels
    return {"tokens": tokens, "labels": labels}


def speaker(tied: bool, loss: Any = mean_loss) -> Problem:
    return Problem(partial(seeded, Speaker, tied), [spoken(7, seed) for seed in range(3)], loss, adamw)


def train_and_tell(rank: int, problem: Problem, way: Way) -> tuple[Outcome, dict[str, tuple[str, tuple[int, ...]]]]:
    """What a training gives, and how each parameter lies: its placement, and the shape that this rank holds."""
    engine = start(problem, way)
    local = {name: tuple(parameter.shape) for name, parameter in user_model(engine).named_parameters()}
    lies = {each.path: (each.placement, local[each.path]) for each in engine.plan.parameters}
    engine.close()
    return train(rank, problem, way), lies


@pytest.mark.parametrize("tied", [True, *slow(False)], ids=["tied", "untied"])
@pytest.mark.parametrize("size", [3, *slow(2, 4, 8)])
def test_a_vocabulary_that_does_not_divide(size: int, tied: bool) -> None:
    problem = speaker(tied)
    expected = plain(problem)
    for rank, (outcome, lies) in enumerate(
        launch(size, train_and_tell, problem, Way(size, [[""]], 1, size, split=(0,)))
    ):
        assert_close(outcome, expected, torch.float64)
        for path in ("embedding.weight", "head.weight", "blocks.0.up.weight", "blocks.1.down.weight"):
            if path in lies:  # a tied weight has one entry
                whole = tuple(problem.build().get_parameter(path).shape)
                placement = parse_placement(lies[path][0])
                assert isinstance(placement, Shard), f"{path} is whole on every rank"
                assert lies[path][1] == local_shape(whole, placement, size, rank)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_such_sizes_in_parts_of_a_batch_and_of_a_model(tied: bool) -> None:
    """Micro-batches and replicas with different numbers of labels; and a split head behind whole blocks."""
    last = ["blocks.1", "norm", "head"]
    check(
        speaker(tied, counted_loss),
        Way(6, [[""]], 2, 3, split=(0,)),
        Way(4, [["embedding", "blocks.0"], last], 2, (1, 3), split=(1,)),
        Way(6, [["embedding", "blocks.0"], last], 2, 3, split=(0, 1)),
    )
