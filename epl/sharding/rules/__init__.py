"""The rules of all operators, by family: what each of them allows."""

from __future__ import annotations

from epl.sharding.options import Call, Option, Rule, is_possible, whole_option

__all__ = ["RULES", "options_of"]

RULES: dict[str, Rule] = {}


def options_of(call: Call) -> tuple[Option, ...]:
    """All ways to run a call on shards, the whole one first; shapes that are not known allow that one only."""
    found = dict.fromkeys([whole_option(call)])
    if call.op.target in RULES and call.is_static:
        found.update(dict.fromkeys(option for option in RULES[call.op.target](call) if is_possible(call, option)))
    return tuple(found)
