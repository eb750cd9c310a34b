"""Predict the memory of a rank over one step: the instructions of its program, with the profile of its stage.

    profile of the stage (fakes), instructions, optimizer -> what comes and goes, one after another -> MemoryCurve

This is the executor's and the reducer's work with sizes in place of tensors:

- a forward pass leaves its activations until the backward pass of the same micro-batch;
- what is received is there from the moment the receive is posted until the micro-batch is freed;
- the first backward pass leaves gradients, a later one adds to them and drops its own; once reducing has started, a
  gradient is copied into its bucket and dropped;
- what is sent stays until the send is known to be over: until a ``Forget``, or the end of the step.

The batch itself is the user's and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from epl.ir.graph import Graph
from epl.ir.types import TensorType
from epl.planner.plan import Plan
from epl.planner.units import units_of
from epl.program.curve import MemoryCurve, Meter
from epl.program.holdings import Holdings
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
from epl.program.lower import LoweredStage
from epl.program.unit_memory import UnitGradients, stand_in_lender
from epl.schedule import Action, Kind
from epl.sharding.collectives import StandInRank
from epl.stage.simulate import Change, StageProfile, simulate

__all__ = ["StageMemory", "Update", "memory_of_stage", "predict"]

_CATEGORY = {  # of a change in a stage or in the optimizer's step
    "activation": "activations",
    "given": "communication",
    "temporary": "temporaries",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class StageMemory:
    """The memory of a stage for one kind of micro-batch.

    Args:
        program: What goes in and out.
        profile: What its function takes.
        paths: The paths in the model of its parameters, by their names in the graph.
    """

    program: StageProgram
    profile: StageProfile
    paths: Mapping[str, str]

    @property
    def gradients(self) -> frozenset[str]:
        """Paths of the parameters that get a gradient."""
        return frozenset(self.paths[name] for name in self.profile.gradients)


@dataclass(frozen=True)
class Update:
    """The memory of the optimizer's step.

    Args:
        before: Bytes of its states before the step.
        changes: What comes and goes: ``optimizer`` (states) and ``temporary``.
        problem: Why it is not known, if it is not.
    """

    before: int = 0
    changes: tuple[Change, ...] = ()
    problem: str = ""


def memory_of_stage(
    lowered: LoweredStage,
    graph: Graph,
    plan: Plan,
    rank: int,
    functions: Mapping[str, Callable[..., Any]],
    *,
    device: torch.device | None = None,
) -> StageMemory:
    """The memory of a rank's stage: its function run on fakes, with stand-ins for the ranks that it works with.

    Args:
        lowered: The stage.
        graph: The graph that it is a part of.
        plan: The plan.
        rank: Whose stage.
        functions: The captured callables.
        device: Where it will run; None for the CPU.
    """
    program = lowered.program
    stage, replica, position = plan.place_of(rank)
    stand_in = StandInRank(position, len(plan.stages[stage].ranks[replica]))
    bound = {target: function.bind(stand_in) for target, function in lowered.functions.items()}
    flowing = {transfer.value for transfer in program.gradients_in}
    profile = simulate(
        lowered.stage,
        lowered.code,
        {**functions, **bound},
        device=device,
        flowing=flowing,
        lender=stand_in_lender(units_of(plan, rank), lowered.stage.runs, device),
    )
    return StageMemory(program, profile, {leaf.name: leaf.path for leaf in graph.parameters})


def predict(program: Program, micro_batches: Sequence[StageMemory], holdings: Holdings, update: Update) -> MemoryCurve:
    """The memory of one training step on one rank.

    Args:
        program: The rank's instructions.
        micro_batches: The memory of the stage for each micro-batch.
        holdings: What is there throughout.
        update: The optimizer's step.
    """
    start = {"weights": holdings.weights, "communication": holdings.buckets, "optimizer": update.before}
    rank = _Rank(micro_batches, holdings, Meter.starting_with(start))
    for instruction in program.instructions:
        rank.run(instruction)
    rank.update(update)
    problems = (memory.profile.problem for memory in micro_batches)
    return rank.meter.curve(problem for problem in (*problems, update.problem) if problem)


@dataclass
class _Sent:
    """What an action has sent, as long as it is not known to have arrived.

    Args:
        size_bytes: Memory that only the send holds.
        stages: Where it has not arrived.
        values: What is sent as it is, without a copy.
    """

    size_bytes: int
    stages: set[int]
    values: frozenset[str]


class _Rank:
    """What the executor and the reducer hold, as sizes."""

    def __init__(self, micro_batches: Sequence[StageMemory], holdings: Holdings, meter: Meter) -> None:
        self.meter = meter
        self._micro_batches, self._holdings = micro_batches, holdings
        self._posted: dict[Action, int] = {}
        self._taken: dict[int, int] = {}  # what each micro-batch has received, and the gradients of that
        self._gradients: dict[str, int] = {}  # what has been accumulated so far
        self._sent: dict[Action, _Sent] = {}
        self._reducing = False
        self._units = UnitGradients(meter, holdings.units, sends_straight=holdings.keeps_sends)
        self._run: dict[type, Callable[[Any], None]] = {
            PostReceive: self._post,
            Forward: self._forward,
            Backward: self._backward,
            Send: self._send,
            Forget: lambda instruction: self._forget(instruction.action, {instruction.stage}),
            Free: self._free,
            StartReduce: lambda _: self._start_reduce(),
            FinishReduce: lambda _: self._finish_reduce(),
            StartRound: lambda _: self._units.start_round(),
            FinishRound: lambda _: self._units.finish_round(),
        }

    def run(self, instruction: Instruction) -> None:
        self.meter.begin(str(instruction))
        self._run[type(instruction)](instruction)

    def _of(self, action: Action) -> StageMemory:
        return self._micro_batches[action.micro_batch]

    # -- what comes from other ranks ------------------------------------------------------------------------------

    def _post(self, instruction: PostReceive) -> None:
        size = sum(_size(transfer) for transfer in instruction.transfers)
        self._posted[instruction.action] = size
        self.meter.add("communication", size)

    def _arrive(self, action: Action, transfers: Sequence[Transfer]) -> int:
        """Put what has arrived together; gives the bytes of that."""
        pieces = self._posted.pop(action, 0)
        whole = {(transfer.value, transfer.stage): _whole(transfer) for transfer in transfers if transfer.part}
        self.meter.add("communication", sum(whole.values()))
        in_pieces = sum(_size(transfer) for transfer in transfers if transfer.part)
        self.meter.add("communication", -in_pieces)
        return pieces - in_pieces + sum(whole.values())

    # -- forward and backward -------------------------------------------------------------------------------------

    def _forward(self, instruction: Forward) -> None:
        memory = self._of(instruction.action)
        self._taken[instruction.action.micro_batch] = self._arrive(instruction.action, memory.program.takes)
        for change in memory.profile.forward:
            self._play(change)

    def _backward(self, instruction: Backward) -> None:
        memory, place = self._of(instruction.action), instruction.action.micro_batch
        coming = memory.program.gradients_in
        received = self._arrive(instruction.action, coming)
        users = dict.fromkeys((transfer.value, transfer.stage) for transfer in coming)
        values = [value for value, _ in users]
        sizes = {transfer.value: _whole(transfer) for transfer in coming}
        sums = sum(sizes[value] * (values.count(value) - 1) for value in dict.fromkeys(values))
        self.meter.add("communication", sums)
        for change in memory.profile.backward:
            if change.kind == "gradient":
                self._accumulate(memory.paths[change.name], change.size_bytes)
            elif change.kind == "returned":
                self._taken[place] = self._taken.get(place, 0) + change.size_bytes
                self.meter.add("communication", change.size_bytes)
            else:
                self._play(change)
        self.meter.add("communication", -received - sums)
        self._let_go(memory, Action(instruction.action.stage, Kind.FORWARD, place))

    def _play(self, change: Change) -> None:
        if change.kind == "kernel":
            self.meter.spike("temporaries", change.size_bytes)
        else:
            self.meter.add(_CATEGORY[change.kind], change.size_bytes)

    def _let_go(self, memory: StageMemory, forward: Action) -> None:
        """What backward needed and is still being sent outlives it."""
        sent = self._sent.get(forward)
        if sent is not None:
            given = memory.profile.given
            kept = sum(given[value].size_bytes for value in sent.values if given[value].is_kept)
            sent.size_bytes += kept
            self.meter.add("communication", kept)

    # -- gradients ------------------------------------------------------------------------------------------------

    def _accumulate(self, path: str, size_bytes: int) -> None:
        """A gradient is complete: it is the first, or is added to the one there is, or goes into its bucket."""
        if self._units.accumulate(path, size_bytes):
            return
        before = self._gradients.get(path)
        if self._reducing and path in self._holdings.reduced:
            self.meter.add("gradients", -self._gradients.pop(path, 0))
        elif before is None:
            self._gradients[path] = size_bytes
            self.meter.add("gradients", size_bytes)

    def _start_reduce(self) -> None:
        self._reducing = True
        self._units.start()

    def _finish_reduce(self) -> None:
        for path in [path for path in self._gradients if path in self._holdings.reduced]:
            self.meter.add("gradients", -self._gradients.pop(path))
        self._units.finish()

    # -- what goes to other ranks ---------------------------------------------------------------------------------

    def _send(self, instruction: Send) -> None:
        memory, action = self._of(instruction.action), instruction.action
        stages = {transfer.stage for transfer in instruction.transfers}
        given = memory.profile.given if action.kind is Kind.FORWARD else {}
        in_parts = {transfer.value for transfer in instruction.transfers if transfer.part}
        apart = {value for value, memory_of in given.items() if memory_of.is_copied} | in_parts
        copies = sum(_size(transfer) for transfer in instruction.transfers if transfer.value in apart)
        self.meter.add("communication", copies)
        going = {value: found for value, found in given.items() if not found.is_kept}
        self.meter.add("communication", -sum(found.size_bytes for value, found in going.items() if value in apart))
        whole = sum(found.size_bytes for value, found in going.items() if value not in apart)
        values = frozenset(transfer.value for transfer in instruction.transfers if transfer.value in given) - apart
        self._sent[action] = _Sent(copies + whole, stages, values)
        if not self._holdings.keeps_sends:
            self._forget(action, stages)

    def _forget(self, action: Action, stages: set[int]) -> None:
        """These stages have taken what the action has sent."""
        sent = self._sent.get(action)
        if sent is not None:
            sent.stages -= stages
            if not sent.stages:
                self.meter.add("communication", -self._sent.pop(action).size_bytes)

    def _free(self, instruction: Free) -> None:
        action = instruction.action
        memory, taken = self._of(action), self._taken.pop(action.micro_batch, 0)
        if action.kind is Kind.FORWARD:  # there was no backward pass to drop what forward has left
            for change in memory.profile.backward:
                self._play(change)
            self._let_go(memory, action)
        elif action in self._sent:
            returned = sum(change.size_bytes for change in memory.profile.backward if change.kind == "returned")
            self._sent[action].size_bytes += returned
            taken -= returned
        self.meter.add("communication", -taken)

    def update(self, update: Update) -> None:
        """After the last instruction: all sends are over, and the optimizer takes its step."""
        self.meter.begin("sends end")
        for action, sent in list(self._sent.items()):
            self._forget(action, set(sent.stages))
        self.meter.begin("optimizer")
        for change in update.changes:
            self._play(change)


def _size(transfer: Transfer) -> int:
    return transfer.type.size_bytes if isinstance(transfer.type, TensorType) else 8


def _whole(transfer: Transfer) -> int:
    """Of what a transfer is a piece of."""
    if not transfer.part or not isinstance(transfer.type, TensorType):
        return _size(transfer)
    return prod(transfer.held) * transfer.type.dtype.itemsize
