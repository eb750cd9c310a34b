"""Lower: a graph, a plan and a schedule become the instructions of one rank.

``lower_stage`` makes the function of a rank's stage for one graph (one signature of the micro-batch); ``lower_step``
makes the list of instructions for a step, whose micro-batches may have different signatures.

Order matters where ranks meet. Between two ranks, values travel in the order of micro-batches and, within one, of their
making; forward and backward values travel on different communicators, so neither waits for the other. The receive for
an action is posted one action ahead, so that the transfer overlaps with computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epl.cost.devices import device_model
from epl.ir.graph import Graph, Ref
from epl.ir.types import ListType
from epl.planner.make import is_split, stage_of_tasks
from epl.planner.plan import Plan
from epl.planner.split import SplitChoice, choose_split
from epl.planner.split_problem import SplitGroup
from epl.program.codegen import StageCode, generate_code
from epl.program.instructions import (
    Backward,
    FinishReduce,
    Forward,
    Free,
    Instruction,
    PostReceive,
    Program,
    Send,
    StageProgram,
    StartReduce,
    Transfer,
)
from epl.program.shards import Exchange, LocalForm, ShardedStage, shard_stage
from epl.schedule import Action, Kind
from epl.sharding.placements import parse_placement

__all__ = ["LoweredStage", "lower_stage", "lower_step"]


@dataclass(frozen=True)
class LoweredStage:
    """A rank's stage for one graph: its function's code, what goes in and out, and what its ranks do together."""

    program: StageProgram
    code: StageCode
    functions: Mapping[str, Exchange | LocalForm] = field(default_factory=dict)


def lower_stage(
    graph: Graph, plan: Plan, rank: int, *, label: str = "", choice: SplitChoice | None = None
) -> LoweredStage:
    """The function of the stage that ``rank`` runs.

    Args:
        graph: The graph, after all passes.
        plan: The plan.
        rank: Whose stage.
        label: Added to the function's name.
        choice: The choice that the plan was made with, if it was for this graph; for another graph it is made here.
    """
    stage, _, position = plan.place_of(rank)
    stage_of = stage_of_tasks(plan.stages)
    ops = tuple(op for op in graph.ops if stage_of[op.task or 0] == stage)
    parts, part_values = _parts(graph, stage_of, stage)
    read = (*(name for op in ops for name in op.reads), *part_values)
    taken = tuple(dict.fromkeys(name for name in read if name not in {op.name for op in ops}))
    held = tuple(leaf.name for leaf in (*graph.parameters, *graph.buffers, *graph.constants) if leaf.name in set(taken))
    inputs = tuple(place for place, leaf in enumerate(graph.inputs) if leaf.name in taken)
    program = StageProgram(
        name=f"stage_{stage}{label}",
        held=held,
        inputs=inputs,
        takes=_takes(graph, plan, rank),
        gives=tuple(dict.fromkeys(name for name, source, _ in _crossings(graph, stage_of) if source == stage)),
        sends=_sends(graph, plan, rank),
        gradients_in=_gradients_in(graph, plan, rank),
        gradients_out=_gradients_out(graph, plan, rank),
        parts=parts,
        needs_backward=_needs_backward(graph, stage_of, stage, taken),
    )
    sharded = ShardedStage(ops, {}, {})
    if is_split(plan.stages[stage]):
        sharded = shard_stage(graph, choice or _choose_again(graph, plan, stage), ops, position)
    arguments = (
        *held,
        *(graph.inputs[place].name for place in inputs),
        *(transfer.value for transfer in program.takes),
    )
    results = [sharded.names.get(name, name) for name in (*program.gives, *part_values)]
    return LoweredStage(program, generate_code(program.name, sharded.ops, arguments, tuple(results)), sharded.functions)


def _choose_again(graph: Graph, plan: Plan, stage: int) -> SplitChoice:
    """How a graph that the plan was not made with flows past the weights where they are."""
    place = plan.stages[stage]
    held = {entry.path: entry for entry in plan.parameters if stage in entry.stages}
    return choose_split(
        graph,
        frozenset(place.taskgraphs),
        SplitGroup(place.device_count, device_model(plan.device_kind), plan.num_micro_batches),
        pins={
            leaf.name: parse_placement(held[leaf.path].placement)
            for leaf in (*graph.parameters, *graph.buffers)
            if leaf.path in held
        },
        summed=frozenset(
            leaf.name for leaf in graph.parameters if leaf.path in held and held[leaf.path].gradient == "P"
        ),
    )


def _needs_backward(graph: Graph, stage_of: Mapping[int, int], stage: int, taken: tuple[str, ...]) -> bool:
    trainable = any(leaf.trainable for leaf in graph.parameters if leaf.name in taken)
    crossing = (name for name, _, target in _crossings(graph, stage_of) if target == stage)
    return trainable or any(name in graph.needs_grad for name in crossing)


def _takes(graph: Graph, plan: Plan, rank: int) -> tuple[Transfer, ...]:
    """What other stages send here, by sender and order of making: the order in which the senders send."""
    stage, _, _ = plan.place_of(rank)
    return tuple(
        _transfer(graph, name, source, plan.source(rank, source))
        for name, source, target in _crossings(graph, stage_of_tasks(plan.stages))
        if target == stage
    )


def _sends(graph: Graph, plan: Plan, rank: int) -> tuple[Transfer, ...]:
    stage, _, _ = plan.place_of(rank)
    return tuple(
        _transfer(graph, name, target, peer)
        for name, source, target in _crossings(graph, stage_of_tasks(plan.stages))
        if source == stage
        for peer in plan.peers(rank, target)
    )


def _gradients_in(graph: Graph, plan: Plan, rank: int) -> tuple[Transfer, ...]:
    """The gradients of what this stage has given: one from each stage that uses it."""
    stage, _, _ = plan.place_of(rank)
    return tuple(
        _transfer(graph, name, target, plan.source(rank, target))
        for name, source, target in _crossings(graph, stage_of_tasks(plan.stages))
        if source == stage and name in graph.needs_grad
    )


def _gradients_out(graph: Graph, plan: Plan, rank: int) -> tuple[Transfer, ...]:
    """The gradients of what this stage has taken, to all that gave it."""
    stage, _, _ = plan.place_of(rank)
    return tuple(
        _transfer(graph, name, source, peer)
        for name, source, target in _crossings(graph, stage_of_tasks(plan.stages))
        if target == stage and name in graph.needs_grad
        for peer in plan.peers(rank, source)
    )


def _crossings(graph: Graph, stage_of: Mapping[int, int]) -> list[tuple[str, int, int]]:
    found = dict.fromkeys(
        (edge.name, stage_of[edge.source], stage_of[edge.target])
        for edge in graph.edges
        if stage_of[edge.source] != stage_of[edge.target]
    )
    return list(found)


def _transfer(graph: Graph, name: str, stage: int, peer: int) -> Transfer:
    kind = graph.type_of(name)
    assert not isinstance(kind, ListType), f"{name} is a list; getitem stays with its maker"
    return Transfer(name, peer, stage, kind, name in graph.needs_grad)


def _parts(graph: Graph, stage_of: dict[int, int], stage: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Roles and values of the step's parts that this stage reports; plain values are no concern of a stage."""
    roles: list[str] = []
    values: list[str] = []
    for output in graph.outputs:
        if isinstance(output.value, Ref) and _home(graph, stage_of, output.value.name) == stage:
            roles.append(output.role)
            values.append(output.value.name)
    return tuple(roles), tuple(values)


def _home(graph: Graph, stage_of: dict[int, int], name: str) -> int:
    """The stage that reports a value: its maker's; for a leaf of the graph the first that has it."""
    maker = graph.op_by_name.get(name)
    if maker is not None:
        return stage_of[maker.task or 0]
    return min((stage_of[op.task or 0] for op in graph.readers.get(name, ())), default=0)


def lower_step(
    plan: Plan, rank: int, actions: Sequence[Action], stages: Sequence[StageProgram], *, train: bool = True
) -> Program:
    """The instructions of one step.

    Args:
        plan: The plan.
        rank: Whose instructions.
        actions: The schedule's actions for the rank's stage.
        stages: The stage's program for each micro-batch.
        train: False for a forward pass only: no backward, no reduction.
    """
    stage, _, _ = plan.place_of(rank)
    actions = [action for action in actions if _has_work(action, stages[action.micro_batch])]
    last_backward = next((action for action in reversed(actions) if action.kind is Kind.BACKWARD), None)
    last_of = {action.micro_batch: action for action in actions}
    instructions: list[Instruction] = []
    for place, action in enumerate(actions):
        if place == 0:
            instructions += _receive(action, stages)
        if place + 1 < len(actions):
            instructions += _receive(actions[place + 1], stages)
        if action is last_backward:
            instructions.append(StartReduce())
        run = Forward if action.kind is Kind.FORWARD else Backward
        instructions.append(run(action, action.micro_batch))
        instructions += _send(action, stages)
        if action is last_of[action.micro_batch]:
            instructions.append(Free(action))
    if train:
        if last_backward is None:
            instructions.append(StartReduce())
        instructions.append(FinishReduce())
    return Program(rank, stage, tuple(instructions))


def _has_work(action: Action, stage: StageProgram) -> bool:
    """A stage through which no gradient flows (frozen, nothing trainable before it) has no backward."""
    return action.kind is Kind.FORWARD or stage.needs_backward


def _receive(action: Action, stages: Sequence[StageProgram]) -> list[Instruction]:
    stage = stages[action.micro_batch]
    transfers = stage.takes if action.kind is Kind.FORWARD else stage.gradients_in
    return [PostReceive(action, transfers)] if transfers else []


def _send(action: Action, stages: Sequence[StageProgram]) -> list[Instruction]:
    stage = stages[action.micro_batch]
    transfers = stage.sends if action.kind is Kind.FORWARD else stage.gradients_out
    return [Send(action, transfers)] if transfers else []
