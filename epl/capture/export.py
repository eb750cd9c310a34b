"""Run ``torch.export`` on a model's step: plain export first, draft export where the model branches on data.

Design: strict=False (the forward runs as Python under fake tensors); a small wrapper takes the tensors of the batch and
returns the tensors of the step's parts, so output classes and caches stay out of the graph. Draft export follows the
branch that the real values take and leaves run-time assertions in the graph.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.export import ExportedProgram
from torch.fx.traceback import preserve_node_meta

from epl.batch import Structure
from epl.capture.marks import Marks, PartPlace, marking
from epl.capture.refusals import PlainAttributes, python_random_refused, user_line
from epl.errors import CaptureError, EplError
from epl.loss import Step

__all__ = ["Exported", "export"]


@dataclass(frozen=True)
class Exported:
    """An exported step: the program, what was marked, and the parts of its result."""

    program: ExportedProgram
    marks: Marks
    parts: tuple[PartPlace, ...]
    follows_data: bool


class _Wrapper(nn.Module):
    """The step as a function of the batch's tensors."""

    def __init__(self, model: nn.Module, step: Step, structure: Structure, marks: Marks) -> None:
        super().__init__()
        self.model = model
        self.hidden = (step, structure, marks)  # in a tuple, so that nothing in it is taken for a submodule

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, structure, marks = self.hidden
        marks.drop_default()
        marks.restart()
        parts = step.run(self.model, structure.unflatten(tensors))
        results = [value for _, value in parts if isinstance(value, torch.Tensor)]
        places = iter(range(len(results)))
        # kept with the marks, since export undoes what forward does to attributes of the module
        marks.parts = tuple(
            PartPlace(role, next(places)) if isinstance(value, torch.Tensor) else PartPlace(role, None, value)
            for role, value in parts
        )
        return tuple(results)


def export(model: nn.Module, step: Step, structure: Structure, tensors: Sequence[torch.Tensor]) -> Exported:
    """The step on these tensors as an exported program.

    Raises:
        CaptureError: export cannot follow the model, or would change what it computes; with the user's line.
    """
    marks = Marks()
    wrapper = _Wrapper(model, step, structure, marks)
    attributes = PlainAttributes(model)
    with _quiet(), marking(marks), python_random_refused(model), _state_kept(model), preserve_node_meta():
        program, follows_data = _export(wrapper, tuple(tensors))
    attributes.refuse_change()
    return Exported(program, marks, marks.parts, follows_data)


def _export(wrapper: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[ExportedProgram, bool]:
    try:
        return torch.export.export(wrapper, tensors, strict=False), False
    except EplError:
        raise
    except Exception as error:
        if not _met_data(error):
            raise _capture_error(error) from error
    try:
        return torch.export.draft_export(wrapper, tensors, strict=False), True
    except EplError:
        raise
    except Exception as error:
        raise _capture_error(error) from error


def _met_data(error: BaseException) -> bool:
    """True if export failed because the model looked at a tensor's value."""
    names = {type(error).__name__, *(type(cause).__name__ for cause in (error.__cause__, error.__context__) if cause)}
    text = str(error)
    return bool(names & {"GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound"}) or (
        "data-dependent" in text or "DataDependent" in "".join(names)
    )


def _capture_error(error: BaseException) -> CaptureError:
    reason = str(error).strip().splitlines()
    return CaptureError(
        f"the model cannot be captured as a graph: {type(error).__name__}: {reason[0] if reason else ''}\n"
        f"  at {user_line(error)}\n"
        "Export runs forward once on tensors without values. Keep to tensor operations there: torch.where for a branch on "
        "data, torch functions for numpy ones. A model that cannot be changed still trains as one TaskGraph "
        "(data parallelism), without scopes."
    )


@contextlib.contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Draft export runs the model for real: random numbers drawn and statistics updated there must not count."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, value in saved:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export logs whole graphs when it meets data; the capture reports what matters itself."""
    loggers = [logging.getLogger(name) for name in ("torch.fx", "torch.export", "torch._export", "torch._dynamo")]
    loggers += [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.startswith(("torch.fx.", "torch.export.", "torch._export."))
    ]
    before = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        # a failing export prints the partial graph to stderr before it raises
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as said:
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(said.getvalue() if "def forward(self, arg0_1" not in said.getvalue() else "")
    finally:
        for logger, disabled in before:
            logger.disabled = disabled
