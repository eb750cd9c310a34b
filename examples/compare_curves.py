"""Compare runs of pretrain_bert.py: one picture of all curves, and how far apart they are.

    python examples/compare_curves.py out/dp.json out/pipeline.json out/hybrid.json --plot out/curves.png

The runs had one seed, so they drew the same weights, batches, masks and dropout; what is left between them is the order
in which float32 numbers are added up. If two curves are further apart than that explains, this ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["plot"]

Curve = dict[str, Any]  # as pretrain_bert.py writes it

# Rounding leaves some 1e-6 after 120 steps [measured: 2 CPU cores, float32]; like any difference it grows as training
# goes on. A wrong gradient, batches in another order or other dropout is seen in the second digit within 50 steps.
TOLERANCE = 1e-3


def main() -> int:
    arguments = parse_arguments()
    curves = [json.loads(path.read_text()) for path in arguments.curves]
    if arguments.plot:
        plot(curves, arguments.plot)
    first = curves[0]
    print(f"Trained    {first['model']}, as a masked language model")
    print(f"on         {first['data']}")
    print(f"for        {len(first['losses'])} steps of {first['samples_per_step']} samples, seed {first['seed']}")
    for curve in curves:
        print(described(curve))
    gap = largest_gap(curves)
    agree = gap.size <= TOLERANCE
    verdict = "agree" if agree else f"do NOT agree (more than {TOLERANCE} apart)"
    print(f"The {len(curves)} curves {verdict}: the largest difference is {gap.size:.1e}, {gap.where}.")
    if arguments.plot:
        print(f"They are drawn in {arguments.plot}.")
    return 0 if agree else 1


class Gap(NamedTuple):
    """The largest difference between two curves at one step, and where it is."""

    size: float
    where: str


def described(curve: Curve) -> str:
    """One line about a run."""
    losses = curve["losses"]
    (_, before), *_, (_, after) = curve["held_out_losses"]
    return (
        f"{curve['name']:<20} training loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
        f"held-out loss {before:.3f} -> {after:.3f}, {curve['samples_per_s']:.0f} samples/s"
    )


def largest_gap(curves: list[Curve]) -> Gap:
    """Over all steps, in the training loss and the held-out loss."""
    gaps = [Gap(0.0, "at any step")]
    for step, losses in enumerate(zip(*(curve["losses"] for curve in curves), strict=True), start=1):
        gaps.append(Gap(max(losses) - min(losses), f"in the training loss of step {step}"))
    for points in zip(*(curve["held_out_losses"] for curve in curves), strict=True):
        losses = [loss for _, loss in points]
        gaps.append(Gap(max(losses) - min(losses), f"in the held-out loss after step {points[0][0]}"))
    return max(gaps, key=lambda gap: gap.size)


def plot(curves: list[Curve], path: Path) -> None:
    """Draw the losses of each run over one another and, if there are several, their distance from the first."""
    figure = Figure(figsize=(8, 6 if len(curves) > 1 else 4), layout="constrained")
    upper, *lower = figure.subplots(2 if len(curves) > 1 else 1, 1, sharex=True, squeeze=False)[:, 0]
    for place, curve in enumerate(curves):
        # each thinner than the one below it, so that all are seen where they coincide
        width = 1.0 + 2.0 * (len(curves) - 1 - place)
        steps = range(1, len(curve["losses"]) + 1)
        upper.plot(steps, curve["losses"], color=f"C{place}", linewidth=width, label=f"{curve['name']}, training")
        held_out_steps, held_out_losses = zip(*curve["held_out_losses"], strict=True)
        size = 4.0 + 3.0 * (len(curves) - 1 - place)
        style = {"color": f"C{place}", "marker": "o", "markersize": size, "linestyle": "none"}
        upper.plot(held_out_steps, held_out_losses, label=f"{curve['name']}, held-out", **style)
    upper.set(ylabel="loss (nats per hidden piece)", title=f"{curves[0]['model']}\non {curves[0]['data']}")
    upper.title.set_fontsize("small")
    upper.legend(fontsize="small")
    upper.grid(alpha=0.3)
    for axes in lower:
        for place, curve in enumerate(curves[1:], start=1):
            gaps = [abs(mine - first) for mine, first in zip(curve["losses"], curves[0]["losses"], strict=True)]
            axes.plot(
                range(1, len(gaps) + 1), gaps, ".", color=f"C{place}", label=f"{curve['name']} and {curves[0]['name']}"
            )
        axes.set(ylabel="difference in training loss")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.axes[-1].set_xlabel("step")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare loss curves that pretrain_bert.py wrote with --curve.")
    parser.add_argument("curves", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw all curves as PNG")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
