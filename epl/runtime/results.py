"""From the parts of micro-batches and replicas to one result, the same on every rank.

Weights. A loss that is a mean over samples is weighted by the samples of its part: with n of N samples, a part's loss
counts n / N, and its backward starts from n / N, so that summed gradients are those of the whole batch. A `SumLoss`
starts from 1, and the summed gradients are divided by the summed count at the end, once all counts are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epl.batch import Structure
from epl.errors import RunError
from epl.ir.graph import Graph, Ref
from epl.ir.types import TensorType, Type
from epl.planner.plan import Plan
from epl.runtime.world import World

__all__ = ["Merged", "OutputForm", "PartResult", "join_outputs", "kind_of_part", "merge", "seed_of"]

_SUMS = ("total", "count")  # roles of a SumLoss, which are added up; other numbers are averaged over samples


@dataclass(frozen=True)
class PartResult:
    """What one rank has of one part of the batch.

    Args:
        num_samples: Samples in the part.
        first_sample: Place of its first sample in the global batch: the order of joining.
        parts: The parts that this rank reports: what its stage made, and on stage 0 the plain values.
    """

    num_samples: int
    first_sample: int
    parts: dict[str, Any]


@dataclass(frozen=True)
class OutputForm:
    """How a model's output is built from its tensors: their roles, in order, and their types."""

    structure: Structure
    types: Mapping[str, Type]


@dataclass(frozen=True)
class Merged:
    """The step's result: the loss, what goes with it, and the count that gradients are still to be divided by."""

    loss: torch.Tensor
    aux: dict[str, Any] | None
    divisor: float | None
    graph: Graph

    @property
    def result(self) -> Any:
        """What a step returns: the loss, or (loss, aux) if the step gives aux."""
        return self.loss if self.aux is None else (self.loss, self.aux)


def seed_of(graph: Graph, reduce_method: str, weight: float) -> float:
    """The gradient of the step's objective with respect to one part's loss."""
    is_sum = any(output.role == "total" for output in graph.outputs)
    return 1.0 if is_sum or reduce_method == "sum" else weight


def merge(world: World, graph: Graph, results: Sequence[PartResult], num_samples: int) -> Merged:
    """The result of the whole step, which had ``num_samples`` samples, on every rank.

    Scalars are weighted means over all parts; tensors whose first dimension is the samples of a part are joined in the
    order of the global batch.
    """
    scalars = [output.role for output in graph.outputs if kind_of_part(graph, output.value) == "number"]
    sums = world.sum_numbers(_weighted_sums(scalars, results)).tolist()
    # divided once, at the end, so that a whole number that is the same everywhere stays exact
    merged: dict[str, Any] = {
        role: total if role in _SUMS else total / num_samples for role, total in zip(scalars, sums, strict=True)
    }
    joined = [output.role for output in graph.outputs if kind_of_part(graph, output.value) == "tensor"]
    merged |= _joined(world, joined, results)
    plain = {output.role: output.value for output in graph.outputs if output.role not in merged}
    aux = {
        output.role.removeprefix("aux."): _scalar(merged[output.role], graph, output.value, world.device)
        if output.role in scalars
        else merged.get(output.role, plain.get(output.role))
        for output in graph.outputs
        if output.role.startswith("aux.")
    }
    value, divisor = _loss(merged)
    dtype = next(kind for kind in _loss_types(graph))
    return Merged(torch.tensor(value, dtype=dtype, device=world.device), aux or None, divisor, graph)


def _loss(merged: dict[str, Any]) -> tuple[float, float | None]:
    if "loss" in merged:
        return merged["loss"], None
    count = merged["count"]
    return (merged["total"] / count if count else float("nan")), count


def _loss_types(graph: Graph) -> list[torch.dtype]:
    types = [
        graph.type_of(out.value.name)
        for out in graph.outputs
        if isinstance(out.value, Ref) and out.role in ("loss", "total")
    ]
    return [kind.dtype for kind in types if isinstance(kind, TensorType)]


def kind_of_part(graph: Graph, value: Any) -> str:
    """``number`` for what is averaged or added up, ``tensor`` for what is joined, else empty: a plain value."""
    if isinstance(value, Ref):
        kind = graph.type_of(value.name)
        return "tensor" if isinstance(kind, TensorType) and kind.shape != () else "number"
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def _weighted_sums(roles: list[str], results: Sequence[PartResult]) -> torch.Tensor:
    """Sum over this rank's parts of each scalar times its samples; the parts of a SumLoss count as they are."""
    sums = torch.zeros(len(roles), dtype=torch.float64)
    for place, role in enumerate(roles):
        for result in results:
            value = result.parts.get(role)
            if value is not None:
                sums[place] += float(value) * (1 if role in _SUMS else result.num_samples)
    return sums


def _scalar(value: float, graph: Graph, source: Any, device: torch.device) -> torch.Tensor:
    """A mean in the type that the model gave it; whole numbers become float64."""
    kind = graph.type_of(source.name) if isinstance(source, Ref) else None
    dtype = kind.dtype if isinstance(kind, TensorType) and kind.dtype.is_floating_point else torch.float64
    return torch.tensor(value, dtype=dtype, device=device)


def _joined(world: World, roles: list[str], results: Sequence[PartResult]) -> dict[str, torch.Tensor]:
    if not roles:
        return {}
    mine = [
        (role, result.first_sample, result.num_samples, result.parts[role].cpu())
        for role in roles
        for result in results
        if role in result.parts
    ]
    everyone = sorted((item for items in world.gather(mine) for item in items), key=lambda item: item[:2])
    joined: dict[str, list[torch.Tensor]] = {}
    for role, _, num_samples, tensor in everyone:
        if tensor.ndim == 0 or tensor.shape[0] != num_samples:
            raise RunError(
                f"{role} has shape {tuple(tensor.shape)} for {num_samples} samples; aux holds scalars, which are averaged, "
                "and tensors whose first dimension is the samples, which are joined. Reduce it, or leave it out."
            )
        joined.setdefault(role, []).append(tensor)
    return {role: torch.cat(tensors).to(world.device) for role, tensors in joined.items()}


def join_outputs(world: World, plan: Plan, output: OutputForm, results: Sequence[PartResult]) -> Any:
    """The model's output for this replica's batch, on every rank of the replica.

    Tensors whose first dimension is the samples are joined, single numbers are averaged by samples; another tensor must
    come from one part only. A replica without samples gets tensors of no samples.
    """
    mine = [
        (part.first_sample, part.num_samples, {role: value.cpu() for role, value in part.parts.items()})
        for part in results
    ]
    everyone = world.gather(mine)
    _, replica, _ = plan.place_of(world.rank)
    parts = sorted(
        (part for rank in plan.ranks_of_replica(replica) for part in everyone[rank]), key=lambda part: part[0]
    )
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for _, num_samples, values in parts:
        for role, value in values.items():
            found.setdefault(role, []).append((num_samples, value))
    return output.structure.unflatten(
        (_join_output(role, found[role]) if role in found else _of_no_samples(kind)).to(world.device)
        for role, kind in output.types.items()
    )


def _of_no_samples(kind: Type) -> torch.Tensor:
    assert isinstance(kind, TensorType)
    if kind.shape:
        return torch.empty(0, *(size or 0 for size in kind.shape[1:]), dtype=kind.dtype)
    return torch.full((), float("nan")).to(kind.dtype)


def _join_output(role: str, pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    if all(tensor.ndim and tensor.shape[0] == count for count, tensor in pieces):
        return torch.cat([tensor for _, tensor in pieces])
    if len(pieces) == 1:
        return pieces[0][1]
    if all(tensor.numel() == 1 for _, tensor in pieces):
        total = sum(count for count, _ in pieces)
        return sum((tensor * (count / total) for count, tensor in pieces), torch.zeros_like(pieces[0][1]))
    raise RunError(
        f"the model's output {role.removeprefix('out.')} has no samples in its first dimension, so the parts of "
        f"{len(pieces)} micro-batches cannot be joined. Evaluate with pipeline.num_micro_batch=1, or return it per sample."
    )
