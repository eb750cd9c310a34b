"""Passes: one feature, one file, one function ``(Graph, Plan) -> Graph``; this is the ordered list.

No feature is asked for anywhere else: a pass reads the plan and leaves the graph as it is where the plan does not want it.
"""

from __future__ import annotations

from collections.abc import Callable

from epl.ir.graph import Graph
from epl.ir.verify import verify
from epl.planner.plan import Plan

__all__ = ["PASSES", "apply_passes"]

Pass = Callable[[Graph, Plan], Graph]

PASSES: tuple[Pass, ...] = ()


def apply_passes(graph: Graph, plan: Plan) -> Graph:
    """The graph after every pass, checked after each one."""
    for change in PASSES:
        graph = verify(change(graph, plan), after=change.__name__, colocated=plan.num_stages == 1)
    return graph
