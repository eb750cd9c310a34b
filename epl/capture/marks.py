"""What a plain export would lose, marked while the model's forward runs under it.

Three things are marked on the operators of the graph:

- **call scopes**: ``with epl.replicate(...)`` inside forward;
- **recompute segments**: what ran inside ``torch.utils.checkpoint.checkpoint``, which export dissolves without a word;
- **custom autograd functions**: export traces through ``Function.forward`` and forgets ``Function.backward`` (a gradient
  of 20 became 4). Here each call becomes one operator, and the run calls ``Function.apply`` again.

Marks travel as ``torch.fx.traceback.annotate`` puts them: in ``node.meta["custom"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.fx.traceback import annotate

from epl.batch import Structure, flatten
from epl.errors import CaptureError
from epl.scopes import Strategy, tracing

__all__ = ["FUNCTION_LIBRARY", "SCOPE", "SEGMENT", "Marks", "PartPlace", "marking"]

SCOPE = "epl_scope"
SEGMENT = "epl_segment"
DEFAULT = "epl_default"
FUNCTION_LIBRARY = "epl_function"


@dataclass(frozen=True)
class PartPlace:
    """A part of the step's result: the place of its tensor among the outputs, or its plain value."""

    role: str
    place: int | None
    value: Any = None


class Marks:
    """The marks of one capture: strategies in order of first use, segments, kept functions, and the parts of the result.

    ``functions[n]`` is what operator ``function.call_n`` of the graph calls, with the operator's tensors as arguments.
    """

    def __init__(self) -> None:
        self.library = torch.library.Library(f"{FUNCTION_LIBRARY}_{id(self):x}", "DEF")
        self.restart()

    def restart(self) -> None:
        """Forget everything; the wrapper's forward calls it, as export may run it more than once."""
        self.strategies: list[Strategy] = []
        self.functions: list[Callable[..., Any]] = []
        self._calls: list[_Call] = []
        self.parts: tuple[PartPlace, ...] = ()
        self.num_segments = 0
        self._open = ExitStack()
        self._default: AbstractContextManager[Any] | None = None

    # -- scopes (epl.scopes.Tracer) -----------------------------------------------------------------------------

    def enter(self, strategy: Strategy) -> None:
        self._open = ExitStack()
        self._open.enter_context(annotate({SCOPE: str(self._index(strategy))}))

    def exit(self, strategy: Strategy) -> None:
        self._open.close()

    def set_default(self, strategy: Strategy) -> None:
        self.drop_default()
        self._default = annotate({DEFAULT: str(self._index(strategy))})
        self._default.__enter__()

    def drop_default(self) -> None:
        """A default set inside forward holds until the next one or the end of forward."""
        if self._default is not None:
            self._default.__exit__(None, None, None)
            self._default = None

    def _index(self, strategy: Strategy) -> int:
        if strategy not in self.strategies:
            self.strategies.append(strategy)
        return self.strategies.index(strategy)

    # -- recompute segments -------------------------------------------------------------------------------------

    def segment(self) -> AbstractContextManager[Any]:
        self.num_segments += 1
        return annotate({SEGMENT: str(self.num_segments - 1)})

    # -- custom autograd functions ------------------------------------------------------------------------------

    def keep(self, function: type[torch.autograd.Function], apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``function.apply(*args)`` as one operator of the graph."""
        call = _Call(function, apply, args)
        place = len(self._calls)
        self._calls.append(call)
        self.functions.append(call.replay)
        self._define(place)
        results = getattr(getattr(torch.ops, self.library.ns), f"call_{place}").default(call.tensors)
        return call.result.unflatten(results)

    def _define(self, place: int) -> None:
        name = f"call_{place}"
        if hasattr(getattr(torch.ops, self.library.ns), name):
            return

        # export runs the operator on fake tensors only; the run replaces it with ``call.replay``
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return self._calls[place].run_without_grad(tensors)

        self.library.define(f"{name}(Tensor[] tensors) -> Tensor[]")
        self.library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self.library.ns}::{name}", run, lib=self.library)


class _Call:
    """One call of a custom autograd function, with the places of its tensors."""

    def __init__(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.function, self.apply = function, apply
        self.tensors: list[torch.Tensor] = []
        self.structure: list[tuple[Any] | None] = []
        for arg in args:
            is_tensor = isinstance(arg, torch.Tensor)
            self.structure.append(None if is_tensor else (arg,))
            if is_tensor:
                self.tensors.append(arg)
        self.result: Structure = Structure("plain", type(None))

    def replay(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The real call, with autograd; the tensors of the result, flat."""
        rest = iter(tensors)
        flat = flatten(self.apply(*(next(rest) if kept is None else kept[0] for kept in self.structure)))
        self.result = flat.structure
        return list(flat.tensors)

    def run_without_grad(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            results = self.replay(*tensors)
        # an operator must not return its argument
        return [result.clone() if any(result is tensor for tensor in tensors) else result for result in results]


@contextmanager
def marking(marks: Marks) -> Iterator[None]:
    """While this is open, scopes, checkpoints and custom autograd functions are marked."""
    with ExitStack() as stack:
        stack.enter_context(tracing(marks))
        stack.enter_context(_checkpoints_marked(marks))
        stack.enter_context(_functions_kept(marks))
        try:
            yield
        finally:
            marks.drop_default()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _checkpoints_marked(marks: Marks) -> Iterator[None]:
    """Run a checkpointed function plainly, with its operators marked as a segment.

    Models bind ``checkpoint`` early (Hugging Face: a functools.partial), so what is replaced is what it calls: a private
    generator for the non-reentrant form (torch 2.13; there is no public hook), an autograd function for the other.
    """

    noop = torch_checkpoint.noop_context_fn

    def unrecorded(function: Any, _: bool = True, context_fn: Any = noop, *__: Any, **___: Any) -> Iterator[None]:
        if context_fn is not noop:
            raise CaptureError(
                "torch.utils.checkpoint with a context_fn (selective recompute) cannot be captured yet; leave context_fn "
                "out, or train the model as one TaskGraph, where it runs as it is"
            )
        with marks.segment():
            yield

    with _replaced(torch_checkpoint, "_checkpoint_without_reentrant_generator", unrecorded):
        yield


@contextmanager
def _functions_kept(marks: Marks) -> Iterator[None]:
    plain = torch.autograd.Function.__dict__["apply"]
    inside: list[bool] = []

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        bound = plain.__get__(None, cls)
        if inside:
            return bound(*args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction:
            with marks.segment():
                return args[0](*args[2:])
        if kwargs:
            raise CaptureError(f"{cls.__name__}.apply was called with keywords {sorted(kwargs)}; it takes none")
        inside.append(True)
        try:
            return marks.keep(cls, bound, args)
        finally:
            inside.pop()

    with _replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield
