"""What settings ask for before the first training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epl.config import Config
from epl.runtime.recheck import check_gradients
from epl.runtime.verify import Report, Trial, small_part
from epl.stage.codegen import Segments

__all__ = ["check_first"]


def check_first(config: Config, trial: Trial, segments: Segments, batch: Any, report: Callable[[Any], Report]) -> None:
    """What ``check_gradients``, ``debug.verify`` and ``debug.verify_only`` ask for.

    Args:
        config: The settings.
        trial: A step.
        segments: The switch of the stages' recompute segments.
        batch: This replica's batch.
        report: Compares a step on a batch with that of one process.
    """
    if config.gradient_checkpoint.check_gradients:
        check_gradients(trial, segments, batch)
    if config.debug.verify_only:
        report(small_part(batch, trial.runner.plan)).end_script(trial.runner.world.rank)
    if config.debug.verify:
        report(batch).check()
