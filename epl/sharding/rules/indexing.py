"""Picking and placing: slices, sections, joins, look-ups. A dimension in which places are looked up stays whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import gcd

import torch

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import aligned, cut_with, linear_in, passed_on, table

__all__ = ["RULES"]


def _others(call: Call, dim: int, *, of: str = "self") -> dict[int, int]:
    return {other: other for other in range(call.rank(of)) if other != dim}


def select(call: Call) -> Iterator[Option]:
    """One place along a dimension, or all of them (``unbind``)."""
    dim = call.dim("dim")
    yield from passed_on(call, {other: other - (other > dim) for other in _others(call, dim)})
    yield from linear_in(call, "self")


def slicing(call: Call) -> Iterator[Option]:
    """``slice`` and ``narrow``: along the dimension itself, all of it, every n-th, or stretches of equal ones."""
    dim = call.dim("dim")
    yield from passed_on(call, _others(call, dim))
    yield from linear_in(call, "self")
    size, step = call.shape("self")[dim], call["step"] or 1
    if not all(isinstance(call[name], (int, type(None))) for name in ("start", "end", "step")):
        return  # a number that is found during the run
    start, stop, _ = slice(call["start"], _stop(call), step).indices(size)
    length = call.results[0].sizes[dim]
    if step == 1 and length > 0:
        stretch = gcd(size, start, length)
        yield call.option(
            {"self": Shard(dim, repeats=size // stretch)}, Shard(dim, repeats=length // stretch), form="slice"
        )
    elif 0 <= start < step and stop == size and size % step == 0:
        yield call.option({"self": Shard(dim, unit=step)}, Shard(dim), form="slice")


def _stop(call: Call) -> int | None:
    length = call["length"]
    start = call["start"]
    if length is None:
        return call["end"]
    start = start if start >= 0 else start + call.shape("self")[call.dim("dim")]
    return start + length


def sections(call: Call) -> Iterator[Option]:
    """``split`` and ``chunk``: sections are one stretch each, or several equal ones, and each stretch is cut."""
    dim = call.dim("dim")
    yield from passed_on(call, _others(call, dim))
    yield from linear_in(call, "self")
    widths = [kind.sizes[dim] for kind in call.results]
    stretch = gcd(*widths)
    if all(widths):
        parts = [Shard(dim, repeats=width // stretch) for width in widths]
        yield call.option({"self": Shard(dim, repeats=sum(widths) // stretch)}, parts, form="sections")


def joining(call: Call) -> Iterator[Option]:
    """``cat``: the reverse of ``split``."""
    kinds = call.types("tensors")
    rank = len(call.results[0].shape)
    dim = call["dim"] % max(1, rank)
    # an empty tensor of one dimension may stand beside any other; a cache of keys begins as one
    is_empty = [kind.shape == (0,) for kind in kinds]
    for other in range(rank):
        if other != dim:
            yield call.option({"tensors": [WHOLE if empty else Shard(other) for empty in is_empty]}, Shard(other))
    full = [kind.shape for kind in kinds if kind.shape != (0,)]
    if len(set(full)) == 1:
        cut = [WHOLE if empty else Shard(dim) for empty in is_empty]
        yield call.option({"tensors": cut}, Shard(dim, repeats=len(full)))
    yield from linear_in(call, "tensors")


def stacking(call: Call) -> Iterator[Option]:
    """``stack``: the new dimension stays whole."""
    rank = len(call.results[0].shape)
    dim = call["dim"] % rank
    for other in range(rank - 1):
        yield call.option({"tensors": Shard(other)}, Shard(other + (other >= dim)))
    yield from linear_in(call, "tensors")


def padding(call: Call) -> Iterator[Option]:
    """Dimensions that get no padding; zeros, and copies of what is there, may be summands."""
    pads, rank = call["pad"] if call["pad"] is not None else call["padding"], call.rank("self")
    padded = {rank - 1 - place // 2 for place, width in enumerate(pads) if width}
    yield from passed_on(call, {dim: dim for dim in range(rank) if dim not in padded})
    if not call["value"]:
        yield from linear_in(call, "self")


def gather(call: Call) -> Iterator[Option]:
    """One look-up for each element: rows of both are cut together, or the places along the dimension."""
    dim = call.dim("dim")
    yield from _together(call, dim, ("self", "index"))
    yield call.option({"index": Shard(dim)}, Shard(dim))
    if _adds_up(call):
        yield call.option({"self": Shard(dim)}, PARTIAL, form="gather")
    yield from linear_in(call, "self")


def _adds_up(call: Call) -> bool:
    """True for tensors that may come out as summands: not for single numbers, nor for truth values."""
    return call.rank("self") > 0 and call.type("self").dtype.itemsize > 1


def _together(call: Call, dim: int, names: Collection[str]) -> Iterator[Option]:
    """Every dimension but one, where all of these tensors have the same size."""
    for other in _others(call, dim):
        if len({call.shape(name)[other] for name in names}) == 1:
            yield call.option({name: Shard(other) for name in names}, Shard(other))


def scatter(call: Call) -> Iterator[Option]:
    """The reverse of ``gather``: rows are cut together."""
    names = ("self", "index", "src") if call.has("src") else ("self", "index")
    yield from _together(call, call.dim("dim"), names)
    if call.has("src") and not call["reduce"]:
        yield from linear_in(call, "self", "src")
    elif call["value"] == 0 and not call["reduce"]:
        yield from linear_in(call, "self")


def scatter_add(call: Call) -> Iterator[Option]:
    """What is added may come from several ranks, each with a part of it."""
    dim = call.dim("dim")
    yield from _together(call, dim, ("self", "index", "src"))
    yield from linear_in(call, "self", "src")
    if call.shape("index") == call.shape("src") and call.rank("self") > 0:
        yield call.option({"self": PARTIAL, "index": Shard(dim), "src": Shard(dim)}, PARTIAL)


def index_select(call: Call) -> Iterator[Option]:
    """Rows by a list of places, which is cut as it comes out."""
    dim = call.dim("dim")
    yield from passed_on(call, _others(call, dim))
    if call.rank("index") == 1:
        yield call.option({"index": Shard(0)}, Shard(dim))
    if _adds_up(call):
        yield call.option({"self": Shard(dim)}, PARTIAL, form="index_select")
    yield from linear_in(call, "self")


def index_add(call: Call) -> Iterator[Option]:
    """Rows added at a list of places: rows of several ranks give summands."""
    dim = call.dim("dim")
    for other in _others(call, dim):
        yield call.option({"self": Shard(other), "source": Shard(other)}, Shard(other))
    yield from linear_in(call, "self", "source")
    if call.rank("index") == 1 and call.rank("source"):
        yield call.option({"self": PARTIAL, "index": Shard(0), "source": Shard(dim)}, PARTIAL)


def index_copy(call: Call) -> Iterator[Option]:
    """Rows written at a list of places, or a number (``index_fill``)."""
    names = ("self", "source") if call.has("source") else ("self",)
    for other in _others(call, call.dim("dim")):
        yield call.option({name: Shard(other) for name in names}, Shard(other))
    if call.has("source") or call["value"] == 0:
        yield from linear_in(call, *names)


def slice_write(call: Call) -> Iterator[Option]:
    """``slice_scatter`` and ``select_scatter``: a copy in which a slice, or one place, is another tensor."""
    dim, fewer = call.dim("dim"), call.rank("src") < call.rank("self")
    for other in _others(call, dim):
        yield call.option({"self": Shard(other), "src": Shard(other - (fewer and other > dim))}, Shard(other))
    yield from linear_in(call, "self", "src")


def _indexed(call: Call) -> tuple[dict[int, int], int, int] | None:
    """Where the dimensions without indices come out, and where those of the indices, and how many; None for masks."""
    kinds = list(call.types("indices"))
    if any(kind.dtype in (torch.bool, torch.uint8) for kind in kinds):
        return None  # how many elements a mask picks depends on it
    places = [place for place, index in enumerate(call["indices"]) if index is not None]
    width = max((len(kind.shape) for kind in kinds), default=0)
    beside = bool(places) and places[-1] - places[0] + 1 == len(places)
    first = places[0] if beside else 0
    kept = [dim for dim in range(call.rank("self")) if dim not in places]
    return {dim: place + (place >= first) * width for place, dim in enumerate(kept)}, first, width


def index(call: Call) -> Iterator[Option]:
    """Indices of some dimensions: the others are cut as they are, the indices among each other, or rows with one index."""
    found = _indexed(call)
    if found is not None:
        kept, first, width = found
        yield from passed_on(call, kept)
        for dim in range(width):
            used = [aligned(kind.sizes, dim, width) for kind in call.types("indices")]
            yield call.option({"indices": used}, Shard(first + dim))
        places = [place for place, given in enumerate(call["indices"]) if given is not None]
        if len(places) == 1 and _adds_up(call):
            yield call.option({"self": Shard(places[0])}, PARTIAL, form="index_rows")
        yield from linear_in(call, "self")


def index_put(call: Call) -> Iterator[Option]:
    """The dimensions without indices are cut, in what is written and what is written to."""
    found = _indexed(call)
    if found is None:
        return
    kept, _, width = found
    for dim, place in kept.items():
        written = cut_with(call, place, len(kept) + width, ["values"])
        yield call.option({"self": Shard(dim), **written}, Shard(dim))
    yield from linear_in(call, "self", "values")


def embedding(call: Call) -> Iterator[Option]:
    """Tokens, columns, or rows: each rank looks up what is among its rows, and zeros stand for the rest."""
    if call["sparse"]:
        return
    last = call.rank("indices")
    if not call["scale_grad_by_freq"]:  # how often a token comes is known of the whole batch only
        for dim in range(last):
            yield call.option({"indices": Shard(dim)}, Shard(dim))
        yield call.option({"weight": Shard(0)}, PARTIAL, form="embedding_rows")
    yield call.option({"weight": Shard(1)}, Shard(last))
    yield call.option({"weight": PARTIAL}, PARTIAL)


def one_hot(call: Call) -> Iterator[Option]:
    """The classes are a new last dimension; how many there are must be said."""
    if call["num_classes"] > 0:
        yield from passed_on(call, {dim: dim for dim in range(call.rank("self"))})


RULES: dict[str, Rule] = {
    **table(select, "select.int unbind.int"),
    **table(slicing, "slice.Tensor narrow"),
    **table(
        sections,
        "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections unsafe_split.Tensor unsafe_chunk",
    ),
    **table(joining, "cat concat concatenate"),
    **table(stacking, "stack"),
    **table(padding, "pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d"),
    **table(gather, "gather"),
    **table(scatter, "scatter.src scatter.value scatter_.src scatter_.value scatter_reduce.two"),
    **table(scatter_add, "scatter_add scatter_add_"),
    **table(index_select, "index_select"),
    **table(index_add, "index_add index_add_"),
    **table(index_copy, "index_copy index_copy_ index_fill.int_Scalar index_fill_.int_Scalar"),
    **table(slice_write, "slice_scatter select_scatter"),
    **table(index, "index.Tensor"),
    **table(index_put, "index_put index_put_"),
    **table(embedding, "embedding"),
    **table(one_hot, "one_hot"),
}
# No rule: embedding_bag (bags of any length), nonzero, masked_select and unique (results of any length), bincount
# without minlength, searchsorted.
