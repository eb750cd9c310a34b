"""Sum gradients over the ranks that hold the same parameter, in buckets, while backward still runs.

Buckets are filled from the last parameter used to the first, since gradients become ready in that order, and a bucket is
reduced as soon as its last gradient is there; always in the same order, so that all ranks agree. After each parameter's
gradient the bucket carries one flag per parameter: 1 if this rank has a gradient. Where no rank has one, the gradient
stays None, as it would in one process (an optimizer would treat zeros differently: weight decay, momentum).

Sources: PyTorch DDP (Li et al. 2020, "PyTorch Distributed", section 3.2: buckets, reverse order, hooks) and EPL's
coalescing and communication pool (a number of buckets instead of a size; communicators taken in turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from epl.runtime.world import Group, World

__all__ = ["ReduceGroup", "Reducer"]


@dataclass(frozen=True)
class ReduceGroup:
    """Parameters whose gradients are summed over the same ranks.

    Args:
        groups: Communicators over those ranks, taken in turn by the buckets.
        names: Paths of the parameters, for messages.
        parameters: The parameters, in order of first use.
        sparse: Paths of those that get sparse gradients.
    """

    groups: tuple[Group, ...]
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    sparse: frozenset[str] = frozenset()


@dataclass
class _Bucket:
    group: Group
    names: list[str]
    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor]
    flags: torch.Tensor
    present: list[float | None] = field(default_factory=list)  # None: not filled yet
    missing: int = 0
    work: Any = None


class Reducer:
    """Holds the buckets of one rank. `start` before the last backward of a step, `finish` after it.

    Args:
        world: The ranks.
        groups: What is reduced over which of them.
        max_buckets: Most buckets of one group.
        overlap: False to reduce after backward only: where code of the user's runs inside backward (a reentrant
            checkpoint of a model without a graph), a gradient may be accumulated in several goes.
    """

    def __init__(self, world: World, groups: Sequence[ReduceGroup], max_buckets: int, *, overlap: bool = True) -> None:
        self._world, self._overlap = world, overlap
        self._buckets: list[_Bucket] = []
        self._sparse: list[tuple[Group, str, torch.nn.Parameter]] = []
        self._place: dict[torch.nn.Parameter, tuple[_Bucket, int]] = {}
        self._next = 0
        self._active = False
        for group in groups:
            self._add_group(group, max_buckets)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_ready)
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    @property
    def names(self) -> frozenset[str]:
        """The parameters whose gradients end in buckets."""
        return frozenset(name for bucket in self._buckets for name in bucket.names)

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The memory of each bucket."""
        return tuple(bucket.flat for bucket in self._buckets)

    # -- buckets ------------------------------------------------------------------------------------------------

    def _add_group(self, group: ReduceGroup, max_buckets: int) -> None:
        dense: dict[torch.dtype, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in zip(reversed(group.names), reversed(group.parameters), strict=True):
            if name in group.sparse:
                self._sparse.append((group.groups[0], name, parameter))
            else:
                dense.setdefault(parameter.dtype, []).append((name, parameter))
        share = max(1, max_buckets // max(1, len(dense)))
        # counted within the group: ranks of different stages have different buckets beside it
        parts = [part for items in dense.values() for part in _parts(items, share)]
        for place, part in enumerate(parts):
            self._add_bucket(group.groups[place % len(group.groups)], part)

    def _add_bucket(self, group: Group, items: list[tuple[str, torch.nn.Parameter]]) -> None:
        parameters = [parameter for _, parameter in items]
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        chunks = flat.split([*sizes, len(sizes)])
        views = [_like(chunk, parameter) for chunk, parameter in zip(chunks, parameters, strict=False)]
        bucket = _Bucket(group, [name for name, _ in items], parameters, flat, views, chunks[-1])
        for place, parameter in enumerate(parameters):
            self._place[parameter] = (bucket, place)
        self._buckets.append(bucket)

    # -- a step -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From here on a gradient that is accumulated is complete."""
        self._active = self._overlap
        self._next = 0
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.parameters), None
            bucket.present = [None] * bucket.missing

    def _on_ready(self, parameter: torch.Tensor) -> None:
        if not self._active:
            return
        bucket, place = self._place[parameter]  # type: ignore[index]
        self._fill(bucket, place)
        self._reduce_ready()

    def _fill(self, bucket: _Bucket, place: int) -> None:
        """Copy a gradient into its bucket; the parameter's gradient is the bucket's memory from then on."""
        parameter, view = bucket.parameters[place], bucket.views[place]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.copy_(gradient.to_dense())
            parameter.grad = view
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view
        bucket.present[place] = 0.0 if gradient is None else 1.0
        bucket.missing -= 1

    def _reduce_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            bucket.flags.copy_(torch.tensor(bucket.present))
            if bucket.group.handle is not None:
                with self._world.waiting(self._what(bucket)):
                    bucket.work = dist.all_reduce(bucket.flat, group=bucket.group.handle, async_op=True)
            self._next += 1

    def finish(self) -> None:
        """Reduce the rest, wait for everything, and drop gradients that no rank has."""
        for bucket in self._buckets:
            for place in range(len(bucket.parameters)):
                if bucket.present[place] is None:
                    self._fill(bucket, place)
        self._reduce_ready()
        for group, name, parameter in self._sparse:
            self._reduce_sparse(group, name, parameter)
        for bucket in self._buckets:
            if bucket.work is not None:
                with self._world.waiting(self._what(bucket)):
                    bucket.work.wait()
            for parameter, view, flag in zip(bucket.parameters, bucket.views, bucket.flags.tolist(), strict=True):
                parameter.grad = view if flag else None
        self._active = False

    def _what(self, bucket: _Bucket) -> str:
        return (
            f"the gradients of {bucket.names[0]} and {len(bucket.names) - 1} more parameters "
            f"from ranks {list(bucket.group.ranks)}"
        )

    # -- sparse gradients ---------------------------------------------------------------------------------------

    def _reduce_sparse(self, group: Group, name: str, parameter: torch.nn.Parameter) -> None:
        """The sum of sparse gradients: every rank's rows, one after another, then coalesced.

        A parameter that some rank has a dense gradient of (a tied output layer) is reduced dense everywhere.
        """
        if group.handle is None:
            return
        gradient = parameter.grad
        is_dense = gradient is not None and not gradient.is_sparse
        rows = 0 if gradient is None or is_dense else gradient.coalesce().indices().shape[1]
        with self._world.waiting(f"the sparse gradient of {name} from ranks {list(group.ranks)}"):
            counts = _all_gather(torch.tensor([rows, int(is_dense), int(gradient is not None)]), group)
            if any(int(count[1]) for count in counts):
                dense = (
                    torch.zeros_like(parameter)
                    if gradient is None
                    else gradient.to_dense()
                    if not is_dense
                    else gradient
                )
                dist.all_reduce(dense, group=group.handle)
                parameter.grad = dense
            elif any(int(count[2]) for count in counts):
                parameter.grad = _gather_rows(parameter, [int(count[0]) for count in counts], group)


def _gather_rows(parameter: torch.nn.Parameter, counts: list[int], group: Group) -> torch.Tensor:
    longest = max(counts)
    indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(longest, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        mine = parameter.grad.coalesce()
        rows = mine.indices().shape[1]
        indices[:rows], values[:rows] = mine.indices()[0], mine.values()
    all_indices, all_values = _all_gather(indices, group), _all_gather(values, group)
    kept = [slice(0, count) for count in counts]
    return torch.sparse_coo_tensor(
        torch.cat([part[keep] for part, keep in zip(all_indices, kept, strict=True)])[None],
        torch.cat([part[keep] for part, keep in zip(all_values, kept, strict=True)]),
        parameter.shape,
    ).coalesce()


def _all_gather(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(parts, tensor, group=group.handle)
    return parts


def _parts(items: list[Any], count: int) -> list[list[Any]]:
    """At most ``count`` runs of items with about the same number of elements."""
    total = sum(parameter.numel() for _, parameter in items)
    parts: list[list[Any]] = [[]]
    done = 0
    for item in items:
        if parts[-1] and done >= total * len(parts) / count:
            parts.append([])
        parts[-1].append(item)
        done += item[1].numel()
    return parts


def _like(chunk: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The chunk with the parameter's shape, and its strides where they cover the memory without gaps."""
    dense = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, size in dense:
        if size != 1 and stride != expected:
            return chunk.view(parameter.shape)
        expected *= size
    return chunk.as_strided(parameter.shape, parameter.stride(), chunk.storage_offset())
