"""Automatic recompute: choose what backward computes again instead of keeping it.

A segment is a run of operators that becomes one checkpointed function. Not in any segment: what talks to other ranks (its
results are kept), what the user has marked (it stays as it is marked), operators that could not be tried, and what changes
memory that is there before the segment. Running statistics of a batch norm, which a second run would change once more,
are copied for the second run. Random operators draw again what they drew, since each is seeded before it runs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from epl.cost.devices import device_model
from epl.ir.graph import Graph, Op, Ref
from epl.ir.rename import renamed
from epl.ir.types import ListType
from epl.passes.segment_costs import Estimate, Segment, StageCosts, forward_times
from epl.passes.segment_search import Choice, search
from epl.planner.plan import Plan
from epl.stage.codegen import SCRATCH
from epl.stage.saved import OpMemory, memory_of
from epl.stage.stage import Stage
from epl.units import size_text

__all__ = ["recompute"]

_SEGMENT_OPERATORS = 8  # a segment costs as much as so many of the cheapest operators [measured: CPU, 2026-11]
_FILLED_LATE = ("aten.rrelu",)  # keeps noise that its kernel is still to draw, where computing again may end before
_WORK = 3  # a step's work in units of its forward: backward is twice as much


def recompute(stage: Stage, plan: Plan) -> Stage:
    """Give the operators of a stage their recompute segments, if the plan says ``auto``.

    A budget is kept if it can be (:mod:`epl.program.budget` sees to it that it can); else as little is kept as can be.
    """
    marked = _marked_segments(stage.graph)
    if marked:
        note = f"{stage.name}: {len(marked)} segments that the model marks are computed again in backward"
        stage = replace(stage, notes=(*stage.notes, note))
    if plan.recompute != "auto" or not stage.graph.needs_grad:
        return stage
    stage = replace(stage, graph=_counters_first(stage.graph))
    marked = _marked_segments(stage.graph)
    device = device_model(plan.device_kind)
    memory, about = memory_of(stage, stage.num_ranks, stage.position)
    times_s = forward_times(stage.graph, device)
    costs = StageCosts(memory, about, times_s, _SEGMENT_OPERATORS * device.operator_s, stage.num_in_flight, marked)
    longest = _longest(stage.graph, about, plan.recompute_end)
    budget = plan.activation_budgets[stage.index] if plan.activation_budgets else 0
    step_s = _WORK * float(times_s.sum())
    most_s = float("inf") if budget else plan.extra_compute * step_s
    choice = search(costs, longest, most_again_s=most_s, budget_bytes=budget)
    share = choice.estimate.again_s / step_s if step_s else 0.0
    note = _note(stage, costs.estimate(()), choice, share)
    return replace(stage, graph=_marked(stage.graph, choice), notes=(*stage.notes, note))


def _note(stage: Stage, plain: Estimate, choice: Choice, share: float) -> str:
    chosen = choice.estimate
    count = f"{len(choice.segments)} segment{'s' if len(choice.segments) != 1 else ''}"
    return (
        f"{stage.name} computes {count} again in backward, chosen for {share:.0%} more work: activations of a micro-batch "
        f"{size_text(plain.kept_bytes)} -> {size_text(chosen.kept_bytes)}, at the peak {size_text(plain.peak_bytes)} -> "
        f"{size_text(chosen.peak_bytes)}"
    )


def _marked_segments(graph: Graph) -> tuple[Segment, ...]:
    """The runs of operators that the user has marked."""
    places = [place for place, op in enumerate(graph.ops) if op.segment is not None]
    runs = groupby(enumerate(places), key=lambda each: (graph.ops[each[1]].segment, each[1] - each[0]))
    found = [[place for _, place in run] for _, run in runs]
    return tuple((run[0], run[-1] + 1) for run in found)


def _counters_first(graph: Graph) -> Graph:
    """Operators that only count in a buffer (``num_batches_tracked``) stand first, where they part no segment."""
    free = [
        op
        for op in graph.ops
        if op.writes
        and op.name not in graph.readers
        and op.name not in graph.output_names
        and all(name in graph.leaves and len(graph.readers[name]) == 1 for name in op.reads)
    ]
    rest = [op for op in graph.ops if op not in free]
    return replace(graph, ops=(*free, *rest))


# -- what may be a segment ----------------------------------------------------------------------------------------


def _longest(graph: Graph, about: list[OpMemory], last_task: int) -> list[int]:
    """For each place, the end of the longest segment that may begin there."""
    limits = _Limits(graph)
    free = [_may_run_again(graph, op, each, last_task) for op, each in zip(graph.ops, about, strict=True)]
    found: list[int] = []
    for start in range(len(graph.ops)):
        end = start
        while end < len(graph.ops) and free[end] and limits.may_join(end, start):
            end += 1
        found.append(limits.end_outside_lists(start, end))
    return found


def _may_run_again(graph: Graph, op: Op, about: OpMemory, last_task: int) -> bool:
    if about.meets_others or not about.is_known or op.segment is not None:
        return False
    if last_task >= 0 and (op.task or 0) > last_task:
        return False
    if op.target.startswith(("function.", "loss.", "aten._assert_scalar", *_FILLED_LATE)):
        return False
    changing = {name for name in op.reads if graph.storage_roots[name] in graph.leaves.keys() & graph.written.keys()}
    if not changing:
        return True
    # what is written to and not returned: a copy will do for the second run, if nobody else reads it; all else may have
    # been changed by the next micro-batch
    return changing <= set(op.writes) and not op.views and all(len(graph.readers[name]) == 1 for name in changing)


class _Limits:
    """Where segments must not begin or end."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.place = {op.name: place for place, op in enumerate(graph.ops)}
        self.last_write = {root: self.place[ops[-1].name] for root, ops in graph.written.items()}
        last = len(graph.ops)
        self.last_use = {name: self.place[ops[-1].name] for name, ops in graph.readers.items()}
        self.last_use |= dict.fromkeys(graph.output_names, last)

    def may_join(self, place: int, start: int) -> bool:
        """False if the operator takes from before ``start`` what is changed in place from there on, or changes it."""
        op = self.graph.ops[place]
        for name in op.reads:
            root = self.graph.storage_roots[name]
            is_before = self.place.get(name, -1) < start or self.place.get(root, -1) < start
            is_own_copy = name in op.writes and root in self.graph.leaves
            if is_before and self.last_write.get(root, -1) >= start and not is_own_copy:
                return False
        return True

    def end_outside_lists(self, start: int, end: int) -> int:
        """The last place up to ``end`` where no list of values (results that are still to be picked) is cut off."""
        while end > start and any(self._is_cut(place, end) for place in range(start, end)):
            end -= 1
        taken = (self.graph.op_by_name.get(name) for place in range(start, end) for name in self.graph.ops[place].reads)
        is_begun = any(op and isinstance(op.type, ListType) and self.place[op.name] < start for op in taken)
        return start if is_begun else end

    def _is_cut(self, place: int, end: int) -> bool:
        op = self.graph.ops[place]
        return isinstance(op.type, ListType) and self.last_use.get(op.name, -1) >= end


# -- marking ------------------------------------------------------------------------------------------------------


def _marked(graph: Graph, choice: Choice) -> Graph:
    number = max((op.segment for op in graph.ops if op.segment is not None), default=-1) + 1
    segment_at = {
        place: number + count for count, (start, end) in enumerate(choice.segments) for place in range(start, end)
    }
    ops: list[Op] = []
    for place, op in enumerate(graph.ops):
        segment = segment_at.get(place, op.segment)
        copied = (
            [name for name in op.writes if graph.storage_roots[name] in graph.leaves] if place in segment_at else []
        )
        for name in copied:
            kind = graph.type_of(name)
            scratch = Op(f"{op.name}_{name}", kind, SCRATCH, (Ref(name),), task=op.task, segment=segment, views=(name,))
            ops.append(replace(scratch, grad=op.grad, autocast=op.autocast))
        names = {name: f"{op.name}_{name}" for name in copied}
        ops.append(replace(renamed(op, names), segment=segment))
    return replace(graph, ops=tuple(ops))
