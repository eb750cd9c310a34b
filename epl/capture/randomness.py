"""Random numbers that torch does not draw: a value drawn at capture would be the same at every step.

Python's ``random`` and numpy keep their numbers in generator objects, the global functions in hidden ones. They are
found among all objects of the process: user code may hold them anywhere, and may have bound their methods early. What
shows that forward has drawn is that a generator's state has changed.
"""

from __future__ import annotations

import gc
import inspect
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from epl.errors import CaptureError, bulleted

__all__ = ["python_random_refused"]


@contextmanager
def python_random_refused(model: nn.Module) -> Iterator[None]:
    """Raise if forward draws from a generator of ``random`` or numpy; the generators are put back as they were."""
    before = [(generator, _state(generator)) for generator in _generators()]
    used: list[tuple[Any, bytes]] = []
    try:
        yield
    finally:
        used += [(generator, state) for generator, state in before if _state(generator) != state]
        for generator, state in used:
            _restore(generator, state)
    if used:
        names = dict.fromkeys(_name(generator) for generator, _ in used)
        raise CaptureError(
            bulleted(
                f"forward draws numbers from {' and '.join(names)}; a graph would repeat the first draw at every step. "
                "Draw with torch (torch.rand), or outside forward and pass the number in the batch. Candidates:",
                _lines_that_mention(model, ("random", "rng", "randint(", "choice(", "shuffle(")),
            )
        )


def _generators() -> list[Any]:
    kinds: list[type] = [random.Random]
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        kinds += [numpy_random.Generator, numpy_random.RandomState]
    wanted = frozenset(kinds)
    # Not sympy's: torch.export draws from it, since sympy shuffles the questions that it asks about a symbol.
    module = sys.modules.get("sympy.core.random")
    sympys = {id(item) for item in vars(module).values()} if module else set()
    return [item for item in gc.get_objects() if type(item) in wanted and id(item) not in sympys]


def _state(generator: Any) -> bytes:
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    return pickle.dumps(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def _restore(generator: Any, state: bytes) -> None:
    value = pickle.loads(state)
    if isinstance(generator, random.Random):
        generator.setstate(value)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = value
    else:
        generator.set_state(value)


def _name(generator: Any) -> str:
    if generator is getattr(random.random, "__self__", None):
        return "random"
    kind = type(generator)
    if kind.__name__ == "RandomState" and generator is getattr(sys.modules["numpy"].random.rand, "__self__", None):
        return "numpy.random"
    return f"a {kind.__module__.split('.')[0]}.{kind.__name__}"


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
