"""The global gradient norm, each parameter counted once, and clipping by it as torch.nn.utils.clip_grad_norm_ does."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn as nn

from epl.errors import RunError
from epl.planner.plan import Plan
from epl.runtime.world import World

__all__ = ["clip_grad_norm", "global_norm"]


def global_norm(world: World, model: nn.Module, plan: Plan, norm_type: float) -> torch.Tensor:
    """The norm of all gradients; a tied parameter counts once, and so does one that several replicas hold."""
    stage, _, _ = plan.place_of(world.rank)
    column = plan.column_of(world.rank)
    parameters = dict(model.named_parameters())
    counted = {entry.path for entry in plan.parameters if entry.kind == "parameter" and entry.owner == stage}
    gradients = [p.grad for path, p in parameters.items() if path in counted and p.grad is not None]
    mine = _norm(gradients, norm_type, world.device)
    if world.size == 1:
        return mine
    everyone = torch.zeros(world.size, dtype=torch.float64)
    everyone[world.rank] = mine.double().cpu() if column == 0 else 0.0
    with world.waiting("the gradient norms of all stages"):
        dist.all_reduce(everyone, group=world.control.handle)
    owners = list(plan.ranks_of_column(0))
    return torch.linalg.vector_norm(everyone[owners], norm_type).to(mine.dtype).to(mine.device)


def _norm(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in dense]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


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
