"""The memory model against real steps: eight models under five plans, predicted beside measured peak.

    python benchmarks/memory_model.py [--models bert,resnet] [--plans one,pipeline]

Every cell is a run of its own: a first step, then one that is measured with ``engine.memory_report(batch)``. Models are
those of transformers with their own rates of dropout, wide enough that activations and weights are of one order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import epl

WIDTH, HEADS, VOCABULARY, LENGTH, SAMPLES = 256, 4, 4096, 128, 16
MIB = 1 << 20
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}


class Plan(NamedTuple):
    """Ranks, stages, devices of each stage, micro-batches."""

    world: int
    num_stages: int = 1
    split: int = 1
    micro_batches: int = 1


PLANS = {
    "one": Plan(1),
    "data parallel": Plan(2),
    "pipeline": Plan(2, num_stages=2, micro_batches=4),
    "both": Plan(4, num_stages=2, micro_batches=4),
    "split": Plan(2, split=2),
}


class Model(NamedTuple):
    """A class, its configuration, and the modules of its second stage; all others are the first."""

    make: Any
    config: Any
    second: tuple[str, ...]


def _layers(path: str, start: int, stop: int) -> tuple[str, ...]:
    return tuple(f"{path}.{i}" for i in range(start, stop))


def _models() -> dict[str, Model]:
    return {**_one_stack(), **_two_stacks(), **_images()}


def _one_stack() -> dict[str, Model]:
    llama = {**TOKENS, **SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2, "use_cache": False}
    gpt = {"n_embd": WIDTH, "n_layer": 6, "n_head": HEADS, "n_positions": LENGTH, "use_cache": False}
    head = ("model.norm", "lm_head")
    return {
        "bert": Model(
            BertForMaskedLM,
            BertConfig(vocab_size=VOCABULARY, num_hidden_layers=6, **SIZES),
            (*_layers("bert.encoder.layer", 3, 6), "cls"),
        ),
        "gpt2": Model(
            GPT2LMHeadModel,
            GPT2Config(**TOKENS, **gpt),
            (*_layers("transformer.h", 3, 6), "transformer.ln_f", "lm_head"),
        ),
        "llama": Model(LlamaForCausalLM, LlamaConfig(**llama), (*_layers("model.layers", 3, 6), *head)),
        "mixtral": Model(
            MixtralForCausalLM,
            MixtralConfig(**{**llama, "num_hidden_layers": 4}, num_local_experts=4),
            (*_layers("model.layers", 2, 4), *head),
        ),
    }


def _two_stacks() -> dict[str, Model]:
    t5: dict[str, Any] = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_heads": HEADS}
    t5 |= {"num_layers": 3, "vocab_size": VOCABULARY, "use_cache": False, "decoder_start_token_id": 0}
    bart: dict[str, Any] = {"d_model": WIDTH, "use_cache": False, "decoder_start_token_id": 2, **TOKENS}
    for part in ("encoder", "decoder"):
        bart |= {f"{part}_layers": 3, f"{part}_attention_heads": HEADS, f"{part}_ffn_dim": 4 * WIDTH}
    first = ("model.decoder.embed_positions", "model.decoder.layernorm_embedding")
    return {
        "t5": Model(
            T5ForConditionalGeneration,
            T5Config(**t5),
            (*_layers("decoder.block", 0, 3), "decoder.final_layer_norm", "lm_head"),
        ),
        "bart": Model(
            BartForConditionalGeneration,
            BartConfig(**bart),
            (*first, *_layers("model.decoder.layers", 0, 3), "lm_head"),
        ),
    }


def _images() -> dict[str, Model]:
    classes: dict[str, Any] = {"num_labels": 10}
    return {
        "vit": Model(
            ViTForImageClassification,
            ViTConfig(image_size=64, patch_size=8, num_hidden_layers=6, **classes, **SIZES),
            (*_layers("vit.layers", 3, 6), "vit.layernorm", "classifier"),
        ),
        "resnet": Model(
            ResNetForImageClassification,
            ResNetConfig(**classes),
            (*_layers("resnet.encoder.stages", 2, 4), "classifier"),
        ),
    }


def _batch(name: str, size: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    if name in ("vit", "resnet"):
        images = torch.randn(size, 3, 64, 64, generator=draw)
        return {"pixel_values": images, "labels": torch.randint(10, (size,), generator=draw)}
    tokens = torch.randint(3, VOCABULARY, (size, LENGTH), generator=draw)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _build(name: str, plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    case = _models()[name]
    model: nn.Module = case.make(case.config).train()
    if name == "gpt2":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # its own name hides it from transformers
    if plan.num_stages == 2:
        second = epl.replicate(1, name="second")
        epl.set_default_strategy(epl.replicate(1, name="first"))
        for path in case.second:
            second(model.get_submodule(path))
    elif plan.split > 1:
        epl.split(plan.split)(model)
    return model


def worker(name: str, plan: Plan, path: str) -> None:
    """One rank of one cell."""
    torch.set_num_threads(1)
    epl.init(epl.Config({"pipeline.num_micro_batch": plan.micro_batches, "run.print_plan": False}))
    model = _build(name, plan)
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    num_replicas = plan.world // (plan.num_stages * plan.split)
    batch = _batch(name, SAMPLES // num_replicas)
    engine.train_step(batch)
    report = engine.memory_report(batch)
    if epl.Env.get().cluster.rank == 0:
        found = [
            (
                rank.predicted.peak_bytes,
                rank.measured.peak_bytes,
                rank.predicted.samples[0].total,
                rank.predicted.problems,
            )
            for rank in report.ranks
            if rank.measured is not None
        ]
        Path(path).write_text(json.dumps(found))


def cell(name: str, plan_name: str) -> tuple[str, list[float], list[float]]:
    """(text of the rank with the largest peak, ratio of each rank, the same of what is beyond weights, states, buckets)."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(PLANS[plan_name].world), __file__, "--worker", name, plan_name, path]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(ran.stderr[-3000:], file=sys.stderr)
            return "failed", [], []
        found = json.loads(Path(path).read_text())
    predicted, measured, _, problems = max(found, key=lambda rank: rank[1])
    ratios = [rank[0] / rank[1] for rank in found]
    beyond = [(rank[0] - rank[2]) / (rank[1] - rank[2]) for rank in found]
    text = f"{predicted / MIB:.1f} / {measured / MIB:.1f} ({predicted / measured:.3f})"
    return text + (f" {problems}" if problems else ""), ratios, beyond


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(_models()))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--worker", nargs=3)
    args = parser.parse_args()
    if args.worker:
        name, plan_name, path = args.worker
        worker(name, PLANS[plan_name], path)
        return
    plans = args.plans.split(",")
    print(f"| model | {' | '.join(plans)} |\n|{' --- |' * (len(plans) + 1)}", flush=True)
    ratios: list[float] = []
    beyond: list[float] = []
    for name in args.models.split(","):
        cells = [cell(name, plan_name) for plan_name in plans]
        ratios += [ratio for each in cells for ratio in each[1]]
        beyond += [ratio for each in cells for ratio in each[2]]
        print(f"| {name} | {' | '.join(text for text, _, _ in cells)} |", flush=True)
    if ratios:
        print(f"\nratio of all ranks: {min(ratios):.3f} to {max(ratios):.3f}")
        print(f"of what comes and goes in a step alone: {min(beyond):.3f} to {max(beyond):.3f}")


if __name__ == "__main__":
    main()
