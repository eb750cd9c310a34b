"""Types of the values in a graph, with a text form: ``f32[4, 16]``, ``i64[]``, ``int``, ``list(f32[2], f32[3])``.

A dimension that is known only when the value exists (the result of ``nonzero``, say) is written ``?``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import torch

from epl.errors import GraphError

__all__ = ["ListType", "ScalarType", "TensorType", "Type", "parse_type"]

_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "c128": torch.complex128,
    "c64": torch.complex64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bool,
}
_DTYPE_TEXT = {dtype: text for text, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorType:
    """A tensor: element type and shape; a dimension of None is known only at run time."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        dims = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{_DTYPE_TEXT.get(self.dtype, str(self.dtype))}[{dims}]"

    @property
    def is_static(self) -> bool:
        """True if every dimension is known before the run."""
        return None not in self.shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape as numbers; unknown dimensions count as 1."""
        return tuple(1 if size is None else size for size in self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements; unknown dimensions count as 1."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class ScalarType:
    """A Python number that a graph computes from a tensor (``tensor.item()``): int, float or bool."""

    kind: str

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class ListType:
    """The results of an operator that returns several; ``getitem`` picks one."""

    items: tuple[Type, ...]

    def __str__(self) -> str:
        return f"list({', '.join(map(str, self.items))})"


Type = TensorType | ScalarType | ListType


def parse_type(text: str) -> Type:
    """The type that ``str(type)`` wrote.

    Raises:
        GraphError: the text is not a type.
    """
    text = text.strip()
    if text in ("int", "float", "bool", "none"):
        return ScalarType(text)
    if text.startswith("list(") and text.endswith(")"):
        return ListType(tuple(parse_type(part) for part in _split_top(text[5:-1])))
    match = re.fullmatch(r"([\w.]+)\[(.*)\]", text)
    dtype = None if match is None else _DTYPES.get(match[1], getattr(torch, match[1].removeprefix("torch."), None))
    if match is None or not isinstance(dtype, torch.dtype):
        raise GraphError(f"{text!r} is not a type; types look like f32[4, 16], i64[], int or list(f32[2], i64[])")
    dims = [dim.strip() for dim in match[2].split(",") if dim.strip()]
    return TensorType(dtype, tuple(None if dim == "?" else int(dim) for dim in dims))


def _split_top(text: str) -> list[str]:
    """Cut at the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]] if text.strip() else []
