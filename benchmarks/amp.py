"""Mixed precision beside torch.autocast: seconds of a step and its peak memory, in one process.

    python benchmarks/amp.py [--workload bert-large-ish] [--rounds 8]

All contestants live in one process and take turns, step by step, on equal weights and the same batches, with AdamW. The
peak is what a step allocates above what was there before it, by torch's profiler. autocast keeps the cast of each weight
until its context ends, unless it is told not to (``cache_enabled=False``).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from datetime import datetime
from statistics import median
from typing import Any

import psutil
import torch
import workloads
from torch.profiler import ProfilerActivity, profile

import epl

LR = 1e-4
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], Any]
TORCH = {
    "plain PyTorch, float32": None,
    "torch.autocast, bfloat16": True,
    "the same, cache_enabled=False": False,
}
EPL = {
    "EPL, float32": {"loss.chunked": "off"},
    "EPL, O1, bfloat16": {"loss.chunked": "off", "amp.level": "O1"},
    "EPL, O1, bfloat16, loss in chunks": {"loss.chunked": "on", "amp.level": "O1"},
}


def plain(args: argparse.Namespace, cache: bool | None) -> Step:
    """The model, in autocast or not."""
    model, loss_fn, *_ = workloads.build(args.workload, args.scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(batch: Batch) -> torch.Tensor:
        lowered = torch.autocast("cpu", torch.bfloat16, cache_enabled=bool(cache))
        with contextlib.nullcontext() if cache is None else lowered:
            loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_epl(args: argparse.Namespace, settings: dict[str, str]) -> Step:
    """The model under EPL."""
    epl.init(epl.Config({"run.print_plan": False, **settings}))
    model, loss_fn, *_ = workloads.build(args.workload, args.scale)
    return epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR), loss_fn=loss_fn).train_step


def peak_mib(step: Step, batch: Batch) -> float:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(batch)
    events: Any = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    return peak / 2**20


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--workload", default="bert-large-ish")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = {name: plain(args, cache) for name, cache in TORCH.items()}
    steps |= {name: with_epl(args, settings) for name, settings in EPL.items()}
    make_batch = workloads.build(args.workload, args.scale)[2]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    work: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for turn in range(args.rounds + 2):
        batch = make_batch(turn, args.batch)
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            start, busy = time.perf_counter(), time.process_time()
            losses[name] = float(steps[name](batch))
            seconds[name].append(time.perf_counter() - start)
            work[name].append(time.process_time() - busy)
    print(f"{datetime.now():%Y-%m-%d %H:%M}, load {psutil.getloadavg()[0]:.1f}: {vars(args)}\n")
    print("| contestant | step s | ratio (range) | of processor time | peak of a step, MiB | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, step in steps.items():
        text = f"{ratio(seconds, name)} | {ratio(work, name)} | {peak_mib(step, batch):.1f}"
        print(f"| {name} | {median(seconds[name][2:]):.3f} | {text} | {losses[name]:.5f} |", flush=True)
    if args.profile:
        for name, step in steps.items():
            print(f"\n{name}\n{_profile(step, batch)}")


def ratio(values: dict[str, list[float]], name: str) -> str:
    """Median and range, over the rounds but the first two, of a contestant's number by the first one's."""
    first = next(iter(values.values()))
    ratios = sorted(a / b for a, b in zip(values[name][2:], first[2:], strict=True))
    return f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def _profile(step: Step, batch: Batch) -> str:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            step(batch)
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=50)


if __name__ == "__main__":
    main()
