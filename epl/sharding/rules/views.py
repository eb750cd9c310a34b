"""Views: the same elements under another shape.

A reshape is read as groups of dimensions, [4, 6] -> [2, 2, 6] as (4 -> 2, 2) and (6 -> 6). Inside a group, elements stand
in one row on both sides. Cutting a dimension cuts that row in units of what is inside the dimension, in each of the
stretches of what is outside of it; two dimensions may be cut together if they cut the row at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod

from epl.sharding.options import Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import broadcast_cuts, dims_of, linear_in, passed_on, table

__all__ = ["RULES", "reshape_cuts"]

Sizes = Sequence[int]


def reshape_cuts(before: Sizes, after: Sizes) -> Iterator[tuple[Shard, Shard]]:
    """How a tensor and what it is reshaped to are cut at the same places."""
    if prod(before) == 0:
        return
    for old, new in _groups(before, after):
        for source in old:
            for target in new:
                yield from _same_places(before, after, (old, source), (new, target))


def _groups(before: Sizes, after: Sizes) -> Iterator[tuple[list[int], list[int]]]:
    """The least runs of dimensions that hold equally many elements; dimensions of size 1 are in none."""
    left = [dim for dim, size in enumerate(before) if size > 1]
    right = [dim for dim, size in enumerate(after) if size > 1]
    while left and right:
        old, new = [left.pop(0)], [right.pop(0)]
        while (more := prod(before[dim] for dim in old) - prod(after[dim] for dim in new)) != 0:
            old, new = (old, [*new, right.pop(0)]) if more > 0 else ([*old, left.pop(0)], new)
        yield old, new


def _same_places(
    before: Sizes, after: Sizes, source: tuple[list[int], int], target: tuple[list[int], int]
) -> Iterator[tuple[Shard, Shard]]:
    (old, i), (new, j) = source, target
    outside_i, outside_j = prod(before[dim] for dim in old if dim < i), prod(after[dim] for dim in new if dim < j)
    inside_i, inside_j = prod(before[dim] for dim in old if dim > i), prod(after[dim] for dim in new if dim > j)
    unit, repeats = lcm(inside_i, inside_j), lcm(outside_i, outside_j)
    first = Shard(i, unit // inside_i, repeats // outside_i)
    second = Shard(j, unit // inside_j, repeats // outside_j)
    if first.num_units(before[i]) and second.num_units(after[j]):
        yield first, second


def _reshaping(*, sizes: str = "", form: str = "") -> Rule:
    def rule(call: Call) -> Iterator[Option]:
        for source, target in reshape_cuts(call.shape("self"), call.results[0].sizes):
            yield call.option({"self": source}, target, sizes=sizes, form=form)
        yield from linear_in(call, "self")

    return rule


def like_other(call: Call) -> Iterator[Option]:
    """``view_as``: the other tensor says the shape, and is cut as the result is."""
    for source, target in reshape_cuts(call.shape("self"), call.shape("other")):
        yield call.option({"self": source, "other": target}, target)
    yield from linear_in(call, "self")


def expanding(call: Call) -> Iterator[Option]:
    """A dimension of many equal slices comes out cut from one slice that is whole."""
    yield from broadcast_cuts(call, sizes="size")
    yield from linear_in(call, "self")


def expanding_as(call: Call) -> Iterator[Option]:
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self")


def broadcasting(call: Call) -> Iterator[Option]:
    """``broadcast_tensors``: as an operator on all of them would be cut."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "tensors")


def _permuting(call: Call, order: Sequence[int]) -> Iterator[Option]:
    yield from passed_on(call, {source: target for target, source in enumerate(order)})
    yield from linear_in(call, "self")


def permute(call: Call) -> Iterator[Option]:
    yield from _permuting(call, dims_of(call, "dims") if call["dims"] else ())


def _swapping(first: str, second: str) -> Rule:
    def rule(call: Call) -> Iterator[Option]:
        one, other = call.dim(first), call.dim(second)
        order = list(range(call.rank("self")))
        if order:
            order[one], order[other] = order[other], order[one]
        yield from _permuting(call, order)

    return rule


def transposing(call: Call) -> Iterator[Option]:
    """``t`` and ``mT`` (and ``mH``, of real numbers the same): the last two dimensions."""
    order = list(range(call.rank("self")))
    yield from _permuting(call, [*order[:-2], *reversed(order[-2:])])


def reversing(call: Call) -> Iterator[Option]:
    yield from _permuting(call, list(reversed(range(call.rank("self")))))


def moving(call: Call) -> Iterator[Option]:
    """``movedim``: the moved dimensions at their new places, the others in order between them."""
    moved = dict(zip(dims_of(call, "destination"), dims_of(call, "source"), strict=True))
    others = iter([dim for dim in range(call.rank("self")) if dim not in moved.values()])
    yield from _permuting(call, [moved[dim] if dim in moved else next(others) for dim in range(call.rank("self"))])


def repeating(call: Call) -> Iterator[Option]:
    """``repeat`` and ``tile``: a repeated dimension is a row of stretches, each cut like the one it repeats."""
    times = call["repeats"] if call["dims"] is None else call["dims"]
    times = [1] * (call.rank("self") - len(times)) + list(times)
    more = len(times) - call.rank("self")
    for dim in range(call.rank("self")):
        yield call.option({"self": Shard(dim)}, Shard(more + dim, repeats=max(1, times[more + dim])))
    yield from linear_in(call, "self")


def repeating_each(call: Call) -> Iterator[Option]:
    """``repeat_interleave``: the copies of an element are a unit."""
    if call["dim"] is not None:
        repeated = call.dim("dim")
        yield from passed_on(call, {dim: dim for dim in range(call.rank("self")) if dim != repeated})
        if call["output_size"] is None:
            yield call.option({"self": Shard(repeated)}, Shard(repeated, unit=max(1, call["repeats"])))
    yield from linear_in(call, "self")


def windows(call: Call) -> Iterator[Option]:
    """``unfold``: windows along one dimension, which stays whole."""
    slid = call.dim("dimension")
    yield from passed_on(call, {dim: dim for dim in range(call.rank("self")) if dim != slid})
    yield from linear_in(call, "self")


def diagonal(call: Call) -> Iterator[Option]:
    """The dimensions beside the two of the diagonal."""
    gone = {call.dim("dim1"), call.dim("dim2")}
    kept = [dim for dim in range(call.rank("self")) if dim not in gone]
    yield from passed_on(call, {dim: place for place, dim in enumerate(kept)})
    yield from linear_in(call, "self")


RULES: dict[str, Rule] = {
    **table(_reshaping(sizes="size"), "view _unsafe_view"),
    **table(_reshaping(sizes="shape"), "reshape"),
    **table(_reshaping(), "flatten.using_ints unsqueeze ravel"),
    # a part of size 1 must not be squeezed, and unflatten names a part of its shape only: both need the shape
    **table(_reshaping(form="reshape"), "squeeze squeeze.dim squeeze.dims unflatten.int"),
    **table(like_other, "view_as reshape_as"),
    **table(expanding, "expand broadcast_to"),
    **table(expanding_as, "expand_as"),
    **table(broadcasting, "broadcast_tensors"),
    **table(permute, "permute"),
    **table(_swapping("dim0", "dim1"), "transpose.int swapdims"),
    **table(_swapping("axis0", "axis1"), "swapaxes"),
    **table(transposing, "t mT adjoint matrix_H"),
    **table(reversing, "numpy_T"),
    **table(moving, "movedim.int movedim.intlist moveaxis.int moveaxis.intlist"),
    **table(repeating, "repeat tile"),
    **table(repeating_each, "repeat_interleave.self_int"),
    **table(windows, "unfold"),
    **table(diagonal, "diagonal"),
}
# No rule: unsqueeze_ and squeeze_, whose argument would be cut along one dimension before and another one after.
