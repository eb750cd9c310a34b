"""The user's optimizers on weights of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.errors import StrategyError
from epl.planner.plan import ParameterPlan, Plan
from epl.runtime.apply import apply_in_groups, refuse_groups
from epl.runtime.state import own_part

__all__ = ["fit_optimizers", "refuse_optimizers", "state_factor"]

# Their update of an element depends on other elements of the weight: on norms, rows, columns or the whole matrix.
_NEED_WHOLE_WEIGHTS = ("Adafactor", "LBFGS", "Muon", "Lamb", "LAMB", "LARS", "Shampoo", "SOAP")


def refuse_optimizers(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse what would make another update of a part of a weight than of the whole.

    Raises:
        StrategyError: an optimizer looks at whole weights, and the plan cuts some; or at all weights, and the plan steps
            them in groups.
    """
    refuse_groups(optimizers, plan.num_apply_groups)
    is_cut = any(entry.placement != "R" for entry in plan.parameters if entry.kind == "parameter")
    wrong = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer).__name__ in _NEED_WHOLE_WEIGHTS]
    if is_cut and wrong:
        raise StrategyError(
            f"{wrong[0]} looks at a whole weight to change any element of it, and under split each rank holds a part. Use "
            "an optimizer that works element by element (SGD, Adam, AdamW, ...), or replicate."
        )


def state_factor(optimizers: Sequence[Optimizer]) -> float:
    """Bytes of optimizer states for each byte of a trained weight: seen on one small weight for each optimizer.

    An optimizer that cannot be tried so is taken for Adam, which keeps two moments.
    """
    sizes, weights = 0.0, 0
    for optimizer in optimizers:
        held = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        sizes, weights = sizes + held * _factor(optimizer), weights + held
    return sizes / weights if weights else 0.0


def _factor(optimizer: Optimizer) -> float:
    weight = nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.zeros_like(weight)
    try:
        like = type(optimizer)([weight], **optimizer.defaults)
        like.step()
    except Exception:  # the user's own class, of another form
        return 2.0
    kept = [value for value in like.state[weight].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in kept if value.numel() > 1) / weight.nbytes


def fit_optimizers(optimizers: Sequence[Optimizer], model: nn.Module, plan: Plan, rank: int) -> Callable[[], None]:
    """Make optimizers fit a plan; gives a function that undoes what concerns their later steps.

    What they already keep of weights that are cut is cut, since some make their state when they are made; and they step
    their weights in as many groups as the plan says.
    """
    parameters = dict(model.named_parameters())
    for entry in plan.parameters:
        if entry.kind == "parameter" and entry.placement != "R" and plan.place_of(rank)[0] in entry.stages:
            for optimizer in optimizers:
                _fit(optimizer, parameters[entry.path], entry, plan, rank)
    return apply_in_groups(optimizers, plan.num_apply_groups)


def _fit(optimizer: Optimizer, parameter: nn.Parameter, entry: ParameterPlan, plan: Plan, rank: int) -> None:
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == entry.shape:
            optimizer.state[parameter][key] = own_part(entry, plan, rank, value).clone()
