"""Lower: a graph, a plan and a schedule become the instructions of one rank.

``lower_stage`` makes the function of a rank's stage for one graph (one signature of the micro-batch); ``lower_step``
makes the list of instructions for a step, whose micro-batches may have different signatures.

Order matters where ranks meet. Between two ranks, values travel in the order of micro-batches and, within one, of their
making; forward and backward values travel on different communicators, so neither waits for the other. The receive for
an action is posted one action ahead, so that the transfer overlaps with computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from epl.ir.graph import Graph, Output, Ref, refs_in
from epl.ir.types import ListType, TensorType
from epl.passes import apply_passes
from epl.planner.crossings import Crossing, crossings
from epl.planner.make import choose_again, stage_of_tasks
from epl.planner.plan import Plan
from epl.planner.split import SplitChoice
from epl.planner.units import units_of
from epl.program.arrivals import over_after
from epl.program.instructions import (
    Backward,
    FinishReduce,
    FinishRound,
    Forget,
    Forward,
    Free,
    Instruction,
    PostReceive,
    Program,
    Send,
    StageProgram,
    StartReduce,
    StartRound,
    Transfer,
)
from epl.schedule import Action, Kind, Schedule
from epl.sharding.local import Bindable
from epl.sharding.options import WHOLE
from epl.sharding.pieces import Piece, Side, pieces_between
from epl.stage.codegen import StageCode, generate_code
from epl.stage.stage import Share, Stage, localize

__all__ = ["LoweredStage", "lower_stage", "lower_step", "stage_notes"]


@dataclass(frozen=True)
class LoweredStage:
    """A rank's stage for one graph: what goes in and out, what it runs, and its function's code."""

    program: StageProgram
    stage: Stage
    code: StageCode

    @property
    def functions(self) -> Mapping[str, Bindable]:
        """What its ranks do together."""
        return self.stage.functions


def lower_stage(
    graph: Graph, plan: Plan, rank: int, *, label: str = "", splits: Mapping[int, SplitChoice] | None = None
) -> LoweredStage:
    """The function of the stage that ``rank`` runs.

    Args:
        graph: The graph.
        plan: The plan.
        rank: Whose stage.
        label: Added to the function's name.
        splits: What the plan was made with, if it was for this graph; for another graph it is chosen here.
    """
    stage, _, position = plan.place_of(rank)
    stage_of = stage_of_tasks(plan.stages)
    ops = tuple(op for op in graph.ops if stage_of[op.task or 0] == stage)
    parts = _parts(graph, stage_of, stage)
    read = (*(name for op in ops for name in op.reads), *(name for part in parts for name in refs_in(part.value)))
    taken = tuple(dict.fromkeys(name for name in read if name not in {op.name for op in ops}))
    held = tuple(leaf.name for leaf in (*graph.parameters, *graph.buffers, *graph.constants) if leaf.name in set(taken))
    inputs = tuple(place for place, leaf in enumerate(graph.inputs) if leaf.name in taken)
    traffic = _Traffic(graph, plan, rank, splits or {})
    program = StageProgram(
        name=f"stage_{stage}{label}",
        held=held,
        inputs=inputs,
        takes=traffic.takes(),
        gives=tuple(dict.fromkeys(crossing.value for crossing in traffic.crossings if crossing.source == stage)),
        sends=traffic.sends(),
        gradients_in=traffic.gradients_in(),
        gradients_out=traffic.gradients_out(),
        parts=tuple(part.role for part in parts),
        needs_backward=_needs_backward(graph, traffic.crossings, stage, taken),
    )
    arguments = (
        *held,
        *(graph.inputs[place].name for place in inputs),
        *dict.fromkeys(transfer.value for transfer in program.takes),
    )
    choice = traffic.choice(stage) if plan.is_sharded(stage) else None
    num_in_flight = plan.peak_in_flight[stage] if plan.peak_in_flight else 1
    local = localize(graph, Share(ops, program.gives, parts, choice, position, num_in_flight, stage))
    local = apply_passes(local, plan)
    return LoweredStage(program, local, generate_code(program.name, local.graph.ops, arguments, local.results))


def stage_notes(graph: Graph, plan: Plan, splits: Mapping[int, SplitChoice] | None = None) -> tuple[str, ...]:
    """What the passes have to say about the first rank of each stage; arguments and errors as of `lower_stage`."""
    firsts = (stage.ranks[0][0] for stage in plan.stages)
    return tuple(note for rank in firsts for note in lower_stage(graph, plan, rank, splits=splits).stage.notes)


def _needs_backward(graph: Graph, crossing: Sequence[Crossing], stage: int, taken: tuple[str, ...]) -> bool:
    trainable = any(leaf.trainable for leaf in graph.parameters if leaf.name in taken)
    return trainable or any(each.value in graph.needs_grad for each in crossing if each.target == stage)


class _Traffic:
    """What one rank sends to other stages and receives from them.

    By stage at the other end, value and piece: between two ranks, that is the same order at both ends.
    """

    def __init__(self, graph: Graph, plan: Plan, rank: int, splits: Mapping[int, SplitChoice]) -> None:
        self.graph, self.plan = graph, plan
        self.stage, self.replica, self.position = plan.place_of(rank)
        self.crossings = crossings(graph, stage_of_tasks(plan.stages))
        self._splits = dict(splits)

    def choice(self, stage: int) -> SplitChoice:
        """How a stage of several devices shares out its work."""
        if stage not in self._splits:
            self._splits[stage] = choose_again(self.graph, self.plan, stage)
        return self._splits[stage]

    def takes(self) -> tuple[Transfer, ...]:
        """What other stages send here."""
        return self._received(self.crossings)

    def sends(self) -> tuple[Transfer, ...]:
        """Where what this stage has made goes."""
        return self._sent(self.crossings)

    def gradients_in(self) -> tuple[Transfer, ...]:
        """The gradients of what this stage has given, from each stage that uses it."""
        return self._received(self._gradients())

    def gradients_out(self) -> tuple[Transfer, ...]:
        """The gradients of what this stage has taken."""
        return self._sent(self._gradients())

    def _gradients(self) -> Iterator[Crossing]:
        """They go the other way."""
        needs_grad = self.graph.needs_grad
        return (Crossing(each.value, each.target, each.source) for each in self.crossings if each.value in needs_grad)

    def _received(self, coming: Iterable[Crossing]) -> tuple[Transfer, ...]:
        mine = (each for each in coming if each.target == self.stage)
        pieces = ((each, piece) for each in mine for piece in self._pieces(each) if piece.target == self.position)
        return tuple(self._transfer(each.value, each.source, piece.source, piece, piece.put) for each, piece in pieces)

    def _sent(self, going: Iterable[Crossing]) -> tuple[Transfer, ...]:
        mine = (each for each in going if each.source == self.stage)
        pieces = ((each, piece) for each in mine for piece in self._pieces(each) if piece.source == self.position)
        return tuple(
            self._transfer(each.value, each.target, piece.target, piece, piece.taken) for each, piece in pieces
        )

    def _pieces(self, crossing: Crossing) -> tuple[Piece, ...]:
        if self.plan.num_shares > 1:  # each position has a pipeline of its own
            return (Piece(self.position, self.position, (), (), ()),)
        kind = self.graph.type_of(crossing.value)
        shape = kind.sizes if isinstance(kind, TensorType) and kind.is_static else ()
        return pieces_between(
            shape, *(self._side(stage, crossing.value) for stage in (crossing.source, crossing.target))
        )

    def _side(self, stage: int, value: str) -> Side:
        placement = self.choice(stage).crossing(value) if self.plan.is_sharded(stage) else WHOLE
        return Side(self.plan.stages[stage].device_count, placement)

    def _transfer(
        self, value: str, stage: int, position: int, piece: Piece, part: tuple[tuple[int, int, int], ...]
    ) -> Transfer:
        kind = self.graph.type_of(value)
        assert not isinstance(kind, ListType), f"{value} is a list; getitem stays with its maker"
        held: tuple[int, ...] = ()
        if isinstance(kind, TensorType) and kind.is_static and self.plan.num_shares == 1:
            held = self._side(self.stage, value).local_shape(kind.sizes, self.position) if part else ()
            kind = TensorType(kind.dtype, piece.shape)
        peer = self.plan.stages[stage].ranks[self.replica][position]
        return Transfer(value, peer, stage, kind, value in self.graph.needs_grad, part, held)


def _parts(graph: Graph, stage_of: dict[int, int], stage: int) -> tuple[Output, ...]:
    """The step's parts that this stage reports; plain values are no concern of a stage."""
    return tuple(
        output
        for output in graph.outputs
        if isinstance(output.value, Ref) and _home(graph, stage_of, output.value.name) == stage
    )


def _home(graph: Graph, stage_of: dict[int, int], name: str) -> int:
    """The stage that reports a value: its maker's; for a leaf of the graph the first that has it."""
    maker = graph.op_by_name.get(name)
    if maker is not None:
        return stage_of[maker.task or 0]
    return min((stage_of[op.task or 0] for op in graph.readers.get(name, ())), default=0)


def lower_step(
    plan: Plan,
    rank: int,
    schedule: Schedule,
    stages: Sequence[StageProgram],
    *,
    train: bool = True,
    num_rounds: int = 0,
) -> Program:
    """The instructions of one step.

    Args:
        plan: The plan.
        rank: Whose instructions.
        schedule: The actions of all stages.
        stages: The stage's program for each micro-batch.
        train: False for a forward pass only: no backward, no reduction.
        num_rounds: Backward passes after each of which gradients are summed, if the plan has such weights: as many as
            the rank with the most micro-batches has; 0: as many as this one has.
    """
    stage, _, _ = plan.place_of(rank)
    actions = [action for action in schedule[stage] if _has_work(action, stages[action.micro_batch])]
    over = over_after(schedule, actions, stages)
    last_backward = next((action for action in reversed(actions) if action.kind is Kind.BACKWARD), None)
    has_rounds = train and any(unit.each_backward for unit in units_of(plan, rank))
    rounds = 0
    last_of = {action.micro_batch: action for action in actions}
    instructions: list[Instruction] = []
    for place, action in enumerate(actions):
        if place == 0:
            instructions += _receive(action, stages)
        if place + 1 < len(actions):
            instructions += _receive(actions[place + 1], stages)
        if action is last_backward:
            instructions.append(StartReduce())
        is_round = has_rounds and action.kind is Kind.BACKWARD
        rounds += is_round
        run = Forward if action.kind is Kind.FORWARD else Backward
        instructions += [StartRound()] * is_round + [run(action, action.micro_batch)] + [FinishRound()] * is_round
        instructions += (Forget(sent, target) for sent, target in over[action])
        instructions += _send(action, stages)
        if action is last_of[action.micro_batch]:
            instructions.append(Free(action))
    if train:
        if last_backward is None:
            instructions.append(StartReduce())
        instructions += [StartRound(), FinishRound()] * (has_rounds * (num_rounds - rounds))
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
