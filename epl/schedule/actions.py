"""What a pipeline stage does, one step at a time, and how it is written down.

An :class:`Action` is one unit of work: *stage 2 runs the forward pass of micro-batch 0*, written ``2F0``. A
:data:`Schedule` holds, for each stage, its actions in the order in which it runs them. The same value is read by the
dry run, by the planner's estimate and by the runtime, so that what was checked is what runs; logs, profiler labels and
errors use the text form.

The notation is that of the pipeline schedules in ``torch.distributed.pipelining``. Its own action class is private and
carries sends, receives and unsharding as well; here communication is derived from the stage graph and not scheduled by
hand, so three fields are enough.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TypeAlias

from epl.errors import PlanError

__all__ = ["Action", "Kind", "Schedule"]


class Kind(enum.Enum):
    """What is run for a micro-batch; the value is the letter of the text form."""

    FORWARD = "F"
    BACKWARD = "B"


_LETTERS = "".join(kind.value for kind in Kind)
# Leading zeros are refused: "02F0" would not come back as it was written.
_PATTERN = re.compile(rf"(0|[1-9][0-9]*)([{_LETTERS}])(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Action:
    """One unit of work of one stage.

    Args:
        stage: which pipeline stage runs it, from 0.
        kind: forward or backward.
        micro_batch: which micro-batch it is run for, from 0.

    Raises:
        PlanError: a stage or a micro-batch below 0.

    Example:
        >>> str(Action(2, Kind.FORWARD, 0))
        '2F0'
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.micro_batch < 0:
            raise PlanError(
                f"stage {self.stage}, micro-batch {self.micro_batch}: both are counted from 0, give 0 or more"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form back.

        Args:
            text: stage, letter and micro-batch without spaces, such as ``"2F0"``.

        Returns:
            The action whose ``str`` is ``text``.

        Raises:
            PlanError: ``text`` is not of that form.

        Example:
            >>> Action.parse("2B11")
            Action(stage=2, kind=<Kind.BACKWARD: 'B'>, micro_batch=11)
        """
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise PlanError(
                f"{text!r} is not an action: write the stage, one letter of {', '.join(_LETTERS)} and the micro-batch, "
                'without spaces or leading zeros, as in "2F0"'
            )
        stage, letter, micro_batch = found.groups()
        return cls(int(stage), Kind(letter), int(micro_batch))


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""For each stage, from 0, its actions in the order in which it runs them."""
