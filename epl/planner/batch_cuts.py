"""How the operators of a ``replicate(k)`` TaskGraph share out the batch, where one batch is for all devices of a replica.

``replicate(k)`` says that weights are whole and the batch is cut. Which dimension of a value is the batch's follows from
the graph: it enters with the batch's tensors, and each operator's rule says where it comes out (a view may move it, an
attention mask has none, a loss adds it up). So each operator gets the one option under which what comes in cut by the
batch stays cut, and no search is needed. An operator that mixes samples (normalisation over the batch, a contrastive
loss) gets its rule's own form, or runs whole on gathered values: the numbers are those of one process on the whole batch.

Source: propagation of shardings from annotations, as in GSPMD (Xu et al. 2021, section 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from epl.ir.graph import Graph
from epl.ir.types import TensorType
from epl.planner.values import tensor_results, value_names
from epl.sharding.options import Call, Option
from epl.sharding.placements import Partial, Replicated, Shard
from epl.sharding.rules import options_of

__all__ = ["batch_cuts"]


@dataclass(frozen=True)
class _Cut:
    """Where the batch is in a value: the dimension, its stretches one after another, and a sample's elements in each."""

    dim: int
    repeats: int = 1
    unit: int = 1

    def scale(self, shard: Shard) -> tuple[Fraction, Fraction]:
        """How many of an option's stretches and units there are in those of the batch."""
        return Fraction(self.repeats, shard.repeats), Fraction(self.unit, shard.unit)


def batch_cuts(graph: Graph) -> dict[str, Option]:
    """The option of each operator that works on a part of the batch, by name; the others run whole.

    Args:
        graph: A graph with its TaskGraphs; all of it is followed, since the batch goes through all of it.
    """
    follow = _Follower(graph)
    follow.run({})
    made_cut = follow.asked_of_makers()
    if made_cut:
        follow.run(made_cut)
    return follow.chosen


class _Follower:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.names = graph, value_names(graph)
        self.fixed = {leaf.name for leaf in (*graph.parameters, *graph.buffers, *graph.constants)}
        self.calls = [Call(op, graph.type_of) for op in graph.ops if op.target != "python.getitem"]
        self.options = {call.op.name: options_of(call)[1:] for call in self.calls}
        self.cuts: dict[str, _Cut] = {}
        self.chosen: dict[str, Option] = {}

    def run(self, made_cut: Mapping[str, Option]) -> None:
        """Follow the batch from the inputs through all operators; those of ``made_cut`` do as it says."""
        self.chosen = {}
        self.cuts = {leaf.name: _Cut(0) for leaf in self.graph.inputs if self._is_of_batch(leaf.type)}
        for call in self.calls:
            option = made_cut.get(call.op.name) or self._best(call)
            if option is not None:
                self.chosen[call.op.name] = option
                self._note(call, option)

    def _is_of_batch(self, kind: TensorType) -> bool:
        """As :func:`epl.batch.take` has it: the first dimension is that of the first tensor that has one."""
        size = next(leaf.type.sizes[0] for leaf in self.graph.inputs if leaf.type.shape) if kind.shape else 0
        return bool(kind.shape) and kind.sizes[0] == size

    def _inputs(self, call: Call) -> list[str]:
        return [self.names[ref] for _, ref in call.refs]

    def _best(self, call: Call) -> Option | None:
        """The option that takes most as it comes: no gathering if that can be, and a cut result before a sum."""
        inputs = self._inputs(call)
        ranked = [
            (score, -place, option)
            for place, option in enumerate(self.options[call.op.name])
            if (score := self._score(inputs, option)) is not None
        ]
        return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None

    def _score(self, inputs: Sequence[str], option: Option) -> tuple[int, int, int, int] | None:
        """(taken as they come, less gathered, less cut on the way, results that stay cut); None if it cannot be."""
        taken = gathered = sliced = 0
        scales: set[tuple[Fraction, Fraction]] = set()
        for name, place in zip(inputs, option.inputs, strict=True):
            cut = self.cuts.get(name)
            if isinstance(place, Partial) or (isinstance(place, Shard) and name in self.fixed):
                return None
            if isinstance(place, Shard) and cut is not None:
                scale = cut.scale(place)
                if place.dim != cut.dim or any(part.denominator != 1 for part in scale):
                    return None
                scales.add(scale)
                taken += 1
            elif isinstance(place, Shard):
                sliced += 1
            elif cut is not None:
                gathered += 1
        if not taken or len(scales) > 1:
            return None
        return taken, -gathered, -sliced, sum(isinstance(place, Shard) for place in option.outputs)

    def _note(self, call: Call, option: Option) -> None:
        """Where the batch is in what an operator gives: its option says so, in units of the operator's own."""
        taken = zip(self._inputs(call), option.inputs, strict=True)
        scales = [
            self.cuts[name].scale(place) for name, place in taken if isinstance(place, Shard) and name in self.cuts
        ]
        repeats, unit = scales[0] if scales else (Fraction(1), Fraction(1))
        for name, place in zip(tensor_results(call.op), option.outputs, strict=True):
            if isinstance(place, Shard):
                self.cuts[name] = _Cut(place.dim, int(place.repeats * repeats), int(place.unit * unit))

    # -- values that are made whole and written to in parts ------------------------------------------------------

    def asked_of_makers(self) -> dict[str, Option]:
        """What makers of values without a batch have to do, since a part of the batch is written into what they make.

        ``z = zeros(batch, 3); z[:, 0] = x``: z is made cut, for what is written in place cannot be converted first.
        """
        roots = self.graph.storage_roots
        asked: dict[str, _Cut] = {}
        found: dict[str, Option] = {}
        for call in reversed(self.calls):
            option = self.chosen.get(call.op.name)
            if option is None:
                option = self._making(call, asked)
                if option is None:
                    continue
                found[call.op.name] = option
            for name, place in zip(self._inputs(call), option.inputs, strict=True):
                is_written = roots.get(name, name) in self.graph.written
                if isinstance(place, Shard) and is_written and name not in self.cuts and name not in self.fixed:
                    asked[name] = _Cut(place.dim)
        return found

    def _making(self, call: Call, asked: Mapping[str, _Cut]) -> Option | None:
        wanted = [asked.get(name) for name in tensor_results(call.op)]
        if not any(wanted):
            return None
        for option in self.options[call.op.name]:
            fits = all(
                isinstance(place, Shard) and place.dim == cut.dim if cut else isinstance(place, Replicated)
                for place, cut in zip(option.outputs, wanted, strict=True)
            )
            uses_fixed = any(
                isinstance(place, Shard) and name in self.fixed
                for name, place in zip(self._inputs(call), option.inputs, strict=True)
            )
            if fits and not uses_fixed:
                return option
        return None
