"""The global gradient norm, each parameter counted once, and clipping by it as torch.nn.utils.clip_grad_norm_ does.

Ranks exchange one number for each parameter, not one for each rank: so every kind of norm, and its rounding, is that of
one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn as nn

from epl.errors import RunError
from epl.planner.plan import Plan
from epl.runtime.world import World

__all__ = ["clip_grad_norm", "global_norm"]


def global_norm(world: World, model: nn.Module, plan: Plan, norm_type: float) -> torch.Tensor:
    """The norm of all gradients; a tied parameter counts once, and so does one that several replicas hold."""
    parameters = dict(model.named_parameters())
    norms = torch.zeros(2, len(parameters), dtype=torch.float64)  # each parameter's norm, and 1 where it has one
    counted = _counted(parameters, plan, world.rank)
    if counted:
        each = [_norm_of(gradient, norm_type).double() for gradient in counted.values()]
        norms[0, list(counted)] = torch.stack(each).cpu()
        norms[1, list(counted)] = 1.0
    world.sum_numbers(norms)
    found = norms[0][norms[1] > 0].to(world.device, _common_dtype(model))
    return torch.linalg.vector_norm(found, norm_type) if found.numel() else found.sum()


def _counted(parameters: Mapping[str, nn.Parameter], plan: Plan, rank: int) -> dict[int, torch.Tensor]:
    """Place -> gradient of the parameters that count on this rank: those of which its stage is the owner."""
    stage, _, _ = plan.place_of(rank)
    owned = {entry.path for entry in plan.parameters if entry.kind == "parameter" and entry.owner == stage}
    if plan.column_of(rank) != 0:
        return {}
    return {
        place: parameter.grad
        for place, (path, parameter) in enumerate(parameters.items())
        if path in owned and parameter.grad is not None
    }


def _norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient.coalesce().values() if gradient.is_sparse else gradient, norm_type)


def _common_dtype(model: nn.Module) -> torch.dtype:
    """The type that one process would give the norm in; the same on all ranks, whichever gradients they have."""
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.requires_grad]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()


def clip_grad_norm(
    world: World,
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
    norm = global_norm(world, model, plan, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RunError(f"the total norm of the gradients is {norm.item()}; it cannot be clipped")
    # the same formula as torch.nn.utils.clip_grad_norm_
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
    return norm
