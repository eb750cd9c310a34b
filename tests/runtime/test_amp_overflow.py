"""Float16: a gradient that overflows on one rank makes all ranks skip the step, and training goes on from there.

A mistake shows as a rank that steps alone (its weights differ), as infinite weights, or as a hang.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.problems import Problem, Way, my_share, start, user_model

FP16: dict[str, Any] = {"amp.level": "O1", "amp.dtype": "fp16"}
HALVES = [["a"], ["b"]]


class Net(nn.Module):
    """Two layers. A large ``gain`` of a sample makes gradients of ``a`` infinite, and a large ``boost`` those of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.a.weight.mul_(1e-3)
            self.a.bias.mul_(1e-3)

    def forward(self, x: Tensor, gain: Tensor, boost: Tensor) -> Tensor:
        return (self.b(self.a(x) * gain) * boost).mean()


def make_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().train()


def batch(seed: int, **factors: float) -> dict[str, Tensor]:
    """Eight samples; only the last one overflows, which is the last replica's."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    found = {"x": x, "gain": torch.ones(8, 1), "boost": torch.ones(8, 1)}
    for name, factor in factors.items():
        found[name][-1] = factor
    return found


GAIN, BOOST = {"gain": 1e5}, {"boost": 1e6}


def both(model: nn.Module) -> list[Optimizer]:
    """One optimizer for each layer."""
    assert isinstance(model, Net)
    return [
        torch.optim.SGD(model.a.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.b.parameters(), lr=1e-2),
    ]


def problem(**factors: float) -> Problem:
    return Problem(make_net, [batch(0), batch(1, **factors), batch(2), batch(3)], optimize=both)


class Story(NamedTuple):
    """What happened at each step."""

    changed: list[bool]  # any weight
    scales: list[float]
    skipped: list[int]
    state: dict[str, Tensor]


def tell(rank: int, problem: Problem, way: Way) -> Story:
    engine = start(problem, way)
    story = Story([], [], [], {})
    before = engine.state_dict()
    for batch in problem.batches:
        engine.train_step(my_share(engine, rank, batch), max_grad_norm=1e9)
        after = engine.state_dict()
        story.changed.append(any(not torch.equal(before[name], after[name]) for name in after))
        story.scales.append(engine.loss_scale)
        story.skipped.append(engine.num_skipped_steps)
        before = after
    return story._replace(state=before)


def tell_each(rank: int, jobs: list[tuple[Problem, Way]]) -> list[Story]:
    return [tell(rank, problem, way) for problem, way in jobs]


DP = [Way(2, config=FP16), *(Way(2, micro_batches=2, config={**FP16, "zero.level": level}) for level in ("v1", "v2"))]
DP_MORE = [Way(2, micro_batches=2, config=FP16), Way(2, config={**FP16, "zero.level": "v0"})]
PIPELINES = [Way(2, HALVES, micro_batches=2, config=FP16)]
FOUR = [
    Way(4, HALVES, micro_batches=2, config=FP16),
    Way(4, HALVES, micro_batches=2, config={**FP16, "zero.level": "v1"}),
    Way(4, HALVES, micro_batches=2, config={**FP16, "zero.level": "v2", "offload.level": "disk"}),
    Way(4, micro_batches=2, config={**FP16, "zero.level": "v2", "optimizer.num_apply_group": 2}),
]


@pytest.mark.parametrize("ways", [DP, PIPELINES, *slow(DP_MORE, FOUR)])
@pytest.mark.parametrize("factors", [GAIN, *slow(BOOST)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(factors: dict[str, float], ways: list[Way]) -> None:
    """In a pipeline a large gain overflows in the first stage alone."""
    jobs = [(problem(**factors), way) for way in ways]
    (expected,) = launch(1, tell, problem(**factors), Way(1, micro_batches=2, config=FP16))
    for stories in launch(ways[0].world, tell_each, jobs):
        for story in stories:
            assert story.changed == [True, False, True, True]
            assert story.scales == [2.0**15, 2.0**14, 2.0**14, 2.0**14]
            assert story.skipped == [0, 1, 1, 1]
            for name, value in story.state.items():  # parts of other sizes are rounded otherwise
                assert torch.allclose(value, expected.state[name], rtol=1e-2, atol=1e-3), name


def several(rank: int, way: Way) -> tuple[list[bool], list[int], float, bool]:
    """Several backwards before a step; the second one overflows."""
    engine = start(problem(), way)
    changed: list[bool] = []
    for factors in (GAIN, {}):
        before = engine.state_dict()
        engine.zero_grad()
        for seed, kind in ((0, {}), (1, factors), (2, {})):
            engine.forward_backward(my_share(engine, rank, batch(seed, **kind)))
        engine.optimizer_step()
        after = engine.state_dict()
        changed.append(any(not torch.equal(before[name], after[name]) for name in after))
    finite = all(bool(value.isfinite().all()) for value in engine.state_dict().values())
    return changed, [engine.num_skipped_steps], engine.loss_scale, finite


@pytest.mark.parametrize("level", ["v2", *slow("", "v0", "v1")])
def test_an_overflow_in_one_of_several_backwards_skips_the_step(level: str) -> None:
    for outcome in launch(2, several, Way(2, config={**FP16, "zero.level": level})):
        assert outcome == ([False, True], [1], 2.0**14, True)


def loop(rank: int, way: Way) -> tuple[list[bool], list[float], list[float], int]:
    """The user's own loop with a schedule of learning rates; the second step overflows."""
    engine = start(
        Problem(make_net, [batch(0)], optimize=lambda model: [torch.optim.Adam(model.parameters(), lr=0.1)]), way
    )
    (optimizer,) = engine._optimizers
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    changed: list[bool] = []
    rates: list[float] = []
    scales: list[float] = []
    for factors in ({}, BOOST, {}):
        before = engine.state_dict()
        optimizer.zero_grad()
        loss = engine.model(**my_share(engine, rank, batch(0, **factors)))
        loss.backward()
        optimizer.step()
        schedule.step()
        after = engine.state_dict()
        changed.append(any(not torch.equal(before[name], after[name]) for name in after))
        rates.append(optimizer.param_groups[0]["lr"])
        scales.append(engine.loss_scale)
    return changed, rates, scales, engine.num_skipped_steps


@pytest.mark.parametrize(
    "way", [Way(2, config=FP16), *slow(Way(2, HALVES, config=FP16), Way(2, config={**FP16, "zero.level": "v2"}))]
)
def test_a_loop_of_ones_own_skips_and_goes_on(way: Way) -> None:
    for outcome in launch(2, loop, way):
        assert outcome == ([True, False, True], [0.05, 0.025, 0.0125], [2.0**15, 2.0**14, 2.0**14], 1)


def test_a_fixed_scale_stays_and_skips_too() -> None:
    way = Way(2, config={**FP16, "amp.loss_scale": 128.0})
    for story in launch(2, tell, problem(gain=1e6, boost=1e2), way):
        assert story.changed == [True, False, True, True]
        assert story.scales == 4 * [128.0]
        assert story.skipped == [0, 1, 1, 1]


def norms(rank: int, jobs: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, Tensor]]]:
    """(global norm, the same after clipping to half of that, gradients before) of a step under each setting."""
    found: list[tuple[float, float, dict[str, Tensor]]] = []
    for config in jobs:
        engine = start(problem(), Way(2, config=config))
        engine.forward_backward(my_share(engine, rank, batch(0)))
        gradients = {name: value for name, value in engine.gradients().items() if value is not None}
        norm = engine.clip_grad_norm_(1e9).item()
        engine.clip_grad_norm_(norm / 2)
        found.append((norm, engine.clip_grad_norm_(1e9).item(), gradients))
    return found


def test_clipping_sees_gradients_without_the_scale() -> None:
    """Scales are powers of two, so they change no digit of a gradient that does not underflow."""
    scaled = [{**FP16, "amp.loss_scale": scale} for scale in (1024.0, 4096.0)]
    for first, other, plain in launch(2, norms, [*scaled, {}]):
        assert first[0] == pytest.approx(other[0], rel=1e-3)
        assert first[0] == pytest.approx(plain[0], rel=1e-2)
        assert first[1] == pytest.approx(first[0] / 2, rel=1e-4)
        assert_close(first[0], torch.nn.utils.get_total_norm(first[2].values()).item(), torch.float32)


def stuck(rank: int) -> tuple[list[int], bool]:
    """Every step overflows: the scale falls to its lowest, and no weight changes."""
    engine = start(problem(), Way(2, config=FP16))
    before = engine.state_dict()
    for _ in range(18):
        engine.train_step(my_share(engine, rank, batch(1, gain=float("inf"))))
    after = engine.state_dict()
    return [engine.num_skipped_steps, int(engine.loss_scale)], all(
        torch.equal(before[name], after[name]) for name in after
    )


@pytest.mark.filterwarnings("ignore")
def test_what_is_infinite_in_forward_never_reaches_the_weights() -> None:
    for outcome in launch(2, partial(stuck)):
        assert outcome == ([18, 1], True)


def alternating(rank: int) -> tuple[bool, int]:
    """Two optimizers that step in turn; the gradients of the second one overflowed at a step of the first."""
    engine = start(problem(), Way(2, config=FP16))
    first, second = engine._optimizers
    engine.forward_backward(my_share(engine, rank, batch(0, **BOOST)))
    first.step()
    first.zero_grad()
    engine.forward_backward(my_share(engine, rank, batch(0)))
    second.step()
    model = user_model(engine)
    return all(bool(p.isfinite().all()) for p in model.parameters()), engine.num_skipped_steps


def test_optimizers_that_step_in_turn_never_step_infinite_gradients() -> None:
    for is_finite, skipped in launch(2, alternating):
        assert is_finite
        assert skipped == 1
