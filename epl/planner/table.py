"""A plan as the table that rank 0 prints before the first step."""

from __future__ import annotations

import re

from epl.planner.plan import EdgePlan, ParameterPlan, Plan, SplitPlan, StagePlan
from epl.planner.units import units_of
from epl.sharding.placements import Shard, parse_placement
from epl.units import size_text

__all__ = ["plan_table"]

_PLACES = {"host": "in host memory", "disk": "in files"}
_MOST_KEPT = 16  # lines about cut weights; plan.parameters has all


def plan_table(plan: Plan) -> str:
    """The plan as text: a head line, one line a stage, what crosses between them, and notes."""
    rows = [
        ("stage", "kind", "ranks, by replica", "parameters", "weights on each", "in flight", "receives per micro-batch")
    ]
    rows += [_row(plan, stage) for stage in plan.stages]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_head(plan)]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [f"  {line}" for split in plan.splits for line in _split(plan, split)]
    lines += [f"  {line}" for line in (*_stored(plan), *_tied(plan), *plan.notes)]
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    micro = f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''}"
    counted = [(plan.num_replicas, "replica"), (plan.num_stages, "stage")]
    parts = [" of ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counted)]
    parts += [micro, f"schedule {plan.schedule}"]
    parts += [f"ZeRO {plan.zero}"] * bool(plan.zero) + [plan.precision] * bool(plan.precision)
    if plan.num_stages > 1:
        parts.append(f"bubble {plan.bubble:.0%}")
    return f"EPL plan for {plan.world_size} rank{'s' if plan.world_size > 1 else ''}: " + ", ".join(parts)


def _row(plan: Plan, stage: StagePlan) -> tuple[str, ...]:
    held = [entry for entry in plan.parameters if stage.index in entry.stages and entry.kind == "parameter"]
    count = sum(_count(entry.shape) for entry in held)
    units = units_of(plan, stage.ranks[0][0])
    in_units = {slot.path for unit in units for slot in unit.slots}
    size = sum(unit.stored_bytes for unit in units if unit.home == "device") + sum(
        _count(entry.shape) * _itemsize(entry.dtype) / _parts(stage, entry)
        for entry in held
        if entry.path not in in_units
    )
    ranks = " ".join("{" + ",".join(map(str, replica)) + "}" for replica in stage.ranks)
    in_flight = plan.peak_in_flight[stage.index] if plan.peak_in_flight else 0
    kind = f"{stage.kind}({stage.device_count})"
    return (
        f"{stage.index} {stage.name}",
        kind,
        ranks,
        f"{count:,}",
        size_text(size),
        str(in_flight),
        _receives(plan, stage),
    )


def _stored(plan: Plan) -> list[str]:
    """What of the weights ranks share out or store elsewhere, stage by stage."""
    lines: list[str] = []
    for stage in plan.stages:
        for home in ("device", "host", "disk"):
            units = [unit for unit in units_of(plan, stage.ranks[0][0]) if unit.home == home]
            if not units:
                continue
            whole, stored = (sum(getattr(unit, name) for unit in units) for name in ("size_bytes", "stored_bytes"))
            stepped = sum(unit.shard_bytes for unit in units if unit.is_trained)
            place = "" if home == "device" else f" {_PLACES[home]}"
            lines.append(
                f"stage {stage.index}: of {size_text(whole)} of weights each rank stores {size_text(stored)}{place} and "
                f"steps {size_text(stepped)}"
                + (", brought for each use" if any(unit.is_lent for unit in units) else "")
            )
    away = {entry.states_home for entry in plan.parameters} - {"device"}
    return lines + [f"optimizer states are stored {_PLACES[home]}" for home in sorted(away)]


def _parts(stage: StagePlan, entry: ParameterPlan) -> int:
    return 1 if entry.placement == "R" else stage.device_count


def _receives(plan: Plan, stage: StagePlan) -> str:
    edges = [edge for edge in plan.edges if edge.target == stage.index]
    sources = sorted({edge.source for edge in edges})
    return "; ".join(f"from {source}: {_listed([e for e in edges if e.source == source])}" for source in sources) or "-"


def _listed(edges: list[EdgePlan]) -> str:
    shown = ", ".join(f"{edge.value} {edge.type}{_bridge(edge)}" for edge in edges[:2])
    more = f" and {len(edges) - 2} more" if len(edges) > 2 else ""
    return f"{shown}{more} = {size_text(sum(edge.size_bytes for edge in edges))}"


def _bridge(edge: EdgePlan) -> str:
    """How the value lies at both ends, if it is not whole at both: the pieces that are needed travel."""
    ends = (edge.placement_at_source, edge.placement_at_target)
    return "" if ends == ("R", "R") else f" ({ends[0]} -> {ends[1]})"


def _split(plan: Plan, split: SplitPlan) -> list[str]:
    """How a stage shares out the work on one batch, what it keeps, and what it sends beside a plan by hand."""
    stage = plan.stages[split.stage]
    is_compared = split.megatron_bytes > 0
    sent = _together(split.sent_bytes, split.megatron_bytes) if is_compared else size_text(split.sent_bytes)
    head = (
        f"{stage.kind} of stage {stage.index} over {stage.device_count} devices (mesh: {plan.num_replicas} x "
        f"{stage.device_count}): for each micro-batch a rank sends {sent}, estimated time {split.time_s * 1e3:.3g} ms"
    )
    return [head, *(f"  {line}" for line in (*_kept(plan, stage), *split.choices, *split.communication))]


def _kept(plan: Plan, stage: StagePlan) -> list[str]:
    """The matrices that are cut, like ones together, and how much of the cut dimension each device keeps."""
    kinds: dict[tuple[str, tuple[int, ...], str], int] = {}
    for entry in plan.parameters:
        if stage.index in entry.stages and entry.placement != "R" and len(entry.shape) > 1:
            key = (re.sub(r"\b\d+\b", "*", entry.path), entry.shape, entry.placement)
            kinds[key] = kinds.get(key, 0) + 1
    lines = [f"{count} x {path} {_shares(shape, place, stage)}" for (path, shape, place), count in kinds.items()]
    more = [f"and {len(lines) - _MOST_KEPT} more kinds of weights"] if len(lines) > _MOST_KEPT else []
    return [f"cut: {line}" for line in (*lines[:_MOST_KEPT], *more)]


def _shares(shape: tuple[int, ...], placement: str, stage: StagePlan) -> str:
    shard = parse_placement(placement)
    assert isinstance(shard, Shard)
    sizes = [size * shard.repeats for size in shard.sizes(shape[shard.dim], stage.device_count)]
    each = str(sizes[0]) if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    return f"{list(shape)} {placement}: {each} of {shape[shard.dim]} on each device"


def _together(sent_bytes: float, by_hand_bytes: float) -> str:
    """Both in one unit, so that they can be compared."""
    unit, name = (2**20, "MiB") if min(sent_bytes, by_hand_bytes) >= 2**18 else (2**10, "KiB")
    return f"{sent_bytes / unit:,.1f} {name} (as Megatron cuts by hand: {by_hand_bytes / unit:,.1f} {name})"


def _tied(plan: Plan) -> list[str]:
    return [
        f"tied over stages {list(entry.stages)}, gradients summed: {entry.path}"
        for entry in plan.parameters
        if len(entry.stages) > 1 and entry.trainable
    ]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _itemsize(dtype: str) -> int:
    bits = "".join(char for char in dtype if char.isdigit())
    return max(1, int(bits) // 8) if bits else 1
