"""A T5 whose weights, gradients and optimizer states are too much for one rank: shared out, in half precision, in files.

    epl launch --nproc 2 examples/large_t5.py --limit 60MiB               refused before the first step
    epl launch --nproc 2 examples/large_t5.py --zero v1                   ranks share out optimizer states and gradients
    epl launch --nproc 2 examples/large_t5.py --zero v2                   and weights
    epl launch --nproc 2 examples/large_t5.py --zero v2 --amp bf16        matrix products in bfloat16, weights in float32
    epl launch --nproc 2 examples/large_t5.py --offload disk              weights and states in files
    epl launch --nproc 2 examples/large_t5.py --zero v2 --offload disk --recompute auto --limit 60MiB      now it fits

All but those with ``--amp`` print the same losses, to rounding, and at the end what each rank's memory was predicted to be
and what it was.
"""

from __future__ import annotations

import argparse

import torch
from library_text import library_text
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

import epl

VOCABULARY = 2000
LENGTH = 64  # pieces of a sample: the second half is told from the first


def loss_fn(model: T5ForConditionalGeneration, batch: tuple[Tensor]) -> Tensor:
    """Continue a text."""
    told, continued = (part.contiguous() for part in batch[0].chunk(2, dim=1))
    loss = model(input_ids=told, labels=continued, use_cache=False).loss
    assert loss is not None
    return loss


def settings(arguments: argparse.Namespace) -> epl.Config:
    """The whole difference between the commands above."""
    values: dict[str, object] = {
        "zero.level": arguments.zero,
        "offload.level": arguments.offload,
        "gradient_checkpoint.type": arguments.recompute,
        "run.memory_limit": arguments.limit,
    }
    if arguments.amp:
        values |= {"amp.level": "O1", "amp.dtype": arguments.amp}
    return epl.Config(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a T5 in less memory.")
    parser.add_argument("--zero", choices=["", "v0", "v1", "v2"], default="")
    parser.add_argument("--amp", choices=["", "bf16", "fp16"], default="")
    parser.add_argument("--offload", choices=["", "disk"], default="")
    parser.add_argument("--recompute", choices=["", "auto"], default="")
    parser.add_argument("--limit", default="", help="most memory of a rank, as 60MiB")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=8)
    arguments = parser.parse_args()

    epl.init(settings(arguments))
    torch.manual_seed(0)
    widths = {
        "d_model": arguments.hidden,
        "d_ff": 4 * arguments.hidden,
        "d_kv": 64,
        "num_heads": arguments.hidden // 64,
    }
    config = T5Config(vocab_size=VOCABULARY, num_layers=arguments.layers, decoder_start_token_id=0, **widths)
    model = T5ForConditionalGeneration(config)
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn=loss_fn)

    text = torch.from_numpy(library_text(VOCABULARY, training_bytes=200_000).training)
    samples = TensorDataset(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH))
    loader = epl.data_loader(samples, arguments.global_batch_size, shuffle=True, seed=0, drop_last=True)
    is_first = epl.Env.get().cluster.rank == 0
    for step, batch in zip(range(1, arguments.steps + 1), loader, strict=False):
        is_last = step == arguments.steps
        report = engine.memory_report(batch) if is_last else None  # a training step like the others, and measured
        loss = engine.train_step(batch, max_grad_norm=1.0) if report is None else report.result
        if is_first:
            print(f"step {step:>3} of {arguments.steps}: loss {float(loss):.4f}", flush=True)
            if report is not None:
                print(report, flush=True)


if __name__ == "__main__":
    main()
