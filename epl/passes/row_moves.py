"""Operators that move the rows of logits, done to rows of features instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from epl.ir.graph import Argument, Ref
from epl.ir.types import TensorType
from epl.sharding.options import Call

__all__ = ["IDENTITIES", "MOVES", "Moved", "No"]


class No(Exception):
    """Why logits must stay whole."""


class Moved(NamedTuple):
    """An operator on rows of features.

    Args:
        dim: Where classes, or features, are in the result.
        shape: The result's shape before features take the place of classes.
        is_view: True if it is given by its shape alone; else it is the same operator with the same further arguments.
        keeps_order: True if all rows are there, in the same order.
    """

    dim: int
    shape: tuple[int | None, ...]
    is_view: bool = False
    keeps_order: bool = False


Move = Callable[[Call, TensorType, TensorType, int], Moved]


def _sizes(kind: TensorType, until: int) -> tuple[int, int]:
    """(product of known sizes, number of unknown ones) of the first dimensions."""
    product, unknown = 1, 0
    for size in kind.shape[:until]:
        product, unknown = product * (size or 1) if size != 0 else 0, unknown + (size is None)
    return product, unknown


def _view(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    classes, before = source.shape[dim], _sizes(source, dim)
    for place, size in enumerate(result.shape):
        if size == classes and _sizes(result, place) == before:
            if result.shape.count(None) > 1:
                raise No(f"the shape of {call.op.name} is known only at run time")
            return Moved(place, result.shape, is_view=True, keeps_order=True)
    raise No(f"{call.op.name} = {call.op.target} cuts or joins its classes")


def _slice(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    if call.dim("dim") == dim:
        raise No(f"{call.op.name} = {call.op.target} takes some of its classes")
    return Moved(dim, result.shape)


def _select(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    return Moved(dim - (call.dim("dim") < dim), _slice(call, source, result, dim).shape)


def _squeeze(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    if len(result.shape) == len(source.shape):  # not of size 1: nothing happens
        return Moved(dim, result.shape, keeps_order=True)
    return _select(call, source, result, dim)._replace(keeps_order=True)


def _unsqueeze(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    return Moved(dim + (call["dim"] % len(result.shape) <= dim), result.shape, keeps_order=True)


def _index(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    indices: Argument = call["indices"]
    assert isinstance(indices, tuple)
    if not all(isinstance(index, Ref) for index in indices) or _num_indexed(call) > dim:
        raise No(f"{call.op.name} = {call.op.target} picks other than rows")
    return Moved(len(result.shape) - (len(source.shape) - dim), result.shape)


def _num_indexed(call: Call) -> int:
    """Dimensions that the indices stand for: a mask is as many as it has."""
    kinds = call.types("indices")
    return sum(len(kind.shape) if kind.dtype.itemsize == 1 else 1 for kind in kinds)


def _permuted(order: list[int], result: TensorType, dim: int) -> Moved:
    rows = [place for place in order if place != dim]
    return Moved(order.index(dim), result.shape, keeps_order=rows == sorted(rows))


def _permute(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    rank = len(source.shape)
    return _permuted([place % rank for place in call["dims"]], result, dim)


def _transpose(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    order = list(range(len(source.shape)))
    one, other = (call.dim("dim0"), call.dim("dim1")) if call["dim0"] is not None else (0, len(order) - 1)
    order[one], order[other] = order[other], order[one]
    return _permuted(order, result, dim)


def _movedim(call: Call, source: TensorType, result: TensorType, dim: int) -> Moved:
    rank = len(source.shape)
    start = call.dim("source")
    order = [place for place in range(rank) if place != start]
    order.insert(call.dim("destination"), start)
    return _permuted(order, result, dim)


MOVES: dict[str, Move] = {
    **dict.fromkeys(
        ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints"), _view
    ),
    "aten.unflatten.int": _view,
    "aten.slice.Tensor": _slice,
    "aten.index_select.default": _slice,
    "aten.select.int": _select,
    "aten.squeeze.dim": _squeeze,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.index.Tensor": _index,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.movedim.int": _movedim,
}
IDENTITIES = (
    *("aten.contiguous.default", "aten.clone.default", "aten.alias.default"),
    *("aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default"),
)
