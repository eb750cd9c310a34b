"""Time of the search for a split's placements, and bytes sent beside a plan by hand, for large models on meta tensors.

    python benchmarks/searching.py [--models bert llama t5] [--devices 2 4 8] [--kind A100-80GB]

One process; nothing is allocated. The bytes are per rank and micro-batch, forward and backward, in the weights' type.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.taskgraphs import build_taskgraphs


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """BERT-large, 8 x 512 tokens."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return BertForMaskedLM(BertConfig(**sizes)), _tokens(8, 512)


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The shape of Llama-7B, 1 x 2,048 tokens."""
    return LlamaForCausalLM(LlamaConfig(use_cache=False)), _tokens(1, 2048)


def t5() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """T5-large, 8 x 512 tokens in and 8 x 128 out."""
    sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **sizes))
    return model, {**_tokens(8, 512), "labels": torch.zeros(8, 128, dtype=torch.long)}


def _tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(samples, length, dtype=torch.long) for name in ("input_ids", "labels")}


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "llama": llama, "t5": t5}


def main() -> None:
    """Print a table, a row for each model and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--kind", default="A100-80GB")
    args = parser.parse_args()
    print("| model | operators | devices | capture s | search s | MiB sent | by hand MiB | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.models:
        for devices in args.devices:
            print(_row(name, devices, args.kind), flush=True)


def _row(name: str, devices: int, kind: str) -> str:
    with torch.device("meta"):
        model, batch = MODELS[name]()
    epl.split(devices)(model.train())
    begin_s = time.perf_counter()
    graph = build_taskgraphs(capture(model, loss_step(None), flatten(batch)).graph)
    captured_s = time.perf_counter()
    (split,) = make_plan(graph, Cluster((devices,), device_kind=kind), epl.Config()).splits
    times = f"{captured_s - begin_s:.1f} | {time.perf_counter() - captured_s:.1f}"
    sent, by_hand = split.sent_bytes / 2**20, split.megatron_bytes / 2**20
    return f"| {name} | {len(graph.ops)} | {devices} | {times} | {sent:,.0f} | {by_hand:,.0f} | {sent / by_hand:.3f} |"


if __name__ == "__main__":
    main()
