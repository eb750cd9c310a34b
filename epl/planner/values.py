"""The values of a graph by the names under which placements are kept: results of operators with several have one each."""

from __future__ import annotations

from collections.abc import Mapping

from epl.ir.graph import Graph, Op, Ref
from epl.ir.types import ListType, TensorType, Type
from epl.sharding.options import Call
from epl.sharding.patterns import Slots

__all__ = ["shapes_of", "slots_of", "tensor_results", "value_names"]


def shapes_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Shapes of all values; the results of an operator with several have the names ``op.0``, ``op.1``, ..."""
    kinds: dict[str, Type] = {name: leaf.type for name, leaf in graph.leaves.items()}
    for op in graph.ops:
        kinds |= _results(op)
    return {name: kind.sizes for name, kind in kinds.items() if isinstance(kind, TensorType)}


def _results(op: Op) -> dict[str, Type]:
    if isinstance(op.type, ListType):
        return {f"{op.name}.{number}": kind for number, kind in enumerate(op.type.items)}
    return {op.name: op.type}


def tensor_results(op: Op) -> tuple[str, ...]:
    """The tensors that an operator makes."""
    return tuple(name for name, kind in _results(op).items() if isinstance(kind, TensorType))


def value_names(graph: Graph) -> dict[str, str]:
    """The name by which each value is known here: what ``getitem`` picks is the result that it picks."""
    names = {name: name for name in (*graph.leaves, *graph.op_by_name)}
    for op in graph.ops:
        if op.target == "python.getitem" and isinstance(op.args[0], Ref):
            names[op.name] = f"{op.args[0].name}.{op.args[1]}"
    return names


def slots_of(call: Call, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Slots:
    """The values of a call by the names of `value_names`."""
    return Slots(tuple(names[ref] for _, ref in call.refs), tensor_results(call.op), shapes)
