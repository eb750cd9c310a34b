"""Keep a memory budget: find what each stage's activations may take, so that all of a rank's memory stays within it.

    budget - (weights, gradients, states) -> recompute -> predict the whole step -> too much? allow less -> recompute ...

The pass that chooses what to compute again counts activations only; the prediction counts all there is, buckets, buffers of
messages and the optimizer's own temporaries included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from epl.errors import PlanError, bulleted
from epl.ir.graph import Graph
from epl.planner.plan import Plan
from epl.planner.split import SplitChoice
from epl.planner.units import shared_out, units_of
from epl.program.curve import MemoryCurve
from epl.program.holdings import Holdings, bucket_bytes, stepped_bytes, weight_bytes
from epl.program.lower import lower_stage, lower_step
from epl.program.memory import Update, memory_of_stage, predict
from epl.schedule import generate
from epl.stage.simulate import Change
from epl.units import size_text

__all__ = ["fit_budget", "refuse_too_large"]

_MOST_TRIES = 7
_NEAR = 0.97  # of the budget: near enough
_MARGIN = 1.03  # predictions are exact for most models, and up to 2 or 3 % low for some
_TEMPORARIES = 2  # of the optimizer, in sizes of the largest weight: Adam's, which steps weights one by one


@dataclass(frozen=True)
class _Job:
    """What is to be fitted."""

    graph: Graph
    plan: Plan
    functions: Mapping[str, Callable[..., Any]]
    splits: Mapping[int, SplitChoice] | None

    def predict(self, plan: Plan, stage: int) -> MemoryCurve:
        """The memory of a stage's first rank in a step under this plan."""
        rank = plan.stages[stage].ranks[0][0]
        lowered = lower_stage(self.graph, plan, rank, splits=self.splits)
        memory = memory_of_stage(lowered, self.graph, plan, rank, self.functions)
        schedule = generate(plan.schedule, plan.num_stages, plan.num_micro_batches)
        program = lower_step(plan, rank, schedule, [lowered.program] * plan.num_micro_batches)
        reduced = _reduced(plan, rank)
        units = units_of(plan, rank)
        holdings = Holdings(weight_bytes(plan, rank), bucket_bytes(plan, rank, reduced), reduced, units=units)
        sizes = stepped_bytes(plan, rank)
        temporary = _TEMPORARIES * max(sizes.values(), default=0)
        spike = (Change("temporary", temporary), Change("temporary", -temporary))
        homes = {entry.path: entry.states_home for entry in plan.parameters}
        states = sum(size for path, size in sizes.items() if homes[path] == "device")
        update = Update(int(plan.state_factor * states), spike)
        return predict(program, [memory] * plan.num_micro_batches, holdings, update)


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
    found = [_fit(job, stage) for stage in range(plan.num_stages)]
    faults = [fit for fit in found if isinstance(fit, str)]
    if faults:
        raise PlanError(
            bulleted(
                f"gradient_checkpoint.memory_budget is {size_text(plan.memory_budget)}, and that cannot be kept. Give it "
                "as much as is needed, cut the batch into more micro-batches (pipeline.num_micro_batch), or the model over "
                "more devices:",
                faults,
            )
        )
    fits = [fit for fit in found if not isinstance(fit, str)]
    notes = (
        f"stage {stage}: a rank's memory is predicted as {size_text(fit.peak_bytes)} of a budget of "
        f"{size_text(plan.memory_budget)}"
        for stage, fit in enumerate(fits)
    )
    return replace(plan, activation_budgets=tuple(fit.room for fit in fits), notes=(*plan.notes, *notes))


def refuse_too_large(
    graph: Graph,
    plan: Plan,
    functions: Mapping[str, Callable[..., Any]],
    splits: Mapping[int, SplitChoice] | None = None,
) -> None:
    """Refuse a plan of which a rank is predicted to need more than ``run.memory_limit``; arguments as of `fit_budget`.

    Raises:
        PlanError: says what each such stage needs, and for what.
    """
    if not plan.memory_limit:
        return
    job = _Job(graph, plan, functions, splits)
    curves = [job.predict(plan, stage) for stage in range(plan.num_stages)]
    faults = [
        f"stage {stage}: the memory cannot be predicted, so that no limit can be kept: {curve.problems[0]}"
        if curve.problems
        else _needs(plan, stage, curve)
        for stage, curve in enumerate(curves)
        if curve.problems or curve.peak_bytes > plan.memory_limit
    ]
    if faults:
        unused = [cure for is_used, cure in _cures(plan) if not is_used]
        raise PlanError(
            bulleted(
                f"run.memory_limit is {size_text(plan.memory_limit)}, and the plan is predicted to need more. What makes "
                f"it less: {', '.join(unused) or 'more devices'}:",
                faults,
            )
        )


def _cures(plan: Plan) -> list[tuple[bool, str]]:
    """(whether the plan has it, what to set) of what takes less memory."""
    return [
        (plan.zero == "v2", "zero.level='v2'"),
        (any(entry.home != "device" for entry in plan.parameters), "offload.level"),
        (bool(plan.recompute), "gradient_checkpoint.type='auto'"),
        (bool(plan.precision), "amp.level='O1'"),
        (plan.num_micro_batches > 1, "pipeline.num_micro_batch"),
        (bool(plan.sharded_stages), "epl.split over more devices"),
    ]


def _needs(plan: Plan, stage: int, curve: MemoryCurve) -> str:
    return (
        f"a rank of stage {stage} {plan.stages[stage].name!r} needs {size_text(curve.peak_bytes)} at its peak: "
        f"{_listed(curve)}"
    )


def _listed(curve: MemoryCurve) -> str:
    return ", ".join(f"{size_text(size)} of {name}" for name, size in curve.at_peak.items() if size)


class _Fit(NamedTuple):
    """Bytes for the activations of a stage, and what a rank's memory comes to with them."""

    room: int
    peak_bytes: int


def _fit(job: _Job, stage: int) -> _Fit | str:
    """The most that the activations of a stage may take, so that as little as can be is computed again; or why not.

    More room for activations means less computed again, and a higher peak, but for small steps in both: so the largest
    room that fits is found by halving.
    """
    plan, budget = job.plan, job.plan.memory_budget / _MARGIN

    def attempt(room: float) -> tuple[_Fit, MemoryCurve]:
        budgets = (max(1, int(room)),) * plan.num_stages
        curve = job.predict(replace(plan, activation_budgets=budgets), stage)
        return _Fit(budgets[0], curve.peak_bytes), curve

    everything, curve = attempt(2**62)
    if curve.problems:
        return f"stage {stage}: the memory cannot be predicted, so that no budget can be promised: {curve.problems[0]}"
    if everything.peak_bytes <= budget:
        return everything
    best: _Fit | None = None
    low, high = 0.0, float(max(sample.total for sample in curve.samples))
    tried = [attempt(1)]
    for _ in range(_MOST_TRIES):
        fit, curve = attempt((low + high) / 2)
        tried.append((fit, curve))
        if fit.peak_bytes <= budget:
            best, low = fit, (low + high) / 2
            if fit.peak_bytes >= _NEAR * budget:
                break
        else:
            high = (low + high) / 2
    if best is None:
        fit, curve = min(tried, key=lambda each: each[0].peak_bytes)
        if fit.peak_bytes > budget:
            return _too_small(plan, stage, curve)
        best = fit
    return best


def _reduced(plan: Plan, rank: int) -> frozenset[str]:
    """The parameters whose gradients this rank sums up with others."""
    in_units = shared_out(plan)
    return frozenset(
        entry.path
        for entry in plan.parameters
        if entry.trainable
        and entry.stages
        and entry.path not in in_units
        and any(rank in ranks and len(ranks) > 1 for ranks in plan.holders(entry))
    )


def _too_small(plan: Plan, stage: int, curve: MemoryCurve) -> str:
    return (
        f"a rank of stage {stage} {plan.stages[stage].name!r} needs at least {size_text(curve.peak_bytes * _MARGIN)}, "
        f"{_MARGIN - 1:.0%} to spare included, with all computed again that helps: {_listed(curve)}"
    )
