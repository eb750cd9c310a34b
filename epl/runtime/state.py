"""The model's tensors across ranks: equal at the start, only where they are needed, whole on demand.

A tensor that a rank does not hold is *released*: its memory becomes one NaN, expanded to its shape, so that shapes stay
right and a use by mistake shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from epl.errors import RunError, bulleted
from epl.planner.plan import ParameterPlan, Plan
from epl.runtime.agree import agree_on, all_succeed, content_of
from epl.runtime.guard import CUT, is_whole
from epl.runtime.weights import Weights
from epl.runtime.world import Group, World
from epl.sharding.placements import join_shards, local_shape, parse_placement, take_shard

__all__ = [
    "add_gradients",
    "agree_on_model",
    "align_buffers",
    "first_names",
    "gather_state",
    "load_whole",
    "make_equal",
    "own_part",
    "release",
    "scale_gradients",
    "take_gradients",
    "tensors_by_path",
    "whole_shapes",
]

_BROADCAST_BYTES = 32 << 20  # EPL broadcasts initial weights in pieces of 32 MiB


def tensors_by_path(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter and buffer once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> the first name of that tensor."""
    firsts = {id(tensor): name for name, tensor in tensors_by_path(model).items()}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: firsts[id(tensor)] for name, tensor in named}


def agree_on_model(world: World, model: nn.Module) -> None:
    """Raise on every rank unless all ranks have a whole model with the same parameters and buffers.

    Raises:
        RunError: the models differ, or an earlier engine has spread the model over the ranks.
    """
    all_succeed(world, lambda: _refuse_released(model))
    lines = [
        f"{path}: {tuple(tensor.shape)} {tensor.dtype} {'trainable' if tensor.requires_grad else 'fixed'}"
        for path, tensor in tensors_by_path(model).items()
    ]
    agree_on(world, "the model's parameters", lines)


def make_equal(world: World, model: nn.Module) -> bool:
    """Give every rank rank 0's weights and buffers; True if some rank had others (another seed, a checkpoint on rank 0).

    The ranks have agreed on the model (`agree_on_model`).
    """
    tensors = list(tensors_by_path(model).values())
    numbers = world.gather_numbers([_fingerprint(tensors)])
    if all(number == numbers[0] for number in numbers):
        return False
    with torch.no_grad(), world.waiting("rank 0's weights"):
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            dist.broadcast(flat, src=0)
            for tensor, chunk in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(chunk.view(tensor.shape))
    return True


def _refuse_released(model: nn.Module) -> None:
    tensors = tensors_by_path(model)
    released = [path for path, tensor in tensors.items() if not is_whole(tensor)]
    if released:
        raise RunError(
            f"an earlier engine has spread this model over the ranks, and this rank does not hold {released[0]} and "
            f"{len(released) - 1} more of its tensors. Build the model anew; to keep the weights, take "
            "engine.state_dict() from the earlier engine before it is closed, and load it into the new model."
        )


def _fingerprint(tensors: list[torch.Tensor]) -> int:
    sums = [
        tensor.detach().sum(dtype=torch.float64) if tensor.dtype != torch.bool else tensor.sum() for tensor in tensors
    ]
    samples = [tensor.detach().reshape(-1)[:64].cpu() for tensor in tensors]
    return content_of([*(total.cpu().reshape(1) for total in sums), *samples])


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.dtype), str(tensor.device))):
        size_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + size_bytes > _BROADCAST_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += size_bytes
    if bucket:
        yield bucket


def release(model: nn.Module, plan: Plan, rank: int) -> None:
    """Give up the memory of what this rank does not use: all of a tensor, or all but its part."""
    tensors = tensors_by_path(model)
    for entry in plan.parameters:
        tensor = tensors[entry.path]
        if not is_held(entry, plan.place_of(rank)[0]):
            fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
            tensor.data = torch.full((), fill, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        elif entry.placement != "R":
            tensor.data = own_part(entry, plan, rank, tensor.detach()).clone(memory_format=torch.contiguous_format)
            setattr(tensor, CUT, True)


def own_part(entry: ParameterPlan, plan: Plan, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a tensor that is cut over the devices of its stage."""
    stage, replica, position = plan.place_of(rank)
    num_ranks = len(plan.stages[stage].ranks[replica])
    return take_shard(whole, parse_placement(entry.placement), num_ranks, position)


@contextmanager
def whole_shapes(model: nn.Module, plan: Plan, rank: int, weights: Weights) -> Iterator[None]:
    """Tensors that are released, cut or in pieces with memory of their whole shape for a while: to capture the model.

    A capture looks at shapes and strides, not at values; on the CPU the memory is never touched, so it costs nothing.
    """
    stage, _, _ = plan.place_of(rank)
    tensors = tensors_by_path(model)
    changed = [
        entry
        for entry in plan.parameters
        if not is_held(entry, stage) or entry.placement != "R" or entry.path in weights
    ]
    saved = [(tensors[entry.path], tensors[entry.path].data, tensors[entry.path].grad) for entry in changed]
    for entry, (tensor, _, _) in zip(changed, saved, strict=True):
        tensor.grad = None  # a gradient has the shape of its tensor
        tensor.data = _untouched(tensor, entry.shape)
    try:
        with weights.reading():  # a capture looks up names
            yield
    finally:
        for tensor, data, gradient in saved:
            tensor.data = data
            tensor.grad = gradient


def _untouched(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    size_bytes = math.prod(shape) * like.element_size()
    # numpy's zeros are pages that the system gives on first touch, torch's are written at once
    memory = torch.from_numpy(np.zeros(max(1, size_bytes), dtype=np.uint8))
    return memory[:size_bytes].view(like.dtype).view(shape)


def is_held(entry: ParameterPlan, stage: int) -> bool:
    """True if a stage keeps this tensor; what nothing uses stays with stage 0."""
    return stage in (entry.stages or (0,))


def align_buffers(world: World, model: nn.Module, plan: Plan, groups: Mapping[tuple[int, ...], Group]) -> None:
    """Give every replica the buffers of the first one: running statistics differ where the data do."""
    if world.size == 1 or plan.num_columns == 1:
        return
    stage, _, _ = plan.place_of(world.rank)
    tensors = tensors_by_path(model)
    ranks = plan.twins(world.rank)
    first = next(rank for rank in ranks if plan.place_of(rank)[1] == 0)
    with world.waiting(f"the buffers of stage {stage}"):
        for entry in plan.parameters:
            if entry.kind == "buffer" and is_held(entry, stage):
                dist.broadcast(tensors[entry.path].data, src=first, group=groups[ranks].handle)


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """These parameters' gradients, taken off them; copies, since a later step reuses the buckets' memory."""
    taken = [None if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def add_gradients(
    parameters: Sequence[nn.Parameter], gradients: Iterable[torch.Tensor | None], factor: torch.Tensor | float = 1.0
) -> None:
    """Add ``factor`` times these gradients to the parameters' own."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                scaled = gradient * factor if isinstance(factor, torch.Tensor) or factor != 1.0 else gradient
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def gather_state(
    world: World, model: nn.Module, plan: Plan, weights: Weights, *, gradients: bool = False
) -> dict[str, torch.Tensor | None]:
    """Every tensor whole, on every rank, under its first name; with ``gradients`` the parameters' gradients."""
    tensors = tensors_by_path(model)
    found: dict[str, torch.Tensor | None] = {}
    if not gradients:
        weights.refresh()
    with torch.no_grad(), world.waiting("the whole model's tensors"):
        for entry in plan.parameters:
            if entry.kind == "buffer" and gradients:
                continue
            tensor = tensors[entry.path].grad if gradients else tensors[entry.path].detach()
            if entry.path in weights:
                tensor = weights.whole_gradient(entry.path) if gradients else weights.whole(entry.path)
            found[entry.path] = _joined(world, plan, entry, tensor, tensors[entry.path])
    weights.end_reading()
    return found


def _joined(
    world: World, plan: Plan, entry: ParameterPlan, tensor: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """The whole of what the owners have."""
    placement, owners = parse_placement(entry.placement), plan.owners(entry)
    parts: list[torch.Tensor] = []
    for position, owner in enumerate(owners):
        shape = local_shape(entry.shape, placement, len(owners), position)
        part = _from_owner(world, owner, tensor, like.new_empty(shape))
        if part is None:
            return None
        parts.append(part)
    return join_shards(parts, placement)


def _from_owner(world: World, owner: int, tensor: torch.Tensor | None, room: torch.Tensor) -> torch.Tensor | None:
    if world.size == 1:
        return None if tensor is None else _dense(tensor).clone()
    present = torch.tensor([tensor is not None], device=room.device, dtype=torch.uint8)
    dist.broadcast(present, src=owner)
    if not present.item():
        return None
    part = _dense(tensor).clone() if world.rank == owner and tensor is not None else room
    dist.broadcast(part, src=owner)
    return part


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).contiguous()


def load_whole(model: nn.Module, plan: Plan, rank: int, weights: Weights, state: Mapping[str, Any]) -> None:
    """Copy the parts of a whole state dict that this rank holds into the model.

    Raises:
        RunError: names are missing or unknown, or shapes differ.
    """
    tensors, first = tensors_by_path(model), first_names(model)
    entries = {entry.path: entry for entry in plan.parameters}
    with weights.reading():
        wanted = set(model.state_dict())
    faults = [f"{name} is missing" for name in sorted(wanted - set(state))]
    faults += [f"{name} is not in the model" for name in sorted(set(state) - wanted)]
    faults += [
        f"{name} has shape {tuple(value.shape)}; the model has {entries[first[name]].shape}"
        for name, value in state.items()
        if name in wanted and name in first and tuple(value.shape) != entries[first[name]].shape
    ]
    if faults:
        raise RunError(bulleted("the state dict does not fit the model:", faults))
    held = {entry.path for entry in plan.parameters if is_held(entry, plan.place_of(rank)[0])}
    with torch.no_grad():
        for name in wanted - first.keys():  # what a module adds to its state besides tensors
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
        for name in (name for name in wanted & first.keys() if first[name] in held):
            path = first[name]
            part = own_part(entries[path], plan, rank, state[name])
            if path in weights:
                weights.load(path, part)
            else:
                tensors[path].copy_(part)
    weights.clear()
