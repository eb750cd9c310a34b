"""The plan: everything that was decided before a run, as one frozen value that a user may print, save or write by hand.

A plan says nothing about batch shapes: a new shape costs a capture, not a new plan. Which values cross between stages
is listed for the example batch it was made with, under ``edges``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epl.errors import PlanError, bulleted
from epl.schedule import SCHEDULE_NAMES

__all__ = ["EdgePlan", "ParameterPlan", "Plan", "StagePlan"]

_KINDS = ("replicate", "split")
_REDUCE_METHODS = ("mean", "sum")


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage: TaskGraphs that share devices.

    Args:
        index: Place in the pipeline.
        name: Names of its TaskGraphs.
        kind: ``replicate`` or ``split``.
        taskgraphs: Indices of its TaskGraphs.
        ranks: ``ranks[replica][position]``: the rank that runs this stage there.
    """

    index: int
    name: str
    kind: str
    taskgraphs: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def device_count(self) -> int:
        """Devices in one replica."""
        return len(self.ranks[0])


@dataclass(frozen=True)
class ParameterPlan:
    """Where a parameter or buffer lives.

    Args:
        path: Its first name in the model.
        aliases: Its other names, if it is tied.
        shape: Its whole shape.
        dtype: Element type, as ``float32``.
        kind: ``parameter`` or ``buffer``.
        trainable: True if it takes a gradient.
        stages: The stages that hold it; empty if nothing in the step uses it (then stage 0 keeps it).
        placement: ``R``: whole on every rank of its stages.
    """

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kind: str
    trainable: bool
    stages: tuple[int, ...]
    placement: str = "R"

    @property
    def owner(self) -> int:
        """The stage whose copy counts: for the state dict and for the global norm."""
        return min(self.stages, default=0)


@dataclass(frozen=True)
class EdgePlan:
    """A value that crosses from one stage to another, for the micro-batch that the plan was made with."""

    value: str
    source: int
    target: int
    type: str
    size_bytes: int
    needs_grad: bool


@dataclass(frozen=True)
class Plan:
    """What runs where and in which order.

    Args:
        world_size: Ranks in all.
        num_replicas: Copies of the whole pipeline: the degree of the nested data parallelism.
        stages: The pipeline.
        parameters: Every parameter and buffer of the model.
        edges: Values that cross between stages.
        num_micro_batches: Parts that each replica's batch is cut into.
        schedule: Name of the schedule.
        reduce_method: ``mean`` or ``sum`` over micro-batches and replicas.
        max_buckets: Most buckets that gradients are reduced in, for each group of ranks.
        num_communicators: Communicators that the buckets take in turn.
        sparse_as_dense: True if sparse gradients are made dense before they are reduced.
        peak_in_flight: Most micro-batches that each stage holds activations of at once.
        bubble: Share of the pipeline's time that is idle, for equal stages and backward twice as long as forward.
        is_opaque: True if the model runs as it is, without a graph.
        notes: What the reader should know, a line each.
    """

    world_size: int
    num_replicas: int
    stages: tuple[StagePlan, ...]
    parameters: tuple[ParameterPlan, ...]
    edges: tuple[EdgePlan, ...]
    num_micro_batches: int
    schedule: str
    reduce_method: str = "mean"
    max_buckets: int = 5
    num_communicators: int = 2
    sparse_as_dense: bool = False
    peak_in_flight: tuple[int, ...] = ()
    bubble: float = 0.0
    is_opaque: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_columns(self) -> int:
        """Parts that the global batch is shared out to: replicas times devices of a stage."""
        return self.num_replicas * self.stages[0].device_count

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """(stage, replica, position) of a rank.

        Raises:
            PlanError: the rank has no place in this plan.
        """
        for stage in self.stages:
            for replica, ranks in enumerate(stage.ranks):
                if rank in ranks:
                    return stage.index, replica, ranks.index(rank)
        raise PlanError(f"rank {rank} has no stage in this plan, which is for {self.world_size} ranks")

    def column_of(self, rank: int) -> int:
        """Which part of the global batch the rank works on."""
        _, replica, position = self.place_of(rank)
        return replica * self.stages[0].device_count + position

    def ranks_of_column(self, column: int) -> tuple[int, ...]:
        """The ranks, by stage, that work on one part of the global batch."""
        replica, position = divmod(column, self.stages[0].device_count)
        return tuple(stage.ranks[replica][position] for stage in self.stages)

    def ranks_of_replica(self, replica: int) -> tuple[int, ...]:
        """All ranks of one replica, which are given the same batch."""
        return tuple(rank for stage in self.stages for rank in stage.ranks[replica])

    def ranks_of_stages(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """All ranks that run one of these stages, in any replica."""
        return tuple(sorted(rank for index in stages for ranks in self.stages[index].ranks for rank in ranks))

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote, or that a user wrote by hand.

        Raises:
            PlanError: the text is not a plan, or the plan is inconsistent.
        """
        try:
            fields = json.loads(text)
            parts = {"stages": StagePlan, "parameters": ParameterPlan, "edges": EdgePlan}
            for key, kind in parts.items():
                fields[key] = tuple(kind(**_tuples(item)) for item in fields[key])
            return Plan(**_tuples(fields))
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"this is not a plan: {error}; Plan.to_json() of any plan shows the form") from error


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return tuple(map(convert, value)) if isinstance(value, list) else value

    return {key: convert(value) for key, value in fields.items()}


def _check(plan: Plan) -> None:
    faults = [*_rank_faults(plan), *_reference_faults(plan), *_number_faults(plan)]
    if not faults:
        faults = list(_unavailable(plan))
    if faults:
        raise PlanError(bulleted("this plan cannot be carried out:", faults))


def _rank_faults(plan: Plan) -> Iterator[str]:
    if not plan.stages:
        yield "it has no stages"
    ranks = [rank for stage in plan.stages for replica in stage.ranks for rank in replica]
    if sorted(ranks) != list(range(plan.world_size)):
        yield f"the stages name the ranks {sorted(ranks)}; each of 0..{plan.world_size - 1} is needed once"
    for stage in plan.stages:
        if len(stage.ranks) != plan.num_replicas:
            yield f"stage {stage.index} has {len(stage.ranks)} replicas; num_replicas is {plan.num_replicas}"
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
    for name in ("num_micro_batches", "max_buckets", "num_communicators"):
        if getattr(plan, name) < 1:
            yield f"{name} is {getattr(plan, name)}; at least 1 is needed"
    if plan.schedule.lower() not in [name.lower() for name in SCHEDULE_NAMES]:
        yield f"schedule is {plan.schedule!r}; one of {', '.join(SCHEDULE_NAMES)} is needed"
    if plan.reduce_method not in _REDUCE_METHODS:
        yield f"reduce_method is {plan.reduce_method!r}; one of {', '.join(_REDUCE_METHODS)} is needed"
    if plan.peak_in_flight and len(plan.peak_in_flight) != len(plan.stages):
        yield f"peak_in_flight has {len(plan.peak_in_flight)} numbers for {len(plan.stages)} stages"


def _unavailable(plan: Plan) -> Iterator[str]:
    counts = [stage.device_count for stage in plan.stages]
    if len(set(counts)) > 1:
        yield (
            f"the TaskGraphs have {counts} devices; different device counts in one pipeline are not yet available. Give "
            "all TaskGraphs the same device_count."
        )
    split = [stage.name for stage in plan.stages if stage.kind == "split" and stage.device_count > 1]
    if split:
        yield f"split over more than one device is not yet available: {split}. Use replicate, or split(1)."
