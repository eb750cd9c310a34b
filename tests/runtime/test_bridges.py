"""TaskGraphs with different strategies side by side: what goes between them, and the numbers of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch, run_on
from tests.runtime.odd_nets import FEATURES, Chain, Normed, TiedTagger, batch_of, draw, tokens_of
from tests.runtime.problems import Outcome, Problem, Way, check, my_share, seeded, start, train
from tests.runtime.test_gradients import token_mean
from tests.zoo import CASES

COLOCATE = {"cluster.colocate_split_and_replicate": True}
HALVES = [["a", "b"], ["c", "d"]]


def chain(size: int = 7, skip: bool = False) -> Problem:
    return Problem(partial(seeded, Chain, skip), [batch_of(size, seed) for seed in range(3)])


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3)]


def built(name: str) -> nn.Module:
    return CASES[name].build(torch.float64)


def loss_of(name: str, model: Any, batch: Any) -> Any:
    loss_fn = CASES[name].loss_fn
    assert loss_fn is not None
    return loss_fn(model, batch)


def zoo(name: str, size: int = 4) -> Problem:
    """By name, for the ranks have to find it again."""
    batches = [CASES[name].batch(size, seed=seed, dtype=torch.float64) for seed in range(3)]
    loss_fn = partial(loss_of, name) if CASES[name].loss_fn else None
    return Problem(partial(built, name), batches, loss_fn, adamw)


# ------------------------------------------------------------------------------------------------- on different devices


def test_replicas_of_different_numbers_in_one_pipeline() -> None:
    """2 -> 1 and 1 -> 2 and 3 -> 2: each rank gets the samples that it works on, and no others."""
    check(
        chain(),
        Way(3, HALVES, devices=(2, 1), micro_batches=2),
        Way(3, HALVES, devices=(1, 2), micro_batches=3),
        Way(5, HALVES, devices=(3, 2)),
        Way(5, [["a"], ["b", "c"], ["d"]], devices=(2, 1, 2), micro_batches=2),
    )


@pytest.mark.slow
def test_two_devices_before_four() -> None:
    check(
        chain(9),
        Way(6, HALVES, devices=(2, 4), micro_batches=2),
        Way(6, HALVES, devices=(2, 4), split=(0, 1)),
        Way(6, HALVES, devices=(4, 2), split=(1,), micro_batches=2),
    )


def test_batches_of_other_sizes_than_the_plan_was_made_with() -> None:
    """Each size is another graph, for which both ends of a bridge are chosen anew."""
    problem = Problem(partial(seeded, Chain), [batch_of(size, size) for size in (6, 5, 1, 7)])
    check(
        problem,
        Way(3, HALVES, devices=(2, 1), micro_batches=2),
        Way(3, HALVES, devices=(1, 2), split=(1,)),
        Way(3, [["a"], ["b", "c"], ["d"]], devices=3, split=(1,), config=COLOCATE),
    )


def test_values_that_skip_stages_of_different_numbers() -> None:
    check(chain(skip=True), Way(5, [["a"], ["b", "c"], ["d"]], devices=(2, 1, 2), micro_batches=2))


def test_replicated_stages_beside_split_ones() -> None:
    check(
        chain(),
        Way(4, HALVES, devices=2, split=(1,), micro_batches=2),
        Way(4, HALVES, devices=2, split=(0,)),
        Way(5, HALVES, devices=(3, 2), split=(1,)),
        Way(5, HALVES, devices=(3, 2), split=(0,), micro_batches=3),
    )


@pytest.mark.slow
def test_two_replicas_of_a_pipeline_of_different_numbers() -> None:
    check(chain(9), Way(6, HALVES, devices=(2, 1), micro_batches=2), Way(6, HALVES, devices=(1, 2), split=(1,)))


def test_batches_with_fewer_samples_than_ranks() -> None:
    check(chain(1), Way(3, HALVES, devices=(2, 1)))
    check(chain(2), Way(5, HALVES, devices=(3, 2)))


def test_batch_normalisation_over_the_ranks_of_a_stage() -> None:
    """Statistics are those of the whole micro-batch, as in one process."""
    problem = Problem(partial(seeded, Normed), [batch_of(8, seed) for seed in range(3)])
    cut = [["a", "b"], ["c"]]
    check(problem, Way(3, cut, devices=(2, 1)), Way(3, cut, devices=(1, 2)))


def test_weights_tied_over_stages_of_different_numbers() -> None:
    problem = Problem(partial(seeded, TiedTagger), [tokens_of(7, seed) for seed in range(3)], token_mean)
    cut = [["embedding"], ["middle", "head"]]
    check(
        problem,
        Way(3, cut, devices=(1, 2), micro_batches=2),
        Way(3, cut, devices=(2, 1), split=(0,)),
        Way(3, cut, devices=(1, 2), split=(1,)),
        Way(5, cut, devices=(3, 2), split=(1,)),
    )


@run_on(3)
def test_the_whole_model_is_seen_through_any_mixture(rank: int) -> None:
    """verify passes, evaluation and state are whole, and a state goes into another plan; tied weights, statistics."""
    problem = Problem(partial(seeded, TiedTagger), [tokens_of(7)], token_mean)
    cut = [["embedding"], ["middle", "head"]]
    state, losses = {}, []
    for way in (
        Way(3, cut, devices=(1, 2), split=(1,)),
        Way(3, cut, devices=(2, 1)),
        Way(3, cut, devices=3, config=COLOCATE),
    ):
        engine = start(problem, way)
        batch = my_share(engine, rank, problem.batches[0])
        if state:
            engine.load_state_dict(state)
            assert_close(engine.state_dict(), state, torch.float64)
        losses.append(float(engine.eval_step(batch)))
        assert not engine.verify(batch).faults
        state = engine.state_dict()
    assert_close(losses, losses[:1] * 3, torch.float64)
    normed = Problem(partial(seeded, Normed), [batch_of(8)])
    engine = start(normed, Way(3, [["a", "b"], ["c"]], devices=(2, 1)))
    engine.verify(my_share(engine, rank, normed.batches[0]))


# -------------------------------------------------------------------------------------------------- on the same devices


def test_replicate_and_split_on_the_same_devices() -> None:
    check(
        chain(),
        Way(2, HALVES, devices=2, split=(1,), config=COLOCATE),
        Way(2, HALVES, devices=2, split=(0,), micro_batches=2, config=COLOCATE),
        Way(3, [["a"], ["b", "c"], ["d"]], devices=3, split=(1,), config=COLOCATE),
        Way(4, HALVES, devices=2, split=(1,), micro_batches=2, config=COLOCATE),
    )


class Written(nn.Module):
    """Parts of a new tensor are written in place; what is written to is made cut as the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.zeros(x.shape[0], 2 * FEATURES, dtype=x.dtype)
        z[:, :FEATURES] = self.a(x)
        z[:, FEATURES:] = x
        z[:, 2].mul_(2)
        return nn.functional.mse_loss(self.b(z[:, :FEATURES] + z[:, FEATURES:]), y)


class Based(nn.Module):
    """What is changed in place comes from a weight, which is whole, so the part that is added has to be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(7, FEATURES))
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.base.clone()
        z.add_(torch.tanh(self.a(x)))
        return nn.functional.mse_loss(self.b(z), y)


class Renormed(nn.Module):
    """An embedding that shortens in place the rows that it is asked for: all ranks have to shorten the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(5, FEATURES, max_norm=1.0), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.b(self.a((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())), y)


class Contrast(nn.Module):
    """Each sample is compared with all others, as in CLIP; the samples' own order is their label."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = nn.functional.normalize(self.a(x)), nn.functional.normalize(self.b(y))
        logits = left @ right.t()
        labels = torch.arange(len(x))
        loss = nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.t(), labels)
        return loss + self.c(x).square().mean()


class Attentive(nn.Module):
    """torch's attention turns [batch, tokens] into [tokens, batch] and [tokens * batch] on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.b = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.stack([x, x * 2, x - y, y], 1)
        return self.b(self.a(z, z, z, need_weights=False)[0]).square().mean()


@pytest.mark.parametrize(
    ("net", "cut"),
    [
        (Written, [["a"], ["b"]]),
        (Based, [["a"], ["b"]]),
        (Renormed, [["a"], ["b"]]),
        (Contrast, [["a", "b"], ["c"]]),
        (Attentive, [["a"], ["b"]]),
    ],
)
def test_replicas_that_write_in_place_or_compare_samples(net: type[nn.Module], cut: list[list[str]]) -> None:
    problem = Problem(partial(seeded, net), [batch_of(7, seed) for seed in range(3)])
    check(
        problem,
        Way(3, cut, devices=3, split=(1,), config=COLOCATE),
        Way(3, cut, devices=(2, 1)),
        Way(3, cut, devices=(1, 2)),
    )


@run_on(2)
def test_only_what_cannot_work_on_a_part_of_the_batch_is_gathered_and_named(rank: int) -> None:
    problem = Problem(partial(seeded, Attentive), [batch_of(6)])
    plan = start(problem, Way(2, [["a"], ["b"]], devices=2, split=(1,), config=COLOCATE)).plan
    assert not [line for line in plan.splits[0].choices if "whole on every rank" in line]
    based = Problem(partial(seeded, Based), [batch_of(7)])
    choices = start(based, Way(2, [["a"], ["b"]], devices=2, split=(1,), config=COLOCATE)).plan.splits[0].choices
    assert "1 x a linear: S(0), R, R -> S(0)" in choices, "what comes before it is shared out all the same"
    assert "under replicate, but whole on every rank, on gathered values: add_" in choices
    mixed = Problem(partial(seeded, Contrast), [batch_of(6)])
    plan = start(mixed, Way(2, [["a", "b"], ["c"]], devices=2, split=(1,), config=COLOCATE)).plan
    assert not [line for line in plan.splits[0].choices if "whole on every rank" in line], "a product has a cut result"


class Classifier(nn.Module):
    """A convolutional backbone and more classes than divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0)
        )
        self.head = nn.Linear(4, 101)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(image)), labels)


@pytest.mark.parametrize("world", [2, 4, *slow(8)])
def test_a_large_classification(world: int) -> None:
    labels = [torch.randint(101, (world + 3,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    batches = [{"image": draw(world + 3, 2, 6, 6, seed=seed), "labels": label} for seed, label in enumerate(labels)]
    problem = Problem(partial(seeded, Classifier), batches)
    check(problem, Way(world, [["backbone"], ["head"]], devices=world, split=(1,), config=COLOCATE))


class Dropping(Chain):
    """Dropout in both halves."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = nn.functional.dropout(torch.tanh(self.b(torch.tanh(self.a(x)))), 0.4)
        return nn.functional.mse_loss(self.d(nn.functional.dropout(torch.tanh(self.c(z)), 0.3)), y)


def train_seeded(rank: int, problem: Problem, ways: list[Way]) -> list[Outcome]:
    outcomes = []
    for way in ways:
        torch.manual_seed(7)
        outcomes.append(train(rank, problem, way))
    return outcomes


def test_dropout_is_that_of_one_process() -> None:
    """Whole on each rank, cut by the batch, and cut by features."""
    problem = Problem(partial(seeded, Dropping), [batch_of(7, seed) for seed in range(3)])
    ((expected,),) = launch(1, train_seeded, problem, [Way(1)])
    ways = [
        Way(3, HALVES, devices=(2, 1)),
        Way(3, HALVES, devices=(1, 2)),
        Way(3, HALVES, devices=3, split=(1,), config=COLOCATE),
        Way(3, HALVES, devices=(1, 2), split=(1,)),
    ]
    for outcomes in launch(3, train_seeded, problem, ways):
        for outcome in outcomes:
            assert_close(outcome, expected, torch.float64)


# ----------------------------------------------------------------------------------------------------- models of the zoo


@pytest.mark.parametrize("name", ["mlp", *slow("bert", "gpt2", "llama", "t5", "vit", "tied", "mixtral")])
def test_stages_of_different_numbers_in_models_of_the_zoo(name: str) -> None:
    cut = CASES[name].stages[2]
    check(zoo(name), Way(3, cut, devices=(2, 1), micro_batches=2), Way(3, cut, devices=(1, 2), split=(1,)))


@pytest.mark.parametrize(
    "name", ["tied", *slow("bert", "gpt2", "llama", "t5", "vit", "mlp", "mixtral", "resnet", "unet")]
)
def test_colocated_strategies_in_models_of_the_zoo(name: str) -> None:
    cut = CASES[name].stages[2]
    check(zoo(name), Way(2, cut, devices=2, split=(1,), config=COLOCATE), Way(4, cut, devices=2, split=(0,)))
