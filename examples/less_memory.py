"""A GPT-2 in less memory: recomputing chosen by EPL, within a budget of bytes, and logits that are never whole.

    epl launch --nproc 2 examples/less_memory.py                        everything kept
    epl launch --nproc 2 examples/less_memory.py --recompute auto       as little memory as a third more work allows
    epl launch --nproc 2 examples/less_memory.py --budget 60MB          at most so much on a rank, with the least extra work
    epl launch --nproc 2 examples/less_memory.py --recompute marked     what the script itself marks: every block

All of them print the same losses, dropout and all, and then what each rank's memory was predicted to be and what it was. A
budget that cannot be kept is refused before the first step, with the least that is needed.
"""

from __future__ import annotations

import argparse

import torch
from library_text import library_text
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

import epl

VOCABULARY = 2000
LENGTH = 64  # pieces of a sample


def loss_fn(model: GPT2LMHeadModel, batch: tuple[Tensor]) -> Tensor:
    """The model shifts the labels itself."""
    loss = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
    assert loss is not None
    return loss


def settings(recompute: str, budget: str, chunks: str) -> epl.Config:
    """The whole difference between the commands above, but for the marks."""
    values: dict[str, object] = {"loss.chunked": chunks}
    if recompute == "auto" or budget:
        values["gradient_checkpoint.type"] = "auto"
        values["gradient_checkpoint.memory_budget"] = budget
    return epl.Config(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 in less memory.")
    parser.add_argument("--recompute", choices=["no", "auto", "marked"], default="no")
    parser.add_argument(
        "--budget", default="", help="most memory of a rank, as 60MB; EPL chooses what to compute again"
    )
    parser.add_argument("--chunks", choices=["auto", "on", "off"], default="auto", help="losses in chunks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=16)
    arguments = parser.parse_args()

    epl.init(settings(arguments.recompute, arguments.budget, arguments.chunks))
    torch.manual_seed(0)
    widths = {"n_embd": arguments.hidden, "n_layer": arguments.layers, "n_head": 4, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **widths))
    if arguments.recompute == "marked":
        for block in model.transformer.h:
            epl.checkpoint(block)
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn=loss_fn)

    text = torch.from_numpy(library_text(VOCABULARY, training_bytes=200_000).training)
    samples = TensorDataset(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH))
    loader = epl.data_loader(samples, arguments.global_batch_size, shuffle=True, seed=0, drop_last=True)
    is_first = epl.Env.get().cluster.rank == 0
    for step, batch in zip(range(1, arguments.steps + 1), loader, strict=False):
        if step == arguments.steps:  # the last one is measured, too; it is a training step like the others
            report = engine.memory_report(batch)
            if is_first:
                print(
                    report,
                    f"step {step:>3} of {arguments.steps}: loss {float(report.result):.4f}",
                    sep="\n",
                    flush=True,
                )
        else:
            loss = engine.train_step(batch)
            if is_first:
                print(f"step {step:>3} of {arguments.steps}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
