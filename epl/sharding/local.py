"""What a rank's stage calls besides torch's own operators, as data: conversions, and local forms of operators.

The runtime binds each to the rank's group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from epl.sharding.collectives import Collectives
from epl.sharding.conversions import Conversion, convert
from epl.sharding.forms import FORMS, Cut

__all__ = ["Bindable", "Exchange", "LocalForm"]


class Bindable(Protocol):
    """Something that becomes a function once the ranks that it works with are known."""

    def bind(self, ranks: Collectives) -> Callable[..., Any]:
        """The function that a stage calls."""
        ...


@dataclass(frozen=True)
class Exchange:
    """A conversion of a value of this whole shape."""

    conversion: Conversion
    shape: tuple[int, ...]

    def bind(self, ranks: Collectives) -> Callable[..., Any]:
        """The function that a stage calls with what the rank holds of the value."""
        return lambda tensor: convert(ranks, tensor, self.conversion, self.shape)


@dataclass(frozen=True)
class LocalForm:
    """An operator's local implementation."""

    form: str
    cut: Cut

    def bind(self, ranks: Collectives) -> Callable[..., Any]:
        """The function that a stage calls with the operator's arguments by name."""
        return partial(FORMS[self.form], ranks, self.cut)
