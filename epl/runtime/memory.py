"""The memory report: for every rank what its plan says it will take, and what it took.

All ranks make it together and have the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.errors import ConfigError, RunError
from epl.program.curve import CATEGORIES, MemoryCurve
from epl.program.holdings import Holdings, bucket_bytes, weight_bytes
from epl.program.instructions import Program
from epl.program.lower import lower_stage
from epl.program.memory import StageMemory, memory_of_stage, predict
from epl.runtime.agree import all_succeed
from epl.runtime.catalog import Variant
from epl.runtime.measure import measured_step, storage_bytes
from epl.runtime.runner import Runner
from epl.runtime.state import tensors_by_path
from epl.runtime.state_home import StateHome
from epl.runtime.updates import simulate_updates, state_tensors
from epl.runtime.world import World
from epl.stage.simulate import StageProfile

__all__ = ["MemoryReport", "RankMemory", "Subject", "report_memory"]

_MIB = 1 << 20


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory over one training step.

    Args:
        rank: The rank.
        stage: The stage that it runs, as the plan names it.
        predicted: From the plan.
        measured: In a real step; None if none was run.
    """

    rank: int
    stage: str
    predicted: MemoryCurve
    measured: MemoryCurve | None = None

    @property
    def ratio(self) -> float | None:
        """The predicted peak over the measured one."""
        return None if self.measured is None else self.predicted.peak_bytes / self.measured.peak_bytes


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all ranks over one training step, by rank.

    ``result`` is what the step that was measured has returned, as ``train_step`` does; None if none was run.
    """

    ranks: tuple[RankMemory, ...]
    result: Any = None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("rank", "stage", "", *CATEGORIES, "peak", "ratio")]
        for rank in self.ranks:
            rows += _rows(rank)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["memory of one training step, in MiB, at the moment of each rank's peak"]
        lines += [
            "  " + "  ".join(_cell(row, place, widths[place]) for place in range(len(row))).rstrip() for row in rows
        ]
        return "\n".join([*lines, *(f"  {problem}" for problem in self._problems())])

    def _problems(self) -> list[str]:
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            for problem in (*rank.predicted.problems, *(rank.measured.problems if rank.measured else ())):
                found.setdefault(problem, []).append(rank.rank)
        return [f"ranks {ranks}: {problem}" for problem, ranks in found.items()]

    def plot(self, path: str) -> None:
        """Draw the memory of each rank over the step, by what it is for, into a picture (``.png``, ``.svg``, ``.pdf``).

        Raises:
            ImportError: matplotlib is not installed.
        """
        from epl.runtime.memory_picture import draw_memory  # lazy: matplotlib is an extra, wanted for the picture only

        draw_memory(path, self.ranks)


def _rows(rank: RankMemory) -> Iterator[tuple[str, ...]]:
    curves = [("predicted", rank.predicted)] + ([("measured", rank.measured)] if rank.measured else [])
    for name, curve in curves:
        ratio = f"{rank.ratio:.3f}" if name == "predicted" and rank.ratio is not None else ""
        sizes = (*curve.peak.sizes, curve.peak_bytes)
        first = name == "predicted"
        yield (
            str(rank.rank) if first else "",
            rank.stage if first else "",
            name,
            *(f"{size / _MIB:.2f}" for size in sizes),
            ratio,
        )


def _cell(row: tuple[str, ...], place: int, width: int) -> str:
    return row[place].ljust(width) if place in (1, 2) else row[place].rjust(width)


@dataclass(frozen=True)
class Subject:
    """What a report is about.

    Args:
        world: The ranks.
        runner: Runs steps.
        model: The model.
        optimizers: Its optimizers.
        step: One training step on a batch.
        home: Where optimizer states live between steps; None for beside the weights.
    """

    world: World
    runner: Runner
    model: nn.Module
    optimizers: Sequence[Optimizer]
    step: Callable[[Any], Any]
    home: StateHome | None = None


def report_memory(subject: Subject, batch: Any | None, path: str | None) -> MemoryReport:
    """The report, on all ranks; with a batch a step is run and measured.

    Args:
        subject: What it is about.
        batch: This replica's batch, or None.
        path: Where rank 0 draws it, or None.

    Raises:
        RunError: a rank has failed; on every rank.
    """
    world = subject.world

    def make_prediction() -> _Prediction:
        if batch is not None:
            _refuse_no_step(subject)
        return _predicted(subject, batch)

    ours = all_succeed(world, make_prediction)
    measured: MemoryCurve | None = None
    results: list[Any] = [None]
    if batch is not None:
        for parameter in subject.model.parameters():
            parameter.grad = None  # as the step itself begins; the profiler would not see that these go
        before = _held_now(subject, ours.constants)
        works_together = subject.runner.plan.is_sharded(ours.program.stage)
        left = partial(_made_by_steps, subject) if works_together else None

        def step() -> object:
            results[0] = subject.step(batch)
            return results[0]

        instructions = ours.program.instructions
        measured = all_succeed(world, lambda: measured_step(step, before, left, instructions, world.device))
    stage = subject.runner.plan.stages[ours.program.stage]
    mine = RankMemory(world.rank, f"{stage.index} {stage.name}", ours.curve, measured)
    report = MemoryReport(tuple(world.gather(mine)), results[0])
    if path is not None:
        all_succeed(world, lambda: report.plot(path) if world.rank == 0 else None)
    return report


def _refuse_no_step(subject: Subject) -> None:
    if not subject.optimizers:
        raise ConfigError(
            "memory_report(batch) runs a training step, which needs an optimizer: pass it to epl.parallelize(model, "
            "optimizer), or ask for the prediction alone with memory_report()"
        )
    if not subject.model.training:
        raise RunError("the model is in eval mode; call model.train() before memory_report(batch), which runs a step")


class _Prediction(NamedTuple):
    curve: MemoryCurve
    program: Program
    constants: list[torch.Tensor]


def _predicted(subject: Subject, batch: Any | None) -> _Prediction:
    """Of the next step, if it is on this batch; else of one in the long run, when optimizers have their states."""
    runner, rank = subject.runner, subject.world.rank
    variants, program = runner.training_parts(batch)
    kinds = {id(variant): variant for variant in variants}
    memories = {key: _memory_of(subject, variant) for key, variant in kinds.items()}
    constants = {id(tensor): tensor for variant in kinds.values() for tensor in _constants(subject, variant)}
    reduced = runner.reducer.names
    holdings = Holdings(
        weight_bytes(runner.plan, rank) + sum(tensor.nbytes for tensor in constants.values()),
        bucket_bytes(runner.plan, rank, reduced),
        reduced,
        keeps_sends=subject.world.device.type == "cpu",
        units=tuple(stored.unit for stored in runner.weights.units),
    )
    gradients = frozenset[str]().union(*(memory.gradients for memory in memories.values()))
    updates = simulate_updates(
        subject.optimizers,
        dict(subject.model.named_parameters()),
        gradients,
        runner.plan.num_apply_groups,
        subject.home,
    )
    micro_batches = [memories[id(variant)] for variant in variants]
    curve = predict(program, micro_batches, holdings, updates.later if batch is None else updates.next)
    return _Prediction(curve, program, list(constants.values()))


def _memory_of(subject: Subject, variant: Variant) -> StageMemory:
    plan, rank = subject.runner.plan, subject.world.rank
    lowered = lower_stage(variant.graph, plan, rank, splits=variant.splits)
    if variant.captured.is_opaque:  # its operator is the model itself, whose own weights are no fakes
        return StageMemory(lowered.program, StageProfile(problem="not predicted: the model runs without a graph"), {})
    return memory_of_stage(lowered, variant.graph, plan, rank, variant.captured.functions, device=subject.world.device)


def _constants(subject: Subject, variant: Variant) -> list[torch.Tensor]:
    """What the stage holds beside the model's own tensors."""
    own = {id(tensor) for tensor in tensors_by_path(subject.model).values()}
    own |= {id(leaf) for stored in subject.runner.weights.units for leaf in stored.leaves}
    return [tensor for tensor in subject.runner.bound(variant).held if id(tensor) not in own]


def _held_now(subject: Subject, constants: Sequence[torch.Tensor]) -> dict[str, int]:
    """Bytes of what is there before a step, by what it is for."""
    seen: set[int] = set()
    return {
        "weights": storage_bytes(_in_memory(subject, constants), seen),
        "optimizer": storage_bytes(state_tensors(subject.optimizers, subject.home), seen),
        "communication": storage_bytes(subject.runner.reducer.memory, seen),
    }


def _in_memory(subject: Subject, constants: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Weights, buffers and constants; not what is stored elsewhere."""
    units = [stored for stored in subject.runner.weights.units if stored.unit.home == "device"]
    away = subject.runner.weights.paths
    alone = (tensor for path, tensor in tensors_by_path(subject.model).items() if path not in away)
    return [*alone, *(stored.stored for stored in units), *constants]


def _made_by_steps(subject: Subject) -> list[torch.Tensor]:
    gradients = (parameter.grad for parameter in subject.model.parameters())
    return [
        *(gradient for gradient in gradients if gradient is not None),
        *state_tensors(subject.optimizers, subject.home),
    ]
