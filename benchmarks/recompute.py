"""Recompute and chunked losses beside torch.utils.checkpoint: peak bytes and seconds of a step, in one process.

    python benchmarks/recompute.py [--model bert] [--rounds 7]

The contestants take turns, step by step, on equal weights and the same batch. The peak is what forward and backward of a
step allocate above what was there before it (no gradients yet), by torch's profiler. "equal peak": the least that EPL
computes again for a peak that is not above that of a checkpoint around each block; "least memory": all that may be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

import epl

VOCABULARY = {"bert": 30_522, "gpt2": 50_257, "t5": 32_128}
NEAR = 1.02  # peaks this near are called equal
SHARES = (0.04, 0.08, 0.12, 0.16, 0.2, 0.24, 0.28, 0.34)
Batch = dict[str, Tensor]


def build(name: str) -> nn.Module:
    """8 layers of width 256, without dropout, so that all contestants have the same loss."""
    torch.manual_seed(0)
    size = VOCABULARY[name]
    if name == "bert":
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        widths = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 1024}
        return BertForMaskedLM(BertConfig(vocab_size=size, **widths, **rates)).train()
    if name == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=size, n_embd=256, n_layer=8, n_head=4, use_cache=False, **rates)
        ).train()
    widths = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=size, decoder_start_token_id=0, use_cache=False, **widths)
    ).train()


def batch_of(name: str) -> Batch:
    """8 sequences of 128 tokens."""
    tokens = torch.randint(3, VOCABULARY[name], (8, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.roll(1, 1)}


@dataclass
class Contestant:
    """Something that runs forward and backward of a batch and returns the loss."""

    name: str
    model: nn.Module
    step: Callable[[Batch], Any]


def plain(name: str, *, checkpointed: bool) -> Contestant:
    """The model itself, with a checkpoint around each block or without."""
    model: Any = build(name)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def step(batch: Batch) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss

    return Contestant("torch.utils.checkpoint around each block" if checkpointed else "plain PyTorch", model, step)


def with_epl(name: str, label: str, **settings: Any) -> Contestant:
    """The model under EPL in a world of one."""
    values = {key.replace("__", "."): value for key, value in settings.items()}
    epl.init(epl.Config({"run.print_plan": False, **values}))
    model = build(name)
    return Contestant(label, model, epl.parallelize(model).forward_backward)


def peak_bytes(contestant: Contestant, batch: Batch) -> int:
    """Bytes above those before the step, at most; by what torch's allocator reports."""
    clear(contestant.model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        contestant.step(batch)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    return peak


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def auto(name: str, share: float, label: str, chunked: str) -> Contestant:
    settings = {"gradient_checkpoint__type": "auto", "gradient_checkpoint__extra_compute": share}
    return with_epl(name, label, loss__chunked=chunked, **settings)


def contestants(name: str, batch: Batch) -> list[Contestant]:
    """All of them; EPL's share of computing again is found for the peak of the checkpointed model."""
    blocks = plain(name, checkpointed=True)
    blocks.step(batch)
    limit = peak_bytes(blocks, batch)
    found = [plain(name, checkpointed=False), blocks, with_epl(name, "EPL, nothing switched on", loss__chunked="off")]
    found[-1].step(batch)
    for share in SHARES:
        equal = auto(name, share, f"EPL, recompute at equal peak ({share:.0%} allowed)", "off")
        equal.step(batch)
        if peak_bytes(equal, batch) <= NEAR * limit:
            break
    else:
        raise SystemExit(f"{name}: no share up to {SHARES[-1]:.0%} keeps the peak of {limit} bytes")
    found.append(equal)
    found.append(auto(name, SHARES[-1], "EPL, recompute, least memory", "off"))
    found.append(with_epl(name, "EPL, loss in chunks", loss__chunked="on"))
    found.append(auto(name, SHARES[-1], "EPL, both, least memory", "on"))
    return found


def main() -> None:
    """A table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*VOCABULARY], action="append")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.model or [*VOCABULARY]:
        compare(name, args.rounds)


def compare(name: str, rounds: int) -> None:
    """Take turns, and print a line for each contestant."""
    batch = batch_of(name)
    rivals = contestants(name, batch)
    losses = [float(rival.step(batch)) for rival in rivals]
    times: list[list[float]] = [[] for _ in rivals]
    for _ in range(rounds):
        for rival, mine in zip(rivals, times, strict=True):
            clear(rival.model)
            start = time.perf_counter()
            rival.step(batch)
            mine.append(time.perf_counter() - start)
    first = statistics.median(times[0])
    print(f"\n{name}, vocabulary {VOCABULARY[name]}\n")
    print("| contestant | peak MiB | step s | time ratio | loss |\n| --- | --- | --- | --- | --- |")
    for rival, mine, loss in zip(rivals, times, losses, strict=True):
        middle = statistics.median(mine)
        peak = peak_bytes(rival, batch) / 2**20
        print(f"| {rival.name} | {peak:.1f} | {middle:.3f} | {middle / first:.2f} | {loss:.6f} |")


if __name__ == "__main__":
    main()
