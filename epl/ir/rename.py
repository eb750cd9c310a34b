"""Other names for what an operator reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from epl.ir.graph import Argument, Op, Ref, map_refs

__all__ = ["renamed"]


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The operator with other names for what it reads; those that are not in ``names`` stay."""
    if not names or all(names.get(name, name) == name for name in op.reads):
        return op

    def rename(name: str) -> Argument:
        return Ref(names.get(name, name))

    return replace(
        op,
        args=tuple(map_refs(arg, rename) for arg in op.args),
        kwargs=tuple((key, map_refs(value, rename)) for key, value in op.kwargs),
        writes=tuple(names.get(name, name) for name in op.writes),
        views=tuple(names.get(name, name) for name in op.views),
    )
