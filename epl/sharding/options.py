"""Options: the ways in which an operator may run on shards.

A rule (:mod:`epl.sharding.rules`) is a function from a call to the options of that operator, for one axis of a mesh. An
option says what each tensor argument is used as and what each result comes out as:

    def linear(call: Call) -> Iterator[Option]:
        last = len(call.type("input").shape) - 1
        for dim in range(last):
            yield call.option({"input": Shard(dim)}, Shard(dim))                       # the batch
        yield call.option({"weight": Shard(0), "bias": Shard(0)}, Shard(last))         # output features
        yield call.option({"input": Shard(last), "weight": Shard(1), "bias": PARTIAL}, PARTIAL)  # input features

What is not named is used whole. That everything runs whole on every rank is always possible, and no rule says it.

All shards of one option are cut at the same places: unit by unit, ``Shard(2, unit=64)`` of 768 features goes with
``Shard(2)`` of their view as 12 heads of 64. How gradients are placed follows from the option (`gradient_handed_back`,
`gradient_expected`): the law of the design, and of Alpa's and GSPMD's partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epl.ir.graph import Argument, Op, refs_in
from epl.ir.types import ListType, TensorType, Type
from epl.sharding.placements import Partial, Placement, Replicated, Shard

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Call",
    "Option",
    "Rule",
    "gradient_expected",
    "gradient_handed_back",
    "is_possible",
    "whole_option",
]

WHOLE = Replicated()
PARTIAL = Partial()


@dataclass(frozen=True)
class Option:
    """One way to run an operator on the ranks of a group.

    Args:
        inputs: What each tensor argument is used as, in the order of ``Call.refs``.
        outputs: What each result comes out as; one for an operator with one result.
        form: Name of a local implementation (:mod:`epl.sharding.forms`); empty: the operator itself, on shards.
        sizes: Name of the argument that holds the shape of the result, which becomes that of the shard.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    form: str = ""
    sizes: str = ""

    @property
    def is_whole(self) -> bool:
        """True if every rank does all the work."""
        return all(isinstance(place, Replicated) for place in (*self.inputs, *self.outputs)) and not self.form


def gradient_handed_back(option: Option, place: int) -> Placement:
    """How the gradient for the argument at this place comes out of the backward pass."""
    used = option.inputs[place]
    if isinstance(used, Shard):
        return used
    if isinstance(used, Partial) or option.is_whole:
        return WHOLE
    return PARTIAL  # each rank has worked with it on a part of the rest


def gradient_expected(output: Placement) -> Placement:
    """How the backward pass wants the gradient of a result that came out like this."""
    return output if isinstance(output, Shard) else WHOLE


class Call:
    """An operator call as rules see it: arguments by the names of the operator's schema, and the types of tensors.

    Args:
        op: The operator.
        type_of: Type of each value, by its name.
    """

    def __init__(self, op: Op, type_of: Callable[[str], Type]) -> None:
        self.op = op
        self.arguments: dict[str, Argument] = _by_name(op)
        self.refs: tuple[tuple[str, str], ...] = tuple(
            (name, ref) for name, argument in self.arguments.items() for ref in _tensors_in(argument, type_of)
        )
        self._type_of = type_of

    def __getitem__(self, name: str) -> Any:
        """An argument as it is written: a number, a tuple, a Ref; None if it is left out and has no default."""
        return self.arguments.get(name)

    def types(self, name: str) -> tuple[TensorType, ...]:
        """Types of the tensors in an argument, in order."""
        found = tuple(self._type_of(ref) for given, ref in self.refs if given == name)
        assert all(isinstance(kind, TensorType) for kind in found)
        return found  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        """True if the argument is a tensor, or a list with tensors."""
        return any(given == name for given, _ in self.refs)

    def type(self, name: str) -> TensorType:
        """Type of an argument that is a tensor."""
        (kind,) = self.types(name)
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an argument that is a tensor."""
        return self.type(name).sizes

    def rank(self, name: str) -> int:
        """Number of dimensions of an argument that is a tensor."""
        return len(self.type(name).shape)

    def dim(self, name: str, of: str = "self") -> int:
        """An argument that is a dimension of the tensor ``of``, counted from 0."""
        dim = self[name]
        return dim % max(1, self.rank(of))

    @cached_property
    def results(self) -> tuple[TensorType, ...]:
        """Types of the results."""
        kind = self.op.type
        items = kind.items if isinstance(kind, ListType) else (kind,)
        return tuple(item for item in items if isinstance(item, TensorType))

    @property
    def is_static(self) -> bool:
        """True if every shape is known before the run."""
        kinds = [self._type_of(ref) for _, ref in self.refs]
        return all(isinstance(kind, TensorType) and kind.is_static for kind in (*kinds, *self.results))

    def option(
        self,
        inputs: Mapping[str, Placement | Iterable[Placement]],
        outputs: Placement | Iterable[Placement],
        *,
        form: str = "",
        sizes: str = "",
    ) -> Option:
        """An option from placements by argument name.

        Args:
            inputs: What tensor arguments are used as; one placement for each tensor if an argument is a list. Arguments
                that are not there are passed over; tensors that are not named are used whole.
            outputs: What results come out as; one placement stands for all of them.
            form: As in `Option`.
            sizes: As in `Option`.
        """
        given = {name: iter([p] * len(self.refs) if isinstance(p, _ONE) else p) for name, p in inputs.items()}
        used = tuple(next(given[name]) if name in given else WHOLE for name, _ in self.refs)
        out = (outputs,) * len(self.results) if isinstance(outputs, _ONE) else tuple(outputs)
        return Option(used, out, form, sizes)


_ONE = (Replicated, Shard, Partial)
Rule = Callable[[Call], Iterator[Option]]


def whole_option(call: Call) -> Option:
    """Everything whole on every rank."""
    return Option((WHOLE,) * len(call.refs), (WHOLE,) * len(call.results))


def is_possible(call: Call, option: Option) -> bool:
    """Every shard is of a dimension with a whole number of units, more than one, and as many in all of them."""
    kinds = [call._type_of(ref) for _, ref in call.refs]
    counts = set()
    for kind, place in zip((*kinds, *call.results), (*option.inputs, *option.outputs), strict=True):
        if isinstance(place, Shard):
            assert isinstance(kind, TensorType)
            counts.add(place.num_units(kind.sizes[place.dim]))
    return len(counts) <= 1 and None not in counts and counts.isdisjoint({0, 1})


def _tensors_in(argument: Argument, type_of: Callable[[str], Type]) -> Iterator[str]:
    return (name for name in refs_in(argument) if isinstance(type_of(name), (TensorType, ListType)))


def _by_name(op: Op) -> dict[str, Argument]:
    """Arguments by their names in the operator's schema, with its defaults."""
    space, _, name = op.target.partition(".")
    if space in ("python", "function"):
        return {str(place): argument for place, argument in enumerate(op.args)} | dict(op.kwargs)
    packet, overload = name.split(".")
    schema = getattr(getattr(getattr(torch.ops, space), packet), overload)._schema
    known = {argument.name: argument.default_value for argument in schema.arguments}
    given = {**dict(zip(known, op.args, strict=False)), **dict(op.kwargs)}
    return {name: given.get(name, default) for name, default in known.items()}  # in the order of the schema
