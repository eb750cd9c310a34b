"""Run ``torch.export`` on a model's step: plain export first, export beside real values where the model looks at data.

Design: strict=False (the forward runs as Python under fake tensors); a small wrapper takes the tensors of the batch and
returns the tensors of the step's parts, so output classes and caches stay out of the graph.

Where forward branches on a tensor's value, real tensors are computed beside the fake ones: the export follows the branch
that the real values take and leaves run-time assertions in the graph. ``torch.export.draft_export`` is this and a report;
it also logs a warning of ten lines, and writes a trace to a file that it never closes. What it switches on is used here
directly: ``torch._functorch.config`` (torch 2.6 and later; no public switch short of ``draft_export``).
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch._functorch.config import patch as functorch_options
from torch.export import ExportedProgram
from torch.fx.traceback import annotate_fn, preserve_node_meta

from epl.batch import Structure
from epl.capture.attributes import ForwardEffects, plain_tensors
from epl.capture.marks import Marks, PartPlace, annotating, marking
from epl.capture.randomness import python_random_refused
from epl.capture.refusals import autograd_calls_refused, user_line
from epl.errors import CaptureError, EplError
from epl.lines import is_users
from epl.loss import Step

__all__ = ["Exported", "export", "modules_of"]

_REAL_VALUES = {"fake_tensor_propagate_real_tensors": True, "generate_fake_kernels_from_real_mismatches": True}
# what export says -> what it means
_MEANINGS = {
    "fake tensor in the exported program constant's list": "it gets at a tensor in a way that export does not see, such as "
    ".data (use .detach()), or keeps a tensor of its own from call to call",
}


@dataclass(frozen=True)
class Exported:
    """An exported step: the program, what was marked, and whether forward branches on values."""

    program: ExportedProgram
    marks: Marks
    follows_data: bool


def _as_tensor(value: Any) -> Any:
    """A number that ``item()`` took out of a tensor (a count of tokens, say) differs from batch to batch."""
    kinds = {torch.SymInt: torch.int64, torch.SymBool: torch.int64, torch.SymFloat: torch.float64}
    return torch.scalar_tensor(value, dtype=kinds[type(value)]) if type(value) in kinds else value


class _Wrapper(nn.Module):
    """The step as a function of the batch's tensors."""

    def __init__(self, model: nn.Module, step: Step, structure: Structure, marks: Marks) -> None:
        super().__init__()
        self.model = model
        self.hidden = (step, structure, marks)  # in a tuple, so that nothing in it is taken for a submodule

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, structure, marks = self.hidden
        marks.restart()
        _give_values(self.model, marks.real_parameters)
        effects = [ForwardEffects(module) for module in modules_of(self.model, step)]
        try:
            with annotating(marks):
                parts = [
                    (role, _as_tensor(value)) for role, value in step.run(self.model, structure.unflatten(tensors))
                ]
        except BaseException:
            for effect in effects:
                effect.put_back()
            raise
        marks.changes = [effect.settle() for effect in effects]
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
    if step.loss_fn is not None:
        annotate_fn({})(step.loss_fn)  # so that export records its lines, as it does those of a module's forward
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(marking(marks))
        stack.enter_context(autograd_calls_refused(marks.functions.is_inside))
        stack.enter_context(python_random_refused(model))
        stack.enter_context(_state_kept(modules_of(model, step)))
        stack.enter_context(preserve_node_meta())
        stack.enter_context(torch.enable_grad())
        program, follows_data = _export(wrapper, _apart(tensors))
    return Exported(program, marks, follows_data)


def _give_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Export beside real values leaves those of parameters uninitialised: torch 2.13 copies plain tensors only."""
    for path, fake in model.named_parameters(remove_duplicate=False):
        if path in values:
            fake.real_tensor = values[path]  # type: ignore[attr-defined]


def _values_of_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, since forward may write to them; a released parameter (one element, expanded) is none to write to."""
    named = list(model.named_parameters(remove_duplicate=False))
    copies = {id(held): held.detach() if 0 in held.stride() else held.detach().clone() for _, held in named}
    return {path: copies[id(held)] for path, held in named}


def modules_of(model: nn.Module, step: Step) -> list[nn.Module]:
    """The model, and a loss function that is a module itself."""
    return [model, step.loss_fn] if isinstance(step.loss_fn, nn.Module) else [model]


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors as objects of their own, each in memory of its own.

    One that is given twice (ids as labels) would become one input; and export beside real values fails for tensors that
    are parts of one memory.
    """
    return tuple([tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors])


def _export(wrapper: _Wrapper, tensors: tuple[torch.Tensor, ...]) -> tuple[ExportedProgram, bool]:
    try:
        return torch.export.export(wrapper, tensors, strict=False), False
    except EplError:
        raise
    except Exception as error:
        if not _met_data(error):
            raise _capture_error(error) from error
    marks = wrapper.hidden[2]
    marks.real_parameters = _values_of_parameters(wrapper.model)
    try:
        with functorch_options(_REAL_VALUES):
            return torch.export.export(wrapper, tensors, strict=False), True
    except EplError:
        raise
    except Exception as error:
        raise _capture_error(error) from error
    finally:
        marks.real_parameters = {}


def _met_data(error: BaseException) -> bool:
    """True if export failed because the model looked at a tensor's value."""
    names = {type(error).__name__, *(type(cause).__name__ for cause in (error.__cause__, error.__context__) if cause)}
    text = str(error)
    return bool(names & {"GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound"}) or (
        "data-dependent" in text or "DataDependent" in "".join(names)
    )


def _capture_error(error: BaseException) -> CaptureError:
    reason = (str(error).strip().splitlines() or [""])[0]
    known = next((meaning for sign, meaning in _MEANINGS.items() if sign in str(error)), "")
    return CaptureError(
        f"the model cannot be captured as a graph: {known or f'{type(error).__name__}: {reason}'}\n"
        f"  at {user_line(error)}\n"
        "Export runs forward once on tensors without values. Keep to tensor operations there: torch.where for a branch on "
        "data, torch functions for numpy ones. A model that cannot be changed still trains as one TaskGraph "
        "(data parallelism), without scopes."
    )


@contextlib.contextmanager
def _state_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Export beside real values runs the model: numbers drawn and statistics updated there must not count.

    Export computes with tensors that modules hold in plain attributes as they are, so those may change in any case.
    """
    tensors = [held for module in modules for held in (*module.buffers(), *plain_tensors(module).values())]
    saved = [(held, held.detach().clone()) for held in tensors]
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        changed = [(held, value) for held, value in saved if not held.is_meta and not torch.equal(held, value)]
        with torch.no_grad():
            for held, value in changed:
                held.copy_(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export logs whole graphs when it meets data; the capture reports what matters itself. The model may speak."""
    loggers = [logging.getLogger(name) for name in ("torch.fx", "torch.export", "torch._export", "torch._dynamo")]
    loggers += [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.startswith(("torch.fx.", "torch.export.", "torch._export."))
    ]
    before = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    said = io.StringIO()
    warned: list[warnings.WarningMessage] = []
    try:
        # a failing export prints the partial graph to stderr before it raises
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(said):
            warnings.simplefilter("always")
            yield
    finally:
        for logger, disabled in before:
            logger.disabled = disabled
        if "def forward(self, arg0_1" not in said.getvalue():
            sys.stderr.write(said.getvalue())
    for note in warned:
        if is_users(note.filename):
            warnings.warn_explicit(note.message, note.category, note.filename, note.lineno)
