"""A Llama in three dimensions: operators split over ranks, layers over stages, batches over replicas.

    epl launch --nproc 8 examples/tensor_parallel.py                     tensor 2 x pipeline 2 x data 2
    epl launch --nproc 4 examples/tensor_parallel.py                     tensor 2 x pipeline 2
    epl launch --nproc 2 examples/tensor_parallel.py --stages 1          tensor 2
    python examples/tensor_parallel.py                                   one process

Two lines of annotation; which dimension of which weight is cut, and what travels, is in the plan that rank 0 prints.
The model is that of Hugging Face transformers, small and with random weights; all commands print the same losses.
"""

from __future__ import annotations

import argparse

import torch
from library_text import Pieces, library_text
from torch import Tensor
from torch.utils.data import Dataset
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

import epl

VOCABULARY = 512
LENGTH = 32  # pieces of a sample


def make_model(layers: int, hidden: int) -> LlamaForCausalLM:
    """Grouped queries as in Llama 3: two heads of queries for one of keys and values."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=8 * hidden // 3 // 8 * 8,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 16,
            num_key_value_heads=hidden // 32,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def annotate(model: LlamaForCausalLM, stages: int, tensor: int) -> None:
    """Equal numbers of layers in each stage, each stage split over ``tensor`` devices."""
    layers = list(model.model.layers)
    for stage in range(stages):
        first, last = stage * len(layers) // stages, (stage + 1) * len(layers) // stages
        modules = layers[first:last]
        modules = [model.model.embed_tokens, *modules] if stage == 0 else modules
        modules = [*modules, model.model.norm, model.lm_head] if stage == stages - 1 else modules
        epl.split(tensor, name=f"stage_{stage}")(*modules)


class Stretches(Dataset[dict[str, Tensor]]):
    """Stretches of text; the model itself shifts the labels."""

    def __init__(self, text: Pieces) -> None:
        self._samples = torch.from_numpy(text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._samples[index], "labels": self._samples[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama, split, as a pipeline, and data-parallel.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tensor", type=int, default=2, help="devices that each stage is split over")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--global-batch-size", type=int, default=16)
    arguments = parser.parse_args()

    epl.init(epl.Config({"pipeline.num_micro_batch": arguments.micro_batches}))
    torch.manual_seed(0)
    model = make_model(arguments.layers, arguments.hidden)
    annotate(model, arguments.stages, arguments.tensor)
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    text = Stretches(library_text(VOCABULARY, training_bytes=300_000).training)
    loader = epl.data_loader(text, arguments.global_batch_size, shuffle=True, seed=0, drop_last=True)
    for step, batch in zip(range(1, arguments.steps + 1), loader, strict=False):
        loss = engine.train_step(batch, max_grad_norm=1.0)
        if epl.Env.get().cluster.rank == 0 and (step == 1 or step % max(1, arguments.steps // 8) == 0):
            print(f"step {step:>3} of {arguments.steps}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
