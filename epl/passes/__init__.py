"""Passes: one feature, one file, one function ``(Stage, Plan) -> Stage``; this is the ordered list.

No feature is asked for anywhere else: a pass reads the plan and leaves the stage as it is where the plan does not want it.
"""

from __future__ import annotations

from collections.abc import Callable

from epl.ir.verify import verify
from epl.passes.chunked_loss import chunk_losses
from epl.passes.lend import lend
from epl.passes.recompute import recompute
from epl.passes.settle import settle_buffers
from epl.planner.plan import Plan
from epl.stage.stage import Stage

__all__ = ["PASSES", "apply_passes"]

Pass = Callable[[Stage, Plan], Stage]

PASSES: tuple[Pass, ...] = (settle_buffers, chunk_losses, recompute, lend)


def apply_passes(stage: Stage, plan: Plan) -> Stage:
    """The stage after every pass, its graph checked after each one."""
    for change in PASSES:
        stage = change(stage, plan)
        verify(stage.graph, after=change.__name__, colocated=True)
    return stage
