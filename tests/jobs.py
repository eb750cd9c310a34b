"""Real jobs for tests: `epl launch` as a process of its own, and what is left of it afterwards.

Every process of a job carries a mark in its environment, by which its ranks and whatever they started can be found in
/proc, whoever their parent is by now.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Ended", "Job", "is_alive", "patience", "started"]

ROOT = Path(__file__).resolve().parents[1]
_START_S = 120.0  # for a job to come to its fault, on a machine that others use, too
_MARK = "EASY_PARALLEL_TEST_JOB"
_TORCH_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMP_NUM_THREADS")


class Ended(NamedTuple):
    """How a job ended."""

    code: int
    out: str
    err: str


class Job:
    """A running job: a launcher, or a process that takes its place."""

    def __init__(self, process: subprocess.Popen[str], mark: str, folder: Path) -> None:
        self.process, self._mark, self.folder = process, mark, folder

    def end(self, timeout_s: float = _START_S) -> Ended:
        """Wait for the launcher."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Ended(self.process.returncode, out, err)

    def processes(self) -> dict[int, dict[str, str]]:
        """The environments of the job's living processes, by process id; the launcher is one of them."""
        found: dict[int, dict[str, str]] = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended
                environment = dict(line.split("=", 1) for line in path.read_text().split("\0") if "=" in line)
                if environment.get(_MARK) == self._mark and is_alive(int(path.parent.name)):
                    found[int(path.parent.name)] = environment
        return found

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that are there, by rank; not those of processes that they started."""
        processes = self.processes()
        return {
            int(environment["RANK"]): pid
            for pid, environment in processes.items()
            if "RANK" in environment and _parent(pid) == self.process.pid
        }

    def wait_until_gone(self, within_s: float) -> float:
        """Wait until no process is left, and return how long that took; an AssertionError if it takes too long."""
        begin_s = time.monotonic()
        while left := self.processes():
            names = {pid: environment.get("RANK", "launcher") for pid, environment in left.items()}
            assert time.monotonic() - begin_s < within_s, f"after {within_s:.1f} s these are left, with rank: {names}"
            time.sleep(0.05)
        return time.monotonic() - begin_s

    def fault_s(self) -> float:
        """When a rank of `tests.faulty` went wrong; waits for it."""
        path = Path(self.folder, "fault")
        deadline_s = time.monotonic() + _START_S
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s, "the fault did not happen"
            time.sleep(0.02)
        return float(path.read_text())

    def kill(self) -> None:
        """Leave nothing behind, whatever the test has found."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def started(
    folder: Path, *command: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """Run ``python <command>`` in a folder, with its output in pipes and without what this process's launcher has set.

    Args:
        folder: where it runs.
        command: arguments of Python.
        prefix: a command that starts Python, such as ``ip netns exec name``.
        environment: variables to add.
    """
    mark = uuid.uuid4().hex
    base = {key: value for key, value in os.environ.items() if not key.startswith(_TORCH_ENVIRONMENT)}
    process = subprocess.Popen(
        [*prefix, sys.executable, *command],
        cwd=folder,
        env=base | {"PYTHONPATH": str(ROOT), _MARK: mark} | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = Job(process, mark, folder)
    try:
        yield job
    finally:
        job.kill()


def patience() -> float:
    """By what a limit that holds on a free machine is to be multiplied on this one now.

    A job of four ranks loads two cores with up to 2.5 processes each, at its start; what is more is somebody else's.
    """
    return max(1.0, os.getloadavg()[0] / (2.5 * (os.cpu_count() or 1)))


def is_alive(pid: int) -> bool:
    """False for a zombie, which waits for whoever adopted it and does nothing any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
