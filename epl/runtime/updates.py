"""The memory of the optimizers' step: the user's own optimizer, run on fake tensors with a ledger.

A table of formulas would know torch's optimizers of today; the optimizer itself knows what it keeps and what it makes on
the way. Two steps are run: the first makes its states, a later one finds them. If states live elsewhere between steps
(``epl.runtime.state_home``), they leave the ledger and come back to it as they leave and come back in a real step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.capture.fakes import Fakes
from epl.capture.ledger import Ledger
from epl.ir.types import TensorType
from epl.program.memory import Update
from epl.runtime.apply import step_in_groups
from epl.runtime.state_home import StateHome, homeless_states
from epl.stage.simulate import changes_of

__all__ = ["Updates", "simulate_updates", "state_tensors"]


class Updates(NamedTuple):
    """The memory of the next step of the optimizers, and of each later one.

    Args:
        next: Of the next step.
        later: Of each later one.
        home_bytes: What their states take in their home from the next step on.
    """

    next: Update
    later: Update
    home_bytes: int = 0


def state_tensors(optimizers: Sequence[Optimizer], home: StateHome | None = None) -> list[torch.Tensor]:
    """The tensors in the optimizers' states, without those that are in their home."""
    values = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return [value for value in tensors if home is None or not home.holds(value)]


def simulate_updates(
    optimizers: Sequence[Optimizer],
    parameters: Mapping[str, nn.Parameter],
    gradients: Collection[str],
    num_groups: int = 1,
    home: StateHome | None = None,
) -> Updates:
    """The memory of a step of these optimizers.

    Args:
        optimizers: The user's; they stay as they are.
        parameters: The model's, by path.
        gradients: Paths of those that have a gradient on this rank.
        num_groups: Groups of weights that are stepped one after another.
        home: Where states live between steps, which does not count; None for beside the weights.
    """
    try:
        return _simulated(optimizers, {parameters[path] for path in gradients}, num_groups, home)
    except Exception as error:  # an optimizer of the user's may do anything; a memory report must not fail with it
        before = _size(state_tensors(optimizers, home))
        text = str(error).strip().split("\n")[0]
        update = Update(before, (), f"the optimizer's step is not predicted: {type(error).__name__}: {text}")
        return Updates(update, update)


def _simulated(
    optimizers: Sequence[Optimizer],
    with_gradient: Collection[nn.Parameter],
    num_groups: int,
    home: StateHome | None,
) -> Updates:
    fakes, ledger = Fakes(), Ledger()
    away = None if home is None else _ImaginedHome(home, fakes, ledger)
    stand_ins = [_stand_in(optimizer, with_gradient, _Fakers(fakes, ledger, away)) for optimizer in optimizers]
    before = _size(state_tensors(stand_ins, away))
    ends = [len(ledger.entries)]
    for _ in range(2):
        for optimizer in stand_ins:
            step_in_groups(optimizer, partial(_step, optimizer, fakes, ledger), num_groups, away)
        ends.append(len(ledger.entries))
    kinds = {ledger.number_of(tensor): "optimizer" for tensor in state_tensors(stand_ins)}
    kinds |= dict.fromkeys(away.seen if away else (), "optimizer")
    after = _size(state_tensors(stand_ins, away))
    at_home = _size(state_tensors(stand_ins)) - after
    first, second = (ledger.entries[start:end] for start, end in pairwise(ends))
    return Updates(Update(before, changes_of(first, kinds)), Update(after, changes_of(second, kinds)), at_home)


def _step(optimizer: Optimizer, fakes: Fakes, ledger: Ledger) -> None:
    with fakes.mode, ledger:
        optimizer.step()


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _ImaginedHome(StateHome):
    """What a home does, with fakes: those that are in it are in no ledger.

    Args:
        of: The home.
        fakes: The fakes.
        ledger: The ledger.
    """

    def __init__(self, of: StateHome, fakes: Fakes, ledger: Ledger) -> None:
        self.of, self.level, self.is_stepped_in = of, of.level, of.is_stepped_in
        self._chosen: set[torch.Tensor] = set()
        self.weights = None if of.weights is None else self._chosen
        self.seen: set[int] = set()  # numbers in the ledger of states that came or went
        self._fakes, self._ledger = fakes, ledger
        self._held: dict[int, torch.Tensor] = {}  # by id

    def choose(self, parameter: torch.Tensor, stand_in: torch.Tensor) -> None:
        """This stand-in is of this parameter."""
        if self.of.weights is not None and parameter in self.of.weights:
            self._chosen.add(stand_in)

    def at_home(self, value: torch.Tensor) -> torch.Tensor:
        """A fake of a state that is in the home; made outside of the ledger."""
        made = self._fakes.tensor(TensorType(value.dtype, tuple(value.shape)), value.device)
        self._ledger.outside(made)
        self._held[id(made)] = made
        return made

    def holds(self, state: torch.Tensor) -> bool:
        return id(state) in self._held

    @contextmanager
    def around(
        self, optimizer: Optimizer, group: Sequence[torch.Tensor], coming: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        if not self.is_stepped_in:
            for weight in (*group, *coming):
                self._fetch(optimizer, weight)
        yield
        kind = type(group[0]) if group else torch.Tensor
        for state, key in homeless_states(self, optimizer, group, kind):
            self.seen.add(self._ledger.number_of(state[key]))
            state[key] = self.at_home(state[key])

    def leave(self, optimizer: Optimizer) -> None:
        """Nothing: no one steps it afterwards."""

    def _fetch(self, optimizer: Optimizer, weight: torch.Tensor) -> None:
        state = optimizer.state[weight] if weight.grad is not None and weight in optimizer.state else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and self.holds(value):
                with self._fakes.mode, self._ledger:
                    state[key] = torch.empty_like(value, device=weight.device)
                self.seen.add(self._ledger.number_of(state[key]))


class _Fakers(NamedTuple):
    """What makes the fakes of a stand-in."""

    fakes: Fakes
    ledger: Ledger
    home: _ImaginedHome | None

    def outside(self, value: Any) -> Any:
        """A fake of what is there before the step and stays; what is no tensor is the same."""
        if not isinstance(value, torch.Tensor):
            return value
        made = self.fakes.tensor(TensorType(value.dtype, tuple(value.shape)), value.device)
        self.ledger.outside(made)
        return made

    def state(self, value: Any) -> Any:
        """A fake of a state."""
        if self.home is None or not isinstance(value, torch.Tensor):
            return self.outside(value)
        if self.home.of.holds(value):
            return self.home.at_home(value)
        with self.fakes.mode, self.ledger:  # it may go home, and that is seen then
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _stand_in(optimizer: Optimizer, with_gradient: Collection[nn.Parameter], make: _Fakers) -> Optimizer:
    """The same optimizer over fakes of the parameters that it will change; without the hooks, which are the user's."""
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    for key in vars(copy):
        if key.endswith("_hooks"):
            copy.__dict__[key] = OrderedDict()
    copy.state = defaultdict(dict)
    copy.param_groups = []
    for group in optimizer.param_groups:
        params = {
            parameter: make.outside(parameter).requires_grad_()
            for parameter in group["params"]
            if parameter in with_gradient
        }
        copy.param_groups.append({**group, "params": list(params.values())})
        for parameter, stand_in in params.items():
            stand_in.grad = make.outside(parameter)
            if make.home is not None:
                make.home.choose(parameter, stand_in)
            if parameter in optimizer.state:
                copy.state[stand_in] = {key: make.state(value) for key, value in optimizer.state[parameter].items()}
    return copy
