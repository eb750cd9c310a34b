"""Random numbers that depend on the step, the sample and the operator, and on nothing else.

Before a random operator runs, the device's generator is seeded from (base seed, step, first sample of the part in the
global batch, number of the draw). So dropout masks are the same under every plan that cuts the global batch at the same
places, replicas differ, and a recomputed segment draws again what it drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["generator_kept", "reseeder"]

_MASK = (1 << 64) - 1


def reseeder(device: torch.device, base: int, step: int, first_sample: int) -> Callable[[int], None]:
    """The function that a stage calls before each random operator, with the number of the draw."""
    part = _mix(_mix(_mix(base) ^ step) ^ first_sample)
    generator = _generator(device)

    def reseed(draw: int) -> None:
        generator.manual_seed(_mix(part ^ draw))

    return reseed


def _mix(number: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): nearby numbers become unrelated ones."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index or 0]


@contextmanager
def generator_kept(device: torch.device) -> Iterator[None]:
    """The user's own random numbers go on as if the step had drawn none."""
    generator = _generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
