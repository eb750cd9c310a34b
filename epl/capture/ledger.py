"""A ledger of the memory that operators make and that is given back, for runs on fake tensors.

Every operator's results pass by here: a storage that was not seen before is memory made, and the end of a storage is memory
given back. So what autograd keeps, and until when, is observed and not modelled. Two things that fakes lack are made up:
values (``tensor.item()``), by stand-ins, and what a kernel needs while it runs, which is left for trials on real memory.

``torch.utils._python_dispatch`` is the documented place of dispatch modes since torch 1.12; there is no public name for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Call", "Entry", "Ledger"]

_VALUE = "aten._local_scalar_dense.default"
# These write every sample's loss into the memory of the result before they reduce it to one number, and that memory stays
# [measured: torch 2.13, CPU, 2026-11: a loss of 4 bytes in a storage of the size of the argument].
_ROOMY = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)


class Call(NamedTuple):
    """An operator's call whose kernel may take memory of its own: the types of its arguments, not the arguments."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


class Like(NamedTuple):
    """What is kept of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Entry(NamedTuple):
    """One line of the ledger.

    Args:
        kind: ``memory`` (made, or given back if negative), ``call`` (a kernel runs) or ``mark``.
        storage: Number of the storage; 0 if it was there before; of a call its place in ``Ledger.calls``.
        size_bytes: Of the storage.
        name: Of a mark.
    """

    kind: str
    storage: int
    size_bytes: int = 0
    name: str = ""


class Ledger(TorchDispatchMode):
    """Writes down every storage that is made and given back inside ``with ledger:``.

    Args:
        hungry: Names of operators (``aten.convolution.default``) whose calls are noted.
    """

    def __init__(self, hungry: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.calls: list[Call] = []
        self._hungry = hungry
        self._number: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._next = 1

    def outside(self, tensor: torch.Tensor) -> None:
        """Note memory that was there before, and that does not count."""
        self._note(tensor, is_counted=False)

    def number_of(self, tensor: torch.Tensor) -> int:
        """The storage of a tensor, as entries call it."""
        return self._number.get(id(tensor.untyped_storage()), 0)

    def mark(self, name: str, tensor: torch.Tensor) -> None:
        """Write a line about a tensor."""
        self.entries.append(Entry("mark", self.number_of(tensor), tensor.untyped_storage().nbytes(), name))

    def _note(self, tensor: torch.Tensor, *, is_counted: bool = True, at_least: int = 0) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._ends:
            return
        number, size_bytes = (self._next, max(at_least, storage.nbytes())) if is_counted else (0, 0)
        self._next += is_counted
        if is_counted:
            self.entries.append(Entry("memory", number, size_bytes))
        self._number[key] = number
        self._ends[key] = weakref.ref(storage, lambda _: self._end(key, number, size_bytes))

    def _end(self, key: int, number: int, size_bytes: int) -> None:
        del self._ends[key], self._number[key]
        if number:
            self.entries.append(Entry("memory", number, -size_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name == _VALUE:
            return _stand_in(args[0].dtype)
        if name in self._hungry:
            described = tuple((key, _described(value)) for key, value in (kwargs or {}).items())
            self.entries.append(Entry("call", len(self.calls)))
            self.calls.append(Call(func, tuple(map(_described, args)), described))
        result = func(*args, **(kwargs or {}))
        room = max(args[0].nbytes, args[1].nbytes) if name in _ROOMY else 0
        for tensor in _tensors(result):
            self._note(tensor, at_least=room)
        return result


def _stand_in(dtype: torch.dtype) -> bool | int | float:
    """A value where there is none, that most code can go on with: 1 is a size and a count; a half is no 0 and no 1."""
    if dtype is torch.bool:
        return True
    return 0.5 if dtype.is_floating_point else 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Like(tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, list):
        return tuple(map(_described, value))
    return value
