"""Which values go between pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epl.ir.graph import Graph

__all__ = ["Crossing", "crossings"]


@dataclass(frozen=True)
class Crossing:
    """A value that one stage makes and another one uses."""

    value: str
    source: int
    target: int


def crossings(graph: Graph, stage_of: Mapping[int, int]) -> tuple[Crossing, ...]:
    """Every value that goes from a stage to another, once for each stage that uses it, in the order of the graph."""
    found = dict.fromkeys(
        Crossing(edge.name, stage_of[edge.source], stage_of[edge.target])
        for edge in graph.edges
        if stage_of[edge.source] != stage_of[edge.target]
    )
    return tuple(found)
