"""Start one process per device, watch over them, and say clearly which one failed.

The work is done by torch's elastic agent (``torch.distributed.elastic``): it agrees with the other nodes on ranks,
starts the ranks with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ... in their environment, notices when
one ends, and restarts all if asked to. One node meets itself at a free port of its own; several meet at the endpoint,
where the launcher of node 0 listens.

Why not ``torchrun``, or ``elastic_launch`` as it stands (torch 2.13):

* A rank that ignores SIGTERM holds up the end of all others for 30 s: the grace is a default of
  ``SubprocessContext._poll``, which ``shutdown_timeout`` does not reach. Here it is 3 s.
* A signal that arrives while ranks are being started leaves behind those that were started before it; so do processes
  that a rank had started when it was killed. Here nothing is left behind (:mod:`epl.processes`).
* A failure is not told to the other nodes, whose ranks then wait in a collective. Here it is (:mod:`epl.board`).
* Rank 0's output arrives late and with a prefix on each line. Here it arrives as it was written.
* The user sees a traceback of the launcher. Here it is the failed rank, why it ended, and the end of its log.

So :class:`_Agent` extends ``LocalElasticAgent``, by the methods that torch documents for that purpose.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from epl.board import Board, Failure, SilentError
from epl.errors import ClusterError, RunError, bulleted
from epl.processes import ProcessGuard, RankLogs, ending, has_failed, new_log_folder, tail
from epl.runtime.orphan import LAUNCHER_PID

__all__ = ["LaunchOptions", "launch"]

_GRACE_S = 3  # from SIGTERM to SIGKILL; a failure is noticed within 0.1 s, so that all ranks end well within 10 s
_MEETING_S = 600  # how long the nodes wait for one another at the start
_TAIL_LINES = 20
_PLAN_FOLDER = (
    "EPL_RUN_LOG_DIR"  # config.py's run.log_dir: the plan is written beside the logs, unless the user said where
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to start, and where.

    Args:
        script: path of a Python script, or the name of a module.
        arguments: what the script finds in ``sys.argv[1:]``, untouched.
        is_module: run ``script`` as ``python -m`` does.
        nproc: ranks on this node, 1 or more.
        nnodes: number of nodes, on each of which a launcher is started.
        node_rank: which of the nodes this is, from 0; may be left out if there is one.
        rdzv_endpoint: ``HOST:PORT`` of node 0, the same on all nodes; may be left out if there is one.
        log_dir: where the folder for this run's logs is made; by default ``epl_logs`` in the working directory, or the
            system's folder for temporary files if that cannot be written.
        max_restarts: how often all ranks are started anew after a failure.

    Raises:
        ClusterError: options that start nothing or contradict one another, all of them in one message.

    Example:
        >>> LaunchOptions(script="timeit", is_module=True, nproc=2).nnodes
        1
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    log_dir: Path | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if violations := [*self._script_violations(), *self._number_violations(), *self._node_violations()]:
            raise ClusterError(bulleted("nothing was started:", violations))

    def _script_violations(self) -> list[str]:
        if not self.script:
            return ["no script was given: write `epl launch --nproc 2 train.py`, or `-m package.module` for a module"]
        if not self.is_module and not Path(self.script).exists():
            return [f"there is no script {self.script!r} in {Path.cwd()}; for a module write `-m {self.script}`"]
        return []

    def _number_violations(self) -> list[str]:
        least = (("--nproc", self.nproc, 1), ("--nnodes", self.nnodes, 1), ("--max-restarts", self.max_restarts, 0))
        return [f"{flag} is {given}: give {bound} or more" for flag, given, bound in least if given < bound]

    def _node_violations(self) -> list[str]:
        found = []
        numbers = "0" if self.nnodes <= 1 else f"0 to {self.nnodes - 1}"
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            found.append("--nnodes needs --rdzv-endpoint HOST:PORT: the address of node 0, the same on every node")
        if self.nnodes > 1 and self.node_rank is None:
            found.append(f"--nnodes needs --node-rank: give each node a number of its own, {numbers}")
        if self.node_rank is not None and not 0 <= self.node_rank < max(self.nnodes, 1):
            found.append(f"--node-rank is {self.node_rank}: with --nnodes {self.nnodes} it is {numbers}")
        host, _, port = (self.rdzv_endpoint or "localhost:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            found.append(f"--rdzv-endpoint is {self.rdzv_endpoint!r}: write HOST:PORT, as in node-0:29500")
        return found


def launch(options: LaunchOptions) -> int:
    """Run the ranks of this node to their end.

    Rank 0's output appears on the terminal, each rank's in a log file of its own. If a rank fails, all ranks of all
    nodes end within 10 s and the failed one is described on stderr. Call it from the main thread, as it handles
    signals.

    Args:
        options: what to start.

    Returns:
        The exit code for the launcher: 0; else that of the rank that failed first, or 128 + the signal that ended it;
        130 after Ctrl-C and 143 after SIGTERM. Until the ranks are started these two end the process itself, which a
        shell reports by the same numbers.

    Raises:
        ClusterError: the folder for the logs cannot be made.
        RunError: the nodes did not meet.

    Example:
        >>> launch(LaunchOptions(script="train.py", arguments=("--lr", "1e-4"), nproc=2))  # doctest: +SKIP
        0
    """
    _quieten_torch()
    name = Path(options.script).stem + (f"-node{options.node_rank}" if options.nnodes > 1 else "")
    folder = new_log_folder(options.log_dir, name)
    logs = RankLogs(folder, _rank_environment(options.nproc, folder))
    _say(f"{options.nproc} {'rank' if options.nproc == 1 else 'ranks'} on this node, logs in {logs.root_log_dir}")
    with ProcessGuard() as guard, contextlib.closing(logs):
        try:
            return _run(_Agent(_worker_spec(options), logs, guard, options), guard)
        except (RendezvousError, dist.DistError) as error:
            place = options.rdzv_endpoint or "a port of this machine"
            advice = "start one on every node; node 0 has to listen there and the others to reach it"
            if "EADDRINUSE" in str(error):
                advice = "the port is taken here, perhaps by a job that has not ended; choose another one"
            said = str(error).partition("Exception raised from")[0].strip()  # what follows is a stack of C++ functions
            raise RunError(
                f"the launchers did not meet at {place} ({_MEETING_S} s at most): {advice}. What torch says: {said}"
            ) from error


def _run(agent: _Agent, guard: ProcessGuard) -> int:
    try:
        result: RunResult = agent.run()
    except SignalException as stop:
        return agent.stopped_by(stop.sigval)
    else:
        if result.state is not WorkerState.SUCCEEDED:
            return agent.end_together()
        guard.forget()
        return 0
    finally:
        agent.close()
        agent.get_worker_group().spec.rdzv_handler.shutdown()


# torch decorates these methods with an untyped wrapper, which hides their signatures from a type checker.
_TorchAgent: Any = LocalElasticAgent


class _Agent(_TorchAgent):
    """torch's agent, with an end that comes soon, is the same on all nodes and is explained."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, guard: ProcessGuard, options: LaunchOptions) -> None:
        super().__init__(spec, logs_specs=logs, shutdown_timeout=_GRACE_S)
        self._logs = logs
        self._guard = guard
        self._options = options
        self._num_starts = 0
        self._board: Board | None = None  # one per start of the ranks, if there are other nodes
        self._failure = Failure(1, "the ranks failed")
        self._repeated: tuple[str, str] | None = None  # of a failure's text: what was shown before, and what to say

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        # torch would install handlers of its own, which raise while ranks are being started.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        if self._options.nnodes > 1:
            store = cast(Store, worker_group.store)  # torch declares it as None, which it is until the nodes have met
            node = self._options.node_rank or 0
            self.close()  # of an earlier start
            self._board = Board(store, node, self._options.nnodes, self._num_starts)
        self._num_starts += 1
        start = super()._start_workers
        return self._guard.start(lambda: start(worker_group))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed_first = {worker.global_rank for worker in worker_group.workers if has_failed(worker.id)}
        if failed_first and self._board is not None:
            self._board.claim()
        with self._guard.bounded(_GRACE_S):
            result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self._logs.close()  # from here on all that the ranks wrote is in their logs
            self._failure = self._describe(result.failures, failed_first)
        if self._board is not None:
            result = self._agree(self._board, result)
        if result.state is WorkerState.FAILED:
            # Rank 0's output is on this terminal already.
            _say(self._failure.text.replace(*self._repeated) if self._repeated else self._failure.text)
            if self._num_starts <= self._options.max_restarts:
                _say(f"starting all ranks anew, restart {self._num_starts} of {self._options.max_restarts}")
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        self._guard.disarm()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _GRACE_S) -> None:
        super()._shutdown(death_sig, min(timeout, _GRACE_S))

    def _agree(self, board: Board, result: RunResult) -> RunResult:
        """The first failure on any node is the failure of all; a success is none before it is one on all."""
        try:
            if result.state is WorkerState.FAILED:
                failure = board.post(self._failure)
            elif result.state is WorkerState.SUCCEEDED:
                failure = board.await_success()
            else:
                failure = board.look()
        except SilentError as error:
            text = f"the launcher of node 0 at {self._options.rdzv_endpoint} {error}, see its terminal"
            if result.state is WorkerState.FAILED:  # perhaps for want of node 0's ranks, perhaps not
                text += f"\n{self._failure.text}"
            failure = Failure(1, text)
        if failure is None:
            return result
        self._failure = failure
        return RunResult(WorkerState.FAILED, failures=result.failures)

    def _describe(self, failures: dict[int, ProcessFailure], failed_first: set[int]) -> Failure:
        # Those that ended before torch ended the rest. If several did between two looks, one may have failed for want
        # of another: that one wrote its traceback later.
        ranks = [rank for rank in failures if rank in failed_first] or list(failures)[:1]
        rank = min(ranks, key=lambda rank: self._logs.path(rank).stat().st_mtime_ns)
        failure, path = failures[rank], self._logs.path(rank)
        text = (
            f"rank {rank} {ending(failure.exitcode)} (process {failure.pid} on {socket.gethostname()}, "
            f"local rank {failure.local_rank})"
        )
        if self._options.nproc * self._options.nnodes > 1:
            text += "; all other ranks are ended"
        if failure.exitcode == -signal.SIGKILL:
            text += "\nSIGKILL is what the system sends when memory runs out: look for the process in `dmesg`"
        if others := [f"rank {other} {ending(failures[other].exitcode)}" for other in sorted(ranks) if other != rank]:
            text += f"\nat the same time {', '.join(others)}"
        if lines := tail(path, _TAIL_LINES):
            end = "\n".join([f"\nthe end of its log, {path}:", *(f"    {line}" for line in lines)])
            self._repeated = (end, f"\nits output is above, and in its log, {path}") if rank == 0 else None
            text += end
        else:
            text += f"\nit wrote nothing to its log, {path}"
        return Failure(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode, text)

    def end_together(self) -> int:
        """Stay until the other nodes know the failure, and return the exit code that goes with it."""
        if self._board is not None:
            self._board.linger()
        return self._failure.exit_code

    def close(self) -> None:
        """Take leave of the other nodes."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def stopped_by(self, received: signal.Signals) -> int:
        """The same for a signal to this launcher."""
        self._logs.close()
        _say(f"stopped by {received.name}, all ranks of this node have ended")
        self._failure = Failure(128 + received, f"node {self._options.node_rank} was stopped by {received.name}")
        if self._board is not None:
            with contextlib.suppress(SilentError):
                self._board.post(self._failure)
        return self.end_together()


def _worker_spec(options: LaunchOptions) -> WorkerSpec:
    meeting = RendezvousParameters(
        backend="static" if options.rdzv_endpoint else "c10d",
        endpoint=options.rdzv_endpoint or "localhost:0",  # port 0: the system chooses one that is free
        run_id="epl" if options.rdzv_endpoint else str(uuid.uuid4()),
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        local_addr=None if options.rdzv_endpoint else "127.0.0.1",
        rank=options.node_rank or 0,
        timeout=_MEETING_S,
    )
    host, _, port = (options.rdzv_endpoint or "").rpartition(":")
    return WorkerSpec(
        role="rank",
        local_world_size=options.nproc,
        rdzv_handler=get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=("-u", *(["-m"] if options.is_module else []), options.script, *options.arguments),
        max_restarts=options.max_restarts,
        master_addr=host.strip("[]") or None,
        master_port=int(port) if port else None,
    )


def _rank_environment(nproc: int, folder: Path) -> dict[str, str]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores // nproc))
    # The last one undoes for the ranks what _Agent._start_workers does to this process.
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    return {
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": signals,
        LAUNCHER_PID: str(os.getpid()),
        _PLAN_FOLDER: os.environ.get(_PLAN_FOLDER, str(folder)),
    }


def _quieten_torch() -> None:
    """What its agent logs about failures is said better below; whoever sets LOGLEVEL wants to see it."""
    if "LOGLEVEL" not in os.environ:
        for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False


def _say(text: str) -> None:
    print("\n".join(f"[epl] {line}" for line in text.splitlines()), file=sys.stderr, flush=True)
