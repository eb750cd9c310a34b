"""Every feature that saves memory, alone and together, on a T5: peak memory and seconds of a step, on two ranks.

    python benchmarks/t5.py [--layers 6] [--rounds 2] [--report] [--names ...]

T5 of base width (768, 12 heads, vocabulary 32,128) with random weights, without dropout, AdamW. All run in the same two
processes, one after another, in rounds; the ratio of a contestant is the median, over the rounds, to the first one in the
same round; processor time (all threads of rank 0) counts no waiting. "peak" is the growth of the resident set from before
its model is built; "allocated" is what EPL's memory report has measured, weights and states included, and files not. Freed
memory goes back to the system at once, which makes all of them slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import datetime
from statistics import median
from typing import Any

import alone
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

import epl

LR, WARMUP = 1e-4, 1
OFF = {"loss.chunked": "off"}
ON = {"loss.chunked": "on", "gradient_checkpoint.type": "auto"}
BF16 = {"amp.level": "O1"}
Batch = dict[str, torch.Tensor]
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "EPL, nothing switched on": OFF,
    "loss in chunks": {"loss.chunked": "on"},
    "recompute": {**OFF, "gradient_checkpoint.type": "auto"},
    "zero v0": {**OFF, "zero.level": "v0"},
    "zero v1": {**OFF, "zero.level": "v1"},
    "zero v2": {**OFF, "zero.level": "v2"},
    "bf16": {**OFF, **BF16},
    "offload disk": {**OFF, "offload.level": "disk"},
    "4 apply groups": {**OFF, "optimizer.num_apply_group": 4},
    "chunks, recompute, v1": {**ON, "zero.level": "v1"},
    "chunks, bf16, v1": {**BF16, "loss.chunked": "on", "zero.level": "v1"},
    "chunks, recompute, bf16, v1": {**ON, **BF16, "zero.level": "v1"},
    "chunks, recompute, bf16, v2": {**ON, **BF16, "zero.level": "v2"},
    "chunks, recompute, bf16, v2, disk": {**ON, **BF16, "zero.level": "v2", "offload.level": "disk"},
}


def build(args: argparse.Namespace) -> T5ForConditionalGeneration:
    """The model, equal on all ranks."""
    torch.manual_seed(0)
    widths = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": args.layers}
    config = T5Config(vocab_size=32_128, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **widths)
    return T5ForConditionalGeneration(config).train()


def batches_of(args: argparse.Namespace, count: int) -> list[Batch]:
    """This rank's own: sentences of 256 tokens and answers of 64."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    shapes = {"input_ids": (args.batch, 256), "labels": (args.batch, 64)}
    return [
        {name: torch.randint(3, 32_128, shape, generator=draw) for name, shape in shapes.items()} for _ in range(count)
    ]


def stepping(name: str, args: argparse.Namespace) -> tuple[Callable[[Batch], Any], Any, int]:
    """A contestant's step, its engine if it is EPL, and its number of weights."""
    settings = CONTESTANTS[name]
    if settings is not None:
        epl.init(epl.Config({"run.print_plan": False, **settings}))
    model = build(args)
    size = sum(parameter.numel() for parameter in model.parameters())
    if settings is not None:
        engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR))
        return engine.train_step, engine, size
    parallel: Any = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(batch: Batch) -> torch.Tensor:
        loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, None, size


def work(args: argparse.Namespace) -> None:
    """All contestants, one after another, in both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = batches_of(args, WARMUP + args.steps)
    for number in range(args.rounds):
        for name in args.names:
            alone.print_result({"round": number, "name": name, **trial(name, args, batches)})


def trial(name: str, args: argparse.Namespace, batches: list[Batch]) -> dict[str, float]:
    """One contestant, from its building on; what it leaves is freed when this returns."""
    growth = alone.Growth()
    step, engine, size = stepping(name, args)
    seconds: list[float] = []
    work_s: list[float] = []
    for batch in batches:
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        loss = float(step(batch))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        work_s.append(time.process_time() - busy)
    peaks = alone.of_all_ranks(growth.peak_mib())
    ranks = engine.memory_report(batches[0]).ranks if engine and args.report else ()
    measured = [rank.measured.peak_bytes / alone.MIB for rank in ranks if rank.measured]
    predicted = [rank.predicted.peak_bytes / alone.MIB for rank in ranks]
    losses = alone.of_all_ranks(loss)
    if engine:
        engine.close()
        epl.init(epl.Config({"run.print_plan": False}))  # forgets the engine, so that its memory goes
    return {
        "params": size,
        "before_mib": growth.before_mib,
        "step_s": median(seconds[WARMUP:]),
        "work_s": median(work_s[WARMUP:]),
        "peak_mib": max(peaks),
        "allocated_mib": max(measured, default=0),
        "predicted_mib": max(predicted, default=0),
        "loss": sum(losses) / len(losses),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=6, help="of the encoder, and as many of the decoder")
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="EPL's memory report, too")
    parser.add_argument("--names", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    flags = [f"--{key}={getattr(args, key)}" for key in ("layers", "batch", "steps", "rounds")]
    flags += ["--report"] if args.report else []
    print(f"{datetime.now():%Y-%m-%d %H:%M}, load {psutil.getloadavg()[0]:.1f}: t5.py {' '.join(flags)}\n", flush=True)
    results: dict[str, list[Any]] = {name: [] for name in args.names}
    for found in alone.results("t5.py", [*flags, "--work", "--names", *args.names], world=2, exact=True):
        print(found, f"load {psutil.getloadavg()[0]:.1f}", flush=True)
        if "error" not in found:
            results[found["name"]].append(found)
    print(table(results))


def table(results: dict[str, list[Any]]) -> str:
    """Medians over the rounds, as Markdown."""
    first = next(iter(results.values()))
    columns = ("contestant", "step s", "ratio", "processor s", "ratio", "peak MiB", "of the first")
    lines = [f"| {' | '.join((*columns, 'allocated MiB (predicted)', 'loss'))} |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, found in results.items():
        pairs = list(zip(found, first, strict=False))
        if not pairs:
            lines.append(f"| {name} | failed | | | | | | | |")
            continue
        ratio = median(a["step_s"] / b["step_s"] for a, b in pairs)
        work = median(a["work_s"] / b["work_s"] for a, b in pairs)
        keys = ("step_s", "work_s", "peak_mib", "allocated_mib", "predicted_mib", "loss")
        mine = {key: median(a[key] for a, _ in pairs) for key in keys}
        share = mine["peak_mib"] / median(b["peak_mib"] for _, b in pairs)
        allocated = f"{mine['allocated_mib']:.0f} ({mine['predicted_mib']:.0f})" if mine["allocated_mib"] else ""
        lines.append(
            f"| {name} | {mine['step_s']:.2f} | {ratio:.2f} | {mine['work_s']:.2f} | {work:.2f} "
            f"| {mine['peak_mib']:.0f} | {share:.2f} | {allocated} | {mine['loss']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
