"""Which weights are stored in one stretch of memory, and how replicas share it out: ZeRO, and weights that are elsewhere.

A *unit* is a run of weights in one flat stretch. Of a unit that is shared out each rank owns a *shard*, an equal part, and
of each weight the *piece* that falls into it; the user's optimizer steps pieces. What is not in any unit stays as it is.

    level   each rank keeps             gradients are summed     weights
    v0      its states                  once a step              all; gathered after the optimizer's step
    v1      its states, gradients       after each backward      all; gathered after the optimizer's step
    v2      its states, gradients,      after each backward      a shard; lent to forward and backward by gathering
            weights

Source: ZeRO (Rajbhandari et al. 2020, section 5) and PyTorch's FSDP (Zhao et al. 2023, flat parameters); EPL's
``zero.level``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from epl.planner.plan import ParameterPlan, Plan
from epl.sharding.placements import local_shape, parse_placement

__all__ = ["Slot", "Unit", "shared_out", "units_of"]

_ALIGNED = 16  # elements: each weight and each shard begins at a multiple, as kernels like it
_NUM_LENT = 16  # parts that lent weights are gathered in: about as many as a model has layers
_LENT_BYTES = (4 << 10, 64 << 20)  # least and most of a part, unless one weight is larger


@dataclass(frozen=True)
class Slot:
    """A weight in a unit.

    Args:
        path: Its path in the model.
        shape: Of what this rank's stage uses of it.
        start: Its first element in the unit.
    """

    path: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class _Treatment:
    """What weights of one unit have in common.

    Args:
        ranks: Those that hold the weights and sum up their gradients.
        num_shards: Parts that are shared out: 1, or one for each of the ranks.
        dtype: Element type, as ``float32``.
        is_trained: True if they take gradients.
        is_lent: True if they are brought for each use and given back after it.
        is_cut: True if each rank stores its own shard of the weights, and no more.
        each_backward: True if gradients are summed after each backward pass, and not once a step.
        is_tied: True if several stages use them. They come to the end of backward at different times, and wait for one
            another for the values between them; so these gradients are summed when all else is done.
        home: Where they are stored: ``device``, ``host`` or ``disk``.
    """

    ranks: tuple[int, ...]
    num_shards: int
    dtype: str
    is_trained: bool
    is_lent: bool
    is_cut: bool
    each_backward: bool
    is_tied: bool
    home: str

    @property
    def order(self) -> tuple[object, ...]:
        """Smaller groups of ranks first: the same order on all ranks, so that none waits for another in a circle."""
        return (len(self.ranks), self.ranks, self.dtype, not self.is_trained, self.is_lent, self.home)


@dataclass(frozen=True)
class Unit(_Treatment):
    """A run of weights that are stored and sent together, as one rank sees it; see `_Treatment` for the first arguments.

    Args:
        slots: The weights, in order.
        shard_size: Elements of a shard.
    """

    slots: tuple[Slot, ...]
    shard_size: int

    @property
    def size(self) -> int:
        """Elements of all shards."""
        return self.shard_size * self.num_shards

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def is_one_weight(self) -> bool:
        """True if it has the memory of one weight, with nothing beside it: then a gradient can be its bucket."""
        return len(self.slots) == 1 and self.size == self.slots[0].size

    @property
    def size_bytes(self) -> int:
        """Of all shards."""
        return self.size * self.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_size * self.itemsize

    @property
    def stored_bytes(self) -> int:
        """What a rank stores of the weights, wherever that is."""
        return self.shard_bytes if self.is_cut else self.size_bytes

    def place_of(self, rank: int) -> int:
        """Which shard a rank owns."""
        return self.ranks.index(rank) if self.num_shards > 1 else 0

    def piece(self, slot: Slot, place: int) -> tuple[int, int]:
        """(start, stop) in a weight's elements of what falls into a shard; the same twice if nothing does."""
        first = place * self.shard_size
        start, stop = max(slot.start, first), min(slot.stop, first + self.shard_size)
        return (start - slot.start, stop - slot.start) if start < stop else (0, 0)


def units_of(plan: Plan, rank: int) -> tuple[Unit, ...]:
    """The units of a rank, in the order in which ranks meet over them: the same order on all ranks of a unit.

    Args:
        plan: The plan.
        rank: Whose units.
    """
    stage, replica, position = plan.place_of(rank)
    num_ranks = len(plan.stages[stage].ranks[replica])
    found: dict[_Treatment, list[tuple[str, tuple[int, ...]]]] = {}
    for entry in plan.parameters:
        treatment = _treatment(plan, entry, stage, rank)
        if treatment is not None:
            shape = local_shape(entry.shape, parse_placement(entry.placement), num_ranks, position)
            found.setdefault(treatment, []).append((entry.path, shape))
    units: list[Unit] = []
    for treatment in sorted(found, key=lambda treatment: treatment.order):
        weights = found[treatment]
        units += [_unit(treatment, part) for part in _parts(weights, _num_parts(plan, treatment, weights))]
    return tuple(units)


def shared_out(plan: Plan) -> frozenset[str]:
    """Paths of the weights that lie in units, on any rank."""
    firsts = {stage.ranks[0][0] for stage in plan.stages}
    return frozenset(slot.path for rank in firsts for unit in units_of(plan, rank) for slot in unit.slots)


def _treatment(plan: Plan, entry: ParameterPlan, stage: int, rank: int) -> _Treatment | None:
    """How a weight is stored; None if each rank that uses it keeps it as it is."""
    if entry.kind != "parameter" or stage not in entry.stages:
        return None
    ranks = next(ranks for ranks in plan.holders(entry) if rank in ranks)
    level = plan.zero if len(ranks) > 1 else ""
    # stages use a tied weight at different times: there is no moment at which all of them could gather it
    is_tied = len(entry.stages) > 1
    is_cut = level == "v2" and not is_tied
    is_away = entry.home != "device"
    shares_states = bool(level) and entry.trainable
    if not (shares_states or is_cut or is_away):
        return None
    return _Treatment(
        ranks=ranks,
        num_shards=len(ranks) if shares_states or is_cut else 1,
        dtype=entry.dtype,
        is_trained=entry.trainable,
        is_lent=is_cut or is_away,
        is_cut=is_cut,
        each_backward=shares_states and level != "v0" and not is_tied,
        is_tied=is_tied,
        home=entry.home,
    )


def _num_parts(plan: Plan, treatment: _Treatment, weights: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    if not treatment.is_lent:
        return plan.max_buckets
    least, most = _LENT_BYTES
    total = sum(prod(shape) for _, shape in weights) * getattr(torch, treatment.dtype).itemsize
    return max(1, min(_NUM_LENT, total // least), -(-total // most))


def _parts(weights: Sequence[tuple[str, tuple[int, ...]]], count: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """About ``count`` runs of about the same number of elements, the last weights first: so gradients become ready.

    A weight larger than that is by itself: its gradient need not be copied to be sent.
    """
    total, done = sum(prod(shape) for _, shape in weights), 0
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    was_large = False
    for path, shape in reversed(weights):
        is_large = prod(shape) > total / count
        if parts[-1] and prod(shape) and (is_large or was_large or done >= total * len(parts) / count):
            parts.append([])
        parts[-1].append((path, shape))
        done, was_large = done + prod(shape), is_large
    return [part[::-1] for part in parts]


def _unit(treatment: _Treatment, weights: Sequence[tuple[str, tuple[int, ...]]]) -> Unit:
    slots: list[Slot] = []
    end = 0
    for path, shape in weights:
        slots.append(Slot(path, shape, end))
        end = _aligned(slots[-1].stop)
    shard_size = _aligned(-(-end // treatment.num_shards))
    return Unit(**vars(treatment), slots=tuple(slots), shard_size=shard_size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
