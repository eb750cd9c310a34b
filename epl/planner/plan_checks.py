"""What in a plan contradicts itself, or cannot be carried out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from epl.schedule import SCHEDULE_NAMES

if TYPE_CHECKING:
    from epl.planner.plan import Plan

__all__ = ["faults_of"]

_KINDS = ("replicate", "split")
_REDUCE_METHODS = ("mean", "sum")
_ZERO_LEVELS = ("", "v0", "v1", "v2")
_PRECISIONS = ("", "bfloat16", "float16")
_HOMES = ("device", "host", "disk")


def faults_of(plan: Plan) -> list[str]:
    """All that is wrong with a plan, a line each."""
    return [*_rank_faults(plan), *_reference_faults(plan), *_number_faults(plan)] or list(_unavailable(plan))


def _rank_faults(plan: Plan) -> Iterator[str]:
    if not plan.stages:
        yield "it has no stages"
    ranks = [rank for stage in plan.stages for replica in stage.ranks for rank in replica]
    if sorted(ranks) != list(range(plan.world_size)):
        yield f"the stages name the ranks {sorted(ranks)}; each of 0..{plan.world_size - 1} is needed once"
    for stage in plan.stages:
        if len(stage.ranks) != plan.num_replicas:
            yield f"stage {stage.index} has {len(stage.ranks)} replicas; num_replicas is {plan.num_replicas}"
        if stage in plan.sharded_stages and any(list(replica) != sorted(replica) for replica in stage.ranks):
            yield f"ranks that share out a stage are in ascending order; stage {stage.index} has {stage.ranks}"
        if len({len(replica) for replica in stage.ranks}) > 1:
            yield f"the replicas of stage {stage.index} have {[len(replica) for replica in stage.ranks]} devices"


def _reference_faults(plan: Plan) -> Iterator[str]:
    """Stages and TaskGraphs are numbered from 0, and what refers to them does so within their numbers."""
    count = len(plan.stages)
    if [stage.index for stage in plan.stages] != list(range(count)):
        yield f"the stages are numbered {[stage.index for stage in plan.stages]}; 0..{count - 1} is needed, in order"
    tasks = [task for stage in plan.stages for task in stage.taskgraphs]
    if sorted(tasks) != list(range(len(tasks))):
        yield f"the stages hold the TaskGraphs {tasks}; each number from 0 is needed once"
    for stage in plan.stages:
        if stage.kind not in _KINDS:
            yield f"stage {stage.index} is of kind {stage.kind!r}; one of {', '.join(_KINDS)} is needed"
    for entry in plan.parameters:
        if not set(entry.stages) <= set(range(count)):
            yield f"{entry.path} is in stages {list(entry.stages)}; there are {count}"
    for edge in plan.edges:
        if not {edge.source, edge.target} <= set(range(count)) or edge.source == edge.target:
            yield f"{edge.value} goes from stage {edge.source} to {edge.target}; there are {count}"


def _number_faults(plan: Plan) -> Iterator[str]:
    for name in ("num_micro_batches", "max_buckets", "num_communicators", "num_apply_groups"):
        if getattr(plan, name) < 1:
            yield f"{name} is {getattr(plan, name)}; at least 1 is needed"
    if plan.schedule.lower() not in [name.lower() for name in SCHEDULE_NAMES]:
        yield f"schedule is {plan.schedule!r}; one of {', '.join(SCHEDULE_NAMES)} is needed"
    if plan.reduce_method not in _REDUCE_METHODS:
        yield f"reduce_method is {plan.reduce_method!r}; one of {', '.join(_REDUCE_METHODS)} is needed"
    for name, allowed in (("zero", _ZERO_LEVELS), ("precision", _PRECISIONS)):
        if getattr(plan, name) not in allowed:
            yield f"{name} is {getattr(plan, name)!r}; one of {', '.join(map(repr, allowed))} is needed"
    for entry in plan.parameters:
        for name in ("home", "states_home"):
            if getattr(entry, name) not in _HOMES:
                yield f"{entry.path} has the {name} {getattr(entry, name)!r}; one of {', '.join(_HOMES)} is needed"
    if plan.peak_in_flight and len(plan.peak_in_flight) != len(plan.stages):
        yield f"peak_in_flight has {len(plan.peak_in_flight)} numbers for {len(plan.stages)} stages"


def _unavailable(plan: Plan) -> Iterator[str]:
    counts = [stage.device_count for stage in plan.stages]
    for entry in plan.parameters:
        numbers = [counts[index] for index in entry.stages]
        if entry.trainable and len(set(numbers)) > 1 and (entry.placement, entry.gradient) != ("R", "P"):
            yield (
                f"{entry.path} is tied over stages {list(entry.stages)} with {numbers} devices, and has the placement "
                f"{entry.placement} and the gradient {entry.gradient}; over different device counts they are R and P"
            )
