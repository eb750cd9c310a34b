"""ZeRO beside its peers: seconds of a step, MiB sent and peak memory, on two ranks, in float32, with AdamW.

    python benchmarks/states.py [--micro 4] [--rounds 8] [--deepspeed]

Time: all contestants live in the same two processes and take turns, step by step; a ratio is the median, over the rounds,
of of a contestant's step by DDP's in the same round. Processor time (all threads of rank 0) counts no waiting, for turns on
a machine that has other work. Memory: each contestant in processes of its own, growth of the resident
set from after the imports to its peak, the building of the whole model on each rank included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import datetime
from statistics import median
from typing import Any

import alone
import peers
import psutil
import torch
import torch.distributed as dist
import workloads

import epl

LR = 1e-4
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]
EPL = {
    "EPL, data parallel": "",
    "EPL, zero v0": "v0",
    "EPL, zero v1": "v1",
    "EPL, zero v2": "v2",
}
PEERS = {
    "DDP": "ddp",
    "DDP and ZeroRedundancyOptimizer": "zero1-torch",
    "fully_shard, weights kept after forward": "fsdp2-zero2",
    "fully_shard": "fsdp2",
}
DEEPSPEED = {f"DeepSpeed stage {stage}": f"deepspeed-z{stage}" for stage in (1, 2, 3)}
ALL = {**PEERS, **EPL, **DEEPSPEED}


def build(name: str, args: argparse.Namespace) -> tuple[Step, Any]:
    """A contestant's step, and its engine if it is EPL."""
    model, loss_fn, _, meta = workloads.build(args.workload, args.scale)
    rank, world = dist.get_rank(), dist.get_world_size()
    if name not in EPL:
        job = peers.Job(model, loss_fn, meta, args.batch, args.micro, rank, world)
        return peers.PEERS[ALL[name]].build(job), None
    settings = {"zero.level": EPL[name], "pipeline.num_micro_batch": args.micro, "run.print_plan": False}
    epl.init(epl.Config(settings))
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR), loss_fn=loss_fn)
    return engine.train_step, engine


def batches_of(args: argparse.Namespace, count: int) -> list[dict[str, torch.Tensor]]:
    """This rank's shares."""
    make = workloads.build(args.workload, args.scale)[2]
    rank, world = dist.get_rank(), dist.get_world_size()
    return [{key: value.chunk(world)[rank] for key, value in make(i, args.batch).items()} for i in range(count)]


def sent_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def take_turns(args: argparse.Namespace) -> None:
    """Both ranks: all contestants, step by step."""
    steps = {name: build(name, args)[0] for name in args.names}
    batches = batches_of(args, args.rounds + 2)
    losses: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    work: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[int]] = {name: [] for name in steps}
    for turn, batch in enumerate(batches):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            before, start, busy = sent_bytes(), time.perf_counter(), time.process_time()
            losses[name] = float(steps[name](batch))
            dist.barrier()  # what a contestant leaves under way counts, too
            seconds[name].append(time.perf_counter() - start)
            work[name].append(time.process_time() - busy)
            sent[name].append((sent_bytes() - before) // dist.get_world_size())
    means = [sum(of) / len(of) for of in zip(*alone.of_all_ranks(list(losses.values())), strict=True)]
    turns, busy = ({name: of[2:] for name, of in values.items()} for values in (seconds, work))  # two to warm up
    alone.print_result(
        {
            "seconds": turns,
            "work": busy,
            "sent_mib": {name: median(values[2:]) / alone.MIB for name, values in sent.items()},
            "loss": dict(zip(losses, means, strict=True)),
        }
    )


def peak_alone(args: argparse.Namespace) -> None:
    """Both ranks: the peak of one contestant."""
    growth = alone.Growth()
    batches = batches_of(args, 4)
    step, engine = build(args.names[0], args)
    for batch in batches[:3]:
        step(batch)
    peaks = alone.of_all_ranks(growth.peak_mib())
    growth.reset()
    step(batches[3])
    steady = alone.of_all_ranks(growth.peak_mib())
    report = None if engine is None else engine.memory_report(batches[3])
    measured = [rank.measured.peak_bytes / alone.MIB for rank in report.ranks if rank.measured] if report else []
    alone.print_result({"peak_mib": peaks, "steady_mib": steady, "report_mib": measured})


def work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if any(name in DEEPSPEED for name in args.names):
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    (take_turns if args.work == "time" else peak_alone)(args)
    dist.barrier()


def main() -> None:
    """Print a table."""
    args = options()
    if args.work:
        work(args)
        return
    flags = [f"--{key}={getattr(args, key)}" for key in ("workload", "scale", "batch", "micro", "rounds")]
    given = [*flags, *(["--deepspeed"] if args.deepspeed else [])]
    print(
        f"{datetime.now():%Y-%m-%d %H:%M}, load {psutil.getloadavg()[0]:.1f}: states.py {' '.join(given)}\n", flush=True
    )
    timed = alone.launch("states.py", [*flags, "--work=time", "--names", *args.names], world=2)
    if "error" in timed:
        sys.exit(timed["error"])
    columns = (
        "contestant",
        "step s",
        "ratio to DDP (range)",
        "the same of processor time",
        "MiB sent per step and rank",
    )
    print(f"| {' | '.join((*columns, 'peak MiB', 'in a later step', 'loss'))} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.names:
        print(row(name, flags, timed), flush=True)


def row(name: str, flags: list[str], timed: Any) -> str:
    """A line of the table."""
    found = alone.launch("states.py", [*flags, "--work=memory", "--names", name], world=2, exact=True)
    mine, of_time, of_work = median(timed["seconds"][name]), ratio(timed["seconds"], name), ratio(timed["work"], name)
    if "error" in found:
        print(found["error"], file=sys.stderr)
        return f"| {name} | {mine:.3f} | {of_time} | {of_work} | | failed | | |"
    steady = f"{max(found['steady_mib']):.0f}"
    steady += f" (report: {max(found['report_mib']):.0f})" if found["report_mib"] else ""
    return (
        f"| {name} | {mine:.3f} | {of_time} | {of_work} | {timed['sent_mib'][name]:.1f} "
        f"| {max(found['peak_mib']):.0f} | {steady} | {timed['loss'][name]:.5f} |"
    )


def ratio(values: dict[str, list[float]], name: str) -> str:
    """Median and range, over the rounds, of a contestant's number by the first one's."""
    first = next(iter(values.values()))
    ratios = sorted(a / b for a, b in zip(values[name], first, strict=True))
    return f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--workload", default="bert-large-ish")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=8, help="samples per step over both ranks")
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--deepspeed", action="store_true", help="with DeepSpeed, which has to be installed")
    parser.add_argument("--names", nargs="+", choices=ALL, help="contestants; the first is what ratios are to")
    parser.add_argument("--work", choices=("time", "memory"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.names = args.names or [*PEERS, *EPL, *(DEEPSPEED if args.deepspeed else ())]
    return args


if __name__ == "__main__":
    main()
