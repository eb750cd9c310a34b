"""The memory of the optimizers' step: the user's own optimizer, run on fake tensors with a ledger.

A table of formulas would know torch's optimizers of today; the optimizer itself knows what it keeps and what it makes on
the way. Two steps are run: the first makes its states, a later one finds them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.capture.fakes import Fakes
from epl.capture.ledger import Ledger
from epl.ir.types import TensorType
from epl.program.memory import Update
from epl.runtime.apply import step_in_groups
from epl.stage.simulate import changes_of

__all__ = ["Updates", "simulate_updates", "state_tensors"]


class Updates(NamedTuple):
    """The memory of the next step of the optimizers, and of each later one."""

    next: Update
    later: Update


def state_tensors(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """The tensors in the optimizers' states."""
    values = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def simulate_updates(
    optimizers: Sequence[Optimizer],
    parameters: Mapping[str, nn.Parameter],
    gradients: Collection[str],
    num_groups: int = 1,
) -> Updates:
    """The memory of a step of these optimizers.

    Args:
        optimizers: The user's; they stay as they are.
        parameters: The model's, by path.
        gradients: Paths of those that have a gradient on this rank.
        num_groups: Groups of weights that are stepped one after another.
    """
    try:
        return _simulated(optimizers, {parameters[path] for path in gradients}, num_groups)
    except Exception as error:  # an optimizer of the user's may do anything; a memory report must not fail with it
        before = sum(tensor.nbytes for tensor in state_tensors(optimizers))
        text = str(error).strip().split("\n")[0]
        update = Update(before, (), f"the optimizer's step is not predicted: {type(error).__name__}: {text}")
        return Updates(update, update)


def _simulated(optimizers: Sequence[Optimizer], with_gradient: Collection[nn.Parameter], num_groups: int) -> Updates:
    fakes, ledger = Fakes(), Ledger()
    stand_ins = [_stand_in(optimizer, with_gradient, fakes, ledger) for optimizer in optimizers]
    before = sum(tensor.nbytes for tensor in state_tensors(stand_ins))
    ends: list[int] = []
    with fakes.mode, ledger:
        for _ in range(2):
            for optimizer in stand_ins:
                step_in_groups(optimizer, optimizer.step, num_groups)
            ends.append(len(ledger.entries))
        kinds = {ledger.number_of(tensor): "optimizer" for tensor in state_tensors(stand_ins)}
    after = sum(tensor.nbytes for tensor in state_tensors(stand_ins))
    first, second = ledger.entries[: ends[0]], ledger.entries[ends[0] : ends[1]]
    return Updates(Update(before, changes_of(first, kinds)), Update(after, changes_of(second, kinds)))


def _stand_in(optimizer: Optimizer, with_gradient: Collection[nn.Parameter], fakes: Fakes, ledger: Ledger) -> Optimizer:
    """The same optimizer over fakes of the parameters that it will change; without the hooks, which are the user's."""
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    for key in vars(copy):
        if key.endswith("_hooks"):
            copy.__dict__[key] = OrderedDict()
    copy.state = defaultdict(dict)
    copy.param_groups = []

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = fakes.tensor(TensorType(value.dtype, tuple(value.shape)), value.device)
        ledger.outside(made)
        return made

    for group in optimizer.param_groups:
        params = {
            parameter: fake(parameter).requires_grad_() for parameter in group["params"] if parameter in with_gradient
        }
        copy.param_groups.append({**group, "params": list(params.values())})
        for parameter, stand_in in params.items():
            stand_in.grad = fake(parameter)
            if parameter in optimizer.state:
                copy.state[stand_in] = {key: fake(value) for key, value in optimizer.state[parameter].items()}
    return copy
