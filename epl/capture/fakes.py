"""Tensors without memory that know their shape, type and device, and on which operators run as on real ones.

The home of torch's fake tensors (``torch._subclasses``; torch 2.13 has no public name for them). Kernels are chosen as on
the real device, so what autograd keeps on fake tensors is what it keeps on real ones; meta tensors choose others.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from epl.ir.types import TensorType

__all__ = ["Fakes"]


class Fakes:
    """A family of fake tensors; ``with fakes.mode:`` operators make more of them."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, kind: TensorType, device: torch.device, *, requires_grad: bool = False) -> torch.Tensor:
        """A fake of this type; unknown dimensions count as 1."""
        with self.mode:
            return torch.empty(kind.sizes, dtype=kind.dtype, device=device, requires_grad=requires_grad)
