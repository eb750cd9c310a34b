"""Run the stages of a cut model one after another in this process, and compare with the plain model.

This is the executor's work without processes: values are handed over by hand, as copies of the declared type, exactly as
a channel would, and gradients come back the same way. So a mistake of capture, planning or lowering shows here in a
fraction of a second, for a model of any oddity; what is left for the tests of the runtime is the transport.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.capture.draws import SeededDraws
from epl.cluster import Cluster
from epl.config import Config
from epl.ir.graph import Graph
from epl.ir.text import parse, to_text
from epl.ir.types import ScalarType, TensorType, Type
from epl.loss import LossFunction, Step, loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.instructions import Transfer
from epl.program.lower import LoweredStage, lower_stage
from epl.sharding.collectives import LonelyRank
from tests.parity import assert_close

__all__ = ["Lowered", "Ran", "check_lowered", "check_parity", "lower", "lower_captured", "run_stages"]


@dataclass(frozen=True)
class Lowered:
    """A model taken as far as a rank needs it: each stage's function, on one rank a stage."""

    model: nn.Module
    captured: Captured
    graph: Graph
    plan: Plan
    stages: tuple[LoweredStage, ...]


class Ran(NamedTuple):
    """What a step left behind."""

    parts: dict[str, Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def lower(
    model: nn.Module, batch: Any, loss_fn: LossFunction | None = None, *, step: Step | None = None, **options: Any
) -> Lowered:
    """Capture a model and lower every stage; one rank for each TaskGraph.

    Args:
        model: The annotated model.
        batch: A batch as the user gives it.
        loss_fn: As in ``epl.parallelize``.
        step: What is computed instead of the loss.
        options: Of ``build_taskgraphs``.
    """
    captured = capture(model, step or loss_step(loss_fn), flatten(batch))
    return lower_captured(model, captured, **options)


def lower_captured(model: nn.Module, captured: Captured, **options: Any) -> Lowered:
    """The rest of `lower`."""
    assert parse(to_text(captured.graph)) == captured.graph
    graph = build_taskgraphs(captured.graph, **options)
    assert parse(to_text(graph)) == graph
    config = Config({"cluster.colocate_split_and_replicate": bool(options.get("colocate"))})
    num_ranks = 1 if options.get("colocate") else sum(spec.device_count for spec in graph.tasks)
    plan = make_plan(graph, Cluster((num_ranks,)), config, is_opaque=captured.is_opaque)
    assert Plan.from_json(plan.to_json()) == plan
    stages = tuple(lower_stage(graph, plan, stage.ranks[0][0]) for stage in plan.stages)
    return Lowered(model, captured, graph, plan, stages)


def run_stages(lowered: Lowered, batch: Any, reseed: Callable[[int], None] | None = None) -> Ran:
    """One training step, stage after stage; gradients are added to the model's parameters."""
    tensors = flatten(batch).tensors
    reseed = reseed or (lambda _: None)
    sent: dict[str, Any] = {}
    runs: list[_StageRun] = []
    for stage in lowered.stages:
        run = _StageRun(lowered, stage)
        run.forward(tensors, sent, reseed)
        runs.append(run)
    returned: dict[str, list[Tensor]] = {}
    for run in reversed(runs):
        run.backward(returned)
    parts = {role: value for run in runs for role, value in run.parts.items()}
    parts |= {out.role: out.value for out in lowered.graph.outputs if out.role not in parts}
    return Ran(parts, _gradients(lowered.model), _buffers(lowered.model))


@dataclass
class _StageRun:
    """One stage in one step."""

    lowered: Lowered
    stage: LoweredStage
    taken: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    loss: Tensor | None = None

    def forward(self, tensors: Sequence[Tensor], sent: dict[str, Any], reseed: Callable[[int], None]) -> None:
        program = self.stage.program
        for transfer in program.takes:
            value = _travelled(sent[transfer.value], transfer.type)
            self.taken[transfer.value] = value.requires_grad_() if transfer.needs_grad else value
        alone = {target: function.bind(LonelyRank()) for target, function in self.stage.functions.items()}
        function = self.stage.code.compile(self.lowered.captured.functions | alone)
        inputs = [tensors[place] for place in program.inputs]
        results = function(*_held(self.lowered, program.held), *inputs, *self.taken.values(), reseed)
        self.given = dict(zip(program.gives, results, strict=False))
        for transfer in program.sends:
            _check_declared(self.given[transfer.value], transfer)
            sent[transfer.value] = self.given[transfer.value]
        for role, value in zip(program.parts, results[len(program.gives) :], strict=True):
            self.parts[role] = value.detach() if isinstance(value, Tensor) else value
            self.loss = value if role in ("loss", "total") else self.loss

    def backward(self, returned: dict[str, list[Tensor]]) -> None:
        program = self.stage.program
        if not program.needs_backward:
            return
        roots = [] if self.loss is None else [(self.loss, torch.ones_like(self.loss))]
        for name in dict.fromkeys(transfer.value for transfer in program.sends if transfer.needs_grad):
            users = sum(transfer.value == name for transfer in program.sends)
            assert len(returned[name]) == users, f"{name} goes to {users} stages, {len(returned[name])} gave a gradient"
            roots.append((self.given[name], torch.stack(returned[name]).sum(0)))
        flowing = [(value, gradient) for value, gradient in roots if value.requires_grad]
        if flowing:
            torch.autograd.backward([value for value, _ in flowing], [gradient for _, gradient in flowing])
        for transfer in program.takes:
            if transfer.needs_grad:
                value = self.taken[transfer.value]
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                returned.setdefault(transfer.value, []).append(_travelled(gradient, transfer.type))


def _travelled(value: Any, kind: Type) -> Any:
    """What the other end has: a contiguous copy, or a Python number."""
    if isinstance(kind, ScalarType):
        return {"int": int, "bool": bool, "float": float}[kind.kind](value)
    return value.detach().clone(memory_format=torch.contiguous_format)


def _check_declared(value: Any, transfer: Transfer) -> None:
    """The receiver makes room by the declared type."""
    kind = transfer.type
    if isinstance(kind, ScalarType):
        assert type(value).__name__ == kind.kind, f"{transfer.value} is declared {kind} and is {value!r}"
        return
    assert isinstance(kind, TensorType)
    assert isinstance(value, Tensor)
    assert value.dtype == kind.dtype
    assert len(value.shape) == len(kind.shape)
    assert all(declared in (None, size) for size, declared in zip(value.shape, kind.shape, strict=True))


def _held(lowered: Lowered, names: Sequence[str]) -> list[Tensor]:
    graph, constants = lowered.captured.graph, lowered.captured.constants
    paths = {leaf.name: leaf.path for leaf in (*graph.parameters, *graph.buffers)}
    tensors: Mapping[str, Tensor] = dict(
        [
            *lowered.model.named_parameters(remove_duplicate=False),
            *lowered.model.named_buffers(remove_duplicate=False),
        ]
    )
    return [tensors[paths[name]] if name in paths else constants[name] for name in names]


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def plain_run(model: nn.Module, batch: Any, step: Step, graph: Graph, reseed: Callable[[int], None]) -> Ran:
    """The same step of the plain model."""
    with SeededDraws(graph, reseed):
        parts = dict(step.run(model, batch))
    (parts["total"] if "total" in parts else parts["loss"]).backward()
    found = {role: value.detach() if isinstance(value, Tensor) else value for role, value in parts.items()}
    return Ran(found, _gradients(model), _buffers(model))


def check_parity(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    num_stages: int | None = None,
    **options: Any,
) -> Lowered:
    """Assert that a model's stages give the loss, aux, gradients and buffers that the plain model gives.

    Args:
        model: The annotated model; its parameters get gradients.
        batch: A batch as the user gives it.
        loss_fn: As in ``epl.parallelize``.
        dtype: How exact the model is.
        num_stages: How many stages there must be.
        options: Of ``build_taskgraphs``.
    """
    before, state = _buffers(model), torch.random.get_rng_state()
    lowered = lower(model, batch, loss_fn, **options)
    assert torch.equal(torch.random.get_rng_state(), state), "capture drew random numbers"
    assert _same(_buffers(model), before), "capture changed a buffer"
    if num_stages is not None:
        assert lowered.plan.num_stages == num_stages
    check_lowered(lowered, batch, loss_fn, dtype=dtype)
    return lowered


def check_lowered(
    lowered: Lowered,
    batch: Any,
    loss_fn: LossFunction | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    num_steps: int = 2,
) -> None:
    """The second half of `check_parity`; what a step leaves behind shows in the next one."""
    model, graph = lowered.model, lowered.captured.graph
    model.zero_grad()
    plain, kept_batch, plain_loss_fn = copy.deepcopy((model, batch, loss_fn))
    for _ in range(num_steps):
        model.zero_grad()
        plain.zero_grad()
        with torch.random.fork_rng(devices=[]):
            ran = run_stages(lowered, batch, torch.manual_seed)
            step = loss_step(plain_loss_fn)
            expected = plain_run(plain, copy.deepcopy(kept_batch), step, graph, torch.manual_seed)
        _compare(ran, expected, dtype)
    assert _same(_numbered(batch), _numbered(kept_batch)), "a step changed the user's batch"


def _compare(ran: Ran, expected: Ran, dtype: torch.dtype) -> None:
    assert ran.parts.keys() == expected.parts.keys()
    for role, value in expected.parts.items():
        if isinstance(value, Tensor):
            assert_close({role: ran.parts[role]}, {role: value}, dtype)
        else:
            assert _plain(ran.parts[role]) == value
    missing = {name for name, gradient in expected.gradients.items() if gradient is None}
    # a parameter that has no say in the loss may get a gradient of zeros, since a stage cannot know what the next one does
    given = {name for name in missing if ran.gradients[name] is not None and ran.gradients[name].any()}  # type: ignore[union-attr]
    assert not given, f"these get no gradient from the plain model: {sorted(given)}"
    theirs = {name: _dense(gradient) for name, gradient in expected.gradients.items() if gradient is not None}
    ours = {name: ran.gradients[name] for name in theirs}
    absent = sorted(name for name, gradient in ours.items() if gradient is None)
    assert not absent, f"these get a gradient from the plain model, and none here: {absent}"
    assert_close({name: _dense(gradient) for name, gradient in ours.items()}, theirs, dtype)
    assert_close(ran.buffers, expected.buffers, dtype)


def _plain(value: Any) -> Any:
    """A number that forward takes out of a tensor comes back as a tensor."""
    return value.item() if isinstance(value, Tensor) else value


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _numbered(batch: Any) -> dict[str, Tensor]:
    flat = flatten(batch)
    return dict(zip(flat.paths, flat.tensors, strict=True))


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())
