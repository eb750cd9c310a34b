"""Which lines are the user's: neither EPL's, nor torch's, nor of Python's own library; and warnings that point at them.

A warning with a fixed ``stacklevel`` points at EPL's own code as soon as there is a second way to reach it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

__all__ = ["OWN", "is_users", "warn"]

OWN = f"{Path(__file__).parent}/"
_LIBRARIES = (f"{Path(torch.__file__).parent}/", OWN)
_STANDARD_LIBRARY = f"{Path(contextlib.__file__).parent}/"


def is_users(file: str) -> bool:
    """True for a file that is neither torch's, nor EPL's, nor of Python's own library."""
    standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not standard and not file.startswith(("<", *_LIBRARIES))


def warn(message: str) -> None:
    """Warn at the line of the user's that led here, through whatever calls of EPL, torch and other libraries.

    Args:
        message: What is the matter, and what to do.

    Example:
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warn("the weights differ")
        >>> str(seen[0].message)
        'the weights differ'
    """
    frames = list(_callers())
    users = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    scripts = [frame for frame in users if "site-packages" not in frame.f_code.co_filename]
    frame = (scripts or users or frames[-1:])[0]
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
