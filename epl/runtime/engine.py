"""The engine: the user's model and optimizer under a plan. What `epl.parallelize` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.batch import flatten
from epl.cluster import Cluster
from epl.config import Config
from epl.errors import ConfigError, PlanError, RunError
from epl.lines import warn
from epl.loss import LossFunction
from epl.planner.make import half_precision, shares_devices
from epl.planner.plan import Plan
from epl.planner.table import plan_table
from epl.runtime.agree import StepNumbers, agree_on, agree_on_example, agree_on_step, all_succeed, digest
from epl.runtime.catalog import Catalog
from epl.runtime.clip import clip_grad_norm
from epl.runtime.data import guess_num_replicas
from epl.runtime.first_step import check_first
from epl.runtime.logs import settings_lines, write_plan
from epl.runtime.memory import MemoryReport, Subject, report_memory
from epl.runtime.model import ParallelModel, in_eval_mode
from epl.runtime.optimizers import refuse_optimizers, state_factor
from epl.runtime.results import Merged, join_outputs
from epl.runtime.runner import Runner
from epl.runtime.scaling import Scaling
from epl.runtime.state import (
    add_gradients,
    agree_on_model,
    align_buffers,
    first_names,
    gather_state,
    load_whole,
    make_equal,
    scale_gradients,
    take_gradients,
    whole_shapes,
)
from epl.runtime.stored import store
from epl.runtime.trace import StepTrace, recording
from epl.runtime.verify import Report, Trial, verify_step
from epl.runtime.world import World

__all__ = ["Engine"]


class Engine:
    """Trains a model under a plan.

    The plan is made at the first batch (or from ``example_batch``): the graph depends on what a batch looks like.
    Every method that computes is called by all ranks together.

    Args:
        model: Any module; its code stays as it is.
        optimizers: Optimizers built on the model's parameters.
        loss_fn: ``loss_fn(model, batch)``; None for the model's own loss.
        world: The ranks.
        cluster: The devices.
        config: The settings.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        loss_fn: LossFunction | None,
        world: World,
        cluster: Cluster,
        config: Config,
    ) -> None:
        self._model = model.to(world.device)
        self._optimizers = optimizers
        self._parameters = list(model.parameters())
        self._loss_fn = loss_fn
        self._world, self._cluster, self._config = world, cluster, config
        self._catalog = Catalog(
            model, loss_fn, colocate=shares_devices(cluster, config), precision=half_precision(config)
        )
        self._scaling = Scaling.of(world, config)
        self._runner: Runner | None = None
        self._buffers_differ = False
        self._verified = False
        self._step_trace = StepTrace(world, config.run.trace, config.run.trace_steps)
        self._parallel_model: ParallelModel | None = None

    # -- preparing ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What runs where. `prepare` or the first step makes it.

        Raises:
            PlanError: there is no plan yet.
        """
        return self._prepared.plan

    @property
    def _prepared(self) -> Runner:
        if self._runner is None:
            raise PlanError(
                "there is no plan before the first batch; run a step, call engine.prepare(batch), or pass example_batch= "
                "to epl.parallelize"
            )
        return self._runner

    def prepare(self, batch: Any) -> Plan:
        """Capture the model on a batch and make the plan, without running a step.

        Args:
            batch: This replica's batch, or one like it.

        Raises:
            CaptureError: the model cannot be captured.
            StrategyError: the annotations cannot be carried out.
            ClusterError: the devices do not divide by the annotations.
            RunError: the ranks have different models or scripts.
        """
        return self._prepare(batch, "train" if self._model.training else "eval")

    def _prepare(self, batch: Any, kind: str) -> Plan:
        if self._runner is not None:
            return self._runner.plan
        agree_on(self._world, "the settings", settings_lines(self._config))
        agree_on_model(self._world, self._model)
        self._world.watch.now("the capture of the model")
        example = agree_on_example(self._world, all_succeed(self._world, lambda: flatten(batch)))
        example = example._replace(tensors=tuple(tensor.to(self._world.device) for tensor in example.tensors))
        factor = state_factor(self._optimizers)
        plan = all_succeed(
            self._world, lambda: self._catalog.make_plan(kind, example, self._cluster, self._config, factor)
        )
        agree_on(self._world, "the plan", plan.to_json().splitlines())
        refuse_optimizers(self._optimizers, plan)
        if make_equal(self._world, self._model) and self._world.rank == 0:
            warn("the ranks started with different weights; all continue with those of rank 0")
        stored = self._stored = store(self._world, plan, self._config, self._model, self._optimizers, self._scaling)
        self._catalog.weights = stored.weights
        self._catalog.around_capture = lambda: whole_shapes(self._model, plan, self._world.rank, stored.weights)
        self._runner = Runner(self._world, self._config, plan, self._catalog, self._model, stored.weights)
        if self._world.rank == 0:
            if self._config.run.print_plan:
                print(plan_table(plan), flush=True)
            write_plan(self._config.run.log_dir, plan, self._config)
        return plan

    def share_of_data(self, example: Callable[[int], Any]) -> tuple[int, int]:
        """(this rank's replica, number of replicas); makes the plan if there is none yet.

        Args:
            example: Gives a batch for the plan, from a guess of the number of replicas.
        """
        if self._runner is None:
            self.prepare(example(guess_num_replicas(self._model, self._world.size)))
        _, replica, _ = self.plan.place_of(self._world.rank)
        return replica, self.plan.num_replicas

    # -- steps --------------------------------------------------------------------------------------------------

    def train_step(self, batch: Any, *, max_grad_norm: float | None = None) -> Any:
        """One optimizer step on one batch: zero gradients, forward and backward, clip, update.

        Args:
            batch: This replica's batch: the same on all ranks of a replica.
            max_grad_norm: Clip the gradients to this global norm before the update; None for no clipping.

        Returns:
            The loss of the global batch, the same on every rank, a tensor of one element; or (loss, aux) if the step
            gives aux.

        Raises:
            RunError: the ranks do not agree, or one has failed; on every rank.

        Example:
            >>> loss = engine.train_step({"input_ids": ids, "labels": labels})  # doctest: +SKIP
        """
        if not self._optimizers:
            raise ConfigError("train_step needs an optimizer: pass it to epl.parallelize(model, optimizer)")
        with self._step_trace.step(lambda: self.plan):
            self.zero_grad()
            loss = self.forward_backward(batch)
            if max_grad_norm is not None:
                self.clip_grad_norm_(max_grad_norm)
            self.optimizer_step()
        return loss

    def forward_backward(self, batch: Any) -> Any:
        """The gradients of the global batch's loss, added to the parameters' ``.grad``; returns as `train_step` does."""
        if not self._model.training:
            raise RunError("the model is in eval mode; call model.train() before a training step")
        self.prepare(batch)
        if not self._verified:
            self._verified = True
            check_first(self._config, self._trial(), self._catalog.segments, batch, lambda b: self._report(b, None))
        earlier = take_gradients(self._parameters)
        merged = self._run_training(batch)
        self._scaling.note()
        add_gradients(self._parameters, earlier)
        self._prepared.probe.watch(self._parameters)
        return merged.result

    def _run_training(self, batch: Any) -> Merged:
        """Forward and backward; the gradients are this batch's alone."""
        ran = self._prepared.run("train", batch, self._scaling.factor)
        self._buffers_differ = True
        merged = ran.merged(self._world)
        if merged.divisor is not None and self.plan.reduce_method == "mean":
            scale_gradients(self._parameters, 1.0 / merged.divisor if merged.divisor else float("nan"))
        self._scaling.unscale(self._parameters)
        return merged

    def pending_gradients(self, batch: Any) -> tuple[Any, list[torch.Tensor | None]]:
        """What `forward_backward` returns, and the gradients, which stay off the parameters; for `model`."""
        self.prepare(batch)
        earlier = take_gradients(self._parameters)
        result = self.forward_backward(batch)
        pending = take_gradients(self._parameters)
        add_gradients(self._parameters, earlier)
        return result, pending

    def forward(self, batch: Any) -> Any:
        """The model's output for this replica's batch, on every rank of the replica, in the model's present mode."""
        self._prepare(batch, "output")  # there may be no labels, and so no loss
        self._align_buffers()
        ran = self._prepared.run("output", batch)
        return join_outputs(self._world, self.plan, ran.output_form, ran.results)

    def eval_step(self, batch: Any) -> Any:
        """The loss of the global batch in eval mode, without gradients; returns as `train_step` does."""
        with in_eval_mode(self._model):
            self.prepare(batch)
            self._align_buffers()
            return self._prepared.run("eval", batch).merged(self._world).result

    def _align_buffers(self) -> None:
        runner = self._prepared
        if self._buffers_differ and runner.changes_buffers:
            align_buffers(self._world, self._model, runner.plan, runner.groups)
        self._buffers_differ = False

    def add_gradients(self, gradients: Iterable[torch.Tensor | None], factor: torch.Tensor | float = 1.0) -> None:
        """Add ``factor`` times these gradients, in the order of the parameters, to the parameters' own; for `model`."""
        add_gradients(self._parameters, gradients, factor)
        self._prepared.probe.watch(self._parameters)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the global norm, as ``torch.nn.utils.clip_grad_norm_`` would in one process; returns the norm.

        Each parameter counts once, whether it is tied, replicated or cut over stages.
        """
        return clip_grad_norm(
            self._prepared.weights, self._model, self.plan, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def optimizer_step(self) -> None:
        """``step()`` of every optimizer; each updates the parameters that this rank holds."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._scaling.forget()
        for parameter in self._parameters:
            parameter.grad = None

    def _together(self, call: str) -> None:
        """Raise on all ranks if they are not all in this call: one rank alone would wait for the others for ever."""
        updates = self._prepared.weights.num_updates
        agree_on_step(self._world, self.plan, StepNumbers(1, digest(call), updates=updates), (call, ""))

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward under ``amp.dtype='fp16'``; else 1."""
        return self._scaling.factor

    @property
    def num_skipped_steps(self) -> int:
        """Steps that were skipped because a gradient overflowed under ``amp.dtype='fp16'``."""
        return self._scaling.num_skipped

    # -- the whole model ----------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model for loops of one's own: ``loss = engine.model(**batch); loss.backward(); optimizer.step()``.

        In training mode with gradients on, a call runs the whole schedule, forward and backward, and returns the loss;
        ``loss.backward()`` then adds the gradients, times what comes in, to the parameters' ``.grad``. Otherwise a call
        is a forward pass and returns what the model returns, for this replica's batch (without a cache of keys and
        values, if the model gives one).
        """
        if self._parallel_model is None:
            self._parallel_model = ParallelModel(self, self._model, has_loss_fn=self._loss_fn is not None)
        return self._parallel_model

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the whole model under its original names, on every rank; all ranks call it together."""
        self._together("state_dict")
        with self._prepared.weights.reading():
            tensors, first = self._gathered(), first_names(self._model)
            own = self._model.state_dict()  # for the names, and for what modules add besides tensors
        return {name: tensors[first[name]] if name in first else value for name, value in own.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of the whole model; each rank takes what it holds, all of it before there is a plan.

        Raises:
            RunError: names are missing or unknown, or shapes differ; lists all of them.
        """
        if self._runner is None:
            self._model.load_state_dict(state)
        else:
            load_whole(self._model, self.plan, self._world.rank, self._runner.weights, state)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Every parameter's gradient, whole, under its first name, on every rank; all ranks call it together."""
        self._together("gradients")
        return self._gathered(gradients=True)

    def _gathered(self, *, gradients: bool = False) -> dict[str, torch.Tensor | None]:
        return gather_state(self._world, self._model, self.plan, self._prepared.weights, gradients=gradients)

    def verify(self, batch: Any, *, tolerance: float | None = None) -> Report:
        """Compare one step with the plain model in one process on the whole global batch.

        Args:
            batch: This replica's batch.
            tolerance: Largest relative difference; None for 1e-9 in float64 and 1e-4 in float32.

        Returns:
            The table: loss, global norm and every gradient; weights that ranks disagree on come first.

        Raises:
            VerifyError: something differs; names the first tensor that does.
        """
        return self._report(batch, tolerance).check()

    def _report(self, batch: Any, tolerance: float | None) -> Report:
        self.prepare(batch)
        self._together("verify")
        return verify_step(self._trial(), batch, tolerance)

    def _trial(self) -> Trial:
        return Trial(self._prepared, self._model, self._loss_fn, self._run_training, self.gradients)

    def memory_report(self, batch: Any = None, path: str | None = None) -> MemoryReport:
        """Where each rank's memory goes in a training step, at its peak and over time; all ranks call it together.

        Not inside ``torch.profiler.profile``: it uses the profiler itself, and there can be one at a time.

        Args:
            batch: None for the prediction, of a step like the last one or like the plan's. With this replica's batch, ONE
                REAL TRAINING STEP is run, as `train_step` does, and measured: weights and optimizer states change.
            path: Rank 0 draws the report there (``.png``).

        Returns:
            The report of all ranks: ``print`` shows the table, ``plot`` draws it.

        Raises:
            RunError: a rank has failed, or no training batch is known yet.
        """
        if batch is not None:
            self.prepare(batch)
        subject = Subject(
            self._world, self._prepared, self._model, self._optimizers, self.train_step, self._stored.home
        )
        self._together(f"memory_report({'batch' if batch is not None else None}, {path})")
        return report_memory(subject, batch, path)

    def trace(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Record what every rank does inside ``with engine.trace(path):`` and write it when the block ends.

        Args:
            path: File of the Chrome trace, written by rank 0, with a picture beside it (``.png``).

        Example:
            >>> with engine.trace("out/trace.json"):  # doctest: +SKIP
            ...     engine.train_step(batch)
        """
        return recording(self._world, lambda: self.plan, path)

    def close(self) -> None:
        """Take EPL's hooks off model and optimizers. The ranks stay connected until the process ends."""
        if self._runner is not None:
            self._runner.close()
            self._stored.undo()
            self._runner = None
