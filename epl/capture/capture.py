"""From a model, a step and an example batch to an annotated graph.

``capture`` is the one entry. What it gives is the graph, and what a graph cannot hold: the callables and the constant
tensors that it names. A model that export cannot follow still trains where no graph is needed: as one operator that
calls the model itself (`opaque`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from epl.batch import Flat, Structure
from epl.capture.convert import convert
from epl.capture.export import export
from epl.capture.opaque import opaque
from epl.capture.refusals import refuse_hooks
from epl.errors import CaptureError
from epl.ir.graph import Graph
from epl.ir.verify import verify
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
        exported = export(model, step, batch.structure, batch.tensors)
        converted = convert(exported, model, batch.paths)
    except CaptureError as error:
        converted = opaque(model, step, batch, error)
        return Captured(converted.graph, converted.functions, {}, structure=step.structure, is_opaque=True)
    left = exported.marks.left_behind
    if left:
        warnings.warn(
            f"forward leaves tensors in attributes ({', '.join(left[:5])}); a parallel step does not. Read them in forward "
            "or in loss_fn, or return them as aux.",
            stacklevel=2,
        )
    return Captured(
        verify(converted.graph),
        converted.functions,
        converted.constants,
        structure=step.structure,
        follows_data=exported.follows_data,
    )
