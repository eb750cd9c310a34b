"""``gradient_checkpoint.check_gradients``: one step with recomputing and one without have the same gradients.

What user code does differently at a second run (a counter, a cache, numbers drawn outside of torch) shows here. EPL's own
checks are in its tests; the original EPL compares shapes and types only.
"""

from __future__ import annotations

from typing import Any

import torch

from epl.errors import RunError, bulleted
from epl.runtime.agree import all_succeed
from epl.runtime.state import add_gradients, take_gradients
from epl.runtime.verify import Trial, buffers_kept
from epl.stage.codegen import Segments

__all__ = ["check_gradients"]

_TOLERANCE = {torch.float64: 1e-9}  # as for all of parity; others as float32
_OTHERS = 1e-5


def check_gradients(trial: Trial, segments: Segments, batch: Any) -> None:
    """Run the step twice; weights, gradients, buffers and random numbers are as before. All ranks call it together.

    Args:
        trial: The step.
        segments: The switch of the stages' recompute segments.
        batch: This replica's batch.

    Raises:
        RunError: a gradient is there in one of both only, or differs; names each. On every rank.
    """
    runner, parameters = trial.runner, list(trial.model.parameters())
    earlier, step = take_gradients(parameters), runner.step
    found: list[list[torch.Tensor | None]] = []
    for keep_all in (True, False):
        segments.keep_all = keep_all
        try:
            with buffers_kept(trial.model):
                trial.run(batch)
        finally:
            segments.keep_all = False
        found.append([None if gradient is None else gradient.clone() for gradient in take_gradients(parameters)])
        runner.step = step
    add_gradients(parameters, earlier)
    names = [name for name, _ in trial.model.named_parameters()]

    def compare() -> None:
        faults = [
            fault for name, plain, again in zip(names, *found, strict=True) if (fault := _fault(name, plain, again))
        ]
        if faults:
            raise RunError(bulleted("computing again in backward changes gradients:", faults))

    all_succeed(runner.world, compare)


def _fault(name: str, plain: torch.Tensor | None, again: torch.Tensor | None) -> str:
    if plain is None or again is None:
        only = "with" if plain is None else "without"
        return "" if plain is again else f"{name} has a gradient only {only} recomputing"
    size = float(plain.abs().max()) if plain.numel() else 0.0
    difference = float((plain - again).abs().max()) if plain.numel() else 0.0
    allowed = _TOLERANCE.get(plain.dtype, _OTHERS) * max(size, 1e-30)
    return "" if difference <= allowed else f"{name}: off by {difference:.3g} where it is up to {size:.3g}"
