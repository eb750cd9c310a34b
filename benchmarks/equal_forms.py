"""Collectives of gloo that give the same: which of them is fastest, by size and number of ranks.

    torchrun --nproc-per-node 2 benchmarks/equal_forms.py

The choice that follows from it is in ``epl/runtime/collectives.py``. The forms of one size take turns; each number is the
median in milliseconds over the turns, of the slowest rank.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

KIB = (1, 16, 256, 4096, 16384)
TURNS = 30

Form = Callable[[torch.Tensor], torch.Tensor]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A reduce-scatter as gloo has it."""
    result = tensor.new_empty(tensor.numel() // dist.get_world_size())
    dist.reduce_scatter_single(result, tensor)
    return result


def by_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """A reduce-scatter: sum all, keep a part."""
    result = tensor.clone()
    dist.all_reduce(result)
    return result.chunk(dist.get_world_size())[dist.get_rank()]


def by_all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    """A reduce-scatter: everyone's part comes here and is summed up here."""
    everyone = torch.empty_like(tensor)
    dist.all_to_all_single(everyone, tensor)
    return everyone.view(dist.get_world_size(), -1).sum(0)


def sum_of_all(tensor: torch.Tensor) -> torch.Tensor:
    """An all-reduce as gloo has it."""
    result = tensor.clone()
    dist.all_reduce(result)
    return result


def sum_by_parts(tensor: torch.Tensor) -> torch.Tensor:
    """An all-reduce: parts by all-to-all, summed up here, and then gathered."""
    result = torch.empty_like(tensor)
    dist.all_gather_single(result, by_all_to_all(tensor))
    return result


FORMS: dict[str, dict[str, Form]] = {
    "reduce-scatter": {"its own": own, "all-reduce": by_all_reduce, "all-to-all and sum": by_all_to_all},
    "all-reduce": {"its own": sum_of_all, "all-to-all, sum, all-gather": sum_by_parts},
}


def measure(forms: dict[str, Form], size_bytes: int) -> dict[str, float]:
    """Milliseconds of each form."""
    tensor = torch.randn(size_bytes // 4)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(TURNS + 2):
        for name, form in forms.items():
            dist.barrier()
            start = time.perf_counter()
            form(tensor)
            took = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 2:
                seconds[name].append(float(took))
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def main() -> None:
    """Print a line for each size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for (what, forms), kib in itertools.product(FORMS.items(), KIB):
        found = measure(forms, kib * 1024)
        if dist.get_rank() == 0:
            text = ", ".join(f"{name} {value:.2f} ms" for name, value in found.items())
            print(f"{what} on {dist.get_world_size()} ranks, {kib:>6} KiB: {text}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
