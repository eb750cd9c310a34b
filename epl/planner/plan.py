"""The plan: everything that was decided before a run, as one frozen value that a user may print, save or write by hand.

A plan says nothing about batch shapes: a new shape costs a capture, not a new plan. Which values cross between stages
is listed for the example batch it was made with, under ``edges``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from epl.errors import PlanError, bulleted
from epl.planner.plan_checks import faults_of

__all__ = ["EdgePlan", "ParameterPlan", "Plan", "SplitPlan", "StagePlan", "sharded_stages"]


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
        placement: What each rank of a stage holds: ``R``, all of it; ``S(0)``, a part along dimension 0
            (:mod:`epl.sharding.placements`).
        gradient: ``P`` if the ranks of its stages each come to a summand of its gradient, which are added up once a
            step; else ``R``.
        home: Where it is stored: in ``device`` memory, in ``host`` memory or on ``disk``; from the latter two it is brought
            for each use.
        states_home: Where the optimizer's states of it are stored, in the same words.
    """

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kind: str
    trainable: bool
    stages: tuple[int, ...]
    placement: str = "R"
    gradient: str = "R"
    home: str = "device"
    states_home: str = "device"

    @property
    def owner(self) -> int:
        """The stage whose copy counts: for the state dict and for the global norm."""
        return min(self.stages, default=0)


@dataclass(frozen=True)
class EdgePlan:
    """A value that crosses from one stage to another, for the micro-batch that the plan was made with.

    Args:
        value: Its name in the graph.
        source: The stage that makes it.
        target: A stage that uses it.
        type: Its type, whole.
        size_bytes: Its size, whole.
        needs_grad: True if its gradient comes back.
        placement_at_source: How the ranks of ``source`` hold it; only the pieces that are needed travel.
        placement_at_target: How those of ``target`` are to hold it.
    """

    value: str
    source: int
    target: int
    type: str
    size_bytes: int
    needs_grad: bool
    placement_at_source: str = "R"
    placement_at_target: str = "R"


@dataclass(frozen=True)
class SplitPlan:
    """How the work of a stage is shared out over its devices, for the micro-batch that the plan was made with.

    Args:
        stage: The stage.
        time_s: Estimate of computing and communication for a micro-batch, forward and backward.
        sent_bytes: Bytes that each rank sends for a micro-batch.
        megatron_bytes: The same for a plan by hand as Megatron makes them (:mod:`epl.planner.split_reference`); 0 beside
            ``replicate``.
        choices: How operators run, a line for each kind.
        communication: What travels, a line for each kind.
    """

    stage: int
    time_s: float
    sent_bytes: float
    megatron_bytes: float
    choices: tuple[str, ...]
    communication: tuple[str, ...]


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
        device_kind: What the devices are, such as "A100-80GB"; empty: not said.
        splits: How stages of several devices share out the work on one batch.
        recompute: Which activations are computed again in the backward pass: those that the user marked (empty), or those
            that EPL chooses (``auto``).
        recompute_end: With ``auto``: the last TaskGraph that computes anything again; -1: all may.
        memory_budget: With ``auto``: bytes that a rank may use at its peak; 0: as few as ``extra_compute`` allows.
        extra_compute: With ``auto``: most of what may be computed again, as a share of a step's work.
        activation_budgets: With a memory budget: bytes that the activations of each stage may take of it; 1: as few as
            can be.
        state_factor: Bytes of optimizer states for each byte of a trained weight; Adam's two moments are 2.
        chunked_loss: Whether logits and their loss are computed in chunks of rows: ``auto``, ``on`` or ``off``.
        chunk_rows: Rows of a chunk; 0: as fits.
        num_apply_groups: Groups of weights that an optimizer steps one after another.
        zero: What replicas share out (ZeRO): nothing (empty), optimizer states (``v0``), gradients too (``v1``), weights
            too (``v2``).
        precision: What suitable operators run in, ``bfloat16`` or ``float16``; empty: as the model is written.
        memory_limit: Bytes that a rank may use; a plan that is predicted to need more is refused; 0: no limit.
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
    device_kind: str = ""
    splits: tuple[SplitPlan, ...] = ()
    recompute: str = ""
    recompute_end: int = -1
    memory_budget: int = 0
    extra_compute: float = 0.34
    activation_budgets: tuple[int, ...] = ()
    state_factor: float = 2.0
    chunked_loss: str = "auto"
    chunk_rows: int = 0
    num_apply_groups: int = 1
    zero: str = ""
    precision: str = ""
    memory_limit: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = faults_of(self)
        if faults:
            raise PlanError(bulleted("this plan cannot be carried out:", faults))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_shares(self) -> int:
        """Parts that a replica's batch is cut into before the step, each with a pipeline of its own.

        That is so if all stages are ``replicate(k)`` with the same k. Else there is one batch for all devices of a replica,
        and stages of several devices share out the work on it, by placements.
        """
        return _num_shares(self.stages)

    @property
    def sharded_stages(self) -> tuple[StagePlan, ...]:
        """The stages whose devices share out the work on one batch."""
        return sharded_stages(self.stages)

    def is_sharded(self, stage: int) -> bool:
        """True if the devices of a stage share out the work on one batch."""
        return self.stages[stage] in self.sharded_stages

    @property
    def num_columns(self) -> int:
        """Parts that the global batch is shared out to."""
        return self.num_replicas * self.num_shares

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
        return replica * self.num_shares + position % self.num_shares

    def ranks_of_column(self, column: int) -> tuple[int, ...]:
        """The ranks, one of each stage, that work on one part of the global batch and report what comes of it."""
        replica, position = divmod(column, self.num_shares)
        return tuple(stage.ranks[replica][position] for stage in self.stages)

    def meetings(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks between which a value may go from one stage to another."""
        pairs = [
            (sender, receiver)
            for senders, receivers in zip(self.stages[source].ranks, self.stages[target].ranks, strict=True)
            for place, sender in enumerate(senders)
            for other, receiver in enumerate(receivers)
            if self.num_shares == 1 or place == other
        ]
        return tuple(pairs)

    def twins(self, rank: int) -> tuple[int, ...]:
        """The ranks of its stage that hold what this rank holds: all of them, or those at its place in each replica."""
        index, _, position = self.place_of(rank)
        if not self.is_sharded(index):
            return self.ranks_of_stages((index,))
        return tuple(sorted(replica[position] for replica in self.stages[index].ranks))

    def holders(self, entry: ParameterPlan) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold a parameter or buffer, in sets that add up its gradient."""
        stages = [self.stages[index] for index in entry.stages]
        if not stages or entry.gradient == "P" or not any(self.is_sharded(stage.index) for stage in stages):
            return (self.ranks_of_stages(entry.stages),)
        places = range(max(stage.device_count for stage in stages))
        return tuple(
            tuple(sorted({replica[place % len(replica)] for stage in stages for replica in stage.ranks}))
            for place in places
        )

    def alike(self, entry: ParameterPlan) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold a parameter or buffer, in sets that hold the same of it; the owner's rank first."""
        whole = entry.placement == "R"
        sets = (self.ranks_of_stages(entry.stages),) if whole else self.holders(entry)
        owner = self.ranks_of_column(0)[entry.owner]
        return tuple(tuple(sorted(ranks, key=lambda rank: (rank != owner, rank))) for ranks in sets if ranks)

    def owners(self, entry: ParameterPlan) -> tuple[int, ...]:
        """The ranks whose parts make the whole of a parameter or buffer: one, unless it is cut."""
        ranks = self.stages[entry.owner].ranks[0]
        return (ranks[0],) if entry.placement == "R" else ranks

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
            fields.setdefault("splits", [])
            parts = {"stages": StagePlan, "parameters": ParameterPlan, "edges": EdgePlan, "splits": SplitPlan}
            for key, kind in parts.items():
                fields[key] = tuple(kind(**_tuples(item)) for item in fields[key])
            return Plan(**_tuples(fields))
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"this is not a plan: {error}; Plan.to_json() of any plan shows the form") from error


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return tuple(map(convert, value)) if isinstance(value, list) else value

    return {key: convert(value) for key, value in fields.items()}


def sharded_stages(stages: tuple[StagePlan, ...]) -> tuple[StagePlan, ...]:
    """The stages of several devices, unless each of these runs a pipeline of its own on a part of the batch."""
    return tuple(stage for stage in stages if stage.device_count > 1) if _num_shares(stages) == 1 else ()


def _num_shares(stages: tuple[StagePlan, ...]) -> int:
    counts = {stage.device_count for stage in stages}
    is_replicated = all(stage.kind == "replicate" for stage in stages)
    return counts.pop() if is_replicated and len(counts) == 1 else 1
