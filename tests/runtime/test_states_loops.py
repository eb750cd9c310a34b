"""Loops of all kinds over shared and offloaded states: each is run twice, plainly and on ranks, and gives the same numbers.

A mistake shows as weights that are not fresh (of the step before), as a schedule or a clip that was lost, or as a hang.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from epl.errors import RunError
from tests.jobs import ROOT, started
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, batch_of
from tests.runtime.problems import Problem, Way, my_share, seeded, start, user_model

HALVES = [["a", "b"], ["c", "d"]]
DISK: dict[str, Any] = {"zero.level": "v2", "offload.level": "disk"}
SETTINGS: list[dict[str, Any]] = [{"zero.level": "v0"}, {"zero.level": "v1"}, {"zero.level": "v2"}, DISK]


def adam(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)]


PROBLEM = Problem(partial(seeded, Chain), [batch_of(8)], optimize=adam)


class Trainer(Protocol):
    """What a story is told with."""

    model: nn.Module
    optimizers: list[Optimizer]

    def backward(self, batch: Any) -> float: ...
    def clip(self, norm: float, kind: float = 2.0) -> float: ...
    def call(self, batch: Any) -> Tensor: ...
    def loss(self, batch: Any) -> float: ...
    def state(self) -> dict[str, Tensor]: ...
    def load(self, state: dict[str, Tensor]) -> None: ...


class Plain:
    """In one process, without EPL."""

    def __init__(self) -> None:
        self.model = PROBLEM.build()
        self.optimizers = PROBLEM.optimize(self.model)

    def backward(self, batch: Any) -> float:
        loss = self.model(**batch)
        loss.backward()
        return loss.item()

    def clip(self, norm: float, kind: float = 2.0) -> float:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm, kind).item()

    def call(self, batch: Any) -> Tensor:
        return self.model(**batch)

    def loss(self, batch: Any) -> float:
        with torch.no_grad():
            return self.model(**batch).item()

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)


class Ranked:
    """On the ranks of a test."""

    def __init__(self, rank: int, way: Way) -> None:
        self.engine, self._rank = start(PROBLEM, way), rank
        self.model = user_model(self.engine)
        self.optimizers = list(self.engine._optimizers)

    def _share(self, batch: Any) -> Any:
        return my_share(self.engine, self._rank, batch)

    def backward(self, batch: Any) -> float:
        return self.engine.forward_backward(self._share(batch)).item()

    def clip(self, norm: float, kind: float = 2.0) -> float:
        return self.engine.clip_grad_norm_(norm, kind).item()

    def call(self, batch: Any) -> Tensor:
        return self.engine.model(**self._share(batch))

    def loss(self, batch: Any) -> float:
        return self.engine.eval_step(self._share(batch)).item()

    def state(self) -> dict[str, Tensor]:
        return self.engine.state_dict()

    def load(self, state: dict[str, Tensor]) -> None:
        self.engine.load_state_dict(state)


Story = Callable[[Trainer], list[Any]]


def _zero(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()


def _step(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        optimizer.step()


def freezing(trainer: Trainer) -> list[Any]:
    """Weights are frozen and thawed between steps."""
    model, told = trainer.model, []
    assert isinstance(model, Chain)
    for frozen, step in ((), 0), (("a", "c"), 1), (("b",), 2), ((), 3), (("a", "b", "c", "d"), 4), (("d",), 5):
        for name in "abcd":
            getattr(model, name).requires_grad_(name not in frozen)
        _zero(trainer)
        if len(frozen) < 4:
            told.append(trainer.backward(batch_of(8, step)))
            _step(trainer)
        told.append(trainer.loss(batch_of(8, step)))
    return told


def clipping(trainer: Trainer) -> list[Any]:
    """Clipped steps, by several norms."""
    told: list[Any] = []
    for step, kind in enumerate((2.0, 1.0, float("inf"))):
        _zero(trainer)
        trainer.backward(batch_of(8, step))
        told.append(trainer.clip(0.01, kind))
        told.append(trainer.clip(1e9))
        _step(trainer)
    return told


def accumulating(trainer: Trainer) -> list[Any]:
    """Several backwards before a step, and gradients that are dropped."""
    told: list[Any] = []
    for step in range(2):
        trainer.backward(batch_of(8, 90))
        _zero(trainer)
        told += [trainer.backward(batch_of(size, step)) for size in (8, 6, 8)]
        told.append(trainer.clip(1e9))
        _step(trainer)
    return told


def scheduling(trainer: Trainer) -> list[Any]:
    """The user's own loop, with a schedule, another one for the momentum, and losses in between."""
    (optimizer,) = trainer.optimizers
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)]
    told: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        loss = trainer.call(batch_of(8, step))
        (loss * 2).backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        told += [loss.item(), trainer.loss(batch_of(4, step)), optimizer.param_groups[0]["lr"]]
    return told


def loading(trainer: Trainer) -> list[Any]:
    """States are saved, changed by training, and loaded again."""
    told: list[Any] = []
    for _ in range(2):
        _zero(trainer)
        trainer.backward(batch_of(8, 1))
        saved = trainer.state()
        _step(trainer)
        told.append(trainer.loss(batch_of(8, 2)))
        trainer.load(saved)
        told.append(trainer.loss(batch_of(8, 2)))
        _step(trainer)
    return told


STORIES = (freezing, clipping, accumulating, scheduling, loading)


def _tell(trainer: Trainer, story: Story) -> tuple[list[Any], dict[str, Tensor]]:
    return story(trainer), trainer.state()


def _tell_each(rank: int, ways: list[Way], stories: list[Story]) -> list[list[tuple[list[Any], dict[str, Tensor]]]]:
    return [[_tell(Ranked(rank, way), story) for way in ways] for story in stories]


def _assert_told(found: Any, expected: Any, what: str) -> None:
    try:
        assert_close(found, expected, torch.float64)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def _check(world: int, cut: list[list[str]], settings: list[dict[str, Any]], *stories: Story) -> None:
    ways = [Way(world, cut, 2, config=config) for config in settings]
    results = launch(world, _tell_each, ways, list(stories), timeout_s=60.0 * (1 + len(stories)))
    for story_number, story in enumerate(stories):
        told, state = _tell(Plain(), story)
        for result in results:
            for config, found in zip(settings, result[story_number], strict=True):
                _assert_told(found, (told, state), f"{story.__name__} under {config}")


def test_loops_over_replicas_are_loops_in_one_process() -> None:
    _check(2, [], [SETTINGS[2]], *STORIES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loops_over_replicas_are_loops_in_one_process_in_each_setting() -> None:
    _check(2, [], SETTINGS, *STORIES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [3, 4])
def test_loops_over_more_replicas_are_loops_in_one_process(world: int) -> None:
    """Over three ranks replicas and micro-batches are of unequal sizes."""
    _check(world, [], SETTINGS, *STORIES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loops_over_pipelines_are_loops_in_one_process() -> None:
    _check(4, HALVES, SETTINGS, *STORIES)


# --------------------------------------------------------------------------------------------------- what engines offer


def _offers(rank: int, way: Way) -> tuple[str, list[float], str]:
    """(verify's table, the losses by engine.model in eval mode and by eval_step, what model.state_dict() says)."""
    engine = start(PROBLEM, way)
    mine = my_share(engine, rank, batch_of(8, 3))
    for _ in range(2):
        engine.train_step(mine)
    report = engine.verify(mine)
    engine.train_step(mine)
    engine.model.eval()
    with torch.no_grad():
        output = float(engine.model(**mine))
    said = "nothing"
    try:
        user_model(engine).state_dict()
    except RunError as error:
        said = str(error)
    return str(report), [output, engine.eval_step(mine).item()], said


@pytest.mark.parametrize("config", [SETTINGS[2], *slow(*SETTINGS[:2], DISK)])
def test_verify_and_forward_see_fresh_weights_and_state_dict_is_refused(config: dict[str, Any]) -> None:
    outcomes = launch(2, _offers, Way(2, micro_batches=2, config=config))
    losses = [loss for _, loss, _ in outcomes]
    assert sum(output for output, _ in losses) / 2 == pytest.approx(losses[0][1], rel=1e-12)
    for report, _, said in outcomes:
        assert "loss" in report
        assert re.search(r"parts of them\. Call engine\.state_dict\(\) on all ranks", said), said


FAULTY = str(ROOT / "tests" / "faulty.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("place", "rank"), [("forward", 2), ("backward", 1), ("between", 3)])
def test_a_killed_rank_ends_all_under_shared_and_offloaded_weights(tmp_path: Path, place: str, rank: int) -> None:
    environment = {"EPL_COMMUNICATION_TIMEOUT": "6", "EPL_ZERO_LEVEL": "v2", "EPL_OFFLOAD_LEVEL": "disk"}
    command = ("-m", "epl.cli", "launch", "--nproc", "4", FAULTY, place, "kill", str(rank))
    with started(tmp_path, *command, environment=environment) as running:
        running.fault_s()
        ended = running.end()
        running.wait_until_gone(10.0)
    assert ended.code == 137, ended.err
    assert f"rank {rank} was killed by SIGKILL" in ended.err, ended.err
