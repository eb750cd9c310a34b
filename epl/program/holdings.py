"""What a rank holds throughout a step, in bytes, as its plan says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from epl.planner.plan import Plan
from epl.planner.units import Unit, units_of
from epl.sharding.placements import local_shape, parse_placement

__all__ = ["Holdings", "bucket_bytes", "stepped_bytes", "weight_bytes"]


@dataclass(frozen=True)
class Holdings:
    """What a rank has throughout a step, and how it treats what it makes.

    Args:
        weights: Bytes of parameters, buffers and constants.
        buckets: Bytes of the buckets that gradients are reduced in.
        reduced: Paths of the parameters whose gradients are copied into them.
        keeps_sends: True if the communicator cannot be asked whether a send is over (gloo's).
        units: Weights that are stored together, and whose gradients are summed together.
    """

    weights: int
    buckets: int = 0
    reduced: frozenset[str] = frozenset()
    keeps_sends: bool = True
    units: tuple[Unit, ...] = ()


def weight_bytes(plan: Plan, rank: int) -> int:
    """Bytes of the parameters and buffers that a rank holds on its device."""
    units = units_of(plan, rank)
    in_units = {slot.path for unit in units for slot in unit.slots}
    alone = sum(
        prod(shape) * getattr(torch, dtype).itemsize for path, shape, dtype in _held(plan, rank) if path not in in_units
    )
    return alone + sum(unit.stored_bytes for unit in units if unit.home == "device")


def stepped_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of what a rank's optimizers step of each weight, by path."""
    stage, _, _ = plan.place_of(rank)
    trained = {entry.path for entry in plan.parameters if entry.trainable and stage in entry.stages}
    sizes = {
        path: prod(shape) * getattr(torch, dtype).itemsize
        for path, shape, dtype in _held(plan, rank)
        if path in trained
    }
    for unit in units_of(plan, rank):
        for slot in unit.slots if unit.num_shards > 1 and unit.is_trained else ():
            start, stop = unit.piece(slot, unit.place_of(rank))
            sizes[slot.path] = (stop - start) * unit.itemsize
    return sizes


def bucket_bytes(plan: Plan, rank: int, reduced: frozenset[str]) -> int:
    """Bytes of the buckets of these parameters: their gradients and a flag for each."""
    return sum(
        (prod(shape) + 1) * getattr(torch, dtype).itemsize
        for path, shape, dtype in _held(plan, rank)
        if path in reduced
    )


def _held(plan: Plan, rank: int) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """(path, shape, element type) of what the rank holds of each parameter and buffer."""
    stage, replica, position = plan.place_of(rank)
    num_ranks = len(plan.stages[stage].ranks[replica])
    for entry in plan.parameters:
        if stage in (entry.stages or (0,)):
            yield (
                entry.path,
                local_shape(entry.shape, parse_placement(entry.placement), num_ranks, position),
                entry.dtype,
            )
