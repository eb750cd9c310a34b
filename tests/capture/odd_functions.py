"""Custom autograd functions, each with one trait, and each with a backward that is wrong on purpose: it shows if it ran."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 7 * x


cube = Cube.apply  # bound before any capture: the usual way to write it


class Scaled(Function):
    """Plain arguments, and a tensor that may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int, mode: str, shift: Tensor | None = None) -> Tensor:
        assert mode == "mode"
        ctx.factor = factor
        return x * factor if shift is None else x * factor + shift

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor * 5, None, None, None


class Several(Function):
    """Tensors, None and a number as results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, None, x + y, 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y * 2 + gradients[2], gradients[0] * x * 3 + gradients[2]


class Sorted(Function):
    """Results that are not differentiable, one of them of floating-point numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        values, places = x.sort(dim=1)
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(places, mask)
        ctx.save_for_backward(places)
        return values, places, mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(gradients[0]).scatter(1, places, gradients[0]) * 2


class AddOne(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class WithSetup(Function):
    @staticmethod
    def forward(x: Tensor, factor: int = 2) -> Tensor:  # type: ignore[override]
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor * 11, None


class Reversed(Function):
    """The gradient reversal of domain adaptation: forward returns its argument itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


class ReversedView(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)


class Outer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return cube(x) * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 13


class GradientInside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((y**2).sum(), y)
        ctx.save_for_backward(gradient)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0]


class Containers(Function):
    @staticmethod
    def forward(ctx: Any, several: list[Tensor], named: dict[str, Any], x: Tensor) -> Tensor:
        return x * 2 + sum(several) * named["scale"] * named["factor"]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, gradients[0] * 3


class Drawing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask, noise = torch.rand_like(x) > 0.5, torch.randn_like(x)
        ctx.save_for_backward(mask)
        return x * mask + noise

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0] * 2


class CheckpointInside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return checkpoint(lambda y: y * 2, x, use_reentrant=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 5


class Constant(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, x: Tensor) -> Tensor:
        return x + table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0] * 2
