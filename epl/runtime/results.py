"""From the parts of micro-batches and replicas to one result, the same on every rank.

Weights. A loss that is a mean over samples is weighted by the samples of its part: with n of N samples, a part's loss
counts n / N, and its backward starts from n / N, so that summed gradients are those of the whole batch. A `SumLoss`
starts from 1, and the summed gradients are divided by the summed count at the end, once all counts are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epl.batch import Structure
from epl.errors import RunError
from epl.ir.graph import Graph, Ref
from epl.ir.types import TensorType
from epl.planner.plan import Plan
from epl.runtime.world import World

__all__ = ["Merged", "OutputForm", "PartResult", "join_outputs", "merge", "seed_of"]


@dataclass(frozen=True)
class PartResult:
    """What one rank has of one part of the batch.

    Args:
        num_samples: Samples in the part.
        weight: num_samples over the samples of the global batch.
        first_sample: Place of its first sample in the global batch: the order of joining.
        parts: The parts that this rank reports: what its stage made, and on stage 0 the plain values.
    """

    num_samples: int
    weight: float
    first_sample: int
    parts: dict[str, Any]


@dataclass(frozen=True)
class OutputForm:
    """How a model's output is built from its tensors, whose roles are in order."""

    structure: Structure
    roles: tuple[str, ...]


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


def merge(world: World, graph: Graph, results: Sequence[PartResult], device: torch.device) -> Merged:
    """The result of the whole step, on every rank.

    Scalars are weighted means over all parts; tensors whose first dimension is the samples of a part are joined in the
    order of the global batch.
    """
    scalars = [output.role for output in graph.outputs if _is_scalar(graph, output.value)]
    sums = world.sum_numbers(_weighted_sums(scalars, results))
    merged: dict[str, Any] = dict(zip(scalars, sums.tolist(), strict=True))
    joined = [output.role for output in graph.outputs if output.role not in merged and isinstance(output.value, Ref)]
    merged |= _joined(world, joined, results, device)
    plain = {output.role: output.value for output in graph.outputs if output.role not in merged}
    aux = {
        output.role.removeprefix("aux."): _scalar(merged[output.role], graph, output.value, device)
        if output.role in scalars
        else merged.get(output.role, plain.get(output.role))
        for output in graph.outputs
        if output.role.startswith("aux.")
    }
    value, divisor = _loss(merged)
    dtype = next(kind for kind in _loss_types(graph))
    return Merged(torch.tensor(value, dtype=dtype, device=device), aux or None, divisor, graph)


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


def _is_scalar(graph: Graph, value: Any) -> bool:
    """True for what is averaged: one number, or a plain int or float."""
    if isinstance(value, Ref):
        kind = graph.type_of(value.name)
        return not isinstance(kind, TensorType) or kind.shape == ()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _weighted_sums(roles: list[str], results: Sequence[PartResult]) -> torch.Tensor:
    """Sum over this rank's parts of each scalar by its weight; the parts of a SumLoss count as they are."""
    sums = torch.zeros(len(roles), dtype=torch.float64)
    for place, role in enumerate(roles):
        for result in results:
            value = result.parts.get(role)
            if value is not None:
                weight = 1.0 if role in ("total", "count") else result.weight
                sums[place] += weight * float(value)
    return sums


def _scalar(value: float, graph: Graph, source: Any, device: torch.device) -> torch.Tensor:
    """A mean in the type that the model gave it; whole numbers become float64."""
    kind = graph.type_of(source.name) if isinstance(source, Ref) else None
    dtype = kind.dtype if isinstance(kind, TensorType) and kind.dtype.is_floating_point else torch.float64
    return torch.tensor(value, dtype=dtype, device=device)


def _joined(
    world: World, roles: list[str], results: Sequence[PartResult], device: torch.device
) -> dict[str, torch.Tensor]:
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
    return {role: torch.cat(tensors).to(device) for role, tensors in joined.items()}


def join_outputs(world: World, plan: Plan, output: OutputForm, results: Sequence[PartResult]) -> Any:
    """The model's output for this replica's batch, on every rank of the replica.

    Tensors whose first dimension is the samples are joined, single numbers are averaged by samples; another tensor must
    come from one part only.
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
    return output.structure.unflatten(_join_output(role, found[role]).to(world.device) for role in output.roles)


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
