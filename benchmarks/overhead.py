"""What EPL adds to a step: plain PyTorch and EPL take turns, step by step, in the same process.

    python benchmarks/overhead.py [--workload bert] [--pairs 60] [--profile]
    torchrun --nproc-per-node 2 benchmarks/overhead.py        # DistributedDataParallel and EPL's data parallelism

Each pair is one step of either, on equal models and the same batch; the order within a pair alternates. The ratio is the
median over the pairs, so that a machine that gets slower harms both alike: what is left of its noise is far less than
between two runs (run.py). With ``--profile`` a table follows that says where each of the two spends its time, by torch's
profiler.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import workloads
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import epl

Step = Callable[[dict[str, torch.Tensor]], Any]
LR = 1e-4


def main() -> None:
    """Print the medians, their ratio with its quartiles, and the two losses, which have to be equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="bert")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    model, loss_fn, make_batch, _ = workloads.build(args.workload)
    steps = {"plain": _plain(copy.deepcopy(model), loss_fn), "epl": _epl(model, loss_fn)}
    batches = [_part(make_batch(step, args.batch), rank, world) for step in range(args.pairs + 3)]
    losses = {name: [float(step(batch)) for batch in batches[:3]] for name, step in steps.items()}
    seconds = _take_turns(steps, batches[3:])
    ratios = sorted(mine / plain for plain, mine in zip(seconds["plain"], seconds["epl"], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    tables = {name: _profile(step, batches[:5]) for name, step in steps.items()} if args.profile else {}
    if rank:
        return
    plain_ms, epl_ms = (statistics.median(seconds[name]) * 1e3 for name in ("plain", "epl"))
    print(
        f"{args.workload}, batch {args.batch}, {world} ranks, {args.pairs} pairs: plain {plain_ms:.1f}, EPL {epl_ms:.1f} ms"
    )
    print(f"ratio {middle:.3f}, quartiles {low:.3f}-{high:.3f}; losses {losses['plain'][2]:.7f} {losses['epl'][2]:.7f}")
    for name, table in tables.items():
        print(f"\n{name}\n{table}")


def _part(batch: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(world)[rank] for name, value in batch.items()}


def _plain(model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> Step:
    model = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _epl(model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> Step:
    epl.init(epl.Config({"run.print_plan": False}))
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR), loss_fn=loss_fn)
    return engine.train_step


def _take_turns(steps: dict[str, Step], batches: list[dict[str, torch.Tensor]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn, batch in enumerate(batches):
        for name in sorted(steps, reverse=turn % 2 == 0):
            start = time.perf_counter()
            steps[name](batch)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _profile(step: Step, batches: list[dict[str, torch.Tensor]]) -> str:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for batch in batches:
            step(batch)
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=50)


if __name__ == "__main__":
    main()
