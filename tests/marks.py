"""Marks for parameters: ``*slow("vit", "unet")`` in a list leaves these cases to ``make test-all``."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["slow"]


def slow(*values: Any) -> list[Any]:
    """The values as parameters that are marked slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
