"""What each operator of a stage leaves in memory for backward: found by running them, one by one, on fake tensors.

A rule per operator would be a second truth beside PyTorch's autograd. Fake tensors choose the same kernels as real ones,
so what `torch.autograd.graph.saved_tensors_hooks` sees on them is what will be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from epl.capture.fakes import Fakes
from epl.ir.graph import Argument, Constant, Op, Parameter, Ref
from epl.ir.types import ListType, ScalarType, TensorType, Type
from epl.sharding.collectives import StandInRank
from epl.stage.codegen import autocast, resolve
from epl.stage.stage import Stage

__all__ = ["Memory", "OpMemory", "memory_of"]


@dataclass
class Memory:
    """A stretch of memory.

    Args:
        size_bytes: Its size.
        maker: The place of the operator that makes it; -1 if it is there before (a weight, the batch, what is received).
        is_kept_anyway: True if it lives through the step whatever is computed again: a weight, the batch.
        readers: Places of the operators that take a value in it.
        savers: Places of the operators that keep it for backward.
        needs_grad: True if a value in it gets a gradient.
    """

    size_bytes: int
    maker: int
    is_kept_anyway: bool = False
    readers: list[int] = field(default_factory=list)
    savers: list[int] = field(default_factory=list)
    needs_grad: bool = False


@dataclass
class OpMemory:
    """What an operator does to memory.

    Args:
        saves_results: True if it keeps something that it has made itself, so that to have it again, it has to run again.
        saves_anything: True if it keeps anything at all.
        meets_others: True if it talks to other ranks.
        is_known: False if it could not be tried; then it is taken to keep all that it takes and makes.
    """

    saves_results: bool = False
    saves_anything: bool = False
    meets_others: bool = False
    is_known: bool = True


class _CountingRank(StandInRank):
    """Counts what it does with others."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.meetings = 0

    def _counted(self, name: str) -> Callable[..., Any]:
        function = getattr(StandInRank, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.meetings += 1
            return function(self, *args, **kwargs)

        return call

    def __getattribute__(self, name: str) -> Any:
        if name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            return self._counted(name)
        return super().__getattribute__(name)


def memory_of(stage: Stage, num_ranks: int, position: int) -> tuple[list[Memory], list[OpMemory]]:
    """All memory that a stage's forward uses, and what each operator does to it.

    Args:
        stage: The stage.
        num_ranks: Devices that share out its work.
        position: This rank's place among them.
    """
    trial = _Trial(stage, num_ranks, position)
    found = [trial.run(place, op) for place, op in enumerate(stage.graph.ops)]
    trial.end()
    return list(trial.memory.values()), found


class _Trial:
    def __init__(self, stage: Stage, num_ranks: int, position: int) -> None:
        self.graph = stage.graph
        self.fakes, self.ranks = Fakes(), _CountingRank(position, num_ranks)
        self.functions = {target: function.bind(self.ranks) for target, function in stage.functions.items()}
        self.memory: dict[int, Memory] = {}  # id of the storage -> what is known of it
        self._alive: list[Any] = []  # storages, so that no two have one id
        self.values: dict[str, Any] = {}
        self._device = torch.device("cpu")
        for leaf in self.graph.leaves.values():
            self.values[leaf.name] = self._leaf(leaf)

    def _leaf(self, leaf: Any) -> Any:
        needs_grad = leaf.name in self.graph.needs_grad and _is_differentiable(leaf.type)
        value = self._stand_in(leaf.type, requires_grad=needs_grad)
        if isinstance(value, torch.Tensor):
            memory = self._note(value, -1)
            memory.is_kept_anyway = True
            memory.needs_grad = needs_grad and not isinstance(leaf, Parameter | Constant)
        return value

    def _stand_in(self, kind: Type, *, requires_grad: bool = False) -> Any:
        if isinstance(kind, TensorType):
            return self.fakes.tensor(kind, self._device, requires_grad=requires_grad)
        if isinstance(kind, ListType):
            return [
                self._stand_in(item, requires_grad=requires_grad and _is_differentiable(item)) for item in kind.items
            ]
        assert isinstance(kind, ScalarType)
        return {"int": 1, "float": 1.0, "bool": True, "none": None}[kind.kind]

    def _note(self, tensor: torch.Tensor, maker: int) -> Memory:
        storage = tensor.untyped_storage()
        if id(storage) not in self.memory:
            self._alive.append(storage)
            self.memory[id(storage)] = Memory(storage.nbytes(), maker)
        return self.memory[id(storage)]

    def run(self, place: int, op: Op) -> OpMemory:
        """Try one operator."""
        args = [self._value(arg) for arg in op.args]
        kwargs = {key: self._value(arg) for key, arg in op.kwargs}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, -1).readers.append(place)
        saved: list[torch.Tensor] = []
        met = self.ranks.meetings
        try:
            result = self._call(op, args, kwargs, saved)
            known = True
        except Exception:  # it needs values, or is code of the user's that does not run here: nothing is known of it
            saved.clear()
            result = self._stand_in(op.type, requires_grad=op.name in self.graph.needs_grad)
            known = False
        self.values[op.name] = result
        if not known and op.name in self.graph.needs_grad:
            saved = [*_tensors((args, kwargs)), *_tensors(result)]
        about = OpMemory(bool(saved and not known), bool(saved), self.ranks.meetings > met, known)
        is_cast_weight = op.target == "aten.to.dtype" and not op.views and self._is_weight(op)
        for tensor in _tensors(result):
            memory = self._note(tensor, place)
            memory.is_kept_anyway |= is_cast_weight  # it is not kept at all, but made anew for backward
            memory.needs_grad |= op.name in self.graph.needs_grad
        for tensor in saved:
            memory = self._note(tensor, place)
            memory.savers.append(place)
            about.saves_results |= memory.maker == place
        return about

    def _is_weight(self, op: Op) -> bool:
        name = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        return isinstance(self.graph.leaves.get(name), Parameter)

    def _call(self, op: Op, args: list[Any], kwargs: dict[str, Any], saved: list[torch.Tensor]) -> Any:
        function = self.functions.get(op.target) or resolve(op.target)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with ExitStack() as stack:
            stack.enter_context(self.fakes.mode)
            stack.enter_context(torch.set_grad_enabled(op.grad))
            stack.enter_context(saved_tensors_hooks(pack, _unpacked))
            if op.autocast:
                stack.enter_context(autocast(op.autocast))
            return function(*args, **kwargs)

    def _value(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self.values[argument.name]
        if isinstance(argument, tuple):
            return [self._value(item) for item in argument]
        return argument

    def end(self) -> None:
        """What the stage gives is read at its end."""
        last = len(self.graph.ops)
        for name in self.graph.output_names:
            for tensor in _tensors(self.values[name]):
                self._note(tensor, -1).readers.append(last)


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_differentiable(kind: Type) -> bool:
    return isinstance(kind, TensorType) and kind.is_differentiable


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _tensors(value)
    elif isinstance(nest, (list, tuple)):
        for value in nest:
            yield from _tensors(value)
