"""Local implementations: operators that need more than themselves to run on shards.

A form is called as ``form(ranks, cut, **arguments)`` with the operator's arguments under the names of its schema, tensors
as this rank holds them, and gives what this rank holds of the result (a tuple of several). Autograd runs through it; where
it talks to other ranks, it brings its own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epl.sharding.placements import Placement

__all__ = ["FORMS", "Cut", "Form"]


@dataclass(frozen=True)
class Cut:
    """How one call is cut.

    Args:
        inputs: What each tensor argument is used as, in the order of ``Call.refs``; units as they are.
        outputs: What each result comes out as.
        input_shapes: Shapes of the whole arguments.
        output_shapes: Shapes of the whole results.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]


Form = Callable[..., Any]

FORMS: dict[str, Form] = {}
