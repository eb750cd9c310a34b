"""What a first capture does in each process anew is done once, in the process that ranks fork from, by importing this.

Operators are looked up, tables and caches filled: a third of a rank's time if the operators are those of its model, so some
models of the zoo are captured. Forward is only traced, on tensors without values: no autograd engine runs and no thread
starts, which a fork would not inherit.
"""

from __future__ import annotations

import gc
import os

import torch

_MODELS = ("bert", "gpt2", "t5", "resnet")


def _warm_up() -> None:
    from epl.batch import flatten
    from epl.capture.capture import capture
    from epl.loss import loss_step
    from tests.zoo import CASES

    with torch.random.fork_rng(devices=[]):
        for case in (CASES[name] for name in _MODELS):
            batch = case.batch(2, seed=0, dtype=torch.float64)
            capture(case.build(torch.float64), loss_step(case.loss_fn), flatten(batch))
    assert len(os.listdir("/proc/self/task")) == 1, "a fork inherits no threads"
    gc.collect()
    gc.freeze()  # else the first collection in each rank would write to, and so copy, each page of this process


try:
    _warm_up()
except Exception as error:  # of a capture that is being worked on: an ImportError is all that a fork server survives
    raise ImportError(str(error)) from error
