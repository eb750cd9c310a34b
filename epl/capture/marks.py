"""What a plain export would lose, marked while the model's forward runs under it.

Four things are marked on the operators of the graph:

- **call scopes**: ``with epl.replicate(...)`` inside forward;
- **recompute segments**: what ran inside ``torch.utils.checkpoint.checkpoint``, which export dissolves without a word;
- **grad mode and autocast**: export has them as nested graphs, and loses ``no_grad`` inside ``autocast`` (torch 2.13). A
  region in which the user turns autocast off is marked even where it is off around: EPL's own mixed precision leaves it;
- **custom autograd functions**: export would keep their forward and lose their backward (``functions.py``).

Marks travel as ``torch.fx.traceback.annotate`` puts them: in ``node.meta["custom"]``. Each call of torch's is annotated by
itself, since others annotate, too, and forget on leaving what was opened inside (``checkpoint`` does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from epl.capture.attributes import Changes, autocast_settings
from epl.capture.checkpoints import checkpoints_plain, replaced
from epl.capture.functions import FunctionCalls
from epl.errors import CaptureError
from epl.scopes import Strategy, tracing

__all__ = ["AUTOCAST", "DEFAULT", "GRAD", "SCOPE", "SEGMENT", "Marks", "PartPlace", "annotating", "marking"]

SCOPE = "epl_scope"
SEGMENT = "epl_segment"
DEFAULT = "epl_default"
GRAD = "epl_grad"
AUTOCAST = "epl_autocast"


@dataclass(frozen=True)
class PartPlace:
    """A part of the step's result: the place of its tensor among the outputs, or its plain value."""

    role: str
    place: int | None
    value: Any = None


class Marks:
    """The marks of one capture: strategies in order of first use, segments, kept functions, the parts of the result."""

    def __init__(self) -> None:
        self.real_parameters: dict[str, torch.Tensor] = {}  # for an export beside real values
        self.functions = FunctionCalls()
        self.restart()

    def restart(self) -> None:
        """Forget everything; the wrapper's forward calls it, as export may run it more than once."""
        self.strategies: list[Strategy] = []
        self.entered: list[Strategy] = []
        self.parts: tuple[PartPlace, ...] = ()
        self.changes: list[Changes] = []
        self.num_segments = 0
        self.functions.restart()
        self._now: dict[str, str] = {}
        self._autocast_around = autocast_settings()
        self._autocasts: Counter[str] = Counter()  # regions that are open, by kind of device

    def now(self) -> dict[str, str]:
        """What an operator that runs now is marked with."""
        marks = dict(self._now)
        if not torch.is_grad_enabled():
            marks[GRAD] = "off"
        # what is off everywhere needs no word; what is off here and on around forward does, and what forward turns off
        words = [
            f"{device}:{dtype}"
            for device, dtype in autocast_settings().items()
            if dtype or self._autocast_around.get(device) or self._autocasts[device] > 0
        ]
        return {**marks, AUTOCAST: ",".join(words)} if words else marks

    # -- scopes (epl.scopes.Tracer) -----------------------------------------------------------------------------

    def enter(self, strategy: Strategy) -> None:
        self.entered.append(strategy)
        self._now[SCOPE] = self._index(strategy)

    def exit(self, strategy: Strategy) -> None:
        self._now.pop(SCOPE, None)

    def set_default(self, strategy: Strategy) -> None:
        self._now[DEFAULT] = self._index(strategy)

    def _index(self, strategy: Strategy) -> str:
        if strategy not in self.strategies:
            self.strategies.append(strategy)
        return str(self.strategies.index(strategy))

    # -- autocast -----------------------------------------------------------------------------------------------

    @contextmanager
    def autocasts(self) -> Iterator[None]:
        """While this is open, each ``torch.autocast`` is counted, in whatever form it is used: all enter and exit so."""
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

        @wraps(enter)
        def entered(region: torch.autocast) -> Any:
            result = enter(region)
            self._autocasts[region.device] += 1
            return result

        @wraps(leave)
        def left(region: torch.autocast, *error: Any) -> Any:
            self._autocasts[region.device] -= 1
            return leave(region, *error)

        with replaced(torch.autocast, "__enter__", entered), replaced(torch.autocast, "__exit__", left):
            yield

    # -- recompute segments -------------------------------------------------------------------------------------

    @contextmanager
    def segment(self, context_fn: Any = None) -> Iterator[None]:
        """A recompute segment; ``context_fn`` is what the user gave to the checkpoint."""
        if context_fn is not None:
            raise CaptureError(
                "torch.utils.checkpoint with a context_fn (selective recompute) cannot be captured yet; leave context_fn "
                "out, or train the model as one TaskGraph, where it runs as it is"
            )
        marks, around, mine = self._now, self._now.get(SEGMENT), str(self.num_segments)
        self.num_segments += 1
        marks[SEGMENT] = mine
        try:
            yield
        finally:
            # a segment that an error has left is closed late, when its generator is collected
            if around is not None and marks.get(SEGMENT) == mine:
                marks[SEGMENT] = around
            elif marks.get(SEGMENT) == mine:
                del marks[SEGMENT]


class _Marking(TorchFunctionMode):
    """Annotates what each call of torch's adds to the graph."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with annotate(self._marks.now()):
            return func(*args, **(kwargs or {}))


@contextmanager
def marking(marks: Marks) -> Iterator[None]:
    """While this is open, scopes are told to the marks, checkpoints are segments, custom autograd functions are kept."""
    with ExitStack() as stack:
        stack.enter_context(tracing(marks))
        stack.enter_context(checkpoints_plain(marks.segment))
        stack.enter_context(marks.functions.kept())
        stack.enter_context(marks.autocasts())
        yield


def annotating(marks: Marks) -> AbstractContextManager[Any]:
    """While this is open, which must be inside forward, operators carry the marks."""
    return _Marking(marks)
