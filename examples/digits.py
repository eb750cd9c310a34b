"""A network of one's own with scopes around calls in `forward`, on scikit-learn's digits, with accuracy.

    python examples/digits.py                       one process runs both parts
    epl launch --nproc 2 examples/digits.py         a pipeline of two stages
    epl launch --nproc 4 examples/digits.py         two replicas of that pipeline

All three print the same losses and accuracies.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import TensorDataset

import epl


class DigitNet(nn.Module):
    """A small convolutional network for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.wide = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.classes = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        # What is called in a scope belongs to it, with the weights it uses; outside of `parallelize` scopes do nothing.
        with epl.replicate(device_count=1, name="stage_0"):
            features = F.relu(self.narrow(images))
            features = F.max_pool2d(F.relu(self.wide(features)), 2)
        with epl.replicate(device_count=1, name="stage_1"):
            return self.classes(F.relu(self.hidden(features.flatten(1))))


def loss_and_accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what goes with it: EPL averages both over all parts of the batch, weighted by their samples."""
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels), {"accuracy": (logits.argmax(1) == labels).float().mean()}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,347 images to train on and 450 that are held out, in equal shares of each digit."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    training_images, held_out_images = (
        torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2]
    )
    training_labels, held_out_labels = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(training_images, training_labels), TensorDataset(held_out_images, held_out_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    torch.manual_seed(arguments.seed)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    engine = epl.parallelize(model, optimizer, loss_fn=loss_and_accuracy)

    training, held_out = digits()
    loader = epl.data_loader(training, arguments.global_batch_size, shuffle=True, seed=arguments.seed)
    whole = epl.data_loader(held_out, len(held_out))  # one batch of all
    is_first_rank = epl.Env.get().cluster.rank == 0
    for epoch in range(1, arguments.epochs + 1):
        losses = [float(engine.train_step(batch)[0]) for batch in loader]
        for batch in whole:
            loss, aux = engine.eval_step(batch)
            if is_first_rank:
                print(
                    f"epoch {epoch}: training loss {sum(losses) / len(losses):.4f}, "
                    f"held-out loss {float(loss):.4f}, accuracy {float(aux['accuracy']):.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
