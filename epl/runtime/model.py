"""The parallel model as an ordinary ``nn.Module``, for training loops that know nothing of pipelines."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
import torch.nn as nn

from epl.errors import RunError

__all__ = ["ParallelModel"]


class _Trainer(Protocol):
    """What the wrapper needs of the engine."""

    def pending_gradients(self, batch: Any) -> tuple[Any, list[torch.Tensor | None]]: ...

    def forward(self, batch: Any) -> Any: ...

    def add_gradients(self, gradients: Any, factor: torch.Tensor | float) -> None: ...


class ParallelModel(nn.Module):
    """Calls run the engine's schedule; parameters, modes and names are those of the user's model.

    In training mode with gradients on, a call runs forward and backward of all micro-batches and returns the loss; its
    ``backward()`` adds the gradients, times what comes in, to the parameters. Otherwise it is a forward pass.
    """

    # Hugging Face's Trainer would pass the number of tokens in a step, and expect each part divided by it; here the
    # engine weighs the parts
    accepts_loss_kwargs = False

    def __init__(self, engine: _Trainer, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._signature = inspect.signature(model.forward)
        self.__dict__["_engine"] = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._batch(args, kwargs)
        engine: _Trainer = self.__dict__["_engine"]
        if not (self.module.training and torch.is_grad_enabled()):
            return engine.forward(batch)
        result, gradients = engine.pending_gradients(batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        loss = _Deposit.apply(anchor, loss, engine, gradients)
        return loss if aux is None else (loss, aux)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            return kwargs
        if kwargs:
            try:
                return dict(self._signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise RunError(f"the model cannot be called like this: {error}") from error
        return args[0] if len(args) == 1 else args

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the model's: ``config``, ``generate``, and so on."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Deposit(torch.autograd.Function):
    """A loss whose gradients are known already: backward puts them where autograd would."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, engine: _Trainer, gradients: Any) -> torch.Tensor:
        ctx.engine, ctx.gradients = engine, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RunError("backward was called twice on one loss; call the model again for new gradients")
        ctx.engine.add_gradients(ctx.gradients, incoming[0])
        ctx.gradients = None
        return None, None, None, None
