"""Which sends are surely over, told by what comes back: so that what was sent need not be kept to the end of the step.

A message of stage p says that p has run the action that made it, and so every action before that one; what those have
taken has arrived. Some communicators (gloo's) cannot be asked whether a send is over without waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from epl.program.instructions import StageProgram
from epl.schedule import Action, Kind, Schedule

__all__ = ["over_after"]


def over_after(
    schedule: Schedule, actions: Sequence[Action], stages: Sequence[StageProgram]
) -> dict[Action, tuple[tuple[Action, int], ...]]:
    """After each action of a rank: (earlier action, other stage) whose message has been taken there, each told once.

    Args:
        schedule: The actions of all stages.
        actions: Those of this rank, in order.
        stages: The rank's program for each micro-batch.
    """
    place = {action: number for row in schedule for number, action in enumerate(row)}
    open_sends: list[tuple[Action, int]] = []
    found: dict[Action, tuple[tuple[Action, int], ...]] = {}
    for action in actions:
        known = {sender: place[Action(sender, action.kind, action.micro_batch)] for sender in _senders(action, stages)}
        over = [
            (sent, target)
            for sent, target in open_sends
            if place[Action(target, sent.kind, sent.micro_batch)] < known.get(target, -1)
        ]
        found[action] = tuple(over)
        open_sends = [each for each in open_sends if each not in over]
        open_sends += [(action, target) for target in _receivers(action, stages)]
    return found


def _senders(action: Action, stages: Sequence[StageProgram]) -> list[int]:
    stage = stages[action.micro_batch]
    transfers = stage.takes if action.kind is Kind.FORWARD else stage.gradients_in
    return list(dict.fromkeys(transfer.stage for transfer in transfers))


def _receivers(action: Action, stages: Sequence[StageProgram]) -> list[int]:
    stage = stages[action.micro_batch]
    transfers = stage.sends if action.kind is Kind.FORWARD else stage.gradients_out
    return list(dict.fromkeys(transfer.stage for transfer in transfers))
