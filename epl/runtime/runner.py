"""One prepared model on one rank: the plan, the groups, the executor, and how a step is run.

``Runner.run`` is one step: cut the batch, find the graph of each micro-batch, agree with the other ranks, lower, execute,
merge. What differs between training, evaluation and a plain forward pass is the instructions that are lowered, not the
loop that runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from epl.batch import Flat, batch_size_of, cut, flatten, take
from epl.config import Config
from epl.errors import RunError, bulleted
from epl.ir.graph import Graph, refs_in
from epl.planner.plan import Plan
from epl.planner.units import shared_out
from epl.program.instructions import Program, StageProgram
from epl.program.lower import lower_step
from epl.runtime.agree import StepNumbers, agree_on_step, content_of, digest
from epl.runtime.catalog import Catalog, Variant
from epl.runtime.channels import Channels
from epl.runtime.collectives import GroupCollectives
from epl.runtime.executor import BoundStage, Executor, MicroBatch
from epl.runtime.probe import ScaleProbe
from epl.runtime.reducer import ReduceGroup, Reducer
from epl.runtime.results import Merged, OutputForm, PartResult, kind_of_part, merge, seed_of
from epl.runtime.rng import generator_kept, reseeder
from epl.runtime.shard_reducer import ShardReducer
from epl.runtime.weights import Weights
from epl.runtime.world import Group, World
from epl.schedule import forward_only, generate
from epl.sharding.collectives import Collectives, LonelyRank

__all__ = ["Ran", "Runner"]

_KINDS = ("train", "eval", "output")
_CALLS = {"train": "a training step", "eval": "eval_step", "output": "a forward pass"}


@dataclass(frozen=True)
class _Part:
    """One micro-batch of this rank: its tensors, its graph, and where it is in the global batch."""

    flat: Flat
    variant: Variant
    start: int
    num_samples: int


@dataclass(frozen=True)
class Ran:
    """What a step left: the parts of each micro-batch, and the graph that says what they are."""

    variant: Variant
    results: tuple[PartResult, ...]
    num_samples: int

    @property
    def output_form(self) -> OutputForm:
        """What the model returns, of a forward pass."""
        structure, graph = self.variant.captured.structure, self.variant.graph
        assert structure is not None
        kinds = {out.role: graph.type_of(name) for out in graph.outputs for name in refs_in(out.value)}
        return OutputForm(structure, kinds)

    def merged(self, world: World) -> Merged:
        """Of all micro-batches and replicas; all ranks call it together."""
        return merge(world, self.variant.graph, self.results, self.num_samples)


class Runner:
    """Runs steps of one model under one plan."""

    def __init__(
        self, world: World, config: Config, plan: Plan, catalog: Catalog, model: nn.Module, weights: Weights
    ) -> None:
        self.world, self.plan, self.model, self.weights = world, plan, model, weights
        self._config, self._catalog = config, catalog
        self.stage, self.replica, self._position = plan.place_of(world.rank)
        self.groups = self._make_groups()
        self._collectives = self._make_collectives()
        self._channels = Channels(world, plan)
        self.probe = ScaleProbe(world, is_spread=plan.num_stages > 1 or bool(plan.sharded_stages or plan.zero))
        self._parameters = dict(model.named_parameters())
        self._reduce(self._find_trainable())
        self._programs: dict[Any, Program] = {}
        self.base_seed = int(world.gather(torch.initial_seed())[0])
        self.step = 0
        self._last: dict[str, Variant] = {}  # the graph that each kind of step used last

    # -- groups -------------------------------------------------------------------------------------------------

    def _make_groups(self) -> dict[tuple[int, ...], Group]:
        """A group for each set of ranks that hold the same; the same ones, in the same order, on all ranks."""
        sets = {ranks for entry in self.plan.parameters if entry.stages for ranks in self.plan.holders(entry)}
        sets |= {self.plan.twins(rank) for rank in range(self.plan.world_size)}
        return {ranks: self.world.group(ranks) for ranks in sorted(sets, key=lambda ranks: (len(ranks), ranks))}

    def _make_collectives(self) -> Collectives:
        """What the devices of this stage do together, if they share out the work on one batch."""
        mine: Collectives = LonelyRank()
        for stage in self.plan.sharded_stages:
            for ranks in stage.ranks:
                group = self.world.group(ranks, "split")
                if self.world.rank in ranks:
                    mine = GroupCollectives(self.world, group, self._position)
        return mine

    def _reduce(self, trainable: frozenset[str]) -> None:
        """Reduce the gradients of these parameters from here on: users freeze and thaw parameters between steps."""
        self._trainable = trainable
        self.weights.follow(trainable)
        overlap = not self.plan.is_opaque
        self.reducer = Reducer(self.world, self._reduce_groups(), self.plan.max_buckets, overlap=overlap)
        self.sharer = ShardReducer(self.world, self.weights.units, overlap=overlap)
        self._executor = Executor(self.world, self._channels, self.reducer, self.sharer)

    def _find_trainable(self) -> frozenset[str]:
        return frozenset([name for name, parameter in self._parameters.items() if parameter.requires_grad])

    def _reduce_groups(self) -> list[ReduceGroup]:
        """What is summed over which ranks; every rank of the world goes through all of it, in the same order."""
        sparse = frozenset() if self.plan.sparse_as_dense else _sparse_parameters(self.model)
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        shared = shared_out(self.plan)
        for entry in self.plan.parameters:
            takes_part = entry.path in self._trainable and entry.stages and entry.path not in shared
            for ranks in self.plan.holders(entry) if takes_part else ():
                by_ranks.setdefault(ranks, []).append(entry.path)
        found: list[ReduceGroup] = []
        for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):
            group, names = self.groups[ranks], tuple(by_ranks[ranks])
            communicators = self._communicators(group) if group.size > 1 else (group,)
            if self.world.rank in ranks and group.size > 1:
                found.append(ReduceGroup(communicators, names, tuple(self._parameters[name] for name in names), sparse))
        return found

    def _communicators(self, group: Group) -> tuple[Group, ...]:
        """The pool that buckets take in turn; every rank of the world makes every pool, in the same order."""
        more = range(1, min(self.plan.num_communicators, self.plan.max_buckets))
        return (group, *(self.world.group(group.ranks, f"pool {number}") for number in more))

    # -- a step -------------------------------------------------------------------------------------------------

    def run(self, kind: str, batch: Any, loss_scale: float = 1.0) -> Ran:
        """Run one step of a kind (``train``, ``eval``, ``output``) on this replica's batch.

        Gradients come out multiplied by ``loss_scale``; what is reported does not.

        Raises:
            RunError: the ranks do not agree, or one has failed; on every rank.
        """
        parts, everyone = self._begin(kind, batch)
        num_samples, before = self._samples(everyone)
        self.probe.warn_if_scaled([numbers.factor for numbers in everyone])
        self.weights.refresh()
        if len({everyone[rank].lending for rank in self.plan.ranks_of_stages((self.stage,))}) > 1:
            self.weights.gather_all()
        if self._find_trainable() != self._trainable:
            self.close()
            self._reduce(self._find_trainable())
        micro_batches = [self._micro_batch(part, num_samples, before, loss_scale) for part in parts]
        stages = [micro_batch.stage.program for micro_batch in micro_batches]
        program = self._program(kind, stages, self._num_rounds(everyone))
        try:
            with self._context(kind, parts):
                self._executor.run(program, micro_batches)
        except Exception as error:
            self.world.watch.report_failure(error)
            raise
        self.weights.clear()
        if kind == "train":
            self.step += 1
        results = self._results(parts, micro_batches, before)
        return Ran(self._last[kind], results, num_samples)

    @contextlib.contextmanager
    def _context(self, kind: str, parts: Sequence[_Part]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.weights.reading())  # a model without a graph is run as it is, with whole weights
            if kind != "train":
                stack.enter_context(torch.no_grad())
            if any(op.random is not None for part in parts for op in part.variant.graph.ops):
                stack.enter_context(generator_kept(self.world.device))
            yield

    def _begin(self, kind: str, batch: Any) -> tuple[list[_Part], list[StepNumbers]]:
        """Everything that can go wrong before ranks wait for one another, and the check that it has not."""
        self.world.watch.now(f"the start of {_CALLS[kind]}")
        error: Exception | None = None
        parts: list[_Part] = []
        mine = StepNumbers(0, _KINDS.index(kind))
        call, form = f"{_CALLS[kind]} on nothing", ""
        try:
            flat = self.on_device(flatten(batch))
            call = f"{_CALLS[kind]} on {_describe(flat)}"
            parts = self._parts(kind, flat)
            form = self._form(kind, flat, parts)
            check = self._config.run.check_batches and len(self.plan.ranks_of_replica(0)) > 1
            content = content_of(flat.tensors) if check else 0
            size = batch_size_of(flat.tensors)
            graphs = digest(" ".join(str(part.variant.number) for part in parts))
            work = digest(" ".join(str(self.bound(part.variant).work) for part in parts))
            lending = digest(" ".join(str(self.bound(part.variant).lending) for part in parts))
            factor = self.probe.factor() if kind == "train" else 0
            numbers = (content, size, graphs, work, lending, factor, self.weights.num_updates)
            mine = StepNumbers(1, _KINDS.index(kind), digest(form), digest(call), *numbers)
        except Exception as caught:
            error = caught
        return parts, agree_on_step(self.world, self.plan, mine, (call, form), error)

    def _form(self, kind: str, flat: Flat, parts: Sequence[_Part]) -> str:
        """What the step gives, line by line: ranks can only merge it if it is the same on all of them.

        Raises:
            RunError: micro-batches of this rank give different things.
        """
        if not parts:  # a batch without samples has no graph of its own
            self._last[kind] = self._last.get(kind) or self._sample(kind, flat)
        else:
            self._last[kind] = parts[0].variant
        forms = {_form(variant.graph): None for variant in (*(part.variant for part in parts), self._last[kind])}
        if len(forms) > 1:
            raise RunError(bulleted("the micro-batches of one step give different results:", list(forms)))
        gradients = (f"the gradient of {name}" for name in sorted(self._find_trainable()))
        return "\n".join([next(iter(forms)), *gradients])

    def _sample(self, kind: str, flat: Flat) -> Variant:
        """The graph for one sample like those of a batch that leaves this rank none."""
        size = batch_size_of(flat.tensors)
        if size:
            tensors = take(flat.tensors, size, (0, 1))
        else:
            tensors = tuple(t.new_zeros(1, *t.shape[1:]) if t.shape[:1] == (0,) else t for t in flat.tensors)
        return self._catalog.find(kind, self._catalog.model_key(), flat._replace(tensors=tensors))

    def on_device(self, flat: Flat) -> Flat:
        """The batch with its tensors where this rank computes."""
        return flat._replace(tensors=tuple(tensor.to(self.world.device, non_blocking=True) for tensor in flat.tensors))

    def _parts(self, kind: str, flat: Flat) -> list[_Part]:
        """This rank's micro-batches: those of its replica, shared out over the devices of its stage."""
        size = batch_size_of(flat.tensors)
        key = self._catalog.model_key()
        parts: list[_Part] = []
        for start, stop in cut(size, self.plan.num_micro_batches):
            shares = cut(stop - start, self.plan.num_shares)
            mine = self._position % self.plan.num_shares
            if mine < len(shares):
                first, last = (start + place for place in shares[mine])
                piece = flat._replace(tensors=take(flat.tensors, size, (first, last)))
                variant = self._catalog.find(kind, key, piece)
                self.bound(variant)
                parts.append(_Part(piece, variant, first, last - first))
        return parts

    def _samples(self, everyone: Sequence[StepNumbers]) -> tuple[int, int]:
        """Samples in the global batch, and in the replicas before this one."""
        sizes = [everyone[self.plan.ranks_of_replica(r)[0]].num_samples for r in range(self.plan.num_replicas)]
        if not any(sizes):
            raise RunError("the global batch is empty: no replica was given a sample")
        return sum(sizes), sum(sizes[: self.replica])

    def _micro_batch(self, part: _Part, num_samples: int, before: int, loss_scale: float) -> MicroBatch:
        assert part.variant.bound is not None
        seed = loss_scale * seed_of(part.variant.graph, self.plan.reduce_method, part.num_samples / num_samples)
        reseed = reseeder(self.world.device, self.base_seed, self.step, before + part.start)
        return MicroBatch(part.variant.bound, part.flat.tensors, seed, reseed)

    def _num_rounds(self, everyone: Sequence[StepNumbers]) -> int:
        """Micro-batches of the rank that has most of them."""
        sizes = [everyone[self.plan.ranks_of_replica(r)[0]].num_samples for r in range(self.plan.num_replicas)]
        parts = (cut(size, self.plan.num_micro_batches) for size in sizes)
        return max(len(each) for each in parts)

    def _program(self, kind: str, stages: list[StageProgram], num_rounds: int = 0) -> Program:
        key = (kind, num_rounds, tuple(map(id, stages)))
        if key not in self._programs:
            make = generate if kind == "train" else lambda _, s, m: forward_only(s, m)
            schedule = make(self.plan.schedule, self.plan.num_stages, len(stages))
            self._programs[key] = lower_step(
                self.plan, self.world.rank, schedule, stages, train=kind == "train", num_rounds=num_rounds
            )
        return self._programs[key]

    def _results(
        self, parts: Sequence[_Part], micro_batches: Sequence[MicroBatch], before: int
    ) -> tuple[PartResult, ...]:
        return tuple(
            PartResult(
                part.num_samples,
                before + part.start,
                self._reported(part.variant.graph, micro_batch.parts),
            )
            for part, micro_batch in zip(parts, micro_batches, strict=True)
        )

    def _reported(self, graph: Graph, parts: dict[str, Any]) -> dict[str, Any]:
        """What this rank has to say: of the ranks of a split stage, which all have the same, the first speaks."""
        if self.world.rank not in self.plan.ranks_of_column(self.plan.column_of(self.world.rank)):
            return {}
        return {**(_plain_parts(graph) if self.stage == 0 else {}), **parts}

    def bound(self, variant: Variant) -> BoundStage:
        """This rank's stage of a graph."""
        return self._catalog.bind(variant, self.plan, self.world.rank, self._collectives)

    def training_parts(self, batch: Any | None) -> tuple[list[Variant], Program]:
        """The graph of each micro-batch of a training step, and this rank's instructions.

        Args:
            batch: This replica's batch; None for micro-batches like that of the last step, or of the plan.

        Raises:
            RunError: no training step is known yet.
        """
        if batch is not None:
            variants = [part.variant for part in self._parts("train", self.on_device(flatten(batch)))]
        else:
            known = self._last.get("train") or (self._catalog.first("train") if self.plan.num_shares == 1 else None)
            if known is None:
                raise RunError("there has been no training batch yet; pass one: engine.memory_report(batch)")
            variants = [known] * self.plan.num_micro_batches
        return variants, self._program("train", [self.bound(variant).program for variant in variants])

    @property
    def changes_buffers(self) -> bool:
        """True if training steps change buffers (running statistics)."""
        return "train" in self._last and _writes_buffers(self._last["train"].graph)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self.reducer.close()
        self.sharer.close()


def _form(graph: Graph) -> str:
    """The parts that ranks merge: numbers, and tensors that are joined."""
    return ", ".join(f"{out.role} ({kind})" for out in graph.outputs if (kind := kind_of_part(graph, out.value)))


def _plain_parts(graph: Graph) -> dict[str, Any]:
    """The parts of a step that are plain numbers of this graph (a count of tokens, say), and belong to no stage."""
    return {out.role: out.value for out in graph.outputs if isinstance(out.value, (int, float))}


def _writes_buffers(graph: Graph) -> bool:
    buffers = {leaf.name for leaf in graph.buffers}
    return any(name in buffers for op in graph.ops for name in op.writes)


def _describe(flat: Flat) -> str:
    shapes = [
        f"{path or 'tensor'}: {tuple(t.shape)} {t.dtype}" for path, t in zip(flat.paths, flat.tensors, strict=True)
    ]
    return f"{flat.structure} with {', '.join(shapes)}"


def _sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the weights whose gradients are sparse: those of embeddings with ``sparse=True``."""
    sparse = {id(getattr(module, "weight", None)) for module in model.modules() if getattr(module, "sparse", False)}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in sparse)
