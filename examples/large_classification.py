"""A classifier of 100,000 classes: its backbone is replicated, its last layer split, on the same devices.

    python examples/large_classification.py                    one process
    epl launch --nproc 2 examples/large_classification.py      backbone on half of the batch, half of the classes each

The last layer has most of the weights. Under data parallelism each rank would keep all of them and sum up all their
gradients; split, a rank keeps its share of the classes, and what travels are the features of the batch. The logits, of
which there are most, never travel: the loss is computed on cut classes.

Each class is one image of scikit-learn's digits, shifted; a sample is that image with some noise.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.models.resnet.modeling_resnet import ResNetConfig, ResNetModel

import epl


class Classifier(nn.Module):
    """A ResNet, the features of an image, and one linear layer over all classes."""

    def __init__(self, num_classes: int, width: int, num_devices: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        config = ResNetConfig(
            num_channels=1, embedding_size=width, hidden_sizes=widths, depths=[1, 1, 1], layer_type="basic"
        )
        with epl.replicate(num_devices, name="backbone"):
            self.backbone = ResNetModel(config)
        with epl.split(num_devices, name="classes"):
            self.classes = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.backbone(images).pooler_output.flatten(1)
        return F.cross_entropy(self.classes(features), labels)


class ShiftedDigits(Dataset[dict[str, Tensor]]):
    """Sample ``i`` belongs to class ``i * step``: image ``class % 1797``, shifted down and right by ``class // 1797``."""

    def __init__(self, num_samples: int, num_classes: int, noise: float) -> None:
        self._images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
        self._num_samples, self._step, self._noise = num_samples, num_classes // num_samples, noise

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = index * self._step
        shift, image = divmod(label, len(self._images))
        digit = self._images[image].roll((shift // 8, shift % 8), (0, 1))
        noise = torch.randn(digit.shape, generator=torch.Generator().manual_seed(index)) * self._noise
        return {
            "images": (digit + noise).unsqueeze(0).repeat_interleave(4, 1).repeat_interleave(4, 2),
            "labels": torch.tensor(label),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier with very many classes.")
    parser.add_argument("--num-classes", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--num-samples", type=int, default=256, help="images to train on, each of a class of its own")
    arguments = parser.parse_args()

    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    cluster = epl.Env.get().cluster
    torch.manual_seed(0)
    model = Classifier(arguments.num_classes, arguments.width, cluster.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine = epl.parallelize(model, optimizer)

    digits = ShiftedDigits(arguments.num_samples, arguments.num_classes, noise=0.05)
    loader = epl.data_loader(digits, arguments.global_batch_size, shuffle=True, seed=0)
    done = 0
    while done < arguments.steps:
        for batch in loader:
            loss = engine.train_step(batch)
            done += 1
            if cluster.rank == 0 and (done == 1 or done % max(1, arguments.steps // 6) == 0):
                print(f"step {done:>3} of {arguments.steps}: loss {float(loss):.4f}", flush=True)
            if done == arguments.steps:
                break


if __name__ == "__main__":
    main()
