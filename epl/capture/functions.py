"""Custom autograd functions, kept as single operators of the graph.

Export traces through ``Function.forward`` and forgets ``Function.backward`` (a gradient of 20 became 4). Here each call
becomes one operator, and the run calls ``Function.apply`` again.

User code may have bound ``apply`` long before (``swish = Swish.apply``), so what is replaced while a model is captured is
what ``Function.apply`` itself calls: the ``apply`` of its base class.

What a call does beside computing (values it changes in place, results that share memory with arguments, random numbers
it draws) is observed when it runs under export. A tensor that it uses without having been given it is refused, since the
graph would not know of it: a later stage might not have it, and its gradient would not be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from epl.batch import Structure, flatten
from epl.capture.checkpoints import replaced
from epl.capture.draws import DrawCounter
from epl.errors import CaptureError, RunError

__all__ = ["FUNCTION_LIBRARY", "FunctionCall", "FunctionCalls"]

FUNCTION_LIBRARY = "epl_function"
_BASE: Any = torch.autograd.Function.__mro__[1]


@dataclass
class FunctionCall:
    """One call of a custom autograd function, as a function of the tensors among its arguments.

    Args:
        name: Name of the function's class.
        apply: Torch's own ``apply`` for that class.
        args: The arguments, with a `_Place` for each tensor.
        writes: Which of the tensors it changes in place.
        views: Which of the tensors its results share memory with.
        num_draws: How many operators in it draw random numbers.
        result: Structure of what it returns.
    """

    name: str
    apply: Callable[..., Any]
    args: tuple[Any, ...]
    writes: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    num_draws: int = 0
    result: Structure | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The real call, with autograd; the tensors of the result, flat.

        Raises:
            RunError: it returned another kind of thing, or other plain values, than when it was captured.
        """
        flat = flatten(
            self.apply(*_filled(self.args, tensors)), f"the result of {self.name}.forward", refuse_lists=False
        )
        if self.result is None:
            self.result = flat.structure
        elif self.result != flat.structure:
            raise RunError(
                f"{self.name}.forward returned {flat.structure}, but {self.result} when the model was captured; of what it "
                "returns, only tensors may differ from call to call"
            )
        return list(flat.tensors)

    def observe(self, watch: _Watch, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The call under export, with a look at what it does beside computing."""
        versions = [tensor._version for tensor in tensors]
        with watch, DrawCounter() as draws:
            results = self(tensors)
        self.num_draws = draws.count
        places = list(enumerate(tensors))
        self.writes = tuple(place for place, tensor in places if tensor._version != versions[place])
        self.views = tuple(place for place, tensor in places if any(_shares(result, tensor) for result in results))
        # an operator must not return its argument itself
        return [result.view_as(result) if any(result is t for t in tensors) else result for result in results]


class FunctionCalls:
    """The custom autograd functions that one capture meets, in order; ``calls[n]`` is operator ``call_n``."""

    def __init__(self) -> None:
        self._library = torch.library.Library(f"{FUNCTION_LIBRARY}_{id(self):x}", "DEF")
        self._num_defined = 0
        self._watch: _Watch | None = None
        self.calls: list[FunctionCall] = []

    def restart(self) -> None:
        """Forget the calls."""
        self.calls.clear()

    def is_inside(self) -> bool:
        """True while a function runs under export."""
        return self._watch is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While this is open, ``apply`` of any custom autograd function becomes an operator."""

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            plain = super(_BASE, cls).apply  # type: ignore[misc]
            if self._watch is not None:
                return self._watch.noted(plain(*args, **kwargs))
            if kwargs:
                raise CaptureError(f"{cls.__name__}.apply was called with keywords {sorted(kwargs)}; it takes none")
            return self._keep(cls.__name__, plain, args)

        with replaced(_BASE, "apply", classmethod(apply)):
            yield

    def _keep(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        tensors: list[torch.Tensor] = []
        call = FunctionCall(name, plain, tuple(_emptied(arg, tensors) for arg in args))
        self.calls.append(call)
        self._define(len(self.calls))
        operator = getattr(getattr(torch.ops, self._library.ns), f"call_{len(self.calls) - 1}").default
        results = operator(tensors)
        assert call.result is not None
        return call.result.unflatten(results)

    def _define(self, num_wanted: int) -> None:
        """Operators for the first calls; export may run forward again, and an operator can be defined but once."""
        for place in range(self._num_defined, num_wanted):
            self._library.define(f"call_{place}(Tensor[] tensors) -> Tensor[]")
            # composite, so that it runs where autograd is on, as the function itself would
            self._library.impl(f"call_{place}", self._runner(place), "CompositeImplicitAutograd")
        self._num_defined = max(self._num_defined, num_wanted)

    def _runner(self, place: int) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            call = self.calls[place]
            self._watch = _Watch(call.name, tensors)
            try:
                return call.observe(self._watch, tensors)
            finally:
                self._watch = None

        return run


class _Watch(TorchFunctionMode):
    """Refuses a traced tensor that a function takes from elsewhere: a module's parameter, or an activation in an object."""

    def __init__(self, name: str, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        # kept alive, so that no other tensor can get the id of one of them
        self._known = {id(tensor): tensor for tensor in given}

    def noted(self, results: Any) -> Any:
        """Remember the tensors in a result as made inside the function."""
        self._known.update((id(tensor), tensor) for tensor in _tensors_in(results))
        return results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            if type(tensor).__name__ == "FakeTensor" and id(tensor) not in self._known:
                raise CaptureError(
                    f"{self._name}.forward uses a tensor of shape {tuple(tensor.shape)} that is not among its arguments (a "
                    "parameter of a module, perhaps), so that the graph would not know of it. Pass it to apply."
                )
        return self.noted(func(*args, **(kwargs or {})))


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes among the arguments."""

    index: int


def _emptied(arg: Any, tensors: list[torch.Tensor]) -> Any:
    """The argument with places for its tensors, which are added to ``tensors``."""
    if isinstance(arg, torch.Tensor):
        tensors.append(arg)
        return _Place(len(tensors) - 1)
    return _mapped(arg, lambda inner: _emptied(inner, tensors))


def _filled(arg: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(arg, _Place):
        return tensors[arg.index]
    return _mapped(arg, lambda inner: _filled(inner, tensors))


def _mapped(arg: Any, change: Callable[[Any], Any]) -> Any:
    """A container with its items changed; anything else as it is."""
    if isinstance(arg, dict):
        return type(arg)((key, change(value)) for key, value in arg.items())
    if isinstance(arg, tuple) and hasattr(arg, "_fields"):
        return type(arg)(*map(change, arg))
    if type(arg) in (list, tuple, set):
        return type(arg)(map(change, arg))
    return arg


def _tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _tensors_in(value)
    elif isinstance(nest, (list, tuple, set)):
        for value in nest:
            yield from _tensors_in(value)


def _shares(result: torch.Tensor, tensor: torch.Tensor) -> bool:
    return result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
