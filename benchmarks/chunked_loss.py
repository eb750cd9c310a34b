"""A last linear layer and its cross entropy, plain and in chunks: time, and memory at the peak, by turns in one process.

    python benchmarks/chunked_loss.py --threads 1

Each is the code that EPL makes for one rank, once with ``loss.chunked`` off and once on; a turn is a forward and a
backward pass. Memory is the sum of what PyTorch's allocator gave and took back since the turn began: gradients are in it,
weights and the batch are not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.lower import lower_stage
from epl.sharding.collectives import LonelyRank

MIB = 2**20


class BertHead(nn.Module):
    """A masked language model's last layers: one label in seven counts."""

    classes = 30_522

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, self.classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.decoder(self.norm(F.gelu(self.transform(x))))
        labels = labels.masked_fill(labels % 7 != 0, -100)
        return F.cross_entropy(logits.view(-1, self.classes), labels.view(-1))


class GptHead(nn.Module):
    """A language model's last layers, with labels shifted by one."""

    classes = 50_257

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, self.classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(x))[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, self.classes), labels[:, 1:].reshape(-1))


def step_of(
    model: nn.Module, batch: tuple[Tensor, Tensor], config: dict[str, Any], in_flight: int
) -> Callable[[], Any]:
    """A forward and a backward pass as a rank runs them."""
    captured = capture(model, loss_step(None), flatten(batch))
    graph = build_taskgraphs(captured.graph)
    plan = replace(make_plan(graph, Cluster((1,)), epl.Config(config)), peak_in_flight=(in_flight,))
    lowered = lower_stage(graph, plan, 0)
    functions = {target: function.bind(LonelyRank()) for target, function in lowered.functions.items()}
    function = lowered.code.compile({**captured.functions, **functions})
    paths = {leaf.name: leaf.path for leaf in graph.parameters}
    held = [
        model.get_parameter(paths[name]) if name in paths else captured.constants[name] for name in lowered.program.held
    ]
    inputs = [batch[place] for place in lowered.program.inputs]

    def step() -> None:
        model.zero_grad()
        for tensor in batch:
            tensor.grad = None
        function(*held, *inputs, lambda draw: None)[-1].backward()

    return step


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most that is allocated at once, beyond what is there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = peak = 0
    for _, size_bytes in events:
        live += size_bytes
        peak = max(peak, live)
    return peak


def measure(head: type[nn.Module], args: argparse.Namespace) -> None:
    """Print a line of the table for each way."""
    torch.manual_seed(0)
    model = head(args.width)
    x = torch.randn(args.samples, args.length, args.width, requires_grad=True)
    batch = (x, torch.randint(30_000, (args.samples, args.length)))
    on = {"loss.chunked": "on", "loss.chunk_rows": args.rows}
    ways = {
        "plain": step_of(model, batch, {"loss.chunked": "off"}, 1),
        "chunks, gradients in forward": step_of(model, batch, on, 1),
        "chunks, gradients in backward": step_of(model, batch, on, 64),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.turns + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    for name, step in ways.items():
        model.zero_grad()
        x.grad = None
        seconds = statistics.median(times[name])
        ratio = statistics.median([one / other for one, other in zip(times[name], times["plain"], strict=True)])
        peak = peak_bytes(step) / MIB
        print(f"| {head.__name__} | {name} | {seconds:.2f} | {ratio:.2f} | {peak:,.0f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=0, help="rows of a chunk; 0: as EPL chooses")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| head | way | s | ratio to plain | MiB at the peak |\n| --- | --- | --- | --- | --- |")
    for head in (BertHead, GptHead):
        measure(head, args)


if __name__ == "__main__":
    main()
