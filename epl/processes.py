"""The ranks of a launcher as processes of the system: what they write, and that none is left behind.

:class:`RankLogs` gives each rank one log file, in which stdout and stderr stand in the order in which they were
written, and shows rank 0's output on the terminal at once and unchanged. Why not torch's own redirection
(``DefaultLogsSpecs``): it keeps two files per rank, and shows them by looking into the files ten times a second, line
by line, with a prefix. Here each rank writes into a pipe, as with ``tee``; should the launcher be killed, the next
output of a rank fails and the rank ends.

:class:`ProcessGuard` ends ranks that do not end by themselves, whenever a signal arrives and whatever they started.
torch starts each rank in a session of its own: a rank's process id is also the id of a process group, to which belongs
what the rank starts, and Ctrl-C on a terminal reaches the launcher alone.

Works on Linux and macOS.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from epl.errors import ClusterError

__all__ = ["ProcessGuard", "RankLogs", "ending", "has_failed", "new_log_folder", "tail"]

_STDOUT, _STDERR = 1, 2
_CHUNK_BYTES = 1 << 16  # what a pipe holds on Linux
_WAKE_S = 0.1  # how soon the reading thread sees that it shall stop
_DRAIN_S = 2.0  # for what ended ranks left in the pipes; something that they started may go on writing for ever
_TAIL_BYTES = 1 << 16


class RankLogs(LogsSpecs):
    """Each rank's output in ``<folder>/rank_<rank>.log``; rank 0's on the terminal too.

    After a restart the files are called ``rank_<rank>.restart_<n>.log``.

    Args:
        folder: an existing folder.
        environment: variables for all ranks, beside those that torch sets.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._environment = environment
        self._pump: _Pump | None = None
        self._paths: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def path(self, rank: int) -> Path:
        """The log of a rank of this node, of its latest start."""
        return self._paths[rank]

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch before each start of the ranks: where each writes, and what is added to its environment."""
        self.close()
        self._pump = pump = _Pump()
        destination = LogsDest()
        for local_rank, env in envs.items():
            rank, restart = int(env["RANK"]), env["TORCHELASTIC_RESTART_COUNT"]
            name = f"rank_{rank}" if restart == "0" else f"rank_{rank}.restart_{restart}"
            self._paths[rank] = self._folder / f"{name}.log"
            error_file = str(self._folder / f"{name}.error.json")
            env.update(self._environment, TORCHELASTIC_ERROR_FILE=error_file)
            destination.error_files[local_rank] = error_file

            log = pump.open_log(self._paths[rank])
            destination.stdouts[local_rank] = pump.pipe_to(log, _STDOUT) if rank == 0 else pump.pipe_to(log)
            # One pipe for both keeps their order; rank 0's are told apart because the terminal's are.
            destination.stderrs[local_rank] = (
                pump.pipe_to(log, _STDERR) if rank == 0 else destination.stdouts[local_rank]
            )
        pump.start()
        return destination

    def close(self) -> None:
        """Wait until all that the ranks wrote, which have ended, is in the logs and on the terminal."""
        if self._pump is not None:
            self._pump.stop()
            self._pump = None


class _Pump:
    """A thread that passes on what arrives in pipes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._descriptors: list[int] = []
        self._stop_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="epl-rank-output", daemon=True)

    def open_log(self, path: Path) -> int:
        self._descriptors.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        return self._descriptors[-1]

    def pipe_to(self, *sinks: int) -> str:
        """A path; what is written to it is written to each of the descriptors ``sinks``."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._selector.register(read_end, selectors.EVENT_READ, sinks)
        # The writing end stays open here until the end, so that a rank may start, end and start others in any order.
        self._descriptors += [read_end, write_end]
        return f"/dev/fd/{write_end}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop_by_s = time.monotonic() + _DRAIN_S
        self._thread.join(_DRAIN_S + 1.0)
        if self._thread.is_alive():  # nobody reads the terminal's end of it
            return
        self._selector.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            stop_by_s = self._stop_by_s
            ready = self._selector.select(_WAKE_S if stop_by_s is None else 0.0)
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK_BYTES)
                for sink in key.data:
                    _write(sink, chunk)
            if stop_by_s is not None and (not ready or time.monotonic() > stop_by_s):
                return


def _write(descriptor: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a terminal that some program left in this mode
            time.sleep(0.01)
        except OSError:  # a full disk, a `| head` that has ended: no reason to hold up or end the training
            return


def new_log_folder(log_dir: Path | None, name: str) -> Path:
    """Make a folder for the logs of one run.

    Args:
        log_dir: where; by default ``epl_logs`` in the working directory, or the system's folder for temporary files if
            nothing can be written there.
        name: what is run; the folder's name adds when, and by which process.

    Raises:
        ClusterError: ``log_dir`` was given and nothing can be written there.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}"
    folder = (log_dir or Path("epl_logs")).absolute() / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        if log_dir is not None:
            raise ClusterError(f"--log-dir {log_dir}: no folder can be made there ({error})") from error
        folder = Path(tempfile.mkdtemp(prefix=f"epl-{name}-"))
    return folder


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines of a file as a terminal would show them: of a progress bar only its last state."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip().split("\n")[-num_lines:] if text.strip()]


def has_failed(pid: int) -> bool:
    """Whether a child of this process has ended badly and nobody has asked for its exit code yet; it can still be asked
    for afterwards."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return status is not None and status.si_status != 0


def ending(exit_code: int) -> str:
    """How a process ended, in words; a negative exit code is that of a signal."""
    if exit_code >= 0:
        return f"failed with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


class ProcessGuard:
    """Within ``with ProcessGuard() as guard`` ranks may be started; after it none is left, whatever happened.

    The first SIGINT, SIGTERM, SIGHUP or SIGQUIT raises torch's ``SignalException``, upon which its agent passes the
    signal on to the ranks and gives them time; the second one kills them.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

    def __init__(self) -> None:
        self._groups: list[int] = []
        self._received: signal.Signals | None = None
        self._starting = False
        # What was to be ignored stays ignored: `nohup epl launch` outlives its terminal.
        self._before = {n: signal.getsignal(n) for n in self._SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}

    def __enter__(self) -> ProcessGuard:
        self.disarm()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, start: Callable[[], dict[int, int]]) -> dict[int, int]:
        """Call ``start``, which starts ranks and returns their process ids by local rank.

        A signal waits until it has: if it raised in the middle, the ranks started so far would be known to nobody.
        """
        self.kill()  # what ranks of the last attempt left behind
        self._starting = True
        for number in self._before:
            signal.signal(number, self._on_signal)
        try:
            pids = start()
            self._groups = list(pids.values())
        finally:
            self._starting = False
        if self._received is not None:
            raise _stopped_by(self._received)
        return pids

    def disarm(self) -> None:
        """While no rank runs, a signal ends this process at once; a handler would have to wait for torch's C++ code."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)

    @contextlib.contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """Kill the ranks if the body takes longer, which it does when it waits for them to heed SIGTERM."""
        before = signal.signal(signal.SIGALRM, lambda *_: self.kill())
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def kill(self) -> None:
        """End the ranks and what they started."""
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def forget(self) -> None:
        """The ranks have ended well; what they left running on purpose may go on."""
        self._groups = []

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._received is not None:
            self.kill()
            return
        self._received = signal.Signals(number)
        if not self._starting:
            raise _stopped_by(self._received)


def _stopped_by(received: signal.Signals) -> SignalException:
    return SignalException(f"the launcher received {received.name}", received)
