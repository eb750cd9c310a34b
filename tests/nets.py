"""Small networks of our own, each with one trait that a pipeline can get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "Deep", "MixedNet", "MixedOutput", "TiedNet", "UNet"]


class Deep(nn.Module):
    """Square layers whose weights are large beside all else; the output is the loss."""

    def __init__(self, width: int, depth: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class MLP(nn.Module):
    """The plain case: tensors go straight through; the loss is computed outside."""

    def __init__(self, features: int, classes: int, dropout: float, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(features, features), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)
        )
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedNet(nn.Module):
    """One parameter is the embedding of the first stage and the head of the last one."""

    def __init__(self, vocabulary: int, features: int, dropout: float, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        nn.init.normal_(self.embedding.weight, std=0.1)  # a usual scale for a head
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(features), nn.Linear(features, features), nn.GELU(), nn.Dropout(dropout))
            for _ in range(depth)
        )
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class UNet(nn.Module):
    """Each level's output is used again on the way up: the first one by the last level, over all that lies between."""

    def __init__(self, channels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.down1 = _convolution(channels, width)
        self.down2 = _convolution(width, 2 * width)
        self.down3 = _convolution(2 * width, 2 * width)
        self.middle = nn.Sequential(_convolution(2 * width, 2 * width), nn.Dropout(dropout))
        self.up3 = _convolution(4 * width, 2 * width)
        self.up2 = _convolution(4 * width, width)
        self.up1 = _convolution(2 * width, width)
        self.head = nn.Conv2d(width, channels, kernel_size=1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        level1 = self.down1(image)
        level2 = self.down2(F.avg_pool2d(level1, 2))
        level3 = self.down3(F.avg_pool2d(level2, 2))
        x = self.middle(level3)
        x = self.up3(torch.cat([x, level3], dim=1))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), level2], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), level1], dim=1))
        return F.mse_loss(self.head(x), target)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    # GroupNorm, not BatchNorm: what a sample gives must not hang on the part of the batch it is in.
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(2, outputs), nn.SiLU())


@dataclass
class MixedOutput:
    """An output class as the ones of transformers: the loss is one field of several."""

    loss: Tensor
    logits: Tensor


class _MixedBlock(nn.Module):
    def __init__(self, features: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, depth: int, extras: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, int, dict[str, Any]]:
        y = self.dropout(torch.tanh(self.linear(x))) * extras["scale"] / depth
        if mask is not None:
            y = y * mask
        if extras["skip"] is not None:
            y = y + extras["skip"]
        return x + y, mask, depth + 1, {**extras, "skip": y, "seen": (*extras["seen"], depth)}


class MixedNet(nn.Module):
    """Its blocks hand None, an int, and a dict with a tensor, None, a string and a tuple to the next one."""

    def __init__(self, features: int, classes: int, dropout: float, depth: int = 4) -> None:
        super().__init__()
        self.scale = nn.Linear(features, features)
        self.blocks = nn.ModuleList(_MixedBlock(features, dropout) for _ in range(depth))
        self.head = nn.Linear(features, classes)

    def forward(
        self, x: Tensor, labels: Tensor, mask: Tensor | None = None, depth: int = 1, mode: str = "mean"
    ) -> MixedOutput:
        extras: dict[str, Any] = {"scale": torch.sigmoid(self.scale(x)), "skip": None, "mode": mode, "seen": ()}
        for block in self.blocks:
            x, mask, depth, extras = block(x, mask, depth, extras)
        logits = self.head(x) / len(extras["seen"])
        return MixedOutput(loss=F.cross_entropy(logits, labels, reduction=extras["mode"]), logits=logits)
