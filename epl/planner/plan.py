"""The plan: everything that was decided before a run, as one frozen value that a user may print, save or write by hand.

A plan says nothing about batch shapes: a new shape costs a capture, not a new plan. Which values cross between stages
is listed for the example batch it was made with, under ``edges``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from epl.errors import PlanError

__all__ = ["EdgePlan", "ParameterPlan", "Plan", "StagePlan"]


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
    ranks = [rank for stage in plan.stages for replica in stage.ranks for rank in replica]
    if sorted(ranks) != list(range(plan.world_size)):
        raise PlanError(f"the stages name the ranks {sorted(ranks)}; each of 0..{plan.world_size - 1} is needed once")
    if any(len(stage.ranks) != plan.num_replicas for stage in plan.stages):
        counts = [len(stage.ranks) for stage in plan.stages]
        raise PlanError(f"the stages have {counts} replicas; each must have num_replicas={plan.num_replicas}")
    if plan.num_micro_batches < 1:
        raise PlanError(f"num_micro_batches is {plan.num_micro_batches}; at least 1 is needed")
    counts = [stage.device_count for stage in plan.stages]
    if len(set(counts)) > 1:
        raise PlanError(
            f"the TaskGraphs have {counts} devices; different device counts in one pipeline are not yet available. "
            "Give all TaskGraphs the same device_count."
        )
    split = [stage.name for stage in plan.stages if stage.kind == "split" and stage.device_count > 1]
    if split:
        raise PlanError(f"split over more than one device is not yet available: {split}. Use replicate, or split(1).")
