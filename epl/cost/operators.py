"""Floating-point operations, bytes and seconds of one operator call, from the shapes that it runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from epl.cost.devices import DeviceModel

__all__ = ["Work", "operator_s", "work_of"]

Shape = tuple[int, ...]
_FREE = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "expand",
    "slice",
    "select",
    "alias",
    "detach",
)
_FREE = (
    *_FREE,
    "flatten",
    "unflatten",
    "split",
    "chunk",
    "getitem",
    "t",
    "movedim",
    "to",
    "contiguous",
    "_assert_scalar",
)


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of memory traffic."""

    flops: float
    size_bytes: float


def work_of(target: str, inputs: Mapping[str, Sequence[Shape]], outputs: Sequence[Shape], itemsize: int) -> Work:
    """What one call does.

    Args:
        target: The operator, as in the graph.
        inputs: Shapes of its tensor arguments by name.
        outputs: Shapes of its results.
        itemsize: Bytes of an element.
    """
    name = target.split(".")[1].rstrip("_")
    if name in _FREE:
        return Work(0.0, 0.0)
    elements = sum(prod(shape) for shapes in inputs.values() for shape in shapes) + sum(map(prod, outputs))
    return Work(_flops(name, inputs, outputs), float(elements * itemsize))


def _flops(name: str, inputs: Mapping[str, Sequence[Shape]], outputs: Sequence[Shape]) -> float:
    size = float(sum(map(prod, outputs)))
    if name == "linear":
        return 2 * size * inputs["input"][0][-1]
    if name in ("addmm", "baddbmm"):
        return 2 * size * inputs["mat1" if "mat1" in inputs else "batch1"][0][-1]
    if name in ("matmul", "mm", "bmm", "mv", "dot"):
        return 2 * size * inputs[next(iter(inputs))][0][-1]
    if name.startswith("conv"):
        return 2 * size * prod(inputs["weight"][0][1:])
    if name == "scaled_dot_product_attention":
        return 4 * size * inputs["key"][0][-2]
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # each place of each sequence, by each matrix
        return 2 * prod(inputs["input"][0][:-1]) * sum(prod(shape) for shape in inputs["params"] if len(shape) == 2)
    if "grouped_mm" in name:
        return 2 * size * inputs["weight"][0][-2]
    return size


def operator_s(work: Work, device: DeviceModel, *, backward: bool) -> float:
    """Seconds on a device: the roofline, with a floor; backward takes twice as long as forward."""
    if not work.size_bytes:
        return 0.0
    forward = max(work.flops / device.flops_per_s, work.size_bytes / device.memory_bytes_per_s, device.operator_s)
    return forward * (3 if backward else 1)
