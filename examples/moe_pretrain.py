"""A small language model with experts, as M6-T has them; the experts are cut over the ranks that replicate the rest.

    python examples/moe_pretrain.py                                      one process
    epl launch --nproc 2 examples/moe_pretrain.py                        half of the batch and half of the experts each
    epl launch --nproc 4 examples/moe_pretrain.py --expert-ranks 2       the same, twice: data parallelism on top

All of them print the same losses and the same counts of dropped tokens: tokens are routed within a sample. The text is
the source of Python's own library, as in ``pretrain_bert.py``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from library_text import Pieces, library_text
from torch import Tensor, nn
from torch.utils.data import Dataset

import epl

VOCABULARY = 512
LENGTH = 32  # pieces of a sample


class Block(nn.Module):
    """Causal attention, and experts in the place of a feed-forward layer."""

    def __init__(self, hidden: int, num_experts: int, num_prototypes: int, expert_ranks: int) -> None:
        super().__init__()
        self.heads = hidden // 32
        self.attention_norm, self.expert_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.queries_keys_values, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = epl.nn.MoE(hidden, 2 * hidden, num_experts, num_prototypes=num_prototypes, top_k=1)
        epl.split(expert_ranks)(self.moe.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, -1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        output, loss, dropped = self.moe(self.expert_norm(x))
        return x + output, loss, dropped


class Decoder(nn.Module):
    """Predicts the next piece; its loss includes the balancing loss of each layer."""

    def __init__(self, layers: int, hidden: int, num_experts: int, num_prototypes: int, expert_ranks: int) -> None:
        super().__init__()
        self.pieces, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(LENGTH, hidden)
        self.blocks = nn.ModuleList(Block(hidden, num_experts, num_prototypes, expert_ranks) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)

    def forward(self, pieces: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.pieces(pieces[:, :-1]) + self.places.weight
        balance, dropped = [], []
        for block in self.blocks:
            x, loss, count = block(x)
            balance.append(loss)
            dropped.append(count)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        return loss + sum(balance), {"dropped": sum(dropped)}  # dropped: of each sample, over all layers


class Stretches(Dataset[Tensor]):
    """Stretches of text, each with the piece that follows its last one."""

    def __init__(self, text: Pieces) -> None:
        count = (len(text) - 1) // LENGTH
        self._samples = [torch.from_numpy(text[place * LENGTH : (place + 1) * LENGTH + 1]) for place in range(count)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        return self._samples[index]


def main() -> None:
    arguments = parse_arguments()
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    cluster = epl.Env.get().cluster
    expert_ranks = arguments.expert_ranks or cluster.world_size
    torch.manual_seed(0)
    epl.set_default_strategy(epl.replicate(expert_ranks))
    model = Decoder(arguments.layers, arguments.hidden, arguments.num_experts, arguments.num_prototypes, expert_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = epl.parallelize(model, optimizer, loss_fn=lambda model, pieces: model(pieces))

    text = Stretches(library_text(VOCABULARY, training_bytes=300_000).training)
    loader = epl.data_loader(text, arguments.global_batch_size, shuffle=True, seed=0, drop_last=True)
    tokens = arguments.global_batch_size * LENGTH * arguments.layers * max(1, arguments.num_prototypes)
    for step, batch in zip(range(1, arguments.steps + 1), loader, strict=False):
        loss, aux = engine.train_step(batch)
        if cluster.rank == 0 and (step == 1 or step % max(1, arguments.steps // 8) == 0):
            dropped = int(aux["dropped"].sum())
            print(
                f"step {step:>3} of {arguments.steps}: loss {float(loss):.4f}, {dropped} of {tokens} tokens dropped",
                flush=True,
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model with experts.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--num-prototypes", type=int, default=2, help="groups of experts; a token goes to one of each")
    parser.add_argument("--expert-ranks", type=int, default=0, help="ranks that share the experts; 0: all")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--global-batch-size", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
