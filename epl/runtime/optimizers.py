"""The user's optimizers on weights of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.errors import StrategyError
from epl.lines import warn
from epl.planner.plan import ParameterPlan, Plan
from epl.runtime.apply import apply_in_groups, refuse_groups
from epl.runtime.state import own_part
from epl.runtime.state_home import StateHome
from epl.runtime.weights import Weights

__all__ = ["fit_optimizers", "refuse_optimizers", "state_factor"]

# Their update of an element depends on other elements of the weight: on norms, rows, columns or the whole matrix.
_NEED_WHOLE_WEIGHTS = ("Adafactor", "LBFGS", "Muon", "Lamb", "LAMB", "LARS", "Shampoo", "SOAP")


def refuse_optimizers(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse what would make another update of a part of a weight than of the whole.

    Raises:
        StrategyError: an optimizer looks at whole weights, and the plan cuts some; or at all weights, and the plan steps
            them in groups.
    """
    level = next((entry.states_home for entry in plan.parameters if entry.states_home != "device"), "")
    refuse_groups(optimizers, plan.num_apply_groups, level)
    is_split = any(entry.placement != "R" for entry in plan.parameters if entry.kind == "parameter")
    is_shared = bool(plan.zero) and plan.num_columns > 1
    wrong = [optimizer for optimizer in optimizers if sees_whole_weights(optimizer)] if is_split or is_shared else []
    if wrong:
        how, cure = (
            ("under split", "replicate") if is_split else (f"with zero.level {plan.zero!r}", "leave zero.level out")
        )
        raise StrategyError(
            f"{type(wrong[0]).__name__} looks at a whole weight to change any element of it, and {how} each rank steps a "
            f"part. Use an optimizer that works element by element (SGD, Adam, AdamW, ...), or {cure}."
        )


def sees_whole_weights(optimizer: Optimizer) -> bool:
    """True if an optimizer makes another update of a part of a weight than of the whole.

    It is tried on a small weight, whole and in two parts, flat as ranks hold them. One that cannot be tried so is taken for
    one that works element by element, unless its name is known.
    """
    if type(optimizer).__name__ in _NEED_WHOLE_WEIGHTS:
        return True
    return any(_is_apart(optimizer, group) for group in optimizer.param_groups)


def _is_apart(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether it shows with the options of one group."""
    options = {key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)}
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    try:
        whole = _stepped(optimizer, options, values, gradients)
    except Exception as error:  # the user's own class, of another form
        warn(
            f"{type(optimizer).__name__} could not be tried on a small weight ({error}), so EPL takes it that it works "
            "element by element; if it looks at whole weights (their norm, their number of dimensions), updates are wrong"
        )
        return False
    cut = [[tensor.flatten()[part] for tensor in (values, *gradients)] for part in (slice(0, 10), slice(10, None))]
    try:
        parts = torch.cat([_stepped(optimizer, options, part[0], part[1:]) for part in cut])
    except Exception:  # such as Muon, which wants matrices
        return True
    return not torch.allclose(whole.flatten(), parts, rtol=1e-9, atol=1e-12)


def _stepped(
    optimizer: Optimizer, options: Mapping[str, Any], values: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The weight after some steps of an optimizer like this one."""
    weight = nn.Parameter(values.clone())
    like = _like(optimizer, weight, options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        like.step()
    return weight.detach()


def _like(optimizer: Optimizer, weight: nn.Parameter, options: Mapping[str, Any]) -> Optimizer:
    """Another optimizer of the same class, on one weight, with these options where they are not the defaults."""
    taken = signature(type(optimizer)).parameters  # AdamW, say, has a default that it does not take
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in taken.values())
    like = type(optimizer)(
        [weight], **{key: value for key, value in optimizer.defaults.items() if takes_all or key in taken}
    )
    like.param_groups[0].update({**optimizer.defaults, **options})
    return like


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
        like = _like(optimizer, weight, {})
        like.step()
    except Exception:  # the user's own class, of another form
        return 2.0
    kept = [value for value in like.state[weight].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in kept if value.numel() > 1) / weight.nbytes


def fit_optimizers(
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    plan: Plan,
    rank: int,
    weights: Weights,
    home: StateHome | None = None,
) -> Callable[[], None]:
    """Make optimizers fit a plan; gives a function that undoes what concerns their later steps.

    What they already keep of weights that are cut is cut, since some make their state when they are made, and so is what is
    loaded into them later, if it is of whole weights; and they step their weights in as many groups as the plan says.
    """
    parameters = dict(model.named_parameters())
    parts: list[tuple[nn.Parameter, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = []
    for entry in plan.parameters:
        is_cut = entry.placement != "R" or entry.path in weights
        if entry.kind == "parameter" and is_cut and plan.place_of(rank)[0] in entry.stages:

            def part(value: torch.Tensor, entry: ParameterPlan = entry) -> torch.Tensor:
                return weights.piece(entry.path, own_part(entry, plan, rank, value))

            parts.append((parameters[entry.path], entry.shape, part))

    def fit(optimizer: Optimizer) -> None:
        for parameter, shape, part in parts:
            _fit(optimizer, parameter, shape, part)

    for optimizer in optimizers:
        fit(optimizer)
    handles = [optimizer.register_load_state_dict_post_hook(fit) for optimizer in optimizers if parts]
    undo_groups = apply_in_groups(optimizers, plan.num_apply_groups, home)

    def undo() -> None:
        undo_groups()
        for handle in handles:
            handle.remove()

    return undo


def _fit(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    shape: tuple[int, ...],
    part: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.shape != parameter.shape:
            optimizer.state[parameter][key] = part(value).clone()
