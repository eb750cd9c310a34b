"""The parallel model as an ordinary ``nn.Module``, for training loops that know nothing of pipelines."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn as nn

from epl.errors import RunError

__all__ = ["ParallelModel", "in_eval_mode"]


class _Trainer(Protocol):
    """What the wrapper needs of the engine."""

    def pending_gradients(self, batch: Any) -> tuple[Any, list[torch.Tensor | None]]: ...

    def forward(self, batch: Any) -> Any: ...

    def add_gradients(self, gradients: Any, factor: torch.Tensor | float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Loss(torch.Tensor):
    """A loss that can be asked for as models return it: ``output.loss``, ``output["loss"]``, ``output[0]``."""

    @property
    def loss(self) -> torch.Tensor:
        return self

    def __getitem__(self, key: Any) -> torch.Tensor:
        if isinstance(key, (str, int)) and key in ("loss", 0):
            return self
        return super().__getitem__(key)  # type: ignore[arg-type]


class ParallelModel(nn.Module):
    """Calls run the engine's schedule; parameters, modes and names are those of the user's model.

    In training mode with gradients on, a call runs forward and backward of all micro-batches and returns the loss; its
    ``backward()`` adds the gradients, times what comes in, to the parameters. Otherwise it is a forward pass.

    Args:
        engine: What runs the calls.
        model: The user's model.
        has_loss_fn: True if the one argument of a call is a batch for the loss function, as it is.
    """

    # Hugging Face's Trainer would pass the number of tokens in a step, and expect each part divided by it; here the
    # engine weighs the parts
    accepts_loss_kwargs = False
    # and accelerate would wrap it into DistributedDataParallel, which waits for gradients that do not come from autograd
    _is_accelerate_prepared = True

    def __init__(self, engine: _Trainer, model: nn.Module, *, has_loss_fn: bool) -> None:
        super().__init__()
        self.module = model
        self._signature = inspect.signature(model.forward)
        self._has_loss_fn = has_loss_fn
        self.__dict__["_engine"] = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._batch(args, kwargs)
        engine: _Trainer = self.__dict__["_engine"]
        if not (self.module.training and torch.is_grad_enabled()):
            return engine.forward(batch)
        result, gradients = engine.pending_gradients(batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        loss = _Deposit.apply(anchor, loss, engine, gradients).as_subclass(Loss)
        return loss if aux is None else (loss, aux)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            return kwargs
        if kwargs:
            try:
                return dict(self._signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise RunError(f"the model cannot be called like this: {error}") from error
        is_whole = len(args) == 1 and (self._has_loss_fn or isinstance(args[0], torch.Tensor))
        return args[0] if is_whole else args

    # -- names as the user's model has them ---------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", **_: Any
    ) -> dict[str, torch.Tensor]:
        """The whole model's, on every rank; all ranks call it together."""
        found = {} if destination is None else destination
        found.update({prefix + name: tensor for name, tensor in self.__dict__["_engine"].state_dict().items()})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Load a whole model's; each rank takes what it holds."""
        self.__dict__["_engine"].load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the model's: ``config``, ``generate``, and so on."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode for a while; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
