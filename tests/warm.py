"""What a first capture does in each process anew is done once, in the process that ranks fork from, by importing this.

Operators are looked up, tables and caches filled: a quarter of a second of each rank's time. Forward is only traced, on
tensors without values: no autograd engine runs and no thread starts, which a fork would not inherit.
"""

from __future__ import annotations

import gc
import threading

import torch
from torch import nn


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.linear(x))).mean()


def _warm_up() -> None:
    from epl.batch import flatten
    from epl.capture.capture import capture
    from epl.loss import loss_step

    with torch.random.fork_rng(devices=[]):
        capture(_Small(), loss_step(None), flatten(torch.ones(2, 2)))
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # else the first collection in each rank would write to, and so copy, each page of this process


try:
    _warm_up()
except Exception as error:  # of a capture that is being worked on: an ImportError is all that a fork server survives
    raise ImportError(str(error)) from error
