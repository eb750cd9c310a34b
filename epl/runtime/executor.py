"""Run a program: a loop over instructions that decides nothing.

Between forward and backward of a micro-batch a stage keeps what autograd needs: the values it received (leaves of its
piece of the autograd graph) and the values it gave (where the gradients from later stages enter).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

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
from epl.runtime.channels import Channels, Pending
from epl.runtime.reducer import Reducer
from epl.runtime.shard_reducer import ShardReducer
from epl.runtime.world import World
from epl.schedule import Action, Kind
from epl.stage.codegen import StageCode

__all__ = ["BoundStage", "Executor", "MicroBatch"]


@dataclass(frozen=True)
class BoundStage:
    """A stage's function with the model's tensors that it takes.

    ``work`` is a number for its operators: ranks that share out a stage have the same. ``lending`` is one for the order in
    which it is lent weights, forward and again in backward.
    """

    program: StageProgram
    code: StageCode
    function: Callable[..., tuple[Any, ...]]
    held: tuple[torch.Tensor, ...]
    work: int = 0
    lending: int = 0


@dataclass
class MicroBatch:
    """One micro-batch in one step, on one rank.

    Args:
        stage: The stage's function for this micro-batch's shapes.
        tensors: The micro-batch's tensors.
        seed: The gradient of the step's objective with respect to this part's loss.
        reseed: Called before each random operator.
        parts: Filled by the forward pass: the step's parts that this stage makes.
    """

    stage: BoundStage
    tensors: Sequence[torch.Tensor]
    seed: float
    reseed: Callable[[int], None]
    parts: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None


class Executor:
    """Runs programs on one rank."""

    def __init__(self, world: World, channels: Channels, reducer: Reducer, sharer: ShardReducer) -> None:
        self._watch, self._recorder = world.watch, world.recorder
        self._channels, self._reducer, self._sharer = channels, reducer, sharer
        self._micro_batches: Sequence[MicroBatch] = ()
        self._posted: dict[Action, list[Pending]] = {}
        self._run: dict[type, Callable[[Any], None]] = {
            PostReceive: self._post_receive,
            Forward: self._forward,
            Backward: self._backward,
            Send: self._send,
            Forget: lambda instruction: self._channels.forget(instruction.action, instruction.stage),
            Free: self._free,
            StartRound: lambda _: self._sharer.start_round(),
            FinishRound: lambda _: self._sharer.finish_round(),
            StartReduce: lambda _: self._start_reduce(),
            FinishReduce: lambda _: self._finish_reduce(),
        }

    def run(self, program: Program, micro_batches: Sequence[MicroBatch]) -> None:
        """Run a program; what it computes is left in the micro-batches and in the parameters' gradients."""
        self._micro_batches = micro_batches
        self._posted.clear()
        self._sharer.begin()
        for instruction in program.instructions:
            with record_function(f"epl {instruction}"), self._recorder.instruction(instruction):
                self._run_one(instruction)
        self._channels.finish_sends()
        self._watch.after_run()

    def _run_one(self, instruction: Instruction) -> None:
        self._watch.now(instruction)
        try:
            self._run[type(instruction)](instruction)
        except Exception as error:
            error.add_note(f"in {instruction}{self._place(error)}")
            raise

    def _place(self, error: BaseException) -> str:
        """The operator, and the user's line, that a stage's function was at."""
        codes = {micro_batch.stage.code.file: micro_batch.stage.code for micro_batch in self._micro_batches}
        for frame in traceback.extract_tb(error.__traceback__):
            op = codes[frame.filename].op_at(frame.lineno or 0) if frame.filename in codes else None
            if op is not None:
                return f", {op.name} = {op.target} of module {op.module or 'the model'}, at {op.source}"
        return ""

    def _post_receive(self, instruction: PostReceive) -> None:
        action = instruction.action
        backward = action.kind is Kind.BACKWARD
        self._posted[action] = [
            self._channels.post(transfer, _what(transfer.value, action), backward=backward)
            for transfer in instruction.transfers
        ]

    def _arrived(self, action: Action, *, backward: bool) -> Iterator[tuple[Transfer, Any]]:
        for pending in self._posted.pop(action, ()):
            yield pending.transfer, self._channels.wait(pending, backward=backward)

    def _forward(self, instruction: Forward) -> None:
        micro_batch = self._micro_batches[instruction.action.micro_batch]
        program = micro_batch.stage.program
        taken = micro_batch.taken
        for transfer, value in self._arrived(instruction.action, backward=False):
            taken[transfer.value] = _put(taken.get(transfer.value), transfer, value)
        needed = {transfer.value for transfer in program.takes if transfer.needs_grad and torch.is_grad_enabled()}
        for name in needed:
            taken[name].requires_grad_()
        results = micro_batch.stage.function(
            *micro_batch.stage.held,
            *(micro_batch.tensors[place] for place in program.inputs),
            *micro_batch.taken.values(),
            micro_batch.reseed,
        )
        given = len(program.gives)
        micro_batch.given = dict(zip(program.gives, results, strict=False))
        for role, value in zip(program.parts, results[given:], strict=True):
            is_loss = role in ("loss", "total")
            micro_batch.parts[role] = value.detach() if isinstance(value, torch.Tensor) else value
            micro_batch.loss = value if is_loss else micro_batch.loss

    def _backward(self, instruction: Backward) -> None:
        micro_batch = self._micro_batches[instruction.action.micro_batch]
        parts: dict[tuple[str, int], Any] = {}  # one gradient from each stage that uses a value
        for transfer, value in self._arrived(instruction.action, backward=True):
            key = (transfer.value, transfer.stage)
            parts[key] = _put(parts.get(key), transfer, value)
        gradients: dict[str, torch.Tensor] = {}
        for (name, _), gradient in parts.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        roots = [(micro_batch.given[name], gradient) for name, gradient in gradients.items()]
        if micro_batch.loss is not None:
            roots.append((_edge(micro_batch.loss), torch.full_like(micro_batch.loss, micro_batch.seed)))
        flowing = [(value, gradient) for value, gradient in roots if value is not None]
        if flowing:
            torch.autograd.backward([value for value, _ in flowing], [gradient for _, gradient in flowing])
        # the roots are done with; what was received is kept until its gradients are sent
        micro_batch.given.clear()
        micro_batch.loss = None

    def _send(self, instruction: Send) -> None:
        action = instruction.action
        micro_batch = self._micro_batches[action.micro_batch]
        backward = action.kind is Kind.BACKWARD
        for transfer in instruction.transfers:
            value = _gradient_of(micro_batch.taken[transfer.value]) if backward else micro_batch.given[transfer.value]
            for dim, start, size in transfer.part:
                value = value.narrow(dim, start, size)
            self._channels.send(transfer, value, _what(transfer.value, action), action)
        if not backward:
            # of what was sent, backward needs the place in autograd's graph and not the memory
            micro_batch.given = {name: _edge(value) for name, value in micro_batch.given.items()}

    def _start_reduce(self) -> None:
        self._reducer.start()
        self._sharer.start()

    def _finish_reduce(self) -> None:
        self._reducer.finish()
        self._sharer.finish()

    def _free(self, instruction: Free) -> None:
        micro_batch = self._micro_batches[instruction.action.micro_batch]
        micro_batch.taken.clear()
        micro_batch.given.clear()
        micro_batch.loss = None


def _edge(value: Any) -> GradientEdge | None:
    """Where a gradient of a value enters autograd's graph; None if it has no place there."""
    wants_gradient = isinstance(value, torch.Tensor) and value.requires_grad
    return get_gradient_edge(value) if wants_gradient else None


def _put(whole: Any, transfer: Transfer, value: Any) -> Any:
    """A value with one more of its pieces in its place; what comes in one piece is the value."""
    if not transfer.part:
        return value
    whole = value.new_zeros(transfer.held) if whole is None else whole
    place = whole
    for dim, start, size in transfer.part:
        place = place.narrow(dim, start, size)
    place.copy_(value)
    return whole


def _gradient_of(value: torch.Tensor) -> torch.Tensor:
    """The gradient of a received value; zero if the stage found it has no influence on the loss."""
    return torch.zeros_like(value) if value.grad is None else value.grad


def _what(value: str, action: Action) -> str:
    kind = "the gradient of" if action.kind is Kind.BACKWARD else "the value"
    return f"{kind} {value} for {action}"
