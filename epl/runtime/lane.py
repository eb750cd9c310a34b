"""A stream of its own for copies between host and device, so that they go on beside computing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Lane"]


class Lane:
    """A stream for copies; on the CPU, where work is done at once, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def running(self) -> AbstractContextManager[Any]:
        """Inside, copies are given to the stream."""
        return nullcontext() if self._stream is None else self._stream

    def mark(self) -> torch.Event | None:
        """The event that all copies given to the stream so far are over."""
        return None if self._stream is None else self._stream.record_event()

    def arrive(self, arrival: torch.Event | None, tensors: Sequence[torch.Tensor]) -> None:
        """The device goes on only when these are there; it does not wait for what is on its way home."""
        if arrival is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(arrival)
            for tensor in tensors:
                tensor.record_stream(current)  # it may be dropped before the kernels that use it have run

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """The stream goes on only when the device is done with the memory of these, or has made them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Return when all copies are over."""
        if self._stream is not None:
            self._stream.synchronize()
