"""Small networks, each with something that a pipeline or a reduction of gradients can get wrong."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Chain", "Frozen", "LateInput", "Normed", "batch_of", "draw"]

FEATURES = 6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch_of(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """``x`` and ``y`` of ``size`` samples."""
    x, y = draw(2, size, FEATURES, seed=seed, dtype=dtype)
    return {"x": x, "y": y}


class Chain(nn.Module):
    """Four linear layers ``a`` to ``d``; with ``skip``, what the first gives is used by the last."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.skip = skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        z = torch.tanh(self.c(torch.tanh(self.b(first))))
        return F.mse_loss(self.d(z + first if self.skip else z), y)


class Frozen(Chain):
    """A chain in which only the parameters are trained whose names start with one of ``trained``."""

    def __init__(self, *trained: str) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))


class LateInput(nn.Module):
    """``x`` and ``late`` are used by the last of three layers; the first one sees ``x`` only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.c = nn.Bilinear(FEATURES, FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor, late: dict[str, Any]) -> Tensor:
        z = self.b(torch.tanh(self.a(x)))
        return F.mse_loss(self.c(z, x) * late["scale"] + late["shift"], y)


class Normed(nn.Module):
    """Batch normalisation in the first and in the last of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        self.b = nn.Linear(FEATURES, FEATURES)
        self.c = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.c(torch.tanh(self.b(self.a(x)))), y)


class Tagger(nn.Module):
    """Classes of tokens; labels of -100 do not count, so samples have different numbers of labels."""

    VOCABULARY = 11

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, FEATURES, **embedding)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, self.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class TiedTagger(Tagger):
    """Its embedding is its head."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__(**embedding)
        self.head.weight = self.embedding.weight


def tokens_of(size: int, seed: int = 0, length: int = 5) -> dict[str, Tensor]:
    """Tokens and labels; sample ``i`` has ``i % length + 1`` labels, and every third sample has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(Tagger.VOCABULARY, (size, length), generator=generator)
    labels = torch.randint(Tagger.VOCABULARY, (size, length), generator=generator)
    for i in range(size):
        labels[i, 0 if i % 3 == 2 else i % length + 1 :] = -100
    return {"tokens": tokens, "labels": labels}


class Unused(nn.Module):
    """A layer that forward does not call, and one that it calls only if the batch has ``extra``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.idle, self.rare = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor, extra: Tensor | None = None) -> Tensor:
        z = torch.tanh(self.a(x))
        if extra is not None:
            z = z + self.rare(extra)
        return F.mse_loss(self.b(z), y)


class Mixture(nn.Module):
    """Parameters of two dtypes, of zero dimensions, of one element, and with strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.image = nn.Conv2d(2, 4, 3, padding=1)
        self.image.weight.data = self.image.weight.data.contiguous(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, FEATURES).t())
        self.single = nn.Linear(4, 4)

    def to(self, dtype: torch.dtype) -> Mixture:  # type: ignore[override]
        """``single`` stays float32, whatever the others are made."""
        super().to(dtype)
        self.single.float()
        return self

    def forward(self, image: Tensor, y: Tensor) -> Tensor:
        z = self.image(image.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        z = self.single(z.float()).to(y.dtype)
        return F.mse_loss((z @ self.turned.t()) * self.scale + self.shift, y)


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them: one operator that draws random numbers inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(Tagger.VOCABULARY, FEATURES)
        self.lstm = nn.LSTM(FEATURES, FEATURES, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(FEATURES, Tagger.VOCABULARY))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(tokens))[0]).flatten(0, 1), labels.flatten())


class Noisy(nn.Module):
    """What it gives is nothing but the masks that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x.new_ones(x.shape), 0.5) + torch.rand_like(x), 0.5) * self.weight


class Predictor(nn.Module):
    """A model without a loss of its own: it takes the whole batch and gives a prediction for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def predictor_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(**batch), batch["y"])


class Scaled(nn.Linear):
    """A layer with buffers: a scale, a bool mask, and a shift that is not saved."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__(FEATURES, FEATURES)
        self.scale: Tensor
        self.mask: Tensor
        self.passing: Tensor
        self.register_buffer("scale", scale)
        self.register_buffer("mask", torch.tensor([True, False] * 3))
        self.register_buffer("passing", torch.ones(FEATURES), persistent=False)


class Named(nn.Module):
    """Tied parameters, a buffer under two names, one that is not saved, an integer one and a bool one."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(FEATURES, FEATURES)
        self.a = nn.Sequential(first, nn.BatchNorm1d(FEATURES))
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor([0.5]))
        self.b = Scaled(self.scale)
        self.tied = nn.Linear(FEATURES, FEATURES)
        self.tied.weight, self.tied.bias = first.weight, first.bias
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.b(torch.tanh(self.a(x))) * self.scale * self.b.scale + self.b.passing
        return F.mse_loss(torch.where(self.b.mask, z, torch.tanh(self.tied(z))), y)


class Branching(nn.Module):
    """Goes one way or the other by a value: of the batch, or of what the first layer made of it."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.of_batch = of_batch

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.a(x)
        decisive = x if self.of_batch else z.detach()
        if decisive.mean() > 0:
            z = z * 3
        return F.mse_loss(self.b(torch.tanh(z)), y)


class Uncapturable(nn.Module):
    """It draws from Python's ``random``, so it runs without a graph; one layer is used inside checkpoints and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.norm(self.a(x))
        for _ in range(2):
            z = z + checkpoint(self._block, z, use_reentrant=True)
        return F.mse_loss(self.b(z) * (random.random() < 2), y)

    def _block(self, z: Tensor) -> Tensor:
        return torch.tanh(self.b(z))


class Selecting(nn.Module):
    """From its first layer to its second go rows chosen by value, their number as an int, and all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.a(x)
        chosen = z[z.detach()[:, 0] > 0]
        count = (z.detach()[:, 1] > 0).sum().item()
        error = self.b(chosen).square().sum() / x.shape[0] + F.mse_loss(self.b(torch.tanh(z)), y)
        return error * (1 + count) + chosen.sum()


class Counting(Chain):
    """A chain that keeps a plain number in its state dict."""

    seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state
