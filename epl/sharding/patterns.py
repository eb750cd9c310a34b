"""Where each dimension of each value may be cut, so that all operators that cut it can agree.

A rule says of one call which dimensions go together: features of a linear layer's result with rows of its weight, heads
with features in units of a head. Dimensions that go together in some call form a *class*, and a class is cut in one way
everywhere: into ``atoms``, which are its smallest stretches that no call would tear. So a cut dimension needs no further
word on where it is cut, and shards that meet always fit.

An option that would leave a class fewer atoms than there are ranks is not offered: with 2 key-value heads on 4 ranks the
8 query heads are still cut in 4, since the option that ties them to the key-value heads is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd, lcm

from epl.sharding.forms import PLACED
from epl.sharding.options import Option
from epl.sharding.placements import Placement, Shard

__all__ = ["Patterns", "Slots"]

Node = tuple[str, int]  # a value and one of its dimensions


@dataclass(frozen=True)
class Slots:
    """The values of one call: ``inputs`` and ``outputs`` in the order of an option's, and the sizes of all."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def shards(self, option: Option) -> Iterator[tuple[Node, int, Shard]]:
        """(value and dimension, its size, the shard) of all that an option cuts."""
        names = (*self.inputs, *self.outputs)
        for name, place in zip(names, (*option.inputs, *option.outputs), strict=True):
            if isinstance(place, Shard):
                yield (name, place.dim), self.shapes[name][place.dim], place


@dataclass
class _Class:
    """Dimensions that are cut alike: ``repeats`` of each, and ``atoms`` in each stretch of any of them.

    What is ``fixed`` from outside is not cut in another way for the sake of an option.
    """

    atoms: int
    fixed: bool = False
    repeats: dict[Node, int] = field(default_factory=dict)


class Patterns:
    """The classes of a graph's dimensions on a group of ``num_ranks`` ranks.

    Args:
        num_ranks: Ranks that share the work.
        fixed: Placements that are given, by value: their dimensions are cut as they say.
    """

    def __init__(self, num_ranks: int, fixed: Mapping[str, Placement], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._num_ranks = num_ranks
        self._classes: dict[Node, _Class] = {}
        for name, place in fixed.items():
            if isinstance(place, Shard):
                node = (name, place.dim)
                count = place.num_units(shapes[name][place.dim])
                assert count is not None
                self._classes[node] = _Class(count, True, {node: place.repeats})

    def tie(self, calls: Sequence[tuple[Slots, Sequence[Option]]]) -> None:
        """Join what the options cut together; those that cost no atoms first, then the others in order."""
        for may_lose in (False, True):
            for slots, options in calls:
                for option in options:
                    self._join(slots, option, may_lose=may_lose)

    def _class_of(self, node: Node, size: int) -> _Class:
        if node not in self._classes:
            self._classes[node] = _Class(size, repeats={node: 1})
        return self._classes[node]

    def _join(self, slots: Slots, option: Option, *, may_lose: bool) -> None:
        ratios: dict[int, Fraction] = {}
        classes: dict[int, _Class] = {}
        num_units = 0
        for node, size, shard in slots.shards(option):
            found = self._class_of(node, size)
            ratio = Fraction(found.repeats[node], shard.repeats)
            if ratios.setdefault(id(found), ratio) != ratio:
                return  # two dimensions of one class, which would have to be cut in different ways
            classes[id(found)] = found
            num_units = shard.num_units(size) or 0
        if not classes:
            return
        stretches = _common(ratios.values())
        factors = {key: stretches / ratio for key, ratio in ratios.items()}
        if num_units % stretches or any(classes[key].atoms % factor for key, factor in factors.items()):
            return
        atoms = gcd(num_units // stretches, *(classes[key].atoms // int(factor) for key, factor in factors.items()))
        if atoms < self._num_ranks or (not may_lose and any(found.atoms != atoms for found in classes.values())):
            return
        if any(found.fixed and (found.atoms, 1) != (atoms, factors[key]) for key, found in classes.items()):
            return
        self._merge([(found, int(factors[key])) for key, found in classes.items()], atoms)

    def _merge(self, parts: list[tuple[_Class, int]], atoms: int) -> None:
        """Make one class of them: the largest takes in the others, so that no dimension moves more often than need be."""
        for found, factor in parts:
            if factor != 1:
                found.repeats = {node: repeats * factor for node, repeats in found.repeats.items()}
        (home, _), *others = sorted(parts, key=lambda part: -len(part[0].repeats))
        home.atoms, home.fixed = atoms, any(found.fixed for found, _ in parts)
        for found, _ in others:
            home.repeats.update(found.repeats)
            self._classes.update(dict.fromkeys(found.repeats, home))

    def concrete(self, slots: Slots, option: Option) -> Option | None:
        """The option with the units and repeats of this graph; None if it does not fit its classes."""
        seen: set[tuple[int, Fraction]] = set()
        for node, size, shard in slots.shards(option):
            found = self._classes.get(node)
            if found is None:
                return None
            stretches = Fraction(found.repeats[node], shard.repeats)
            seen.add((id(found), stretches))
            if stretches.denominator != 1 or (shard.num_units(size) or 0) % (int(stretches) * found.atoms):
                return None
            if found.atoms < self._num_ranks or (option.form in PLACED and stretches != 1):
                return None
        if len(seen) > 1:
            return None
        return replace(
            option,
            inputs=tuple(map(self._real, slots.inputs, option.inputs, [slots] * len(slots.inputs))),
            outputs=tuple(map(self._real, slots.outputs, option.outputs, [slots] * len(slots.outputs))),
        )

    def _real(self, name: str, place: Placement, slots: Slots) -> Placement:
        return self.shard(name, place.dim, slots.shapes[name]) if isinstance(place, Shard) else place

    def shard(self, name: str, dim: int, shape: tuple[int, ...]) -> Shard:
        """How a dimension is cut, if it is."""
        found = self._classes[(name, dim)]
        repeats = found.repeats[(name, dim)]
        return Shard(dim, shape[dim] // repeats // found.atoms, repeats)

    def shards_of(self, name: str, shape: tuple[int, ...]) -> Iterator[Shard]:
        """Every way to cut a value that some call can use."""
        for dim in range(len(shape)):
            found = self._classes.get((name, dim))
            if found is not None and found.atoms >= self._num_ranks:
                yield self.shard(name, dim, shape)


def _common(ratios: Iterable[Fraction]) -> int:
    """The smallest whole number that is a multiple of all of them."""
    return lcm(*(ratio.numerator for ratio in ratios))
