"""Load batches so that each replica gets its share of the global batch, and all ranks of a replica the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from epl.batch import cut, flatten, take
from epl.errors import ConfigError
from epl.scopes import tag_of

__all__ = ["ReplicaLoader", "Share", "guess_num_replicas"]

Share = tuple[int, int]


class ReplicaLoader:
    """Iterates over this replica's part of each global batch. Made by ``epl.data_loader``.

    The global batch is cut into consecutive parts, one a replica; the first ones hold one sample more where it does not
    divide. A replica for which nothing is left in a small last batch gets an empty batch, and takes part with it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch_size: int,
        share: Callable[[Callable[[int], Any]], Share],
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(global_batch_size, int) or global_batch_size < 1:
            raise ConfigError(f"global_batch_size={global_batch_size!r}: it must be an int of at least 1")
        taken = sorted({"batch_size", "sampler", "batch_sampler"} & set(options))
        if taken:
            raise ConfigError(
                f"epl.data_loader sets {', '.join(taken)} itself; give global_batch_size, shuffle and seed"
            )
        self.dataset, self.global_batch_size = dataset, global_batch_size
        self._share, self._shuffle, self._seed, self._drop_last = share, shuffle, seed, drop_last
        self._options = options
        self.epoch = 0

    @property
    def _num_samples(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Global batches in one pass over the data."""
        full, rest = divmod(self._num_samples, self.global_batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        batches = self._global_batches()
        if not batches:
            return
        replica, num_replicas = self._share(lambda count: self._collate(batches[0][: max(1, len(batches[0]) // count)]))
        shares = [_share_of(batch, replica, num_replicas) for batch in batches]
        # a replica without samples loads one and drops it, for the form of its batch
        loader = DataLoader(
            self.dataset,
            batch_sampler=[share or list(batch[:1]) for share, batch in zip(shares, batches, strict=True)],
            **self._options,
        )
        self.epoch += 1
        for share, batch in zip(shares, loader, strict=True):
            yield batch if share else _emptied(batch)

    def _global_batches(self) -> list[Sequence[int]]:
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator).tolist()
        else:
            order = list(range(self._num_samples))
        size = self.global_batch_size
        return [order[place * size : (place + 1) * size] for place in range(len(self))]

    def _collate(self, indices: Sequence[int]) -> Any:
        return next(iter(DataLoader(self.dataset, batch_sampler=[list(indices)], **self._in_process())))

    def _in_process(self) -> dict[str, Any]:
        worker_options = ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
        return {key: value for key, value in self._options.items() if key not in worker_options}


def guess_num_replicas(model: nn.Module, world_size: int) -> int:
    """From the annotations that are visible without a capture; a wrong guess costs one more capture."""
    tags = [tag_of(module) for module in model.modules()]
    strategies = {id(tag.strategy): tag.strategy for tag in tags if tag is not None}
    devices = sum(strategy.device_count for strategy in strategies.values()) or 1
    return max(1, world_size // devices)


def _share_of(batch: Sequence[int], replica: int, num_replicas: int) -> list[int]:
    parts = cut(len(batch), num_replicas)
    return list(batch[slice(*parts[replica])]) if replica < len(parts) else []


def _emptied(batch: Any) -> Any:
    flat = flatten(batch)
    return flat.structure.unflatten(take(flat.tensors, 1, (0, 0)))
