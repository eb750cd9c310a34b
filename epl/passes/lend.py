"""Weights that the plan stores elsewhere are brought for each use, and casts of weights are made anew for each use.

This is ZeRO's third stage (``zero.level`` v2), weights in host memory or files (``offload.level``), and the half of
memory-efficient AMP that the graph alone cannot say: that no cast is kept for backward (:mod:`epl.stage.leases`).

Weights that each rank keeps whole, and whose updates other ranks send (v0, v1), are waited for at their first use.

It comes after recompute, so that a segment brings its weights itself when it runs again, instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from epl.errors import StrategyError
from epl.ir.graph import Graph, Op, Output, Parameter, Ref, map_refs
from epl.ir.rename import renamed
from epl.ir.types import TensorType
from epl.passes.precision import is_weight_cast
from epl.planner.plan import Plan
from epl.planner.units import Slot, units_of
from epl.stage.leases import Lease
from epl.stage.stage import Stage

__all__ = ["lend"]


@dataclass(frozen=True)
class _Cast:
    """A weight that the graph casts."""

    name: str
    dtype: torch.dtype


def lend(stage: Stage, plan: Plan) -> Stage:
    """Put a lease before each use of a weight that is stored elsewhere or cast.

    Raises:
        StrategyError: forward changes a weight that is stored elsewhere.
    """
    units = units_of(plan, plan.stages[stage.index].ranks[0][stage.position])
    away = {slot.path: (number, slot) for number, unit in enumerate(units) if unit.is_lent for slot in unit.slots}
    parameters = {leaf.name: leaf for leaf in stage.graph.parameters}
    stored = {name: away[leaf.path] for name, leaf in parameters.items() if leaf.path in away}
    casts = _casts(stage.graph, parameters) if plan.precision else {}
    coming = {
        leaf.name: number
        for number, unit in enumerate(units)
        for leaf in stage.graph.parameters
        if unit.num_shards > 1 and not unit.is_lent and leaf.path in {slot.path for slot in unit.slots}
    }
    if not stored and not casts and not coming:
        return stage
    _refuse_writes(stage.graph, stored, parameters)
    writer = _Writer(stage.graph, stored, casts, coming)
    ops: list[Op] = []
    for op in stage.graph.ops:
        if op.name not in casts:
            ops += writer.with_leases(op)
    outputs = writer.outputs(ops)
    graph = replace(stage.graph, ops=tuple(ops), outputs=outputs)
    return replace(stage, graph=graph, leases=writer.leases, runs=tuple(writer.runs), arrivals=writer.arrivals)


def _casts(graph: Graph, parameters: Mapping[str, Parameter]) -> dict[str, _Cast]:
    """The operators that the precision pass has put in to cast a weight for one reader."""
    found: dict[str, _Cast] = {}
    for op in graph.ops:
        name = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        is_free = op.name not in graph.output_names and op.name not in graph.written
        if name in parameters and is_weight_cast(graph, op) and is_free:
            assert isinstance(op.type, TensorType)
            found[op.name] = _Cast(name, op.type.dtype)
    return found


def _refuse_writes(graph: Graph, stored: Mapping[str, object], parameters: Mapping[str, Parameter]) -> None:
    written = [name for name in stored if name in graph.written]
    if written:
        op = graph.written[written[0]][0]
        raise StrategyError(
            f"forward changes the weight {parameters[written[0]].path} in place, at {op.source}, and the plan stores that "
            "weight elsewhere (zero.level 'v2', offload.level) and brings a copy for each use. Use zero.level 'v1' or less "
            "and keep the weight out of offload.parameters, or change it outside of forward."
        )


class _Writer:
    """Writes leases, and remembers which units are used in which order."""

    def __init__(
        self,
        graph: Graph,
        stored: Mapping[str, tuple[int, Slot]],
        casts: Mapping[str, _Cast],
        coming: Mapping[str, int],
    ) -> None:
        self.graph, self.stored, self.casts = graph, stored, casts
        self.coming = coming
        self.leases: dict[str, Lease] = {}
        self.runs: list[int] = []
        self.arrivals: dict[str, int] = {}

    def with_leases(self, op: Op) -> list[Op]:
        """The operator, after leases of what it reads."""
        names: dict[str, str] = {}
        found: list[Op] = []
        for name in dict.fromkeys(op.reads):
            weight = self.casts[name].name if name in self.casts else name
            if weight in self.coming and f"arrive.{self.coming[weight]}" not in self.arrivals:
                found.append(self._arrival(weight, op))
                names[weight] = found[-1].name
            if name in self.casts or name in self.stored:
                found.append(renamed(self._lease(name, op), names))
                names[name] = found[-1].name
        return [*found, renamed(op, names)]

    def _arrival(self, weight: str, reader: Op) -> Op:
        """Gives the weight itself, once its unit is up to date."""
        unit = self.coming[weight]
        target = f"arrive.{unit}"
        self.arrivals[target] = unit
        made = Op(f"{weight}_arrived", self.graph.type_of(weight), target, (Ref(weight),), views=(weight,))
        return _placed(made, reader)

    def _lease(self, name: str, reader: Op) -> Op:
        cast = self.casts.get(name)
        weight, dtype = (cast.name, cast.dtype) if cast else (name, None)
        kind = self.graph.type_of(name)
        assert isinstance(kind, TensorType)
        number = len(self.leases)
        if weight in self.stored:
            unit, slot = self.stored[weight]
            if not self.runs or self.runs[-1] != unit:
                self.runs.append(unit)
            lease = Lease(len(self.runs) - 1, slot.start, slot.shape, dtype)
        else:
            lease = Lease(-1, 0, kind.sizes, dtype)
        target = f"lease.{number}"
        self.leases[target] = lease
        return _placed(Op(f"{weight}_lent_{number}", kind, target, (Ref(weight),)), reader)

    def outputs(self, ops: list[Op]) -> tuple[Output, ...]:
        """The results; of a weight that is one, a lease is added."""
        names: dict[str, str] = {}
        for name in self.graph.output_names:
            if name in self.stored:
                ops.append(self._lease(name, ops[-1]))
                names[name] = ops[-1].name

        def rename(name: str) -> Ref:
            return Ref(names.get(name, name))

        return tuple(replace(output, value=map_refs(output.value, rename)) for output in self.graph.outputs)


def _placed(op: Op, reader: Op) -> Op:
    """The operator where its reader is: the same task, segment and modes."""
    return replace(
        op,
        task=reader.task,
        segment=reader.segment,
        grad=reader.grad,
        autocast=reader.autocast,
        source=reader.source,
        module=reader.module,
    )
