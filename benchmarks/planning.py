"""Time from a model to the first instruction: capture, build, plan, lower, compile; for BERT-large by default.

    python benchmarks/planning.py [--layers 24] [--hidden 1024]

One process, no other ranks; the plan is for 8 devices (2 stages, 4 replicas).
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import BertConfig, BertForMaskedLM

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.lower import lower_stage, lower_step
from epl.schedule import generate


def main() -> None:
    """Print the seconds of each phase; the second line is a second signature, when all is imported."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
    model = BertForMaskedLM(BertConfig(num_attention_heads=args.hidden // 64, **sizes))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.0f} M parameters, {args.layers} layers")
    first, second = (epl.replicate(1, name=f"stage_{stage}") for stage in range(2))
    first(model.bert.embeddings, *model.bert.encoder.layer[: args.layers // 2])
    second(*model.bert.encoder.layer[args.layers // 2 :], model.cls)
    for length in (128, 64):
        _time_phases(model, length)


def _time_phases(model: torch.nn.Module, length: int) -> None:
    tokens = torch.randint(0, 1000, (2, length))
    clock = [time.perf_counter()]
    captured = capture(model, loss_step(None), flatten({"input_ids": tokens, "labels": tokens}))
    clock.append(time.perf_counter())
    graph = build_taskgraphs(captured.graph)
    clock.append(time.perf_counter())
    plan = make_plan(graph, Cluster.from_spec("1x8"), epl.Config({"pipeline.num_micro_batch": 4}))
    clock.append(time.perf_counter())
    stage = lower_stage(graph, plan, 0)
    lower_step(plan, 0, generate(plan.schedule, 2, 4), [stage.program] * 4)
    clock.append(time.perf_counter())
    stage.code.compile(captured.functions)
    clock.append(time.perf_counter())
    names = ("capture", "build", "plan", "lower", "compile")
    phases = ", ".join(f"{name} {end - start:.2f}" for name, start, end in zip(names, clock, clock[1:], strict=False))
    print(f"sequence {length}: {clock[-1] - clock[0]:.2f} s ({phases}), {len(graph.ops)} operators")


if __name__ == "__main__":
    main()
