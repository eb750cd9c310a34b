"""Batches and losses as plain data: find the tensors in nested containers, cut them, put them back.

A batch is a tensor, tuple, list, dict (any Mapping), dataclass, or a nest of them, whose leaves are tensors and plain
values (None, bool, int, float, str). `flatten` takes it apart; `Structure.unflatten` puts it together again.
(torch's pytree would do most of this, but it is private and knows neither dataclasses nor mappings it was not told of.)
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from epl.errors import RunError, bulleted

__all__ = ["Flat", "Structure", "batch_size_of", "call_model", "cut", "flatten", "note_on_sizes", "take"]

_PLAIN = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class Structure:
    """The shape of a nest: how to build it again from its tensors.

    Args:
        kind: ``tensor``, ``plain``, ``sequence``, ``mapping`` or ``dataclass``.
        type: Class of the container, or of the plain value.
        keys: Names of the children.
        children: Structures of the children, in order.
        value: The plain value itself.
    """

    kind: str
    type: type
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    value: Any = None

    def unflatten(self, tensors: Iterable[Any]) -> Any:
        """The nest with these tensors in the places where `flatten` found them."""
        return self._build(iter(tensors))

    def _build(self, tensors: Any) -> Any:
        if self.kind == "tensor":
            return next(tensors)
        if self.kind == "plain":
            return self.value
        children = [child._build(tensors) for child in self.children]
        if self.kind == "sequence":
            return self.type(*children) if hasattr(self.type, "_fields") else self.type(children)
        items = dict(zip(self.keys, children, strict=True))
        return _dataclass(self.type, items) if self.kind == "dataclass" else _mapping(self.type, items)

    def __str__(self) -> str:
        if self.kind in ("tensor", "plain"):
            return "tensor" if self.kind == "tensor" else repr(self.value)
        names = self.keys if self.kind != "sequence" else ("",) * len(self.children)
        inner = ", ".join(f"{key}{': ' if key else ''}{child}" for key, child in zip(names, self.children, strict=True))
        return f"{self.type.__name__}({inner})"


def _dataclass(kind: type, items: dict[str, Any]) -> Any:
    given = {field.name for field in dataclasses.fields(kind) if field.init}
    made = kind(**{name: value for name, value in items.items() if name in given})
    for name, value in items.items():
        if name not in given:
            object.__setattr__(made, name, value)  # what the class computes by itself, it computed for the whole batch
    return made


def _mapping(kind: type, items: dict[Any, Any]) -> Any:
    # output classes of models are dicts with the keys as fields
    return kind(**items) if dataclasses.is_dataclass(kind) else kind(items)


class Flat(NamedTuple):
    """A nest taken apart: the tensors in order, the path of each, and the structure."""

    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    structure: Structure


def flatten(nest: Any, what: str = "the batch", *, refuse_lists: bool = True) -> Flat:
    """Take a nest apart.

    Args:
        nest: The nest.
        what: What it is, for the message.
        refuse_lists: True to refuse lists of numbers or texts: in a batch one may be meant as a value for each sample,
            and would not be cut with them.

    Raises:
        RunError: a leaf is neither a tensor nor a plain value, or is such a list; the message gives its path.
    """
    tensors: list[torch.Tensor] = []
    paths: list[str] = []

    def visit(nest: Any, path: str) -> Structure:
        if isinstance(nest, torch.Tensor):
            tensors.append(nest)
            paths.append(path)
            return Structure("tensor", torch.Tensor)
        if isinstance(nest, _PLAIN):
            # NaN is equal to nothing unless it is the same object
            return Structure("plain", type(nest), value=math.nan if nest != nest else nest)
        if refuse_lists and path and _is_list_of_values(nest):
            raise RunError(
                f"{what} at {path} is a list of plain values, {len(nest)} of Python's {type(nest[0]).__name__}; tensors "
                "are cut into parts with the samples, lists are not. If it has a value for each sample, make it a tensor "
                "(torch.as_tensor), or leave it out if the model does not need it; if it is the same for all samples, make "
                "it a tuple."
            )
        kind, items = _children(nest, f"{what} at {path}" if path else what)
        children = tuple(visit(child, f"{path}.{key}" if path else str(key)) for key, child in items.items())
        container = dict if isinstance(nest, defaultdict) else type(nest)  # whose constructor wants a function
        return Structure(kind, container, tuple(items), children)

    structure = visit(nest, "")
    return Flat(tuple(tensors), tuple(paths), structure)


def _children(nest: Any, place: str) -> tuple[str, dict[Any, Any]]:
    if _is_mapping(nest):
        return "mapping", {key: nest[key] for key in nest.keys()}  # noqa: SIM118 - a UserDict-like need not be iterable
    if isinstance(nest, (list, tuple)):
        return "sequence", {str(place): item for place, item in enumerate(nest)}
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return "dataclass", {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}
    name = type(nest).__name__
    cure = "Convert it to a tensor, or leave it out."
    if type(nest).__module__.partition(".")[0] == "numpy":
        name = f"numpy.{name}"
        cure = "Make it a tensor with torch.as_tensor where the batch is made (in a collate_fn, say), or leave it out."
    raise RunError(
        f"{place} is a {name}; what goes into a model or comes out of it holds tensors, None, bool, int, float and str in "
        f"tuples, lists, dicts and dataclasses. {cure}"
    )


def _is_list_of_values(nest: Any) -> bool:
    return isinstance(nest, list) and bool(nest) and all(isinstance(item, (int, float, complex, str)) for item in nest)


def _is_mapping(nest: Any) -> bool:
    return isinstance(nest, Mapping) or (hasattr(nest, "keys") and hasattr(nest, "__getitem__"))


def call_model(model: Any, batch: Any) -> Any:
    """``model(batch)``, ``model(*batch)`` or ``model(**batch)``, by the kind of the batch."""
    if dataclasses.is_dataclass(batch):
        return model(batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    if not _is_mapping(batch):
        return model(batch)
    return model(**{key: batch[key] for key in batch.keys()})  # noqa: SIM118 - a UserDict-like need not be iterable


def batch_size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one; 1 if none has."""
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim > 0), 1)


def note_on_sizes(batch: Flat) -> str:
    """For the message of an error: the first dimensions of a batch's tensors, if they are not all one; else nothing.

    >>> print(note_on_sizes(flatten({"x": torch.ones(4, 2), "y": torch.ones(7)})))
    in this part of the batch, tensors have different first dimensions:
      - 4: x
      - 7: y
    The samples are counted in the first tensor, x, and only tensors of as many are cut into parts (micro-batches); the
    others go whole into each part. If those hold samples too, give all of them the same number.
    """
    sizes: dict[int, list[str]] = {}
    for tensor, path in zip(batch.tensors, batch.paths, strict=True):
        if tensor.ndim:
            sizes.setdefault(tensor.shape[0], []).append(path)
    if len(sizes) < 2:
        return ""
    first = next(iter(sizes.values()))[0]
    return bulleted(
        "in this part of the batch, tensors have different first dimensions:",
        [f"{size}: {', '.join(paths)}" for size, paths in sizes.items()],
    ) + (
        f"\nThe samples are counted in the first tensor, {first}, and only tensors of as many are cut into parts "
        "(micro-batches); the\nothers go whole into each part. If those hold samples too, give all of them the same number."
    )


def cut(size: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each part; the first ``size % num_parts`` parts hold one more, and no part is empty.

    >>> cut(7, 4)
    ((0, 2), (2, 4), (4, 6), (6, 7))
    >>> cut(2, 4)
    ((0, 1), (1, 2))
    """
    num_parts = min(size, num_parts)
    parts: list[tuple[int, int]] = []
    start = 0
    for place in range(num_parts):
        stop = start + size // num_parts + (place < size % num_parts)
        parts.append((start, stop))
        start = stop
    return tuple(parts)


def take(tensors: Sequence[torch.Tensor], size: int, part: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Samples ``part[0]`` to ``part[1]`` of each tensor whose first dimension is ``size``; others whole."""
    if part == (0, size):
        return tuple(tensors)
    return tuple(t[part[0] : part[1]] if t.ndim > 0 and t.shape[0] == size else t for t in tensors)
