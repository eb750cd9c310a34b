"""``epl.checkpoint``: mark a module whose activations are computed again in the backward pass instead of being kept.

It is ``torch.utils.checkpoint`` around the module's forward, and so works with EPL and without. EPL captures it as a
recompute segment. The module gets a class of its own, derived from its class (as ``fully_shard`` does it), so that its
names, its state dict and copies of it stay what they are.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from epl.errors import StrategyError

__all__ = ["checkpoint"]

_Module = TypeVar("_Module", bound=nn.Module)


class _Checkpointed:
    """Comes before a module's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return torch_checkpoint(plain, *args, use_reentrant=False, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = type(self).__mro__[2]
        return _made_again, (base,), self.__dict__


def _made_again(base: type[nn.Module]) -> nn.Module:
    kind = _checkpointed_class(base)
    return kind.__new__(kind)


def _checkpointed_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(
        base.__name__, (_Checkpointed, base), {"__module__": base.__module__, "__qualname__": base.__qualname__}
    )


def checkpoint(module: _Module) -> _Module:
    """Compute a module's activations again in the backward pass; returns the module.

    Args:
        module: The module; only its inputs are kept. Its parameters, its names and its results stay the same, and random
            numbers repeat.

    Raises:
        StrategyError: it is no module, or is marked already.

    Example:
        >>> block = checkpoint(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        >>> for layer in model.encoder.layers: epl.checkpoint(layer)  # doctest: +SKIP

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    if not isinstance(module, nn.Module):
        raise StrategyError(f"epl.checkpoint takes an nn.Module, got a {type(module).__name__}")
    if isinstance(module, _Checkpointed):
        raise StrategyError(f"this {type(module).__name__} is marked with epl.checkpoint already")
    module.__class__ = _checkpointed_class(type(module))
    return module
