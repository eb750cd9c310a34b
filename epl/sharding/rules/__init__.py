"""The rules of all operators, by family: what each of them allows."""

from __future__ import annotations

from epl.sharding.discovery import discover
from epl.sharding.options import Call, Option, Rule, is_possible, whole_option
from epl.sharding.rules import (
    attention,
    convolution,
    factories,
    indexing,
    losses,
    matmul,
    normalisation,
    ordering,
    pointwise,
    random,
    recurrent,
    reductions,
    views,
)

__all__ = ["RULES", "is_discovered", "options_of"]

_FAMILIES = (
    pointwise,
    reductions,
    matmul,
    views,
    indexing,
    attention,
    normalisation,
    convolution,
    losses,
    factories,
    random,
    ordering,
    recurrent,
)

RULES: dict[str, Rule] = {target: rule for family in _FAMILIES for target, rule in family.RULES.items()}
assert len(RULES) == sum(len(family.RULES) for family in _FAMILIES), "an operator has rules in two families"


def options_of(call: Call) -> tuple[Option, ...]:
    """All ways to run a call on shards, the whole one first; shapes that are not known allow that one only."""
    found = dict.fromkeys([whole_option(call)])
    if not call.is_static:
        return tuple(found)
    if not is_discovered(call.op.target):
        found.update(dict.fromkeys(option for option in RULES[call.op.target](call) if is_possible(call, option)))
    elif any(kind.is_differentiable for kind in call.results):
        found.update(dict.fromkeys(discover(call)))
    return tuple(found)


def is_discovered(target: str) -> bool:
    """True if no rule says what an operator allows, so that it is tried out, or runs whole."""
    return target not in RULES
