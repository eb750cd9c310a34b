"""What a captured graph would silently change, found before or after the forward has run under export.

- module and tensor hooks: export runs forward hooks once, at capture, and never runs backward hooks;
- Python's and numpy's random numbers: a value drawn at capture would be the same at every step;
- plain attributes that forward changes (``self.step += 1``): the graph would keep the first value.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn as nn

from epl.errors import CaptureError, bulleted

__all__ = ["PlainAttributes", "hooks_in", "python_random_refused", "user_line", "user_line_of_stack"]

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_STANDARD_LIBRARY = f"{Path(contextlib.__file__).parent}/"
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hooks_in(model: nn.Module) -> list[str]:
    """One line for each hook on a module, with where it was defined."""
    found: list[str] = []
    for path, module in model.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind, {}).values():
                found.append(f"{path or 'the model'} has a {kind[1:-1].replace('_', ' ')}: {_place_of(hook)}")
    return found


def _place_of(function: Any) -> str:
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


@contextmanager
def python_random_refused(model: nn.Module) -> Iterator[None]:
    """Raise if forward draws from Python's ``random`` or from numpy's global generator.

    The functions of the ``random`` module are methods of one hidden generator, bound at import; their state is what
    shows that one of them was called, whatever name it was called by.
    """
    numpy_random = _numpy_random()
    before = random.getstate(), _numpy_state(numpy_random)
    yield
    used = [
        name
        for name, changed in (
            ("random", random.getstate() != before[0]),
            ("numpy.random", _numpy_state(numpy_random) != before[1]),
        )
        if changed
    ]
    random.setstate(before[0])
    if used:
        raise CaptureError(
            bulleted(
                f"forward draws numbers from {' and '.join(used)}; a graph would repeat the first draw at every step. "
                "Draw with torch (torch.rand), or outside forward and pass the number in the batch. Candidates:",
                _lines_that_mention(model, ("random.", "np.random", "randint(", "choice(", "shuffle(")),
            )
        )


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _numpy_state(numpy_random: Any) -> str:
    return "" if numpy_random is None else repr(numpy_random.get_state()[1:])


def _lines_that_mention(model: nn.Module, words: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        if kind.__module__.startswith("torch."):
            continue
        try:
            lines, first = inspect.getsourcelines(kind.forward)
        except (OSError, TypeError):
            continue
        file = inspect.getsourcefile(kind.forward)
        found += [
            f"{file}:{first + place}: {line.strip()}"
            for place, line in enumerate(lines)
            if any(word in line for word in words) and "torch.rand" not in line
        ]
    return found or ["(no line of a forward method names it; look at the functions that forward calls)"]


class PlainAttributes:
    """The plain values (numbers, strings, None) that a model's modules hold, to see whether they have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (path, vars(module), name)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and name != "training"
        ]
        self.values = self.now()

    def now(self) -> tuple[Any, ...]:
        """The values at this moment."""
        return tuple([holder.get(name) for _, holder, name in self._places])

    def refuse_change(self) -> None:
        """Raise if forward has changed one, which a graph would not repeat."""
        changed = [
            f"{path or 'the model'}.{name}: {before!r} became {holder.get(name)!r}"
            for (path, holder, name), before in zip(self._places, self.values, strict=True)
            if holder.get(name) is not before and holder.get(name) != before
        ]
        for (_, holder, name), before in zip(self._places, self.values, strict=True):
            holder[name] = before
        if changed:
            raise CaptureError(
                bulleted(
                    "forward changes attributes of modules; a graph would keep the first value. Keep such state in a "
                    "buffer (self.register_buffer) and change it with tensor operations, or change it outside forward:",
                    changed,
                )
            )


def user_line(error: BaseException | TracebackType | None) -> str:
    """The innermost line of an error's traceback that is neither torch's nor EPL's: ``file:line in f: code``."""
    trace = error.__traceback__ if isinstance(error, BaseException) else error
    frames = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
    if not frames:
        return "(no line of the model)"
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}"


def user_line_of_stack(stack: str) -> str:
    """``file:line`` of the innermost line of a node's stack trace that is not torch's."""
    best = ""
    for line in stack.splitlines():
        text = line.strip()
        if text.startswith('File "'):
            file, _, rest = text[6:].partition('", line ')
            if _is_users(file):
                best = f"{file}:{rest.split(',')[0]}"
    return best


def _is_users(file: str) -> bool:
    standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not standard and not file.startswith(("<", *_LIBRARIES))
