"""Keep a memory budget: find what each stage's activations may take, so that all of a rank's memory stays within it.

    budget - (weights, gradients, states) -> recompute -> predict the whole step -> too much? allow less -> recompute ...

The pass that chooses what to compute again counts activations only; the prediction counts all there is, buckets, buffers of
messages and the optimizer's own temporaries included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from epl.errors import PlanError
from epl.ir.graph import Graph
from epl.planner.plan import Plan
from epl.planner.split import SplitChoice
from epl.program.curve import MemoryCurve
from epl.program.lower import LoweredStage, lower_stage, lower_step
from epl.program.memory import Holdings, Update, bucket_bytes, memory_of_stage, predict, weight_bytes
from epl.schedule import generate
from epl.stage.simulate import Change
from epl.units import size_text

__all__ = ["fit_budget"]

_MOST_TRIES = 6
_MARGIN = 1.02  # predictions are exact for most models, and up to 2 % low for some
_TEMPORARIES = 3  # of the optimizer, in sizes of the largest weight: Adam's loop makes two and frees them one late


@dataclass(frozen=True)
class _Job:
    """What is to be fitted."""

    graph: Graph
    plan: Plan
    functions: Mapping[str, Callable[..., Any]]
    splits: Mapping[int, SplitChoice] | None

    def lower(self, plan: Plan, stage: int) -> LoweredStage:
        return lower_stage(self.graph, plan, self.plan.stages[stage].ranks[0][0], splits=self.splits)

    def predict(self, plan: Plan, stage: int) -> tuple[LoweredStage, MemoryCurve]:
        """The stage as it is lowered under this plan, and the memory of its first rank in a step."""
        rank, lowered = plan.stages[stage].ranks[0][0], self.lower(plan, stage)
        memory = memory_of_stage(lowered, self.graph, plan, rank, self.functions)
        schedule = generate(plan.schedule, plan.num_stages, plan.num_micro_batches)
        program = lower_step(plan, rank, schedule, [lowered.program] * plan.num_micro_batches)
        reduced = _reduced(plan, rank)
        holdings = Holdings(weight_bytes(plan, rank), bucket_bytes(plan, rank, reduced), reduced)
        sizes = [leaf.type.size_bytes for leaf in lowered.stage.graph.parameters if leaf.trainable]
        temporary = _TEMPORARIES * max(sizes, default=0)
        spike = (Change("temporary", temporary), Change("temporary", -temporary))
        update = Update(int(plan.state_factor * sum(sizes)), spike)
        return lowered, predict(program, [memory] * plan.num_micro_batches, holdings, update)


def fit_budget(
    graph: Graph,
    plan: Plan,
    functions: Mapping[str, Callable[..., Any]],
    splits: Mapping[int, SplitChoice] | None = None,
) -> Plan:
    """The plan with what the activations of each stage may take; the plan itself if it has no budget.

    Args:
        graph: The graph of one micro-batch.
        plan: With a memory budget.
        functions: The captured callables.
        splits: What the plan was made with.

    Raises:
        PlanError: a stage needs more than the budget whatever is computed again; says how much.
    """
    if not plan.memory_budget:
        return plan
    job = _Job(graph, plan, functions, splits)
    allowed = tuple(_fit(job, stage) for stage in range(plan.num_stages))
    return replace(plan, activation_budgets=allowed)


def _fit(job: _Job, stage: int) -> int:
    """Bytes for the activations of a stage."""
    plan, budget = job.plan, job.plan.memory_budget / _MARGIN
    least, curve = job.predict(replace(plan, activation_budgets=(1,) * plan.num_stages), stage)
    if curve.peak_bytes > budget:
        raise PlanError(_too_small(plan, stage, curve))
    room = budget - least.stage.static_bytes(plan.state_factor)
    for _ in range(_MOST_TRIES):
        if room <= 1:
            break
        _, curve = job.predict(replace(plan, activation_budgets=(int(room),) * plan.num_stages), stage)
        if curve.peak_bytes <= budget:
            return int(room)
        room -= curve.peak_bytes - budget
    return 1  # as little as can be, which fits


def _reduced(plan: Plan, rank: int) -> frozenset[str]:
    """The parameters whose gradients this rank sums up with others."""
    return frozenset(
        entry.path
        for entry in plan.parameters
        if entry.trainable and entry.stages and any(rank in ranks and len(ranks) > 1 for ranks in plan.holders(entry))
    )


def _too_small(plan: Plan, stage: int, curve: MemoryCurve) -> str:
    parts = ", ".join(f"{size_text(size)} of {name}" for name, size in curve.at_peak.items() if size)
    return (
        f"gradient_checkpoint.memory_budget is {size_text(plan.memory_budget)}, and a rank of stage {stage} "
        f"{plan.stages[stage].name!r} needs at least {size_text(curve.peak_bytes * _MARGIN)} with all computed again that "
        f"can be: {parts}. Give it that much, cut the batch into more micro-batches (pipeline.num_micro_batch), or the "
        "model over more devices."
    )
