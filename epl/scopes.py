"""Strategies and their scopes: what the user writes to say how parts of a model may be parallelised.

A scope records annotations and does nothing else. It marks modules that are constructed (or registered) inside it, and
parameters that are registered inside it; while a model is being captured it tells the capture, so that calls inside
``forward`` are marked too. Source: EPL's ``replicate``, ``split`` and ``set_default_strategy``; its nesting rules.

The one ambient thing is the context variable below: which strategy is entered, which is the default, and who listens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Protocol, TypeVar, overload

import torch.nn as nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from epl.errors import StrategyError

__all__ = [
    "DeafTracer",
    "Strategy",
    "Tag",
    "Tracer",
    "replicate",
    "reset_scopes",
    "set_default_strategy",
    "split",
    "strategies_of",
    "tag_of",
    "tags_of_parameters",
    "tracing",
]

_ATTRIBUTE = "_epl_tag"
_OF_PARAMETERS = "_epl_tags_of_parameters"
_Target = TypeVar("_Target", nn.Module, nn.Parameter)


class Tracer(Protocol):
    """Who is told about scopes while a model's forward runs under capture."""

    def enter(self, strategy: Strategy) -> None: ...

    def exit(self, strategy: Strategy) -> None: ...

    def set_default(self, strategy: Strategy) -> None: ...


class DeafTracer:
    """For a forward that runs as it is: its scopes have nothing to say, and a default that it sets ends with it."""

    def enter(self, strategy: Strategy) -> None: ...

    def exit(self, strategy: Strategy) -> None: ...

    def set_default(self, strategy: Strategy) -> None: ...


@dataclass(frozen=True)
class _Ambient:
    entered: Strategy | None = None
    default: Strategy | None = None
    tracer: Tracer | None = None


_NOTHING = _Ambient()
_ambient: ContextVar[_Ambient] = ContextVar("epl_scopes", default=_NOTHING)


@dataclass(frozen=True, eq=False)
class Strategy:
    """How a part of a model is parallelised. Made by `replicate` and `split`; each object is a TaskGraph of its own.

    Use it as a context manager around the construction of modules, as a context manager around calls inside
    ``forward``, or call it with a module that exists already.
    """

    kind: str
    device_count: int
    name: str
    where: str
    placements: tuple[tuple[str, str], ...] = ()

    def __enter__(self) -> Strategy:
        ambient = _ambient.get()
        if ambient.entered is not None:
            raise StrategyError(_nesting_message(ambient.entered, self))
        _ambient.set(replace(ambient, entered=self))
        if ambient.tracer is not None:
            ambient.tracer.enter(self)
        else:
            _watch_construction()
        return self

    def __exit__(self, *_: object) -> None:
        ambient = _ambient.get()
        if ambient.entered is not self:
            raise StrategyError(f"{self} is left, but it is not the strategy that was entered last: {ambient.entered}")
        _ambient.set(replace(ambient, entered=None))
        if ambient.tracer is not None:
            ambient.tracer.exit(self)
        else:
            _watch_construction()

    @overload
    def __call__(self, target: nn.Module, *more: nn.Module) -> nn.Module: ...

    @overload
    def __call__(self, target: nn.Parameter) -> nn.Parameter: ...

    def __call__(self, target: Any, *more: nn.Module) -> Any:
        """Give modules that exist already, or one parameter, to this strategy; returns the first.

        Modules inside that have been given to another strategy before keep it: what is written for a part goes before what
        is written for the whole, in whichever order.

        Example:
            >>> head = nn.Linear(4, 2)
            >>> replicate(1, name="stage_1")(head) is head
            True
        """
        if isinstance(target, nn.Parameter):
            setattr(target, _ATTRIBUTE, Tag(self))
            return target
        for module in (target, *more):
            if not isinstance(module, nn.Module):
                raise StrategyError(
                    f"{self} was called with a {type(module).__name__}; it takes modules or one parameter"
                )
            _give(module, self)
        return target

    def __str__(self) -> str:
        return f"{self.kind}({self.device_count}, name={self.name!r}) made at {self.where}"

    def __deepcopy__(self, memo: object) -> Strategy:
        # a copied layer stays in the TaskGraph of its original
        return self


@dataclass(frozen=True)
class Tag:
    """What a module or parameter carries: its strategy, and whether it came from `set_default_strategy`."""

    strategy: Strategy
    is_default: bool = False


def replicate(device_count: int = 1, name: str | None = None, device: str | None = None) -> Strategy:
    """A TaskGraph of ``device_count`` devices, whose batch dimension is shared out over them.

    Args:
        device_count: Devices in one model replica; at least 1.
        name: Shown in plans and messages; "replicate" if not given.
        device: Kind of device; not yet available.

    Raises:
        StrategyError: device_count is not a positive int, or ``device`` is given.

    Example:
        >>> with replicate(device_count=1, name="stage_0"):
        ...     encoder = nn.Linear(8, 8)
    """
    return _make("replicate", device_count, name, device)


def split(
    device_count: int = 1,
    name: str | None = None,
    device: str | None = None,
    *,
    placements: Mapping[str, str] | None = None,
) -> Strategy:
    """A TaskGraph of ``device_count`` devices, whose weights are shared out over them.

    All devices get the same batch. Which dimension of which weight is cut, and what is communicated, is found by a search
    (``docs/concepts.md``); the plan shows it.

    Args:
        device_count, name, device: As for `replicate`.
        placements: Where some weights have to lie, by name: ``{"*.decoder.weight": "S(0)"}``. A name may have ``*`` for any
            text; ``S(d)`` is cut along dimension d, ``R`` is whole on every device. The rest is chosen around it.

    Raises:
        StrategyError: an argument is wrong. When the plan is made: a name fits no weight of the TaskGraph, or a weight
            cannot be cut like this.

    Source: Whale (Jia et al. 2022) for the annotation; GSPMD and Alpa for placements and their choice.

    Example:
        >>> head = split(device_count=2)(nn.Linear(8, 100))
    """
    strategy = _make("split", device_count, name, device)
    wrong = [text for text in (placements or {}).values() if not re.fullmatch(r"R|S\(\d+\)", str(text))]
    if wrong:
        raise StrategyError(
            f"split(placements=...): {wrong[0]!r} is not a placement of a weight; write 'R' (whole) or 'S(0)' (cut along "
            "dimension 0)"
        )
    return replace(strategy, placements=tuple((placements or {}).items()))


def _make(kind: str, device_count: int, name: str | None, device: str | None) -> Strategy:
    if not isinstance(device_count, int) or isinstance(device_count, bool) or device_count < 1:
        raise StrategyError(f"{kind}(device_count={device_count!r}): device_count must be an int of at least 1")
    if name is not None and not isinstance(name, str):
        raise StrategyError(f"{kind}(name={name!r}): name must be a string")
    if device is not None:
        raise StrategyError(f"{kind}(device={device!r}): choosing a kind of device is not yet available; leave it out")
    return Strategy(kind, device_count, name or kind, _caller())


def _caller() -> str:
    frame = sys._getframe(3)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _nesting_message(outer: Strategy, inner: Strategy) -> str:
    return (
        f"strategies cannot be nested: {inner} is entered inside {outer}. "
        f"Leave the outer scope first; scopes may follow one another, and one strategy may be entered again later."
    )


def set_default_strategy(strategy: Strategy) -> None:
    """Give everything that is made or called from here on, outside any scope, to ``strategy``.

    Each call opens a new TaskGraph: k calls make a pipeline of k stages. Only `replicate` can be a default.

    Raises:
        StrategyError: the strategy is not a ``replicate``, or a scope is entered.
    """
    if not isinstance(strategy, Strategy) or strategy.kind != "replicate":
        raise StrategyError(f"only replicate is supported as the default strategy, got {strategy}")
    ambient = _ambient.get()
    if ambient.entered is not None:
        raise StrategyError(f"set_default_strategy({strategy}) inside {ambient.entered}: leave the scope first")
    _ambient.set(replace(ambient, default=strategy))
    if ambient.tracer is not None:
        ambient.tracer.set_default(strategy)
    else:
        _watch_construction()


def reset_scopes() -> None:
    """Forget the default strategy; ``epl.init`` calls it, so that settings do not leak from an earlier init."""
    _ambient.set(_Ambient())
    _watch_construction()


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """While this is open, scopes tell ``tracer`` instead of marking modules; a default set outside does not apply."""
    before = _ambient.get()
    if before.entered is not None:
        raise StrategyError(f"a model cannot be captured inside a scope; leave {before.entered} first")
    _ambient.set(_Ambient(tracer=tracer))
    try:
        yield
    finally:
        _ambient.set(before)


def tag_of(target: nn.Module | nn.Parameter) -> Tag | None:
    """The tag that a module or a parameter carries itself, if any."""
    return getattr(target, _ATTRIBUTE, None)


def tags_of_parameters(model: nn.Module) -> dict[int, Tag]:
    """The tags of a model's bare parameters, by the parameter's id.

    The modules remember them too, since a parameter loses what it carries when it is copied or leaves the meta device.
    """
    found: dict[int, Tag] = {}
    for module in model.modules():
        for name, tag in vars(module).get(_OF_PARAMETERS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                found[id(parameter)] = tag
    own = ((parameter, tag_of(parameter)) for parameter in model.parameters())
    return {**found, **{id(parameter): tag for parameter, tag in own if tag is not None}}


def strategies_of(model: nn.Module, *, with_defaults: bool = True) -> list[Strategy]:
    """The strategies that a model's modules and parameters carry, in order."""
    tags = [*(tag_of(module) for module in model.modules()), *tags_of_parameters(model).values()]
    return list(
        dict.fromkeys(tag.strategy for tag in tags if tag is not None and (with_defaults or not tag.is_default))
    )


def _give(module: nn.Module, strategy: Strategy) -> None:
    """Tag a module and those inside it, but for parts that have been given to others than the module itself."""
    before = tag_of(module)
    object.__setattr__(module, _ATTRIBUTE, Tag(strategy))
    for inner in module.children():
        tag = tag_of(inner)
        is_apart = tag is not None and not tag.is_default and (before is None or tag.strategy is not before.strategy)
        if not is_apart:
            _give(inner, strategy)


def _tag_tree(module: nn.Module, strategy: Strategy) -> None:
    for inner in module.modules():
        object.__setattr__(inner, _ATTRIBUTE, Tag(strategy))


def _on_module(_: nn.Module, __: str, submodule: nn.Module | None) -> None:
    """A module put into its parent inside a scope belongs to the scope, whenever it was made (a deep copy, say)."""
    ambient = _ambient.get()
    if ambient.entered is not None and ambient.tracer is None and submodule is not None:
        _tag_tree(submodule, ambient.entered)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """A bare parameter registered inside a scope on a module from outside it."""
    ambient = _ambient.get()
    if ambient.entered is None or ambient.tracer is not None or parameter is None:
        return
    tag = tag_of(module)
    if tag is None or tag.strategy is not ambient.entered:
        setattr(parameter, _ATTRIBUTE, Tag(ambient.entered))
        vars(module).setdefault(_OF_PARAMETERS, {})[name] = Tag(ambient.entered)


def _marking(plain_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(plain_init)
    def marking_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        ambient = _ambient.get()
        strategy = ambient.entered or ambient.default
        if strategy is not None and ambient.tracer is None:
            object.__setattr__(self, _ATTRIBUTE, Tag(strategy, is_default=ambient.entered is None))

    return marking_init


class _Watch:
    """The hooks that are in place while a scope is entered or a default is set; torch is untouched otherwise."""

    def __init__(self) -> None:
        self._handles: tuple[Any, ...] = ()
        self._plain_init: Callable[..., None] = nn.Module.__init__
        self._marking_init: Callable[..., None] = nn.Module.__init__

    def update(self, wanted: bool) -> None:
        if wanted and not self._handles:
            # what is there now, since other libraries replace it, too
            self._plain_init = nn.Module.__init__
            self._marking_init = nn.Module.__init__ = _marking(self._plain_init)
            on_module: Callable[..., None] = _on_module
            on_parameter: Callable[..., None] = _on_parameter
            self._handles = (
                register_module_module_registration_hook(on_module),
                register_module_parameter_registration_hook(on_parameter),
            )
        elif not wanted and self._handles:
            if nn.Module.__init__ is self._marking_init:
                nn.Module.__init__ = self._plain_init
            for handle in self._handles:
                handle.remove()
            self._handles = ()


_watch = _Watch()


def _watch_construction() -> None:
    ambient = _ambient.get()
    _watch.update(ambient.tracer is None and (ambient.entered or ambient.default) is not None)
