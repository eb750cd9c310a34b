"""The global gradient norm, each parameter counted once, and clipping by it as torch.nn.utils.clip_grad_norm_ does.

Ranks exchange one number for each parameter, or for each part of one that is cut, not one for each rank: so every kind of
norm, and its rounding, is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import repeat

import torch
import torch.nn as nn

from epl.errors import RunError
from epl.planner.plan import Plan
from epl.runtime.weights import Weights

__all__ = ["clip_grad_norm", "global_norm"]


def global_norm(weights: Weights, model: nn.Module, plan: Plan, norm_type: float) -> torch.Tensor:
    """The norm of all gradients; a tied parameter counts once, and so does one that several replicas hold."""
    world, parameters = weights.world, dict(model.named_parameters())
    pieces = plan.world_size if plan.zero else max(stage.device_count for stage in plan.stages)
    norms = torch.zeros(2, len(parameters), pieces, dtype=torch.float64)  # of each part, and 1 where there is one
    for place, piece, gradient in _counted(parameters, plan, weights):
        norms[:, place, piece] = torch.stack([_norm_of(gradient, norm_type).double().cpu(), torch.ones(())])
    world.sum_numbers(norms)
    is_cut = pieces > 1 and bool(parameters)
    whole = torch.stack(list(map(_joined, *norms, repeat(norm_type)))) if is_cut else norms[0].flatten()
    found = whole[norms[1].sum(-1) > 0].to(world.device, _common_dtype(model))
    return torch.linalg.vector_norm(found, norm_type) if found.numel() else found.sum()


def _joined(norms: torch.Tensor, there: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of a gradient from those of its parts."""
    parts = norms[there > 0]
    return parts.sum() if len(parts) < 2 else torch.linalg.vector_norm(parts, norm_type)


def _counted(
    parameters: Mapping[str, nn.Parameter], plan: Plan, weights: Weights
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(place of the parameter, part of it, gradient) of what counts on this rank.

    That is what it is an owner of, and of what is shared out its piece of what an owner has.
    """
    rank, entries = weights.world.rank, {entry.path: entry for entry in plan.parameters}
    units = (stored.unit for stored in weights.units)
    sharers = {slot.path: unit for unit in units if unit.num_shards > 1 for slot in unit.slots}
    for place, (path, parameter) in enumerate(parameters.items()):
        owners, unit = plan.owners(entries[path]), sharers.get(path)
        mine = [number for number, owner in enumerate(owners) if owner == rank or (unit and owner in unit.ranks)]
        if mine and parameter.grad is not None and parameter.grad.numel():
            part = unit.place_of(rank) * len(owners) if unit else 0
            yield place, part + mine[0], parameter.grad


def _norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient.coalesce().values() if gradient.is_sparse else gradient, norm_type)


def _common_dtype(model: nn.Module) -> torch.dtype:
    """The type that one process would give the norm in; the same on all ranks, whichever gradients they have."""
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.requires_grad]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()


def clip_grad_norm(
    weights: Weights,
    model: nn.Module,
    plan: Plan,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; returns the norm before.

    Raises:
        RunError: ``max_norm`` is not a positive number; or, if asked for, the norm is not finite.
    """
    if not max_norm > 0:
        raise RunError(f"clip_grad_norm_(max_norm={max_norm!r}): max_norm must be a positive number")
    norm = global_norm(weights, model, plan, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RunError(f"the total norm of the gradients is {norm.item()}; it cannot be clipped")
    # the same formula as torch.nn.utils.clip_grad_norm_
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
    return norm
