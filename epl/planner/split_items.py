"""What the choice of placements is made of: items that decide, edges between them, and the ranks that share the work."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from epl.cost.devices import DeviceModel
from epl.sharding.options import Option

__all__ = ["STATES", "Edge", "Item", "Problem", "SplitGroup", "Use"]

STATES = 4  # a trained weight, its gradient, and the two moments of Adam


@dataclass(frozen=True)
class SplitGroup:
    """Those who share the work.

    Args:
        num_ranks: Ranks.
        device: What each computes on.
        num_micro_batches: In a step: what is done once a step is shared by them.
    """

    num_ranks: int
    device: DeviceModel
    num_micro_batches: int = 1


@dataclass(frozen=True)
class Item:
    """Something that decides.

    Args:
        name: Of the operator or leaf; ``"-> name"`` for the outside world, which takes a value.
        kind: ``op``, ``stored`` (a parameter, buffer or constant), ``given`` (comes from the batch or another stage) or
            ``out`` (leaves).
        label: Its module or path, with ``*`` for the number of a repeated block, and its operator.
        group: Items of one group decide alike.
        options: What it may do; for a leaf one result and no inputs.
        times_s: Seconds of each option.
        sizes_bytes: Memory that each option takes for as long as the training runs: weights and what belongs to them.
    """

    name: str
    kind: str
    label: tuple[str, ...]
    group: Hashable
    options: tuple[Option, ...]
    times_s: tuple[float, ...]
    sizes_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Use:
    """A value as one item takes it: the argument at ``place`` of item ``item``."""

    item: int
    place: int


@dataclass(frozen=True)
class Edge:
    """A value and those who use it.

    Args:
        value: Its name.
        maker: The item that makes it, as its result number ``result``.
        uses: Who takes it.
        size_bytes: Of the whole value.
        needs_grad: True if a gradient comes back.
        is_weight: True for a parameter: a gradient that every rank has a part of is summed once a step.
        fixed: Uses that must take it as it is made, because it is changed in place later.
    """

    value: str
    maker: int
    result: int
    uses: tuple[Use, ...]
    size_bytes: int
    needs_grad: bool
    is_weight: bool
    fixed: frozenset[Use]


@dataclass(frozen=True)
class Problem:
    """Items, edges, and the group.

    ``summed`` are weights of whose gradients each rank is to have a summand until the end of the step, if they are whole.
    """

    items: tuple[Item, ...]
    edges: tuple[Edge, ...]
    group: SplitGroup
    summed: frozenset[str] = frozenset()

    @property
    def num_ranks(self) -> int:
        return self.group.num_ranks
