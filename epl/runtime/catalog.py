"""The graphs that one model has been captured as, by what they were captured for.

A capture is kept per signature: the batch's structure, shapes and plain values, and what in the model decides what
forward does (training flags, which parameters are trainable, plain attributes). Where the model branches on values that
depend on the batch alone, the branch is part of the signature too: each graph has a guard, and a batch that fails all
guards is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from epl.batch import Flat, batch_size_of, cut, take
from epl.capture.capture import Captured, capture
from epl.capture.refusals import PlainAttributes
from epl.cluster import Cluster
from epl.config import Config
from epl.errors import RunError
from epl.ir.graph import Graph, StrategySpec
from epl.lines import warn
from epl.loss import LossFunction, loss_step, output_step
from epl.passes.precision import mixed_precision, precision_lines
from epl.planner.make import choose_splits, make_plan
from epl.planner.plan import Plan
from epl.planner.split import SplitChoice
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.budget import fit_budget, refuse_too_large
from epl.program.guards import GuardCode, guard_of
from epl.program.lower import LoweredStage, lower_stage, stage_notes
from epl.runtime.agree import digest
from epl.runtime.executor import BoundStage
from epl.runtime.weights import Weights
from epl.sharding.collectives import Collectives
from epl.stage.codegen import Segments
from epl.stage.leases import Leases

__all__ = ["Catalog", "Variant"]

_MANY = 8  # captures of one shape that look like more to come


@dataclass
class Variant:
    """One graph of the model, and the stage that this rank makes of it.

    Args:
        captured: The graph as it was captured, and what it names.
        graph: The graph with TaskGraphs.
        number: The same on all ranks that have captured the same operators.
        guard: The branches that the batch alone decides.
        holds: Whether a batch takes these branches.
        splits: What the plan was made with, if it was made with this graph: how each split stage shares out its work.
        bound: The stage, once it is compiled.
    """

    captured: Captured
    graph: Graph
    number: int
    guard: GuardCode | None
    holds: Callable[..., bool]
    splits: Mapping[int, SplitChoice] = field(default_factory=dict)
    bound: BoundStage | None = None

    def make_plan(self, cluster: Cluster, config: Config, state_factor: float) -> Plan:
        """The plan for this graph; what was chosen for it on the way is kept, so that it need not be chosen again.

        ``state_factor`` is in bytes of optimizer states for each byte of a trained weight.
        """
        is_opaque = self.captured.is_opaque
        self.splits = choose_splits(self.graph, cluster, config, is_opaque=is_opaque)
        plan = make_plan(self.graph, cluster, config, is_opaque=is_opaque, splits=self.splits)
        plan = fit_budget(self.graph, replace(plan, state_factor=state_factor), self.captured.functions, self.splits)
        refuse_too_large(self.graph, plan, self.captured.functions, self.splits)
        lines = precision_lines(self.graph) if config.amp.debug_log else []
        return replace(plan, notes=(*plan.notes, *stage_notes(self.graph, plan, self.splits), *lines))


class Catalog:
    """Finds the graph for a micro-batch, capturing the model if there is none yet."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        *,
        colocate: bool,
        precision: torch.dtype | None = None,
    ) -> None:
        self._model, self._precision = model, precision
        self._loss_fn = loss_fn
        self._colocate = colocate
        self._tasks: tuple[StrategySpec, ...] | None = None
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._attributes = PlainAttributes(model)
        self._variants: dict[Any, list[Variant]] = {}
        self.segments = Segments()
        self.weights: Weights | None = None
        self.around_capture: Callable[[], AbstractContextManager[Any]] = nullcontext

    def model_key(self) -> tuple[Any, ...]:
        """What in the model decides what forward does."""
        flags = tuple([module.training for module in self._modules])
        trainable = tuple([parameter.requires_grad for parameter in self._parameters])
        return flags, trainable, self._attributes.now()

    def find(self, kind: str, model_key: tuple[Any, ...], batch: Flat) -> Variant:
        """The graph for a micro-batch.

        Args:
            kind: ``train``, ``eval`` or ``output``: what is computed.
            model_key: What `model_key` gave.
            batch: The micro-batch.

        Raises:
            CaptureError: the model cannot be captured.
            StrategyError: its annotations cannot be carried out.
        """
        shapes = tuple([(tensor.shape, tensor.dtype) for tensor in batch.tensors])
        variants = self._variants.setdefault((kind, batch.structure, shapes, model_key), [])
        for variant in variants:
            if variant.holds(batch.tensors):
                return variant
        variants.append(self._capture(kind, batch))
        if len(variants) == _MANY:
            _warn_of_many(variants[-1])
        return variants[-1]

    def make_plan(self, kind: str, example: Flat, cluster: Cluster, config: Config, state_factor: float) -> Plan:
        """The plan for the graph of a replica's batch like this one; arguments as of `find` and `Variant.make_plan`."""
        size = batch_size_of(example.tensors)
        parts = cut(size, config.pipeline.num_micro_batch)
        if not parts:
            raise RunError("the first batch is empty; a plan needs at least one sample")
        piece = example._replace(tensors=take(example.tensors, size, parts[0]))
        return self.find(kind, self.model_key(), piece).make_plan(cluster, config, state_factor)

    def first(self, kind: str) -> Variant | None:
        """The graph of the first micro-batch of this kind, if there has been one."""
        return next((variants[0] for key, variants in self._variants.items() if key[0] == kind), None)

    def _capture(self, kind: str, batch: Flat) -> Variant:
        step = output_step() if kind == "output" else loss_step(self._loss_fn)
        with torch.enable_grad(), self.around_capture():
            captured = capture(self._model, step, batch)
        graph = build_taskgraphs(captured.graph, colocate=self._colocate, tasks=self._tasks)
        if self._tasks is None:
            self._tasks = graph.tasks
        if self._precision is not None and not captured.is_opaque:
            graph = mixed_precision(graph, self._precision)
        guard = guard_of(captured.graph) if captured.follows_data else None
        number = digest(" ".join(f"{op.name} {op.target} {op.task}" for op in graph.ops))
        return Variant(captured, graph, number, guard, self._holds(captured, guard))

    def _holds(self, captured: Captured, guard: GuardCode | None) -> Callable[..., bool]:
        if guard is None:
            return lambda _: True
        function = guard.code.compile({})
        held = self._held(captured, guard.held)

        def holds(tensors: Sequence[torch.Tensor]) -> bool:
            with torch.no_grad():
                return all(function(*held, *(tensors[place] for place in guard.inputs), _no_draws))

        return holds

    def bind(self, variant: Variant, plan: Plan, rank: int, collectives: Collectives) -> BoundStage:
        """The stage that ``rank`` makes of a graph, compiled; ``collectives`` are those of its stage's devices."""
        if variant.bound is None:
            if variant.captured.is_opaque and plan.sharded_stages:
                raise RunError(
                    "for a batch of this kind the model cannot be captured as a graph (the warning above says why), and "
                    "a plan in which devices share out the work on one batch needs one. Mend that, or use one replicate."
                )
            self._check_held(variant.graph, plan, rank)
            number = sum(variant.bound is not None for variants in self._variants.values() for variant in variants)
            lowered = lower_stage(variant.graph, plan, rank, label=f"_{number}", splits=variant.splits)
            variant.bound = BoundStage(
                lowered.program,
                lowered.code,
                self._compile(variant, lowered, collectives),
                self._held(variant.captured, lowered.program.held),
                digest(" ".join(op.target for op in lowered.code.ops)),
                _lending(lowered),
            )
        return variant.bound

    def _compile(self, variant: Variant, lowered: LoweredStage, collectives: Collectives) -> Callable[..., Any]:
        functions: dict[str, Callable[..., Any]] = dict(variant.captured.functions)
        functions |= {target: function.bind(collectives) for target, function in lowered.functions.items()}
        stage, leases = lowered.stage, None
        if stage.arrivals:
            assert self.weights is not None
            functions |= {target: self.weights.arrival(unit) for target, unit in stage.arrivals.items()}
        if stage.leases:
            assert self.weights is not None
            leases = Leases(lambda: self.segments.is_again)
            functions |= leases.bind(stage.leases, self.weights.lender(stage.runs))
        return lowered.code.compile(functions, self.segments, leases)

    def _check_held(self, graph: Graph, plan: Plan, rank: int) -> None:
        """A parameter that this stage needs for this batch must be one that the plan lets it keep."""
        stage, _, _ = plan.place_of(rank)
        kept = {entry.path for entry in plan.parameters if stage in entry.stages}
        tasks = plan.stages[stage].taskgraphs
        missing = [leaf.path for task in tasks for leaf in graph.parameters_of(task) if leaf.path not in kept]
        if missing:
            raise RunError(
                f"a batch of this kind uses {', '.join(missing[:5])} in stage {stage}, where the plan, made from the first "
                "batch, does not keep them. Pass example_batch= with a batch that uses every part to epl.parallelize."
            )

    def _held(self, captured: Captured, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        graph = captured.graph
        paths = {leaf.name: leaf.path for leaf in (*graph.parameters, *graph.buffers)}
        return tuple(self._leaf(paths[name]) if name in paths else captured.constants[name] for name in names)

    def _leaf(self, path: str) -> torch.Tensor:
        """What a stage is given of a parameter or buffer."""
        tensor = _tensor_at(self._model, path)
        return tensor if self.weights is None else self.weights.leaf(path, tensor)


def _lending(lowered: LoweredStage) -> int:
    if not lowered.stage.runs:
        return 0
    return digest(" ".join(f"{op.target} {op.segment}" for op in lowered.code.ops))


def _warn_of_many(variant: Variant) -> None:
    lines = {op.source: None for op in variant.captured.graph.ops if op.target.startswith("aten._assert_scalar")}
    warn(
        f"the model was captured {_MANY} times for batches of one shape, which takes seconds each time, since it branches "
        f"on values that keep changing, at {', '.join(lines) or 'a place that is not known'}. Keep such a value in a "
        "tensor: no int() or float() of it, torch.where for a branch."
    )


def _tensor_at(model: nn.Module, path: str) -> torch.Tensor:
    holder, _, name = path.rpartition(".")
    return getattr(model.get_submodule(holder), name)


def _no_draws(_: int) -> None:
    """A guard draws no random numbers."""
