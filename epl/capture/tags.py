"""Which strategy each operator gets: call scope > construction scope > parameter tag > default strategy > none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch.nn as nn

from epl.ir.graph import Op, StrategySpec
from epl.scopes import Strategy, Tag, strategies_of, tag_of, tags_of_parameters

__all__ = ["Tagger"]


class Tagger:
    """Numbers the strategies of one capture in order of first use, and finds the one of each operator.

    Args:
        model: The model, whose modules and parameters carry tags.
        called: The strategies that forward entered or made the default, as the marks number them.
        entered: Those that it entered.
    """

    def __init__(self, model: nn.Module, called: Sequence[Strategy], entered: Sequence[Strategy]) -> None:
        self._called = called
        self._order: list[Strategy] = []
        self._parameter_tags: dict[str, Tag] = {}
        self._tags_of_parameters = tags_of_parameters(model)
        # a module that is registered under several names is called under one of them
        self._module_tags = {path: tag_of(module) for path, module in model.named_modules(remove_duplicate=False)}
        self._own_cuts = _own_cuts(model)
        self._cuts: dict[str, tuple[str, int]] = {}  # name in the graph -> path, dimension
        self._asked: dict[Strategy, dict[str, str]] = {}
        self._explicit = tuple(dict.fromkeys([*strategies_of(model, with_defaults=False), *entered]))

    def note_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Remember the tag of a parameter that stands in the graph as ``name``."""
        tag = self._tags_of_parameters.get(id(parameter))
        if tag is not None:
            self._parameter_tags[name] = tag
        if id(parameter) in self._own_cuts:
            self._cuts[name] = self._own_cuts[id(parameter)]

    def tag(self, op: Op, modules: list[str], scope: str | None, default: str | None) -> int | None:
        """Index of the operator's strategy; None if no annotation reaches it."""
        strategy = self._find(op, modules, scope, default)
        if strategy is None:
            return None
        if strategy not in self._order:
            self._order.append(strategy)
        if strategy.kind == "split":
            asked = self._asked.setdefault(strategy, {})
            asked.update(
                (path, f"S({dim})") for path, dim in (self._cuts[name] for name in op.reads if name in self._cuts)
            )
        return self._order.index(strategy)

    def _find(self, op: Op, modules: list[str], scope: str | None, default: str | None) -> Strategy | None:
        if scope is not None:
            return self._called[int(scope)]
        around = list(self._tags_around(modules))
        constructed = next((tag.strategy for tag in around if not tag.is_default), None)
        if constructed is not None:
            return constructed
        owned = next((self._parameter_tags[name] for name in op.reads if name in self._parameter_tags), None)
        if owned is not None:
            return owned.strategy
        if default is not None:
            return self._called[int(default)]
        return next((tag.strategy for tag in around), None)

    def _tags_around(self, modules: list[str]) -> Iterator[Tag]:
        """Tags of the modules that the call is in, innermost first."""
        for path in reversed(modules):
            tag = self._module_tags.get(path)
            if tag is not None:
                yield tag

    def specs(self) -> Iterator[StrategySpec]:
        """The strategies as data: those that have operators, in order of use, then those that the user wrote in vain."""
        for strategy in dict.fromkeys([*self._order, *self._explicit]):
            is_default = strategy not in self._explicit
            where = (strategy.name, strategy.where)
            yield StrategySpec(strategy.kind, strategy.device_count, *where, is_default, self._placements(strategy))

    def _placements(self, strategy: Strategy) -> tuple[tuple[str, str], ...]:
        """What the user asks for, and what the modules ask for that the user does not mention."""
        mentioned = [pattern for pattern, _ in strategy.placements]
        asked = self._asked.get(strategy, {}).items()
        own = [(path, text) for path, text in asked if not any(fnmatchcase(path, pattern) for pattern in mentioned)]
        return (*strategy.placements, *sorted(own))


def _own_cuts(model: nn.Module) -> dict[int, tuple[str, int]]:
    """Parameters whose module says how they are cut under ``split`` (``split_dims``, as experts do): path and dimension."""
    found: dict[int, tuple[str, int]] = {}
    for path, module in model.named_modules():
        for name, dim in getattr(type(module), "split_dims", {}).items():
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                found[id(parameter)] = (f"{path}.{name}" if path else name, dim)
    return found
