"""The timeline of a step as a picture: one row a rank, forward and backward blocks with their micro-batch's number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from epl.planner.plan import Plan
from epl.runtime.record import Event

__all__ = ["draw_timeline"]

_COLOURS = {"forward": "#4c78a8", "backward": "#54a24b", "communication": "#b0b0b0", "wait": "#f2cf5b"}
_LABELS = {"forward": "forward", "backward": "backward", "communication": "send, reduce", "wait": "wait"}


def draw_timeline(path: Path, by_rank: Sequence[Sequence[Event]], plan: Plan) -> None:
    """Draw all ranks' events into a PNG."""
    figure = Figure(figsize=(14, 1.6 + 0.6 * len(by_rank)), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, events in enumerate(by_rank):
        for event in sorted(
            events, key=lambda event: list(_COLOURS).index(event.kind) if event.kind in _COLOURS else -1
        ):
            if event.kind in _COLOURS:
                _block(axes, rank, event)
    axes.set_yticks(range(len(by_rank)), [_row_name(plan, rank) for rank in range(len(by_rank))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{plan.schedule}, {plan.num_micro_batches} micro-batches; idle in the dry run {plan.bubble:.0%}")
    axes.legend(
        handles=[Patch(color=colour, label=_LABELS[kind]) for kind, colour in _COLOURS.items()],
        loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(_COLOURS), frameon=False,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path)


def _row_name(plan: Plan, rank: int) -> str:
    stage, replica, _ = plan.place_of(rank)
    return f"rank {rank}\nstage {stage}, replica {replica}"


def _block(axes: Axes, rank: int, event: Event) -> None:
    height = 0.8 if event.kind in ("forward", "backward") else 0.4
    axes.barh(
        rank, event.duration_s * 1e3, left=event.start_s * 1e3, height=height, color=_COLOURS[event.kind],
        edgecolor="white", linewidth=0.5,
    )  # fmt: skip
    if event.micro_batch >= 0 and event.kind in ("forward", "backward"):
        middle = (event.start_s + event.duration_s / 2) * 1e3
        axes.text(middle, rank, str(event.micro_batch), ha="center", va="center", fontsize=7, color="white")
