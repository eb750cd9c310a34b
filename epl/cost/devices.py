"""How fast devices and the links between them are.

The numbers steer choices; what a plan will take on a certain machine is measured, not looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU", "DeviceModel", "LinkModel", "device_model"]

GiB = 1 << 30


@dataclass(frozen=True)
class LinkModel:
    """What a collective step between neighbours costs: ``latency_s + size_bytes / bandwidth_bytes_per_s``."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class DeviceModel:
    """A kind of device, and its links to others in the same machine.

    Args:
        name: As it is called in ``cluster`` specifications.
        flops_per_s: Dense matrix multiplication in the type that training computes in.
        memory_bytes_per_s: Rate of reading and writing its memory.
        memory_bytes: Its memory; 0: not limited.
        operator_s: Least time of any operator.
        link: To other devices of the same machine.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    operator_s: float
    link: LinkModel

    @property
    def copy_s_per_byte(self) -> float:
        """Time to cut a tensor or to join parts; on GPUs small strided copies reach a small part of the memory's rate."""
        return min(2e-10, 12 / self.memory_bytes_per_s)  # the first: a CPU core [measured as below]


# One core, and gloo over loopback. [measured: 2-core virtual machine, 2026-11]
CPU = DeviceModel("cpu", 5e10, 8e9, 0, 5e-6, LinkModel(1.5e-4, 1.5e9))

# 70 % of the data sheets' dense rates and bandwidths (autoparallel's default, its per-operator floor of 7 us); bandwidths
# of links as NCCL reaches them in a machine.
_GPUS = (
    DeviceModel("T4", 0.7 * 65e12, 0.7 * 320e9, 16 * GiB, 7e-6, LinkModel(2e-5, 10e9)),
    DeviceModel("P100", 0.7 * 18.7e12, 0.7 * 732e9, 16 * GiB, 7e-6, LinkModel(2e-5, 10e9)),
    DeviceModel("V100-16GB", 0.7 * 125e12, 0.7 * 900e9, 16 * GiB, 7e-6, LinkModel(1e-5, 120e9)),
    DeviceModel("V100-32GB", 0.7 * 125e12, 0.7 * 900e9, 32 * GiB, 7e-6, LinkModel(1e-5, 120e9)),
    DeviceModel("A100-40GB", 0.7 * 312e12, 0.7 * 1555e9, 40 * GiB, 7e-6, LinkModel(1e-5, 220e9)),
    DeviceModel("A100-80GB", 0.7 * 312e12, 0.7 * 2039e9, 80 * GiB, 7e-6, LinkModel(1e-5, 220e9)),
    DeviceModel("H100-80GB", 0.7 * 989e12, 0.7 * 3350e9, 80 * GiB, 7e-6, LinkModel(1e-5, 360e9)),
    DeviceModel("H200", 0.7 * 989e12, 0.7 * 4800e9, 141 * 10**9, 7e-6, LinkModel(1e-5, 360e9)),
)


def device_model(kind: str) -> DeviceModel:
    """The model of a kind of device: "" or "cpu" is a CPU core; else the first GPU whose name begins like it.

    A kind that is not known is taken for an A100: ratios of computing to communication are alike on most GPUs.
    """
    if kind in ("", "cpu"):
        return CPU
    named = [model for model in _GPUS if model.name.lower().startswith(kind.lower())]
    return named[0] if named else device_model("A100-80GB")
