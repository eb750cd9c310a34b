"""A model that cannot be captured, as a graph of one operator that calls the model itself.

That is enough where no graph is needed: one TaskGraph, that is data parallelism and what goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.func import functional_call

from epl.batch import Flat
from epl.capture.attributes import ForwardEffects
from epl.capture.convert import Converted
from epl.capture.refusals import user_line
from epl.errors import CaptureError, EplError, RunError
from epl.ir.graph import Buffer, Graph, Input, Op, Output, Parameter, Ref, StrategySpec
from epl.ir.types import ListType, ScalarType, TensorType, Type
from epl.lines import warn
from epl.loss import Parts, Step
from epl.scopes import DeafTracer, Strategy, strategies_of, tracing

__all__ = ["opaque"]


def opaque(model: nn.Module, step: Step, batch: Flat, error: CaptureError) -> Converted:
    """The graph of a step that calls the model, with a warning that says why.

    The step is run once, without gradients, to learn what it gives and which scopes it enters.

    Args:
        model: The model.
        step: What is computed.
        batch: An example.
        error: Why the model cannot be captured.

    Raises:
        CaptureError: ``error``, if the annotations ask for more than one TaskGraph, which needs a graph; or forward fails
            by itself.
    """
    if len(strategies_of(model)) > 1:
        raise error
    called = _CalledStrategies()
    try:
        with tracing(called):
            parts = _trial(model, step, batch)
    except EplError:
        raise
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
        hint = "" if step.loss_fn is not None else "\nno loss_fn was given, so the batch itself was passed to forward"
        raise CaptureError(f"forward fails: {reason}\n  at {user_line(failure)}{hint}") from failure
    strategies = list(dict.fromkeys([*strategies_of(model), *called.strategies]))
    if len(strategies) > 1:
        raise error
    warn(f"the model runs as it is, as one TaskGraph, since it cannot be captured: {error}")
    specs = tuple(StrategySpec(s.kind, s.device_count, s.name, s.where, placements=s.placements) for s in strategies)
    return Converted(_graph(model, batch, parts, specs), {"function.call_0": _Call(model, step, batch, parts)}, {})


class _CalledStrategies(DeafTracer):
    """Notes the strategies that forward enters."""

    def __init__(self) -> None:
        self.strategies: list[Strategy] = []

    def enter(self, strategy: Strategy) -> None:
        self.strategies.append(strategy)

    def set_default(self, strategy: Strategy) -> None:
        self.strategies.append(strategy)


class _StepModule(nn.Module):
    """The step as a module with the model in it, so that it can be called with other tensors for its weights."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, batch: Any) -> Parts:
        return self.step.run(self.model, batch)


class _Call:
    """What the operator calls: the step, on the tensors of a batch and with the weights that the runtime gives."""

    def __init__(self, model: nn.Module, step: Step, batch: Flat, parts: Parts) -> None:
        self._model, self._step = model, step
        self._whole = _StepModule(model, step)
        self._batch_structure, self._structure = batch.structure, step.structure
        self._fixed = _fixed(parts)

    def __call__(self, tensors: list[torch.Tensor], held: Sequence[torch.Tensor]) -> list[Any]:
        own = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        given = {f"model.{name}": tensor for name, tensor in zip(own, held, strict=True) if tensor is not own[name]}
        with tracing(DeafTracer()):
            batch = self._batch_structure.unflatten(tensors)
            parts = functional_call(self._whole, given, (batch,)) if given else self._step.run(self._model, batch)
        if _fixed(parts) != self._fixed or self._step.structure != self._structure:
            raise RunError(
                f"the model gave {_fixed(parts)} beside tensors, and {self._fixed} for the first batch of this kind; only "
                "tensors and numbers of aux may differ from batch to batch"
            )
        return [value for _, value in parts]


def _fixed(parts: Parts) -> list[tuple[str, Any]]:
    """Roles, and the values that the graph holds as constants."""
    return [(role, None if _kind(value) is not None else value) for role, value in parts]


def _kind(value: Any) -> Type | None:
    """Type of what is handed on as a value; None for what is a constant."""
    if isinstance(value, torch.Tensor):
        return TensorType(value.dtype, tuple(value.shape))
    return ScalarType(type(value).__name__) if isinstance(value, (bool, int, float)) else None


def _graph(model: nn.Module, batch: Flat, parts: Parts, strategies: tuple[StrategySpec, ...]) -> Graph:
    inputs = tuple(
        Input(f"in_{place}", TensorType(tensor.dtype, tuple(tensor.shape)), path)
        for place, (tensor, path) in enumerate(zip(batch.tensors, batch.paths, strict=True))
    )
    parameters, buffers = _parameters(model), _buffers(model)
    held = tuple(Ref(leaf.name) for leaf in (*parameters, *buffers))
    tag = 0 if strategies else None
    kinds = [_kind(value) for _, value in parts]
    op = Op(
        "step",
        ListType(tuple(kind or ScalarType("none") for kind in kinds)),
        "function.call_0",
        (tuple(Ref(leaf.name) for leaf in inputs), held),
        writes=tuple(leaf.name for leaf in buffers),
        random=0,
        tag=tag,
        module=type(model).__name__,
    )
    picks = [
        Op(f"part_{place}", kind, "python.getitem", (Ref("step"), place), tag=tag)
        for place, kind in enumerate(kinds)
        if kind is not None
    ]
    outputs = tuple(
        Output(role, value if kinds[place] is None else Ref(f"part_{place}"))
        for place, (role, value) in enumerate(parts)
    )
    return Graph(inputs, parameters, buffers, (), (op, *picks), outputs, strategies=strategies)


def _parameters(model: nn.Module) -> tuple[Parameter, ...]:
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


def _buffers(model: nn.Module) -> tuple[Buffer, ...]:
    persistent = set(model.state_dict(keep_vars=True))
    return tuple(
        Buffer(f"b_{place}", TensorType(buffer.dtype, tuple(buffer.shape)), path, path in persistent)
        for place, (path, buffer) in enumerate(model.named_buffers())
    )


def _trial(model: nn.Module, step: Step, batch: Flat) -> Parts:
    """What the step gives; the model and the generators are as before."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    effects = ForwardEffects(model)
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            return step.run(model, batch.structure.unflatten(batch.tensors))
    finally:
        effects.put_back()
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
