"""What the families share: broadcast operands, dimensions that pass through, and sums of partial values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Placement, Shard

__all__ = ["aligned", "broadcast_cuts", "cut_with", "dims_of", "linear_in", "passed_on", "table"]


def table(rule: Rule, names: str) -> dict[str, Rule]:
    """The rule for each of these ATen operators; one without an overload's name means ``default``."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


def dims_of(call: Call, argument: str = "dim", of: str = "self") -> tuple[int, ...]:
    """The dimensions that an argument names, counted from 0: a number, several, or all of them for None and ()."""
    given, rank = call[argument], call.rank(of)
    if given is None or given in ((), []):
        return tuple(range(rank))
    return tuple(dim % max(1, rank) for dim in (given if isinstance(given, (tuple, list)) else (given,)))


def aligned(shape: Sequence[int], dim: int, rank: int) -> Placement:
    """How an operand is cut if a result of ``rank`` dimensions, to which it is broadcast, is cut along ``dim``."""
    own = dim - (rank - len(shape))
    return Shard(own) if own >= 0 and shape[own] != 1 else WHOLE


def broadcast_cuts(
    call: Call, names: Collection[str] = (), *, skip: Collection[int] = (), form: str = "", sizes: str = ""
) -> Iterator[Option]:
    """The result cut along each dimension, and the tensors of the named arguments (of all of them) with it."""
    rank = len(call.results[0].shape)
    for dim in range(rank):
        if dim not in skip:
            yield call.option(cut_with(call, dim, rank, names), Shard(dim), form=form, sizes=sizes)


def cut_with(call: Call, dim: int, rank: int, names: Collection[str] = ()) -> dict[str, list[Placement]]:
    """How the named arguments (all of them) are cut if what they are broadcast to is cut along ``dim``."""
    chosen = names or dict.fromkeys(name for name, _ in call.refs)
    return {name: [aligned(kind.sizes, dim, rank) for kind in call.types(name)] for name in chosen}


def passed_on(call: Call, dims: Mapping[int, int], *, of: str = "self", form: str = "") -> Iterator[Option]:
    """A dimension of one argument that comes out as one of the results, whatever else is done."""
    for source, target in dims.items():
        yield call.option({of: Shard(source)}, Shard(target), form=form)


def linear_in(call: Call, *names: str, form: str = "") -> Iterator[Option]:
    """Summands of the named arguments, all tensors, give summands of the result."""
    kinds = [kind for name in names for kind in call.types(name)]
    is_whole_sum = all(call.has(name) for name in names) and all(
        kind.dtype.itemsize > 1 for kind in (*kinds, *call.results)
    )
    gives_real = all(kind.is_differentiable for kind in call.results)
    # what is rounded to whole numbers does not add up again
    if is_whole_sum and (gives_real or not any(kind.is_differentiable for kind in kinds)):
        yield call.option(dict.fromkeys(names, PARTIAL), PARTIAL, form=form)
