"""Make a plan from a graph with TaskGraphs, a cluster and a config: the user's annotations carried out as written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from epl.cluster import Cluster, VirtualDevice
from epl.config import Config
from epl.cost.devices import device_model
from epl.errors import ClusterError, ConfigError, StrategyError
from epl.ir.graph import Buffer, Graph, Parameter
from epl.ir.types import ListType, ScalarType, TensorType, Type
from epl.planner.contradictions import refuse_contradictions
from epl.planner.crossings import crossings
from epl.planner.plan import EdgePlan, ParameterPlan, Plan, StagePlan, sharded_stages
from epl.planner.split import Decided, SplitChoice, choose_split, wished_placements
from epl.planner.split_items import SplitGroup
from epl.planner.split_table import describe_split
from epl.schedule import dry_run, generate
from epl.sharding.options import WHOLE
from epl.sharding.placements import Placement, Shard, parse_placement
from epl.units import size_bytes_of

__all__ = ["choose_again", "choose_splits", "half_precision", "make_plan", "shares_devices", "stage_of_tasks"]

_HOMES = {  # of weights and of optimizer states, by offload.level
    "": ("device", "device"),
    "v0": ("host", "host"),
    "optimizer": ("device", "host"),
    "disk": ("disk", "disk"),
}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}


def make_plan(
    graph: Graph,
    cluster: Cluster,
    config: Config,
    *,
    is_opaque: bool = False,
    splits: Mapping[int, SplitChoice] | None = None,
) -> Plan:
    """The plan for a graph on a cluster.

    Args:
        graph: A graph whose operators are all in TaskGraphs.
        cluster: The devices.
        config: Micro-batches, schedule, and how gradients are reduced.
        is_opaque: True if the model runs without a graph.
        splits: What `choose_splits` gave; it is called if not given.

    Raises:
        ClusterError: the devices do not divide by the TaskGraphs' device counts; gives the numbers.
        PlanError: the plan would need what is not yet available, or does not fit the devices.
        StrategyError: ``split`` of a model that runs without a graph, or an operator that has to see the batch whole.
    """
    refuse_contradictions(graph, config, is_opaque=is_opaque)
    stages = _stages(graph, cluster, config)
    splits = choose_splits(graph, cluster, config, is_opaque=is_opaque) if splits is None else splits
    _refuse_frequencies(graph, len(stages[0].ranks), config)
    stage_of = stage_of_tasks(stages)
    num_micro_batches = config.pipeline.num_micro_batch
    schedule = generate(config.pipeline.strategy, len(stages), num_micro_batches)
    edges = _edges(graph, stage_of, splits)
    outcome = dry_run(schedule, dependencies={(edge.source, edge.target) for edge in edges} or None)
    return Plan(
        world_size=cluster.world_size,
        num_replicas=len(stages[0].ranks),
        stages=stages,
        parameters=tuple(map(_Homes(graph, config).of, _parameters(graph, stage_of, splits))),
        edges=edges,
        num_micro_batches=num_micro_batches,
        schedule=config.pipeline.strategy,
        reduce_method=config.communication.gradients_reduce_method,
        max_buckets=config.communication.max_splits,
        num_communicators=config.communication.num_communicators,
        sparse_as_dense=config.communication.sparse_as_dense,
        peak_in_flight=tuple(outcome.peak_in_flight),
        bubble=outcome.bubble,
        is_opaque=is_opaque,
        device_kind=cluster.device_kind,
        splits=tuple(describe_split(graph, stages[index], choice) for index, choice in splits.items()),
        recompute="auto" if config.gradient_checkpoint.type == "auto" else "",
        recompute_end=config.gradient_checkpoint.end_taskgraph,
        memory_budget=size_bytes_of(config.gradient_checkpoint.memory_budget),
        extra_compute=config.gradient_checkpoint.extra_compute,
        chunked_loss=config.loss.chunked,
        chunk_rows=config.loss.chunk_rows,
        num_apply_groups=config.optimizer.num_apply_group,
        zero=config.zero.level,
        precision=_PRECISIONS[config.amp.dtype] if config.amp.level else "",
        memory_limit=size_bytes_of(config.run.memory_limit),
        notes=(*_notes(graph, len(stages), is_opaque), *_sharing_notes(config, stages)),
    )


def choose_splits(graph: Graph, cluster: Cluster, config: Config, *, is_opaque: bool = False) -> dict[int, SplitChoice]:
    """How each stage of several devices shares out the work, by stage; arguments and errors as of `make_plan`.

    A weight that several stages use is placed by the first one; over different device counts it is whole.
    """
    stages = _stages(graph, cluster, config)
    sharded = sharded_stages(stages)
    if is_opaque and sharded:
        raise StrategyError(
            f"{graph.tasks[sharded[0].taskgraphs[0]]} needs the model as a graph, and it cannot be captured as one: the "
            "warning above says why. Mend that, or use one replicate for the whole model."
        )
    device = device_model(cluster.device_kind)
    users = _users(graph, stage_of_tasks(stages))
    tied = frozenset(leaf.name for leaf in graph.parameters if len(users.get(leaf.name, ())) > 1)
    pins = {name: WHOLE for name in tied if len({stages[index].device_count for index in users[name]}) > 1}
    choices: dict[int, SplitChoice] = {}
    for stage in sharded:
        tasks = frozenset(stage.taskgraphs)
        wishes = wished_placements(graph, tasks)
        _refuse_other_wishes(graph, pins, wishes)
        group = SplitGroup(stage.device_count, device, config.pipeline.num_micro_batch)
        choices[stage.index] = choice = choose_split(graph, tasks, group, Decided(pins, wishes, tied=tied))
        pins |= {name: place for name, place in choice.stored.items() if name in tied}
    return choices


def _refuse_other_wishes(graph: Graph, pins: Mapping[str, Placement], wishes: Mapping[str, Placement]) -> None:
    for name in pins.keys() & wishes.keys():
        pin, wish = pins[name], wishes[name]
        if pin != wish and not (isinstance(pin, Shard) and isinstance(wish, Shard) and pin.dim == wish.dim):
            path = next(leaf.path for leaf in graph.parameters if leaf.name == name)
            raise StrategyError(
                f"{path} is tied over several stages, where it is placed as {pin}; split(placements=...) asks for {wish}. "
                "Ask for the same in all of them, and over different device counts for R."
            )


def choose_again(graph: Graph, plan: Plan, stage: int) -> SplitChoice:
    """How a graph that the plan was not made with flows past the weights where they are."""
    place = plan.stages[stage]
    held = {entry.path: entry for entry in plan.parameters if stage in entry.stages}
    pins = {
        leaf.name: parse_placement(held[leaf.path].placement)
        for leaf in (*graph.parameters, *graph.buffers)
        if leaf.path in held
    }
    summed = [leaf.name for leaf in graph.parameters if leaf.path in held and held[leaf.path].gradient == "P"]
    group = SplitGroup(place.device_count, device_model(plan.device_kind), plan.num_micro_batches)
    return choose_split(graph, frozenset(place.taskgraphs), group, Decided(pins, summed=frozenset(summed)))


def _refuse_frequencies(graph: Graph, num_replicas: int, config: Config) -> None:
    """An embedding that divides gradients by the frequency of a token counts it within what it is given at once."""
    counting = [op for op in graph.ops if op.target == "aten.embedding.default" and op.args[3:4] == (True,)]
    parts = num_replicas * config.pipeline.num_micro_batch
    if counting and parts > 1:
        raise StrategyError(
            f"{counting[0].module or 'the model'} is an embedding with scale_grad_by_freq=True, which counts tokens within "
            f"a part of the batch, and there would be {parts} parts: its gradient would be another one. Leave it out, or "
            "train with one replica and pipeline.num_micro_batch=1."
        )


def half_precision(config: Config) -> torch.dtype | None:
    """What suitable operators run in; None: as the model is written."""
    return getattr(torch, _PRECISIONS[config.amp.dtype]) if config.amp.level else None


def stage_of_tasks(stages: tuple[StagePlan, ...]) -> dict[int, int]:
    """Stage of each TaskGraph."""
    return {task: stage.index for stage in stages for task in stage.taskgraphs}


def shares_devices(cluster: Cluster, config: Config) -> bool:
    """True if all TaskGraphs are on the same devices: as configured, or because there is only one."""
    return config.cluster.colocate_split_and_replicate or cluster.world_size == 1


def _stages(graph: Graph, cluster: Cluster, config: Config) -> tuple[StagePlan, ...]:
    tasks = tuple(range(len(graph.tasks)))
    if cluster.world_size == 1:
        return (_stage(graph, 0, tasks, ((0,),)),)
    colocate = shares_devices(cluster, config)
    try:
        devices = cluster.virtual_devices(
            [spec.device_count for spec in graph.tasks],
            prefer_intra_node=config.cluster.device_place_prefer_intra_node,
            colocate=colocate,
        )
    except ClusterError as error:
        raise ClusterError(f"{error}{_cure(graph, colocate=colocate)}") from error
    groups = [tasks] if colocate else [(task,) for task in tasks]
    return tuple(_stage(graph, index, group, _ranks(devices[group[0]])) for index, group in enumerate(groups))


def _cure(graph: Graph, *, colocate: bool) -> str:
    """What else may be meant where the devices do not come out even."""
    if colocate:
        named = ", ".join(f"{spec.kind}({spec.device_count}) {spec.name!r}" for spec in graph.tasks)
        return f" (cluster.colocate_split_and_replicate, with {named})"
    if len({spec.kind for spec in graph.tasks}) > 1:
        return "; if split and replicate are to share the same devices, set cluster.colocate_split_and_replicate"
    return ""


def _ranks(device: VirtualDevice) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(place.rank for place in replica) for replica in device.replicas)


def _stage(graph: Graph, index: int, tasks: tuple[int, ...], ranks: tuple[tuple[int, ...], ...]) -> StagePlan:
    specs = [graph.tasks[task] for task in tasks]
    kind = "split" if any(spec.kind == "split" for spec in specs) else "replicate"
    names = dict.fromkeys(spec.name for spec in specs)
    return StagePlan(index, "+".join(names), kind, tasks, ranks)


def _edges(graph: Graph, stage_of: dict[int, int], splits: Mapping[int, SplitChoice]) -> tuple[EdgePlan, ...]:
    def placement(stage: int, value: str) -> str:
        return str(splits[stage].crossing(value)) if stage in splits else "R"

    return tuple(
        EdgePlan(
            crossing.value,
            crossing.source,
            crossing.target,
            str(graph.type_of(crossing.value)),
            _size_bytes(graph.type_of(crossing.value)),
            crossing.value in graph.needs_grad,
            placement(crossing.source, crossing.value),
            placement(crossing.target, crossing.value),
        )
        for crossing in crossings(graph, stage_of)
    )


def _size_bytes(kind: Type) -> int:
    if isinstance(kind, TensorType):
        return kind.size_bytes
    return (
        8 if isinstance(kind, ScalarType) else sum(map(_size_bytes, kind.items if isinstance(kind, ListType) else ()))
    )


def _parameters(graph: Graph, stage_of: dict[int, int], splits: Mapping[int, SplitChoice]) -> tuple[ParameterPlan, ...]:
    users = _users(graph, stage_of)
    return tuple(
        _parameter(leaf, tuple(sorted(users.get(leaf.name, ()))), splits)
        for leaf in (*graph.parameters, *graph.buffers)
    )


class _Homes:
    """Where weights and their optimizer states are stored, as ``offload`` says."""

    def __init__(self, graph: Graph, config: Config) -> None:
        level, self._pattern = config.offload.level, config.offload.parameters
        self._home, self._states_home = _HOMES[level]
        if level and not any(self._is_meant(leaf.path) for leaf in graph.parameters):
            some = ", ".join(leaf.path for leaf in graph.parameters[:3])
            raise ConfigError(
                f"offload.parameters is {self._pattern!r}, and that is found in the path of no weight; the paths are "
                f"{some}, ..."
            )

    def _is_meant(self, path: str) -> bool:
        try:
            return re.search(self._pattern, path) is not None
        except re.error as error:
            raise ConfigError(
                f"offload.parameters is {self._pattern!r}, which is no regular expression: {error}"
            ) from error

    def of(self, entry: ParameterPlan) -> ParameterPlan:
        """The entry with its homes."""
        if entry.kind != "parameter" or not entry.stages or not self._is_meant(entry.path):
            return entry
        return replace(entry, home=self._home, states_home=self._states_home)


def _sharing_notes(config: Config, stages: tuple[StagePlan, ...]) -> list[str]:
    level, count = config.zero.level, config.pipeline.num_micro_batch
    if not level:
        return []
    num_sharers = len(stages[0].ranks) * (max(stage.device_count for stage in stages))
    if num_sharers == 1:
        return [f"zero.level {level!r} has nothing to share out: each weight is on one rank only"]
    times = "once a step" if level == "v0" or count == 1 else f"{count} times a step, which v0 does once"
    more = f", and weights are gathered {2 * count} times" if level == "v2" else ""
    return [f"zero.level {level!r}: gradients are summed {times}{more}"]


def _users(graph: Graph, stage_of: Mapping[int, int]) -> dict[str, set[int]]:
    """The stages that use each value."""
    users: dict[str, set[int]] = {}
    for op in graph.ops:
        for name in op.reads:
            users.setdefault(name, set()).add(stage_of[op.task or 0])
    return users


def _parameter(leaf: Parameter | Buffer, stages: tuple[int, ...], splits: Mapping[int, SplitChoice]) -> ParameterPlan:
    choices = [splits[stage] for stage in stages if stage in splits]
    return ParameterPlan(
        path=leaf.path,
        aliases=leaf.aliases if isinstance(leaf, Parameter) else (),
        shape=tuple(size or 0 for size in leaf.type.shape),
        dtype=str(leaf.type.dtype).removeprefix("torch."),
        kind="parameter" if isinstance(leaf, Parameter) else "buffer",
        trainable=isinstance(leaf, Parameter) and leaf.trainable,
        stages=stages,
        placement=str(choices[0].stored.get(leaf.name, "R")) if choices else "R",
        gradient="P" if any(leaf.name in choice.summed_later for choice in choices) else "R",
    )


def _notes(graph: Graph, num_stages: int, is_opaque: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if is_opaque:
        notes.append("the model runs as it is, without a graph: data parallelism only")
    unused = [leaf.path for leaf in graph.parameters if leaf.trainable and not graph.readers.get(leaf.name)]
    if unused and not is_opaque:
        notes.append(f"{len(unused)} parameters take no part in the loss and get no gradient: {', '.join(unused[:3])}")
    empty = [spec.name for index, spec in enumerate(graph.tasks) if not graph.taskgraphs[index].ops]
    if empty:
        notes.append(f"TaskGraphs without operators: {', '.join(empty)}")
    return tuple(notes)
