"""What a model's modules hold besides parameters and buffers: numbers, lists, tensors in plain attributes.

A graph neither reads nor changes them at each step. So what decides forward is part of the key that a graph is kept
under (`PlainAttributes`), and what forward changes is found, put back, and refused (`ForwardEffects`): the graph would
keep the first value. Tensors that forward leaves in attributes for others to look at do not change what it computes;
that they will not be there is said in a warning. A buffer that is assigned a new tensor is written to instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from epl.errors import CaptureError, bulleted

__all__ = ["ForwardEffects", "PlainAttributes", "plain_tensors"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ORDERED = (list, tuple, deque)
_CONTAINERS = (dict, set, frozenset, *_ORDERED)
_OWN = frozenset(vars(nn.Module()))  # what every module has
_MAX_DEPTH = 5
_NOTHING = object()


class PlainAttributes:
    """The plain values that a model's modules hold, also in containers and dataclasses, and which tensors they hold.

    Where the values are is found once; ``now`` looks at them, and is quick enough for every step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [vars(module) for module in model.modules()]
        self._find()

    def _find(self) -> None:
        self._sizes = [len(attributes) for attributes in self._modules]
        places = [(held, name, value) for held in self._modules for name, value in held.items() if name not in _OWN]
        self._plain = [(held, name) for held, name, value in places if isinstance(value, _PLAIN)]
        self._tensors = [(held, name) for held, name, value in places if isinstance(value, torch.Tensor)]
        self._nests = list({id(value): value for *_, value in places if _is_setting(value)}.values())

    def now(self) -> tuple[Any, ...]:
        """The values at this moment, as something that can be a key."""
        if [len(attributes) for attributes in self._modules] != self._sizes:
            self._find()
        plain = tuple([held.get(name) for held, name in self._plain])
        tensors = tuple([id(held.get(name)) for held, name in self._tensors])
        nests = tuple([tuple(_hashable(_leaves(nest, ""))) for nest in self._nests])
        return plain, tensors, nests


def _is_setting(value: Any) -> bool:
    """Containers and records; other objects may be at work, and change at each step without a say in forward."""
    is_record = isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return is_record or isinstance(value, _CONTAINERS)


def _hashable(leaves: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((path, id(leaf) if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The plain values and tensors in a nest, with their paths; a set counts as one value."""
    for inner, item in _walk(value, path, _MAX_DEPTH):
        if isinstance(item, (torch.Tensor, *_PLAIN)):
            yield inner, item
        elif isinstance(item, (set, frozenset)):
            yield inner, frozenset(member for member in item if isinstance(member, _PLAIN))


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """A value and what it holds. One object may hold containers but no further objects: those lead anywhere."""
    yield path, value
    if depth:
        for name, item in _items(value):
            stop = not isinstance(value, _CONTAINERS) and not isinstance(item, _CONTAINERS)
            yield from _walk(item, f"{path}{name}", 0 if stop else depth - 1)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, _ORDERED):
        return [(f"[{place}]", item) for place, item in enumerate(value)]
    if _holds_attributes(value):
        return [(f".{name}", item) for name, item in vars(value).items()]
    return []


def _holds_attributes(value: Any) -> bool:
    """True for an object of a user's class; functions, classes, modules and tensors are none."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (torch.Tensor, ModuleType))


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every attribute that a module has beyond what all modules have, with its path."""
    for prefix, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                yield f"{prefix}.{name}" if prefix else name, value


def _all_leaves(model: nn.Module) -> dict[str, Any]:
    return {path: leaf for prefix, value in _attributes(model) for path, leaf in _leaves(value, prefix)}


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules hold neither as parameters nor as buffers, by path."""
    return {path: leaf for path, leaf in _all_leaves(model).items() if isinstance(leaf, torch.Tensor)}


class ForwardEffects:
    """What the modules of a model hold before forward, to see and undo what forward changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = [
            (path, module, dict(module._parameters), dict(module._buffers)) for path, module in model.named_modules()
        ]
        nests = [item for _, value in _attributes(model) for _, item in _walk(value, "", _MAX_DEPTH)]
        holders: list[Any] = [
            held for module in model.modules() for held in (vars(module), module._parameters, module._buffers)
        ]
        holders += [item if isinstance(item, _CONTAINERS) else vars(item) for item in nests if _can_change(item)]
        self._copies = [(holder, copy.copy(holder)) for holder in holders]
        self._before = _all_leaves(model)

    def settle(self) -> list[str]:
        """After forward: write to the buffers that were assigned anew, and put attributes back.

        Returns:
            Paths of the attributes in which forward has left tensors.

        Raises:
            CaptureError: forward has changed anything else; lists all of it.
        """
        now = _all_leaves(self._model)
        paths = [path for path in {**self._before, **now} if not _same(*self._pair(path, now))]
        tensors = [path for path in paths if isinstance(now.get(path, self._before.get(path)), torch.Tensor)]
        faults = [
            f"{path}: {' became '.join(map(_shown, self._pair(path, now)))}" for path in paths if path not in tensors
        ]
        faults += self._write_buffers()
        self.put_back()
        if faults:
            raise CaptureError(
                bulleted(
                    "forward changes attributes of modules; a graph would keep the first value. Keep such state in a "
                    "buffer (self.register_buffer) and change it with tensor operations, or change it outside forward "
                    "(what is the same at every step can be set in __init__):",
                    faults,
                )
            )
        return tensors

    def _pair(self, path: str, now: dict[str, Any]) -> tuple[Any, Any]:
        return self._before.get(path, _NOTHING), now.get(path, _NOTHING)

    def put_back(self) -> None:
        """Attributes, the containers in them, parameters and buffers as they were registered before forward."""
        for holder, kept in self._copies:
            if isinstance(holder, (list, deque)):
                holder.clear()
                holder.extend(kept)
            elif isinstance(holder, set):
                holder.intersection_update(kept)
                holder.update(kept)
            elif isinstance(holder, dict):
                for name in [name for name in holder if name not in kept]:
                    del holder[name]
                holder.update(kept)

    def _write_buffers(self) -> Iterator[str]:
        """A new tensor under a buffer's name is written to the buffer; lines for what cannot be."""
        for path, module, parameters, buffers in self._held:
            dot = f"{path}." if path else ""
            for name, value in module._parameters.items():
                if value is not parameters.get(name):
                    yield f"{dot}{name}: a parameter was replaced or added"
            for name, value in list(module._buffers.items()):
                before = buffers.get(name)
                if value is before:
                    continue
                if before is None or value is None or (before.shape, before.dtype) != (value.shape, value.dtype):
                    yield f"{dot}{name}: {_shown(before)} became {_shown(value)}"
                    continue
                with torch.no_grad():
                    before.copy_(value)


def _can_change(item: Any) -> bool:
    return isinstance(item, (dict, set, list, deque)) or (
        _holds_attributes(item) and not isinstance(item, (*_CONTAINERS, *_PLAIN))
    )


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor) or type(before) is not type(now):
        return False
    return before == now or (before != before and now != now)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "nothing" if value is _NOTHING else repr(value)
