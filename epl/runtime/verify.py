"""Compare a parallel step with one plain process: the loss, every gradient, the global norm; and ranks' weights.

The reference is the user's own model, called as plain PyTorch on rank 0 with the whole weights. It gets the whole global
batch at once, unless the result depends on how a batch is cut (batch norm in training mode, random numbers, summed
gradients): then it gets the same parts, with the same random numbers, and the report says so.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn as nn

from epl.batch import Flat, batch_size_of, cut, flatten, take
from epl.capture.draws import SeededDraws
from epl.errors import VerifyError
from epl.ir.graph import Graph
from epl.loss import LossFunction, loss_step
from epl.planner.plan import Plan
from epl.runtime.agree import all_succeed
from epl.runtime.results import Merged
from epl.runtime.rng import generator_kept, reseeder
from epl.runtime.runner import Runner
from epl.runtime.state import add_gradients, gather_state, take_gradients
from epl.runtime.weights import Weights
from epl.runtime.world import World

__all__ = ["Difference", "Reference", "Report", "Trial", "compare", "plain_step", "small_part", "verify_step"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF = 5e-2  # the plain process computes in full precision, and bfloat16 has three digits
_BY_PARTS = ("aten.batch_norm.", "aten.instance_norm.")
# a gradient that is zero but for rounding is measured against the largest one: the shift of a softmax, for example
_FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """One compared quantity: ``error`` is the largest difference over the largest value."""

    name: str
    expected: float
    actual: float
    error: float
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What was compared, worst first among gradients, and whether all of it agrees."""

    differences: tuple[Difference, ...]
    tolerance: float
    by_parts: bool

    @property
    def faults(self) -> tuple[Difference, ...]:
        return tuple(diff for diff in self.differences if not diff.error <= self.tolerance)

    def __str__(self) -> str:
        width = max(len(diff.name) for diff in self.differences)
        how = "the same parts one after another" if self.by_parts else "the whole global batch at once"
        lines = [
            f"verify: against one plain process on {how}; tolerance {self.tolerance:.0e}",
            f"  {'':{width}}  {'one process':>14}  {'this plan':>14}  {'relative error':>14}",
        ]
        shown = [*self.faults, *(diff for diff in self.differences if diff not in self.faults)]
        lines += [
            f"  {diff.name:{width}}  {diff.expected:14.6e}  {diff.actual:14.6e}  {diff.error:14.1e}"
            f"{'' if diff.error <= self.tolerance else '  <-- DIFFERS ' + diff.note}"
            for diff in shown
        ]
        count = len(self.differences)
        lines.append(f"{len(self.faults)} of {count} differ" if self.faults else f"all {count} agree")
        return "\n".join(lines)

    def end_script(self, rank: int) -> NoReturn:
        """Print the table on rank 0, and end the script: with 1 if something differs."""
        if rank == 0:
            print(self, flush=True)
        raise SystemExit(1 if self.faults else 0)

    def check(self) -> Report:
        """Return the report if everything agrees.

        Raises:
            VerifyError: something does not; the table, with what differs first.
        """
        if self.faults:
            first = self.faults[0]
            raise VerifyError(
                f"{len(self.faults)} of {len(self.differences)} quantities differ from one process, first of them "
                f"{first.name} (relative error {first.error:.1e}{', ' + first.note if first.note else ''})\n{self}"
            )
        return self


@dataclass(frozen=True)
class Trial:
    """The step that is compared: who runs it, on what, and how.

    Args:
        runner: Runs it under its plan.
        model: The model.
        loss_fn: As in ``epl.parallelize``.
        run: Forward and backward on a batch.
        gradients: Every gradient, whole, on every rank.
    """

    runner: Runner
    model: nn.Module
    loss_fn: LossFunction | None
    run: Callable[[Any], Merged]
    gradients: Callable[[], dict[str, torch.Tensor | None]]


def verify_step(trial: Trial, batch: Any, tolerance: float | None) -> Report:
    """Run a step and compare; weights, gradients, buffers and random numbers are as before. All ranks call it together."""
    runner, model = trial.runner, trial.model
    world, plan, parameters = runner.world, runner.plan, list(model.parameters())
    earlier, step = take_gradients(parameters), runner.step
    with buffers_kept(model):
        weights = gather_state(world, model, plan, runner.weights)
        stale = stale_weights(runner.weights, model, plan)
        batches = gather_batches(world, plan, batch)
        ran = trial.run(batch)
        gradients = trial.gradients()
    runner.step = step
    for parameter in parameters:
        parameter.grad = None
    add_gradients(parameters, earlier)

    def make_report() -> Report | None:
        if world.rank != 0:
            return None
        whole = {path: tensor for path, tensor in weights.items() if tensor is not None}
        setting = Setting(world, plan, ran.graph, runner.base_seed, step)
        with runner.weights.reading():  # what is copied meanwhile refuses nothing
            reference = plain_step(model, trial.loss_fn, whole, batches, setting)
        report = compare(reference, ran.loss, gradients, plan, tolerance)
        return replace(report, differences=(*stale, *report.differences))

    return world.gather(all_succeed(world, make_report))[0]


class Reference(NamedTuple):
    """What one plain process computes."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    by_parts: bool


@dataclass(frozen=True)
class _Part:
    flat: Flat
    start: int
    num_samples: int


def plain_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[Flat],
    setting: Setting,
) -> Reference:
    """The step of one plain process with these weights on all replicas' batches."""
    plain = _with_weights(model, weights)
    by_parts = _depends_on_parts(setting, batches)
    parts = list(_parts(batches, setting.plan)) if by_parts else [_whole(batches)]
    total = sum(part.num_samples for part in parts)
    step = loss_step(loss_fn)
    losses: list[float] = []
    counts: list[float] = []
    with generator_kept(setting.world.device):
        for part in parts:
            with SeededDraws(setting.graph, setting.reseeder(part.start)):
                values = dict(step.run(plain, part.flat.structure.unflatten(part.flat.tensors)))
            weight = 1.0 if "total" in values or setting.plan.reduce_method == "sum" else part.num_samples / total
            objective = values["total"] if "total" in values else values["loss"]
            (objective * weight).backward()
            losses.append(float(objective.detach()) * (1.0 if "total" in values else part.num_samples / total))
            counts.append(float(values.get("count", 0.0)))
    divisor = sum(counts) or 1.0
    scale = 1.0 if setting.plan.reduce_method == "sum" else 1.0 / divisor
    gradients = {
        path: None if parameter.grad is None else _dense(parameter.grad) * scale
        for path, parameter in plain.named_parameters()
    }
    return Reference(sum(losses) / divisor, gradients, by_parts)


@dataclass(frozen=True)
class Setting:
    """Where a reference runs: the plan it stands beside, and the random numbers of the step."""

    world: World
    plan: Plan
    graph: Graph
    base_seed: int
    step: int

    def reseeder(self, start: int) -> Callable[[int], None]:
        return reseeder(self.world.device, self.base_seed, self.step, start)


def _with_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of the model with these tensors in place of its own; ties stay ties."""
    memo: dict[int, Any] = {}
    for path, parameter in model.named_parameters():
        memo[id(parameter)] = nn.Parameter(weights[path].clone(), requires_grad=parameter.requires_grad)
    for path, buffer in model.named_buffers():
        memo[id(buffer)] = weights[path].clone()
    return copy.deepcopy(model, memo)


def _depends_on_parts(setting: Setting, batches: Sequence[Flat]) -> bool:
    """True if the whole global batch at once would not give the same, or cannot be put together."""
    forms = {(flat.structure, tuple(tensor.shape[1:] for tensor in flat.tensors)) for flat in batches}
    by_parts = any(op.random is not None or op.target.startswith(_BY_PARTS) for op in setting.graph.ops)
    return by_parts or setting.plan.reduce_method == "sum" or len(forms) > 1


def _whole(batches: Sequence[Flat]) -> _Part:
    first = batches[0]
    sizes = [batch_size_of(batch.tensors) for batch in batches]
    columns = zip(*(batch.tensors for batch in batches), strict=True)
    tensors = tuple(
        torch.cat(list(column)) if column[0].ndim and column[0].shape[0] == sizes[0] else column[0]
        for column in columns
    )
    return _Part(first._replace(tensors=tensors), 0, sum(sizes))


def _parts(batches: Sequence[Flat], plan: Plan) -> Iterator[_Part]:
    before = 0
    for batch in batches:
        size = batch_size_of(batch.tensors)
        for start, stop in cut(size, plan.num_micro_batches):
            for first, last in cut(stop - start, plan.num_shares):
                piece = (start + first, start + last)
                yield _Part(batch._replace(tensors=take(batch.tensors, size, piece)), before + piece[0], last - first)
        before += size


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def stale_weights(weights: Weights, model: nn.Module, plan: Plan) -> tuple[Difference, ...]:
    """The parameters of which some rank holds another value than the owner: an update that did not reach it."""
    world, parameters = weights.world, dict(model.named_parameters())
    stage, _, _ = plan.place_of(world.rank)
    mine = {
        path: weights.own_whole(path, parameters[path]).detach().cpu()
        for path in _held_by(plan, stage)
        if not weights.is_cut(path)  # no two ranks hold the same of it
    }
    everyone = world.gather({path: _content(tensor) for path, tensor in mine.items()})
    found: list[Difference] = []
    for entry in (entry for entry in plan.parameters if entry.kind == "parameter"):
        numbers = {rank: numbers[entry.path] for rank, numbers in enumerate(everyone) if entry.path in numbers}
        for ranks in plan.alike(entry) if numbers else ():
            owner = ranks[0]
            others = [rank for rank in ranks if numbers[rank] != numbers[owner]]
            if not others:
                continue
            values = world.gather(mine.get(entry.path))
            first = _tensor(entry.path, values[owner], values[others[0]], 0.0, entry.stages)
            note = f"the weight itself is another on ranks {others} than on rank {owner}"
            found.append(replace(first, name=f"weight {entry.path}", note=note))
    return tuple(found)


def _held_by(plan: Plan, stage: int) -> list[str]:
    return [entry.path for entry in plan.parameters if entry.kind == "parameter" and stage in entry.stages]


def _content(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


def compare(
    reference: Reference,
    loss: torch.Tensor,
    gradients: Mapping[str, torch.Tensor | None],
    plan: Plan,
    tolerance: float | None,
) -> Report:
    """The table of differences."""
    if tolerance is None:
        dtypes = {gradient.dtype for gradient in gradients.values() if gradient is not None}
        tolerance = _HALF if plan.precision else max((_TOLERANCES.get(dtype, 1e-2) for dtype in dtypes), default=1e-4)
    found = [_number("loss", reference.loss, float(loss))]
    found.append(_number("global norm", _norm(reference.gradients), _norm(gradients)))
    largest = max(
        (float(g.abs().max()) for g in reference.gradients.values() if g is not None and g.numel()), default=0.0
    )
    entries = {entry.path: entry for entry in plan.parameters}
    tensors = [
        _tensor(path, expected, gradients.get(path), _FLOOR * largest, entries[path].stages)
        for path, expected in reference.gradients.items()
    ]
    return Report((*found, *sorted(tensors, key=lambda diff: -diff.error)), tolerance, reference.by_parts)


def _number(name: str, expected: float, actual: float) -> Difference:
    error = abs(actual - expected) / max(abs(expected), 1e-12)
    return Difference(name, expected, actual, error, _ratio(expected, actual))


def _tensor(
    path: str, expected: torch.Tensor | None, actual: torch.Tensor | None, floor: float, stages: tuple[int, ...]
) -> Difference:
    held = f"held by stages {list(stages)}"
    if expected is None or actual is None:
        same = expected is None and actual is None
        note = f"one process has {'no' if expected is None else 'a'} gradient, this plan the opposite; {held}"
        return Difference(path, _size(expected), _size(actual), 0.0 if same else float("inf"), "" if same else note)
    actual = actual.to(expected.device)
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, floor, 1e-300)
    difference = float((actual - expected).abs().max()) if expected.numel() else 0.0
    note = "; ".join(part for part in (_ratio(_size(expected), _size(actual)), held) if part)
    return Difference(path, _size(expected), _size(actual), difference / scale, note)


def _size(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor.double()))


def _norm(gradients: Mapping[str, torch.Tensor | None]) -> float:
    return sum(_size(gradient) ** 2 for gradient in gradients.values()) ** 0.5


def _ratio(expected: float, actual: float) -> str:
    """A factor that looks like a number of ranks or parts is the usual sign of a sum that should be a mean."""
    ratio = actual / expected if expected else float("nan")
    for whole in range(2, 65):
        for factor, text in ((whole, f"{whole} times"), (1 / whole, f"1/{whole} of")):
            if abs(ratio / factor - 1) < 1e-3:
                return f"{text} the expected value"
    return ""


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Statistics that a trial step changes are put back."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        # a released buffer (one element, expanded) has nothing to put back
        held = [(buffer, value) for buffer, value in saved if buffer.stride() == value.stride()]
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)


def small_part(batch: Any, plan: Plan) -> Any:
    """The first samples of a batch: two for each micro-batch and device, enough to compare and quick."""
    flat = flatten(batch)
    size = batch_size_of(flat.tensors)
    wanted = min(size, 2 * plan.num_micro_batches * plan.num_shares)
    return flat.structure.unflatten(take(flat.tensors, size, (0, wanted)))


def gather_batches(world: World, plan: Plan, batch: Any) -> list[Flat]:
    """Every replica's batch, taken apart, on every rank."""
    flat = flatten(batch)
    mine = flat._replace(tensors=tuple(tensor.cpu() for tensor in flat.tensors))
    everyone = world.gather(mine)
    batches = [everyone[plan.ranks_of_replica(replica)[0]] for replica in range(plan.num_replicas)]
    return [b._replace(tensors=tuple(t.to(world.device) for t in b.tensors)) for b in batches]
