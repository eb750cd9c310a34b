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
from epl.capture.convert import Converted, convert
from epl.capture.export import export
from epl.capture.refusals import hooks_in
from epl.errors import CaptureError, bulleted
from epl.ir.graph import Buffer, Graph, Input, Op, Output, Parameter, Ref, StrategySpec
from epl.ir.types import ListType, TensorType
from epl.ir.verify import verify
from epl.loss import Step
from epl.scopes import tag_of

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
        hooks = hooks_in(model)
        if hooks:
            raise CaptureError(bulleted("hooks would run at capture only, not at each step; remove them:", hooks))
        exported = export(model, step, batch.structure, batch.tensors)
        converted = convert(exported, model, batch.paths)
    except CaptureError as error:
        if not _one_taskgraph(model):
            raise
        warnings.warn(f"the model runs as it is, as one TaskGraph, since it cannot be captured: {error}", stacklevel=2)
        return opaque(model, step, batch)
    return Captured(
        verify(converted.graph),
        converted.functions,
        converted.constants,
        structure=step.structure,
        follows_data=exported.follows_data,
    )


def _one_taskgraph(model: nn.Module) -> bool:
    """True if the annotations that can be seen without a capture ask for at most one TaskGraph."""
    tags = [tag_of(target) for target in (*model.modules(), *model.parameters())]
    return len({id(tag.strategy) for tag in tags if tag is not None}) <= 1


def opaque(model: nn.Module, step: Step, batch: Flat) -> Captured:
    """A graph of one operator that calls the model: enough for data parallelism, which needs no more.

    The step is run once, without gradients, to learn what it gives.
    """
    converted = _opaque_graph(model, step, batch)
    return Captured(converted.graph, converted.functions, converted.constants, structure=step.structure, is_opaque=True)


def _opaque_graph(model: nn.Module, step: Step, batch: Flat) -> Converted:
    roles = _trial(model, step, batch)
    inputs = tuple(
        Input(f"in_{place}", TensorType(tensor.dtype, tuple(tensor.shape)), path)
        for place, (tensor, path) in enumerate(zip(batch.tensors, batch.paths, strict=True))
    )
    parameters = _opaque_parameters(model)
    buffers = tuple(
        Buffer(f"b_{place}", TensorType(buffer.dtype, tuple(buffer.shape)), path)
        for place, (path, buffer) in enumerate(model.named_buffers())
    )

    def call(tensors: list[torch.Tensor], *_: object) -> list[Any]:
        return [value for _, value in step.run(model, batch.structure.unflatten(tensors))]

    held = tuple(Ref(leaf.name) for leaf in (*parameters, *buffers))
    kinds = tuple(TensorType(value.dtype, tuple(value.shape)) for _, value in roles if isinstance(value, torch.Tensor))
    op = Op(
        "step",
        ListType(kinds),
        "function.call_0",
        (tuple(Ref(leaf.name) for leaf in inputs), held),
        writes=tuple(leaf.name for leaf in buffers),
        random=0,
        module=type(model).__name__,
    )
    picks = [
        Op(f"part_{place}", TensorType(value.dtype, tuple(value.shape)), "python.getitem", (Ref("step"), place))
        for place, (_, value) in enumerate(roles)
        if isinstance(value, torch.Tensor)
    ]
    outputs = tuple(
        Output(role, Ref(f"part_{place}") if isinstance(value, torch.Tensor) else value)
        for place, (role, value) in enumerate(roles)
    )
    strategies = _opaque_strategies(model)
    ops = (op, *picks)
    graph = Graph(inputs, parameters, buffers, (), ops, outputs, strategies=strategies)
    return Converted(graph, {"function.call_0": call}, {})


def _opaque_parameters(model: nn.Module) -> tuple[Parameter, ...]:
    paths: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    return tuple(
        Parameter(
            f"p_{place}",
            TensorType(parameter.dtype, tuple(parameter.shape)),
            paths[id(parameter)][0],
            parameter.requires_grad,
            tuple(paths[id(parameter)][1:]),
        )
        for place, parameter in enumerate(model.parameters())
    )


def _opaque_strategies(model: nn.Module) -> tuple[StrategySpec, ...]:
    tags = [tag.strategy for tag in map(tag_of, model.modules()) if tag is not None]
    return tuple(StrategySpec(s.kind, s.device_count, s.name, s.where) for s in tags[:1])


def _trial(model: nn.Module, step: Step, batch: Flat) -> list[tuple[str, Any]]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        roles = step.run(model, batch.structure.unflatten(batch.tensors))
        for buffer, value in buffers:
            buffer.copy_(value)
    return roles
