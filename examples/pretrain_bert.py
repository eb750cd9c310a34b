"""Train BERT as a masked language model, data-parallel, as a pipeline, both, or split; `annotate` is all that differs.

    epl launch --nproc 2 examples/pretrain_bert.py --strategy dp --micro-batches 2
    epl launch --nproc 2 examples/pretrain_bert.py --strategy pipeline --micro-batches 4
    epl launch --nproc 4 examples/pretrain_bert.py --strategy hybrid --micro-batches 2
    epl launch --nproc 2 examples/pretrain_bert.py --strategy split --micro-batches 4

The model is that of Hugging Face transformers, small and with random weights; the text is the source of Python's own
library, so nothing is downloaded. The four commands print the same losses, dropout included: each cuts the 32 samples
of a step into 4 parts, and EPL's random numbers depend on the step, the sample and the operator, not on the rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from library_text import IGNORED, MaskedText, Text, library_text
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM

import epl

VOCABULARY = 512
LENGTH = 32  # pieces of a sample
HELD_OUT_SAMPLES = 256
WARMUP = 0.15  # of all steps


def main() -> None:
    arguments = parse_arguments()
    epl.init(epl.Config({"pipeline.num_micro_batch": arguments.micro_batches}))
    torch.manual_seed(arguments.seed)
    model = make_model(arguments.layers, arguments.hidden)
    annotate(model, arguments.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    engine = epl.parallelize(model, optimizer, loss_fn=masked_loss)

    text = library_text(VOCABULARY)
    job = Job(arguments, engine, optimizer, text)
    job.train()
    if job.is_first_rank:
        job.report()


def annotate(model: BertForMaskedLM, strategy: str) -> None:
    """Say how the model may be parallelised. Without annotations each rank is a replica: data parallelism."""
    if strategy in ("pipeline", "hybrid"):
        layers = model.bert.encoder.layer
        half = len(layers) // 2
        epl.replicate(device_count=1, name="stage_0")(model.bert.embeddings, *layers[:half])
        epl.replicate(device_count=1, name="stage_1")(*layers[half:], model.cls)
    elif strategy == "split":
        epl.split(device_count=2)(model)
    # "hybrid" has the annotations of "pipeline": on 4 ranks 2 stages leave room for 2 replicas, and EPL uses them.


def masked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> epl.SumLoss:
    """The mean over all hidden pieces of the global batch.

    Given as a sum and a count: parts have different numbers of hidden pieces, so the mean of their means would be
    another number, and would depend on where the batch is cut.
    """
    logits = model(input_ids=batch["input_ids"]).logits
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return epl.SumLoss(total, (labels != IGNORED).sum())


def make_model(layers: int, hidden: int) -> BertForMaskedLM:
    """A small BERT with BERT's own dropout of 0.1."""
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            intermediate_size=4 * hidden,
            max_position_embeddings=LENGTH,
            type_vocab_size=1,
        )
    )
    # BERT's 0.02 is for vectors of 768 numbers. In narrow ones pieces start out too much alike: learning sets in late.
    nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.1)
    return model


class Job:
    """A run: its data, its loop, and the curve that it leaves."""

    def __init__(
        self, arguments: argparse.Namespace, engine: epl.Engine, optimizer: torch.optim.Optimizer, text: Text
    ) -> None:
        self.arguments, self.engine, self.optimizer = arguments, engine, optimizer
        cluster = epl.Env.get().cluster
        self.is_first_rank, self.num_ranks = cluster.rank == 0, cluster.world_size
        self.text = text
        training = MaskedText(text.training, LENGTH, VOCABULARY, arguments.seed)
        held_out = MaskedText(text.held_out[: HELD_OUT_SAMPLES * LENGTH], LENGTH, VOCABULARY, seed=0)
        self.loader = epl.data_loader(
            training, arguments.global_batch_size, shuffle=True, seed=arguments.seed, drop_last=True
        )
        self.held_out = epl.data_loader(held_out, len(held_out))  # one batch of all
        self.losses: list[float] = []
        self.held_out_losses: list[tuple[int, float]] = []
        self.samples_per_s = 0.0

    def train(self) -> None:
        """The training loop, as it would be on one device."""
        steps = self.arguments.steps
        schedule = LambdaLR(self.optimizer, lambda step: min((step + 1) / (WARMUP * steps), 1 - step / steps))
        progress = Progress(steps, self.arguments.global_batch_size, is_shown=self.is_first_rank)
        for batch in itertools.islice(endless(self.loader), steps):
            if len(self.losses) % self.arguments.evaluate_every == 0:
                self.evaluate()
            loss = self.engine.train_step(batch)
            schedule.step()
            self.losses.append(float(loss))
            progress.step(self.losses[-1], self.held_out_losses[-1][1])
        self.samples_per_s = progress.close()
        self.evaluate()

    def evaluate(self) -> None:
        """The loss on the held-out text, without dropout, at this step."""
        for batch in self.held_out:
            self.held_out_losses.append((len(self.losses), float(self.engine.eval_step(batch))))

    def report(self) -> None:
        """Write what was asked for, and say how it went."""
        curve = self.curve()
        if self.arguments.curve:
            write_text(self.arguments.curve, json.dumps(curve, indent=1) + "\n")
        if self.arguments.plot:
            # here and not above, as only the rank that draws needs what takes seconds to import
            from compare_curves import plot

            plot([curve], self.arguments.plot)
        (_, before), *_, (steps, after) = self.held_out_losses
        print(
            f"{curve['name']}: {steps} steps, training loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}, "
            f"held-out loss {before:.3f} -> {after:.3f}, {self.samples_per_s:.0f} samples/s",
            flush=True,
        )

    def curve(self) -> dict[str, Any]:
        """Everything about the run that a comparison needs, ready for JSON."""
        count = sum(parameter.numel() for parameter in self.engine.model.parameters())
        return {
            "name": f"{self.arguments.strategy} on {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}",
            "model": f"BertForMaskedLM, {self.arguments.layers} layers of width {self.arguments.hidden}, "
            f"{count:,} weights",
            "data": f"{self.text.num_bytes:,} bytes of {self.text.num_files} files of Python's library "
            f"as {len(self.text.training):,} pieces",
            "samples_per_step": self.arguments.global_batch_size,
            "seed": self.arguments.seed,
            "losses": self.losses,
            "held_out_losses": self.held_out_losses,
            "samples_per_s": self.samples_per_s,
        }


class Progress:
    """How far the job is: a bar on a terminal, else ten lines in all, which look well in a file."""

    def __init__(self, steps: int, samples_per_step: int, *, is_shown: bool) -> None:
        self._steps, self._samples_per_step = steps, samples_per_step
        is_terminal = sys.stdout.isatty()
        self._bar = tqdm(total=steps, unit="step", file=sys.stdout, disable=not (is_shown and is_terminal))
        self._has_lines = is_shown and not is_terminal
        self._done = 0
        self._start_s = time.perf_counter()

    def step(self, loss: float, held_out_loss: float) -> None:
        """One step more."""
        self._done += 1
        figures = {
            "loss": f"{loss:.3f}",
            "held-out": f"{held_out_loss:.3f}",
            "samples/s": f"{self._samples_per_s():.0f}",
            "memory": f"{peak_memory_bytes() / 2**20:.0f} MiB",
        }
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update()
        if self._has_lines and self._done * 10 // self._steps > (self._done - 1) * 10 // self._steps:
            described = ", ".join(f"{name} {value}" for name, value in figures.items())
            print(f"step {self._done:>4} of {self._steps}: {described}", flush=True)

    def close(self) -> float:
        """Leave the bar as it is; returns samples per second."""
        self._bar.close()
        return self._samples_per_s()

    def _samples_per_s(self) -> float:
        return self._done * self._samples_per_step / (time.perf_counter() - self._start_s)


def peak_memory_bytes() -> int:
    """The most memory that this rank has held: its device's, or the process's where the device is the CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def endless(loader: Any) -> Iterator[Any]:
    """Pass after pass over the data, each in a new order."""
    while True:
        yield from loader


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small BERT on the source of Python's library.")
    add = parser.add_argument
    add("--strategy", choices=("dp", "pipeline", "hybrid", "split"), default="dp", help="how the model is annotated")
    add("--steps", type=int, default=120)
    add("--global-batch-size", type=int, default=32, help="samples in a step, over all ranks")
    add("--micro-batches", type=int, default=4, help="parts that a replica cuts its batch into")
    add("--learning-rate", type=float, default=2e-3)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--seed", type=int, default=0, help="of the weights, the order of the data, the masks and dropout")
    add("--evaluate-every", type=int, default=30, metavar="STEPS", help="how often the held-out loss is computed")
    add("--curve", type=Path, metavar="FILE", help="write the losses as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the losses as PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
