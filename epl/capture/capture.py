"""From a model, a step and an example batch to an annotated graph.

``capture`` is the one entry. What it gives is the graph, and what a graph cannot hold: the callables and the constant
tensors that it names. A model that export cannot follow still trains where no graph is needed: as one operator that
calls the model itself (`opaque`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from epl.batch import Flat, Structure, note_on_sizes
from epl.capture.attributes import ForwardEffects
from epl.capture.convert import Converted, convert
from epl.capture.export import Exported, export, modules_of
from epl.capture.opaque import opaque
from epl.capture.refusals import refuse_hooks
from epl.errors import CaptureError, bulleted
from epl.ir.graph import Graph, Ref
from epl.ir.verify import verify
from epl.lines import warn
from epl.loss import Step

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Args:
        graph: The annotated graph; no TaskGraphs yet.
        functions: What the operators named ``function.call_N`` call.
        constants: The tensors that the graph names as constants.
        structure: Structure of the output, when the step gives the model's whole output.
        is_opaque: True if the graph is one operator that calls the model itself.
        follows_data: True if the model branches on values: the graph holds assertions that the branch is the same.
    """

    graph: Graph
    functions: dict[str, Callable[..., Any]]
    constants: dict[str, torch.Tensor]
    structure: Structure | None = None
    is_opaque: bool = False
    follows_data: bool = False


def capture(model: nn.Module, step: Step, batch: Flat) -> Captured:
    """The graph of ``step`` on batches like ``batch``.

    Raises:
        CaptureError: the model cannot be captured, and its annotations need a graph (more than one TaskGraph).
    """
    try:
        refuse_hooks(model)
        exported, converted = _exported(model, step, batch)
        _refuse_frozen_numbers(converted.graph)
    except CaptureError as error:
        converted = _as_it_is(model, step, batch, error)
        return Captured(converted.graph, converted.functions, {}, structure=step.structure, is_opaque=True)
    left = [path for changes in exported.marks.changes for path in changes.tensors]
    if left:
        warn(
            f"forward leaves tensors in attributes ({', '.join(left[:5])}); a parallel step does not. Read them in forward "
            "or in loss_fn, or return them as aux."
        )
    return Captured(
        verify(converted.graph),
        converted.functions,
        converted.constants,
        structure=step.structure,
        follows_data=exported.follows_data,
    )


def _as_it_is(model: nn.Module, step: Step, batch: Flat, error: CaptureError) -> Converted:
    try:
        return opaque(model, step, batch, error)
    except CaptureError as failure:
        note = note_on_sizes(batch)  # of a part of the batch: what was cut has another size than what was not
        if not note:
            raise
        raise CaptureError(f"{failure}\n{note}") from failure.__cause__


def _exported(model: nn.Module, step: Step, batch: Flat) -> tuple[Exported, Converted]:
    """The step as a graph. Where forward sets plain attributes, it is captured again with them set.

    Raises:
        CaptureError: the model cannot be captured, or forward changes attributes at each call.
    """
    exported = export(model, step, batch.structure, batch.tensors)
    converted = convert(exported, model, batch.paths)
    changes = [change for change in exported.marks.changes if change.lines]
    if not changes:
        return exported, converted
    before = [ForwardEffects(module) for module in modules_of(model, step)]
    for change in changes:
        change.apply()
    again = export(model, step, batch.structure, batch.tensors)
    converted_again = convert(again, model, batch.paths)
    if any(change.lines for change in again.marks.changes) or not _equal(converted, converted_again):
        for effects in before:
            effects.put_back()
        raise CaptureError(
            bulleted(
                "forward changes attributes of modules; a graph would keep the first value. Keep such state in a buffer "
                "(self.register_buffer) and change it with tensor operations, or change it outside forward:",
                [line for change in changes for line in change.lines],
            )
        )
    return again, converted_again


def _refuse_frozen_numbers(graph: Graph) -> None:
    """``float(tensor)`` becomes a constant, with an assertion that the value is the same: true for one step only."""
    for op in graph.ops:
        condition = op.args[0] if op.target.startswith("aten._assert_scalar") else None
        test = graph.op_by_name.get(condition.name) if isinstance(condition, Ref) else None
        if test is None or test.target != "python.eq" or not any(isinstance(arg, float) for arg in test.args):
            continue
        if not graph.known_from_batch.issuperset(test.reads):
            raise CaptureError(
                f"forward makes a Python float of a tensor's value at {test.source}, and a graph would keep the first one. "
                "Keep it as a tensor, or take it with .item()."
            )


def _equal(one: Converted, other: Converted) -> bool:
    return one.graph == other.graph and all(
        torch.equal(tensor, other.constants[name]) for name, tensor in one.constants.items()
    )
