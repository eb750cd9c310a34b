"""What a plain export would lose, marked while the model's forward runs under it.

Three things are marked on the operators of the graph:

- **call scopes**: ``with epl.replicate(...)`` inside forward;
- **recompute segments**: what ran inside ``torch.utils.checkpoint.checkpoint``, which export dissolves without a word;
- **custom autograd functions**: export would keep their forward and lose their backward (``functions.py``).

Marks travel as ``torch.fx.traceback.annotate`` puts them: in ``node.meta["custom"]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.fx.traceback import annotate

from epl.capture.checkpoints import checkpoints_plain
from epl.capture.functions import FunctionCalls
from epl.errors import CaptureError
from epl.scopes import Strategy, tracing

__all__ = ["SCOPE", "SEGMENT", "Marks", "PartPlace", "marking"]

SCOPE = "epl_scope"
SEGMENT = "epl_segment"
DEFAULT = "epl_default"


@dataclass(frozen=True)
class PartPlace:
    """A part of the step's result: the place of its tensor among the outputs, or its plain value."""

    role: str
    place: int | None
    value: Any = None


class Marks:
    """The marks of one capture: strategies in order of first use, segments, kept functions, the parts of the result."""

    def __init__(self) -> None:
        self.functions = FunctionCalls()
        self._annotation = ExitStack()
        self._now: dict[str, str] = {}
        self.restart()

    def restart(self) -> None:
        """Forget everything; the wrapper's forward calls it, as export may run it more than once."""
        self.strategies: list[Strategy] = []
        self.entered: list[Strategy] = []
        self.parts: tuple[PartPlace, ...] = ()
        self.left_behind: list[str] = []
        self.num_segments = 0
        self.functions.restart()
        self.close()

    def close(self) -> None:
        """Mark nothing from here on; a default strategy that forward has set ends with it."""
        self._now = {}
        self._annotation.close()

    def _mark(self, key: str, number: str | None) -> None:
        """Change one mark; the others stay, in whatever order they were opened."""
        kept = {other: value for other, value in self._now.items() if other != key}
        self._now = kept if number is None else {**kept, key: number}
        self._annotation.close()
        if self._now:
            self._annotation.enter_context(annotate(self._now))

    # -- scopes (epl.scopes.Tracer) -----------------------------------------------------------------------------

    def enter(self, strategy: Strategy) -> None:
        self.entered.append(strategy)
        self._mark(SCOPE, self._index(strategy))

    def exit(self, strategy: Strategy) -> None:
        self._mark(SCOPE, None)

    def set_default(self, strategy: Strategy) -> None:
        self._mark(DEFAULT, self._index(strategy))

    def _index(self, strategy: Strategy) -> str:
        if strategy not in self.strategies:
            self.strategies.append(strategy)
        return str(self.strategies.index(strategy))

    # -- recompute segments -------------------------------------------------------------------------------------

    @contextmanager
    def segment(self, context_fn: Any = None) -> Iterator[None]:
        """A recompute segment; ``context_fn`` is what the user gave to the checkpoint."""
        if context_fn is not None:
            raise CaptureError(
                "torch.utils.checkpoint with a context_fn (selective recompute) cannot be captured yet; leave context_fn "
                "out, or train the model as one TaskGraph, where it runs as it is"
            )
        around, mine = self._now.get(SEGMENT), str(self.num_segments)
        self.num_segments += 1
        self._mark(SEGMENT, mine)
        try:
            yield
        finally:
            # a segment that an error has left is closed late, when its generator is collected
            if self._now.get(SEGMENT) == mine:
                self._mark(SEGMENT, around)


@contextmanager
def marking(marks: Marks) -> Iterator[None]:
    """While this is open, scopes, checkpoints and custom autograd functions are marked."""
    with ExitStack() as stack:
        stack.enter_context(tracing(marks))
        stack.enter_context(checkpoints_plain(marks.segment))
        stack.enter_context(marks.functions.kept())
        stack.callback(marks.close)
        yield
