"""Make a plain model draw the random numbers that its captured graph draws, for the comparison in ``verify``.

``TorchDispatchMode`` is private by its module's name (torch.utils._python_dispatch, since 1.12) and documented for
extension authors; there is no public way to see an operator run below composite ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epl.capture.checkpoints import checkpoints_plain
from epl.ir.graph import Graph
from epl.scopes import DeafTracer, tracing

__all__ = ["DrawCounter", "SeededDraws"]


class DrawCounter(TorchDispatchMode):
    """Counts the primitive operators that draw random numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.before_draw()
            self.count += 1
        return func(*args, **(kwargs or {}))

    def before_draw(self) -> None:
        """Nothing to do when only counting."""


class SeededDraws(DrawCounter):
    """Calls ``reseed(n)`` before draw n of a plain model, where the graph's operators do so.

    Checkpointed functions are not run again in the backward pass while this is open for the forward pass: their second
    run would draw from a generator that was seeded in between. Scopes in forward have nothing to say meanwhile.
    """

    def __init__(self, graph: Graph, reseed: Callable[[int], None]) -> None:
        super().__init__()
        self._starts = {op.random for op in graph.ops if op.random is not None}
        self._reseed = reseed
        self._open = ExitStack()

    def __enter__(self) -> SeededDraws:
        self._open.enter_context(checkpoints_plain(lambda _: nullcontext()))
        self._open.enter_context(tracing(DeafTracer()))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def before_draw(self) -> None:
        if self.count in self._starts:
            self._reseed(self.count)
