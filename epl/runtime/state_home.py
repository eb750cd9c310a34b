"""Where the states of optimizers live between steps, if not beside the weights: in files, or in the host's memory.

The optimizers are the user's, and make their states themselves at the first step that changes a weight. So a home looks at
``optimizer.state`` around the step of each group of weights:

    DiskHome    states are tensors in files: stepped where they are; new ones are moved there after the group's step, and
                what the step has brought into memory is written and given back.
    HostHome    states are in pinned host memory: copied to the device before the group's step, and back after it. The
                next group's states come while this one steps, on a stream of their own.

In both, memory has the states of one group or two; the group is what ``epl.runtime.apply`` steps at once. What moves are
whole dense tensors in ``optimizer.state[weight]``; counters and small ones stay, and so does what an optimizer keeps
elsewhere.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from epl.runtime.disk import DiskSpace
from epl.runtime.lane import Lane

__all__ = ["DiskHome", "HostHome", "StateHome", "homeless_states"]

_LEAST_ELEMENTS = 1024  # of what is worth the move


class StateHome(ABC):
    """Where states live between steps.

    Attributes:
        level: What ``offload.level`` is, for messages.
        weights: Those whose states live there; None for all.
        is_stepped_in: True if states are stepped where they live, False if they are copied to the weights for that.
    """

    level: str
    weights: Collection[torch.Tensor] | None
    is_stepped_in: bool

    @abstractmethod
    def around(
        self, optimizer: Optimizer, group: Sequence[torch.Tensor], coming: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Inside, the states of a group of weights are where they can be stepped.

        Args:
            optimizer: Whose.
            group: The weights.
            coming: Those that are stepped after them; none for the last group of the step.
        """

    @abstractmethod
    def holds(self, state: torch.Tensor) -> bool:
        """Is this tensor's memory in the home?"""

    @abstractmethod
    def leave(self, optimizer: Optimizer) -> None:
        """Put states where the optimizer can step them without the home; it is not used for this optimizer any more."""


def homeless_states(
    home: StateHome, optimizer: Optimizer, group: Iterable[torch.Tensor], kind: type[torch.Tensor] = torch.Tensor
) -> list[tuple[dict[Any, Any], Any]]:
    """(state of a weight, key) of each tensor of this class that belongs in the home and is not there."""
    found: list[tuple[dict[Any, Any], Any]] = []
    for weight in group:
        if weight in optimizer.state and (home.weights is None or weight in home.weights):
            state = optimizer.state[weight]
            plain = {
                key: value for key, value in state.items() if type(value) is kind and value.layout is torch.strided
            }
            uses = Counter(id(value.untyped_storage()) for value in plain.values())
            found += (
                (state, key)
                for key, value in plain.items()
                if _can_move(value) and uses[id(value.untyped_storage())] == 1 and not home.holds(value)
            )
    return found


def _can_move(value: torch.Tensor) -> bool:
    """Is it worth the move, and has it all of its memory to itself? What shares memory would be torn apart."""
    is_whole = value.untyped_storage().nbytes() == value.nbytes
    return value.numel() > _LEAST_ELEMENTS and is_whole and not value.requires_grad


class DiskHome(StateHome):
    """States in files, of weights that are on the CPU.

    Args:
        space: The files.
        weights: Parameters whose states live there; None for all.
    """

    level, is_stepped_in = "disk", True

    def __init__(self, space: DiskSpace, weights: Collection[torch.Tensor] | None = None) -> None:
        self.weights = None if weights is None else frozenset(weights)
        self._space = space

    def holds(self, state: torch.Tensor) -> bool:
        return self._space.holds(state)

    @contextmanager
    def around(
        self, optimizer: Optimizer, group: Sequence[torch.Tensor], coming: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        yield
        for state, key in homeless_states(self, optimizer, group):
            state[key] = self._on_disk(state[key])
        values = (value for weight in group for value in optimizer.state.get(weight, {}).values())
        used = (*group, *(value for value in values if isinstance(value, torch.Tensor)))
        held = [value for value in used if self._space.holds(value)]
        if held:  # with no tensor it would be all
            self._space.give_back_pages(*held)

    def leave(self, optimizer: Optimizer) -> None:
        """Nothing: what is in files can be stepped as it is, and may not fit into memory."""

    def _on_disk(self, value: torch.Tensor) -> torch.Tensor:
        """A copy that lies in memory in the same order, since kernels ask whether weights and states do."""
        assert value.device.type == "cpu", "weights on an accelerator cannot be stepped with states in files"
        strides = torch.empty_like(value, device="meta").stride()
        return self._space.tensor((value.numel(),), value.dtype).as_strided(value.shape, strides).copy_(value)


class _Guest(NamedTuple):
    """A state on the device, and where it lives."""

    state: dict[Any, Any]
    key: Any
    at_home: torch.Tensor
    on_device: torch.Tensor


class _Fetched(NamedTuple):
    """A group's states on their way to the device, and the event of their arrival."""

    guests: tuple[_Guest, ...] = ()
    arrival: torch.Event | None = None


class HostHome(StateHome):
    """States in the host's memory, pinned so that a device copies to and from it by itself.

    Args:
        device: Where the weights are.
        weights: Parameters whose states live there; None for all.
        level: ``offload.level``.
    """

    is_stepped_in = False

    def __init__(
        self, device: torch.device, weights: Collection[torch.Tensor] | None = None, level: str = "optimizer"
    ) -> None:
        self.level = level
        self.weights = None if weights is None else frozenset(weights)
        self._device = device
        self._lane = Lane(device)
        self._held: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._coming = _Fetched()

    def holds(self, state: torch.Tensor) -> bool:
        return self._held.get(id(state)) is state

    @contextmanager
    def around(
        self, optimizer: Optimizer, group: Sequence[torch.Tensor], coming: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        here = self._coming if self._coming.guests else self._fetch(optimizer, group)
        self._coming = _Fetched()
        self._lane.arrive(here.arrival, [guest.on_device for guest in here.guests])
        for guest in here.guests:
            guest.state[guest.key] = guest.on_device
        try:
            self._coming = self._fetch(optimizer, coming)
            yield
        except BaseException:
            self._coming = _Fetched()  # there will be no next group
            raise
        finally:
            self._bring_home(optimizer, group, here.guests)
            if not self._coming.guests:
                self._lane.wait()  # after the last group the user may look at the states

    def leave(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and self.holds(value):
                    state[key] = value.to(self._device)

    def _fetch(self, optimizer: Optimizer, group: Sequence[torch.Tensor]) -> _Fetched:
        """Start to copy to the device what the step of a group will use."""
        stepped = (weight for weight in group if weight.grad is not None and weight in optimizer.state)
        states: list[dict[Any, Any]] = [optimizer.state[weight] for weight in stepped]
        with self._lane.running():
            guests = tuple(
                _Guest(state, key, value, self._copy_of(value, self._device))
                for state in states
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and self.holds(value)
            )
            return _Fetched(guests, self._lane.mark())

    def _bring_home(self, optimizer: Optimizer, group: Sequence[torch.Tensor], guests: Sequence[_Guest]) -> None:
        places = {(id(guest.state), guest.key): guest.at_home for guest in guests}
        moving = homeless_states(self, optimizer, group)
        self._lane.follow([state[key] for state, key in moving])
        with self._lane.running():
            for state, key in moving:
                value, place = state[key], places.get((id(state), key))
                if place is not None and place.shape == value.shape and place.dtype == value.dtype:
                    state[key] = place.copy_(value, non_blocking=True)
                else:
                    state[key] = self._copy_of(value, torch.device("cpu"))
                    self._held[id(state[key])] = state[key]

    def _copy_of(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        pinned = device.type == "cpu" and self._device.type != "cpu"
        return torch.empty_like(value, device=device, pin_memory=pinned).copy_(value, non_blocking=True)
