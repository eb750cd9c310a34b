"""What a rank does in a step, as a list of small frozen values; the executor is a loop over them.

An instruction's text names the action it belongs to as schedules do: ``1F2`` is the forward pass of stage 1 on
micro-batch 2. Logs, traces and errors use that text.
"""

from __future__ import annotations

from dataclasses import dataclass

from epl.ir.types import Type
from epl.schedule import Action

__all__ = [
    "Backward",
    "FinishReduce",
    "FinishRound",
    "Forget",
    "Forward",
    "Free",
    "Instruction",
    "PostReceive",
    "Program",
    "Send",
    "StageProgram",
    "StartReduce",
    "StartRound",
    "Transfer",
]


@dataclass(frozen=True)
class Transfer:
    """One value, or a piece of one, that travels between two ranks.

    Args:
        value: Its name in the graph.
        peer: The rank at the other end.
        stage: The stage at the other end.
        type: The type of what travels; dimensions that are not known travel ahead of it.
        needs_grad: True if its gradient travels back.
        part: Where it is in what this rank holds of the value: (dimension, start, size), one after another; empty: all.
        held: The shape of what this rank holds of the value, if this is a part of it.
    """

    value: str
    peer: int
    stage: int
    type: Type
    needs_grad: bool
    part: tuple[tuple[int, int, int], ...] = ()
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class PostReceive:
    """Start to receive what ``action`` needs from other ranks; ``action`` itself waits for it."""

    action: Action
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"RECV {self.action} {_listed(self.transfers, '<-')}"


@dataclass(frozen=True)
class Forward:
    """Run a stage's function on a micro-batch; ``code`` is the place of the function in ``Program.codes``."""

    action: Action
    code: int

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True)
class Backward:
    """Run autograd for a stage and a micro-batch, from the gradients received to those to be sent."""

    action: Action
    code: int

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True)
class Send:
    """Send what ``action`` has made; does not wait."""

    action: Action
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"SEND {self.action} {_listed(self.transfers, '->')}"


@dataclass(frozen=True)
class Forget:
    """Let go of what ``action`` has sent to a stage: it is known to have arrived there."""

    action: Action
    stage: int

    def __str__(self) -> str:
        return f"FORGET {self.action} -> stage {self.stage}"


@dataclass(frozen=True)
class Free:
    """Drop what the stage holds of a micro-batch: nothing will ask for it any more."""

    action: Action

    def __str__(self) -> str:
        return f"FREE {self.action}"


@dataclass(frozen=True)
class StartReduce:
    """From here on, a gradient that is complete is reduced at once: the next backward is the step's last."""

    def __str__(self) -> str:
        return "START_REDUCE"


@dataclass(frozen=True)
class FinishReduce:
    """Reduce what is left and wait for all gradients."""

    def __str__(self) -> str:
        return "FINISH_REDUCE"


@dataclass(frozen=True)
class StartRound:
    """What is summed after each backward pass (ZeRO v1 and v2) is summed in the next one."""

    def __str__(self) -> str:
        return "START_ROUND"


@dataclass(frozen=True)
class FinishRound:
    """Send what is left of a round; a rank without a backward pass of its own takes part with nothing."""

    def __str__(self) -> str:
        return "FINISH_ROUND"


Instruction = (
    PostReceive | Forward | Backward | Send | Forget | Free | StartReduce | FinishReduce | StartRound | FinishRound
)


@dataclass(frozen=True)
class StageProgram:
    """One stage for one batch signature: the function's source and what goes in and out.

    Args:
        name: Name of the function.
        held: Names of the parameters, then buffers and constants that it takes: arguments that stay the same.
        inputs: Places in the batch's tensors of the inputs that it takes.
        takes: Values it receives from other stages, with the rank each piece comes from.
        gives: Values it sends to other stages, in the order of its results.
        sends: Where each of them goes; a value may go to several stages, and to several ranks of one.
        gradients_in: Where the gradient of what it gives comes from: from ranks of each stage that uses it.
        gradients_out: Where the gradient of what it takes goes.
        parts: Roles of the step's parts that it makes, in the order of its results, after ``gives``.
        needs_backward: True if a gradient flows through the stage.
    """

    name: str
    held: tuple[str, ...]
    inputs: tuple[int, ...]
    takes: tuple[Transfer, ...]
    gives: tuple[str, ...]
    sends: tuple[Transfer, ...]
    gradients_in: tuple[Transfer, ...]
    gradients_out: tuple[Transfer, ...]
    parts: tuple[str, ...]
    needs_backward: bool


@dataclass(frozen=True)
class Program:
    """The instructions of one rank for one step; ``stages`` are what ``Forward.code`` counts."""

    rank: int
    stage: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions))


def _listed(transfers: tuple[Transfer, ...], arrow: str) -> str:
    return ", ".join(f"{transfer.value}{arrow}{transfer.peer}" for transfer in transfers)
