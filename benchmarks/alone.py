"""One contestant in processes of its own: start them, and measure how far the resident set rises above the imports.

Memory that the C library keeps after tensors are freed is no contestant's fault, so peaks are measured with every tensor
mapped by itself (``exact``), which costs time; times are taken without it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

MIB = 2**20
HERE = Path(__file__).resolve().parent


class Growth:
    """Resident memory now, after all imports; later, how far it rose above that."""

    def __init__(self) -> None:
        torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),))  # so that nobody's capture imports it later
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before_mib = psutil.Process().memory_info().rss / MIB
        self.reset()

    @staticmethod
    def reset() -> None:
        """The peak is what there is now."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """The highest since then."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return peak_kib / 1024 - self.before_mib


def of_all_ranks(value: Any) -> list[Any]:
    """The value of every rank, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print_result(result: dict[str, Any]) -> None:
    """One JSON line, from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


def launch(script: str, arguments: list[str], *, world: int, exact: bool = False) -> Any:
    """Run a script on some ranks and give its last JSON line, or a dict with the end of its output under ``error``."""
    return list(results(script, arguments, world=world, exact=exact))[-1]


def results(script: str, arguments: list[str], *, world: int, exact: bool = False) -> Iterator[Any]:
    """The same for each JSON line, as it comes; ``error`` last if the script fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--master-addr=127.0.0.1"]
    command += [f"--master-port={port}", str(HERE / script), *arguments]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths)}
    if exact:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
    output: deque[str] = deque(maxlen=40)
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:
            output.append(line)
            if line.startswith("{"):
                yield json.loads(line)
    if ran.returncode:
        yield {"error": "".join(output)}
