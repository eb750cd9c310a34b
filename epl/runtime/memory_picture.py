"""The memory of a step as a picture: for each rank a stack by what it is for, predicted beside measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from epl.program.curve import CATEGORIES, MemoryCurve
from epl.runtime.memory import RankMemory
from epl.units import size_text

__all__ = ["draw_memory"]

_COLOURS = ("#4c78a8", "#9ecae9", "#b0b0b0", "#f2cf5b", "#54a24b", "#e45756")  # one for each category
_MIB = 1 << 20
_MOST_LABELS = 24  # along one axis


def draw_memory(path: str, ranks: Sequence[RankMemory]) -> None:
    """Draw all ranks into one picture."""
    columns = 2 if any(rank.measured for rank in ranks) else 1
    figure = Figure(figsize=(8 * columns, 0.8 + 2.6 * len(ranks)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(ranks), columns, squeeze=False)
    for row, rank in zip(grid, ranks, strict=True):
        top = max(curve.peak_bytes for curve in (rank.predicted, rank.measured) if curve) / _MIB
        for axes, curve, kind in zip(row, (rank.predicted, rank.measured), ("predicted", "measured"), strict=False):
            if curve is not None:
                _stack(axes, curve, top)
                axes.set_title(
                    f"rank {rank.rank}, stage {rank.stage}, {kind}: peak {size_text(curve.peak_bytes)}", fontsize=9
                )
        row[0].set_ylabel("MiB")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=len(CATEGORIES), frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _stack(axes: Axes, curve: MemoryCurve, top: float) -> None:
    """Each instruction as wide as any other, so that two curves can be compared."""
    places: list[float] = []
    labels: list[tuple[float, str]] = []
    for number, (instruction, group) in enumerate(groupby(curve.samples, key=lambda sample: sample.instruction)):
        count = len(list(group))
        places += [number + (place + 0.5) / count for place in range(count)]
        if re.fullmatch(r"\d+[FB]\d+|optimizer", instruction):
            labels.append((number + 0.5, instruction))
    columns = [[sample.sizes[i] / _MIB for sample in curve.samples] for i in range(len(CATEGORIES))]
    axes.stackplot(places, columns, labels=CATEGORIES, colors=_COLOURS, linewidth=0)
    axes.axhline(curve.peak_bytes / _MIB, color="black", linewidth=0.6, linestyle=":")
    shown = labels[:: 1 + len(labels) // _MOST_LABELS]
    axes.set_xticks([place for place, _ in shown], [label for _, label in shown], fontsize=6, rotation=45)
    axes.set_ylim(0, top * 1.05)
    axes.margins(x=0)
