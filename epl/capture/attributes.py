"""What a model's modules hold besides parameters and buffers: numbers, lists, tensors in plain attributes.

A graph neither reads nor changes them at each step. So what decides forward is part of the key that a graph is kept
under (`PlainAttributes`), and what forward changes is found and put back (`ForwardEffects`): a plain value that changes at
each step is refused, since the graph would keep the first one; one that forward sets once stays set. Tensors that forward
leaves in attributes for others to look at do not change what it computes; that they will not be there is said in a
warning. A buffer that is assigned a new tensor is written to instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from epl.errors import CaptureError, bulleted

__all__ = ["Changes", "ForwardEffects", "PlainAttributes", "autocast_settings", "plain_tensors"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ORDERED = (list, tuple, deque)
_CONTAINERS = (dict, set, frozenset, *_ORDERED)
# what every module has, and EPL's own marks
_OWN = frozenset(vars(nn.Module())) | {"_epl_tag", "_epl_tags_of_parameters"}
_MAX_DEPTH = 5
_MAX_ITEMS = 1000
_NOTHING = object()


class PlainAttributes:
    """The plain values that a model's modules hold, also in containers and dataclasses, and which tensors they hold.

    The autocast around the model belongs to them, since forward does not look the same under another one. Where the values
    are is found once; ``now`` looks at them, and is quick enough for every step.
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
        nests = tuple(_hashable(_leaves(("", nest) for nest in self._nests)))
        return tuple(autocast_settings().items()), plain, tensors, nests


def autocast_settings() -> dict[str, str]:
    """For each kind of device that can be computed on, the dtype of autocast; empty where it is off."""
    devices = ["cpu"]
    if torch.accelerator.is_available():
        devices.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    return {
        device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if torch.is_autocast_enabled(device)
        else ""
        for device in devices
    }


def _is_setting(value: Any) -> bool:
    """Containers and records; other objects may be at work, and change at each step without a say in forward."""
    is_record = isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return is_record or isinstance(value, _CONTAINERS)


def _hashable(leaves: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((path, id(leaf) if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves)


def _leaves(nests: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The plain values and tensors in nests, with their paths; a set counts as one value."""
    for path, item in _walk(nests):
        if isinstance(item, (torch.Tensor, *_PLAIN)):
            yield path, item
        elif isinstance(item, (set, frozenset)):
            yield path, frozenset(member for member in item if isinstance(member, _PLAIN))


def _walk(nests: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Everything in nests; what is held at several places, such as a config, comes once."""
    seen: set[int] = set()

    def walk(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        yield path, value
        if not depth or isinstance(value, (torch.Tensor, *_PLAIN)) or id(value) in seen:
            return
        seen.add(id(value))
        for name, item in _items(value):
            # an object may hold containers, but no further objects: those lead anywhere
            stop = not isinstance(value, _CONTAINERS) and not isinstance(item, _CONTAINERS)
            yield from walk(f"{path}{name}", item, 0 if stop else depth - 1)

    for path, value in nests:
        yield from walk(path, value, _MAX_DEPTH)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, _CONTAINERS) and len(value) > _MAX_ITEMS:
        return [(".__len__()", len(value))]  # a vocabulary, say: data rather than settings
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


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules hold neither as parameters nor as buffers, by path."""
    return {path: leaf for path, leaf in _leaves(_attributes(model)) if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True)
class Changes:
    """What one run of forward would leave in attributes.

    Args:
        lines: One for each plain value that it changes.
        tensors: Paths of the attributes in which it leaves tensors.
        entries: (container, key, value) of what it changes, where no tensor is in it; key None for a whole list or set.
    """

    lines: list[str]
    tensors: list[str]
    entries: list[tuple[Any, Any, Any]]

    def apply(self) -> None:
        """Leave the plain values as forward would."""
        for holder, key, value in self.entries:
            if key is None:
                _restore(holder, value)
            elif value is _NOTHING:
                holder.pop(key, None)
            else:
                holder[key] = value


class ForwardEffects:
    """What the modules of a model hold before forward, to see and undo what forward changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = [
            (path, module, dict(module._parameters), dict(module._buffers)) for path, module in model.named_modules()
        ]
        items = {id(item): item for _, item in _walk(_attributes(model)) if _can_change(item)}
        holders = [vars(module) for module in model.modules()]
        holders += [item if isinstance(item, _CONTAINERS) else vars(item) for item in items.values()]
        self._copies = [(holder, copy.copy(holder)) for holder in holders]
        self._before = dict(_leaves(_attributes(model)))

    def settle(self) -> Changes:
        """After forward: write to the buffers that were assigned anew, and put attributes back.

        Raises:
            CaptureError: forward has registered parameters or buffers, or changed the form of one.
        """
        now = dict(_leaves(_attributes(self._model)))
        pairs = {path: (self._before.get(path, _NOTHING), now.get(path, _NOTHING)) for path in {**self._before, **now}}
        changed = {path: pair for path, pair in pairs.items() if not _same(*pair)}
        tensors = {path: pair[1] for path, pair in changed.items() if any(isinstance(x, torch.Tensor) for x in pair)}
        # recurrent modules keep lists of their parameters
        registered = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        plain = {path: pair for path, pair in changed.items() if path not in tensors}
        lines = [f"{path}: {_shown(old)} became {_shown(new)}" for path, (old, new) in plain.items()]
        entries = [entry for holder, kept in self._copies for entry in _changed_entries(holder, kept)]
        faults = list(self._write_buffers())
        self.put_back()
        if faults:
            raise CaptureError(
                bulleted("forward changes what the model is made of, which a graph cannot follow:", faults)
            )
        return Changes(lines, [path for path, new in tensors.items() if id(new) not in registered], entries)

    def put_back(self) -> None:
        """Attributes, the containers in them, parameters and buffers as they were registered before forward."""
        for holder, kept in self._copies:
            _restore(holder, kept)
        for _, module, parameters, buffers in self._held:
            _restore(module._parameters, parameters)
            _restore(module._buffers, buffers)

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


def _restore(holder: Any, kept: Any) -> None:
    if isinstance(holder, (list, deque)):
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, set):
        holder.intersection_update(kept)
        holder.update(kept)
    else:
        for name in [name for name in holder if name not in kept]:
            del holder[name]
        holder.update(kept)


def _changed_entries(holder: Any, kept: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What differs and has no tensor in it."""
    if not isinstance(holder, dict):
        ordered = len(holder) == len(kept) and all(map(_same, holder, kept))
        if not (holder == kept if isinstance(holder, set) else ordered) and not _has_tensor(list(holder)):
            yield holder, None, copy.copy(holder)
        return
    for key in [*holder, *(key for key in kept if key not in holder)]:
        value = holder.get(key, _NOTHING)
        if key not in _OWN and not _same(kept.get(key, _NOTHING), value) and not _has_tensor(value):
            yield holder, key, value


def _has_tensor(value: Any) -> bool:
    return any(isinstance(item, torch.Tensor) for _, item in _walk([("", value)]))


def _can_change(item: Any) -> bool:
    return isinstance(item, (dict, set, list, deque)) or (
        _holds_attributes(item) and not isinstance(item, (*_CONTAINERS, *_PLAIN))
    )


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now) or not isinstance(now, (frozenset, *_PLAIN)):
        return False
    return before == now or (before != before and now != now)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "nothing" if value is _NOTHING else repr(value)
