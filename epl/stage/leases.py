"""Weights that are brought for one use and given back after it: gathered from other ranks, read from a file, or cast.

A *lease* is an operator that takes a stored weight and gives it as the next operator wants it. What it gives lives as long
as forward reads it. Autograd does not keep it, but a note of where it was; when backward asks, it is brought again.

    forward                                     backward
    w = lease_3(p_w)    # gathered, cast        linear's backward asks for its weight -> gathered, cast again
    y = linear(x, w)    # keeps a note of w     the gradient of w, in the type of p_w, goes to p_w
    del w

Source: FSDP (Zhao et al. 2023, gathering and prefetching of units); EPL's memory-efficient AMP (no cast is
kept for backward).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Coming", "Lease", "Leases", "Lender", "UnitCache"]


@dataclass(frozen=True)
class Lease:
    """How a weight is brought.

    Args:
        run: Place among the stage's runs of units, where its unit is used; -1 if the weight is at hand, and is only cast.
        start: Its first element in the unit.
        shape: Its shape.
        dtype: What it is cast to; None: nothing.
    """

    run: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class Lender(Protocol):
    """Who brings units of weights."""

    def bring(self, run: int, direction: int) -> torch.Tensor:
        """The memory of the unit of a run; the next one in this direction (1, -1; 0: none) may be brought ahead."""
        ...


class _Note(NamedTuple):
    """Of a leased tensor that autograd wanted to keep: how to have it again, and which part of it."""

    again: Callable[[], torch.Tensor]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """What autograd keeps as it is. It must not change until backward: with hooks, torch does not see to that."""

    tensor: torch.Tensor
    version: int


class _Lend(torch.autograd.Function):
    """From the stored weight to the leased one, and the gradient back in the stored one's type."""

    @staticmethod
    def forward(ctx: Any, stored: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.dtype = stored.dtype
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(ctx.dtype), None


class Leases:
    """The leases of one stage.

    Args:
        is_again: Tells whether a recompute segment is running once more.
    """

    def __init__(self, is_again: Callable[[], bool] = lambda: False) -> None:
        self._is_again = is_again
        self._notes: dict[int, tuple[weakref.ref[Any], Callable[[], torch.Tensor]]] = {}

    def bind(self, leases: Mapping[str, Lease], lender: Lender) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """The functions that a stage calls, by target."""
        return {target: partial(self._lend, lease, lender) for target, lease in leases.items()}

    def _lend(self, lease: Lease, lender: Lender, stored: torch.Tensor) -> torch.Tensor:
        direction = 0 if self._is_again() else 1
        leased = _Lend.apply(stored, partial(_made, lease, lender, stored.detach(), direction))
        self._note(leased, partial(_made, lease, lender, stored.detach(), -1))
        return leased

    def _note(self, leased: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        storage = leased.untyped_storage()
        key = id(storage)
        self._notes[key] = (weakref.ref(storage, lambda _: self._notes.pop(key, None)), again)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The stage's function, with autograd keeping notes in place of leased tensors."""

        @wraps(function)
        def run(*args: Any) -> Any:
            with saved_tensors_hooks(self._pack, _unpack):
                return function(*args)

        return run

    def _pack(self, tensor: torch.Tensor) -> _Note | _Kept:
        found = self._notes.get(id(tensor.untyped_storage()))
        if found is None:
            return _Kept(tensor, tensor._version)
        return _Note(found[1], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _made(lease: Lease, lender: Lender, stored: torch.Tensor, direction: int) -> torch.Tensor:
    if lease.run < 0:
        assert lease.dtype is not None
        return stored.to(lease.dtype)
    unit = lender.bring(lease.run, direction)
    weight = unit[lease.start : lease.start + prod(lease.shape)].view(lease.shape)
    return weight if lease.dtype is None else weight.to(lease.dtype)


def _unpack(kept: _Note | _Kept) -> torch.Tensor:
    if isinstance(kept, _Note):
        return kept.again().as_strided(kept.size, kept.stride, kept.offset)
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(kept.tensor.shape)} is at version {kept.tensor._version}; expected version "
            f"{kept.version} instead"
        )
    return kept.tensor


class Coming(Protocol):
    """A unit on its way."""

    def get(self) -> torch.Tensor:
        """Its memory, once it is here."""
        ...


class UnitCache:
    """Holds the unit that is in use, and the one that comes next.

    Args:
        runs: The unit of each run, in the order of forward.
        start: Starts to bring a unit.
        ahead: Whether to start the next one ahead of its use: of use where bringing goes on beside computing.
    """

    def __init__(self, runs: Sequence[int], start: Callable[[int], Coming], *, ahead: bool) -> None:
        self._runs, self._start, self._ahead = runs, start, ahead
        self._held: dict[int, Coming] = {}

    def bring(self, run: int, direction: int) -> torch.Tensor:
        """As of `Lender`."""
        unit, next_run = self._runs[run], run + direction
        wanted = [unit]
        if self._ahead and direction and 0 <= next_run < len(self._runs):
            wanted.append(self._runs[next_run])
        self._drop(set(self._held) - set(wanted))
        for each in wanted:
            if each not in self._held:
                self._held[each] = self._start(each)
        return self._held[unit].get()

    def clear(self) -> None:
        """Let go of all: the weights are about to change."""
        self._drop(set(self._held))

    def _drop(self, units: set[int]) -> None:
        for unit in sorted(units):
            self._held.pop(unit).get()  # what is on its way has to arrive: the other ranks send it
