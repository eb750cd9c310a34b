"""Run a function on several ranks, each its own process, and bring back what each of them returned or raised.

    launch(4, function, *args)      -> [result of rank 0, ..., result of rank 3]
    @run_on(4)                      a test whose body runs on each rank

A rank finds the environment that a launcher would give it (RANK, WORLD_SIZE, MASTER_ADDR, ...), so ``epl.init()`` in
the body meets the other ranks as it does in a user's script. The store that they meet at is held here and listens on a
port that the system chose, so no two runs can want the same one.

Why not ``torch.multiprocessing.spawn``: it imports torch and transformers in every rank (seconds each). Here ranks fork
from one clean process that imported them once (and captured a model, tests/warm.py), which takes some hundredths of a
second. Nothing that starts threads or runs autograd may happen in that process: a fork would inherit its locks and not
its threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["launch", "launch_expecting_errors", "run_on"]

_CONTEXT = multiprocessing.get_context("forkserver")
_HOST = "127.0.0.1"
_START_S = 60.0  # the first rank waits until everything below is imported, perhaps on a busy machine
_TRACE_S = 1.0  # what a rank that ran out of time has for writing down where it is
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # eight ranks on two cores; no threads to fork
_PRELOAD = (
    "pytest",
    "torch",
    "torch.export",
    "torch.export._trace",  # what export imports at its first call, half a second of it
    "torch.export._draft_export",
    "epl",
    "torch.distributed",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bart", "bert", "gpt2", "llama", "mixtral")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("resnet", "t5", "vit")),
    "tests.warm",  # a first capture
)


def launch(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run ``function(rank, *args)`` on each rank and return the results, rank 0 first.

    Args:
        world_size: number of ranks; 1 takes the same path.
        function: defined at the top of a module, so that a rank can import it.
        args: copied to every rank; tensors too, nothing is shared.
        timeout_s: how long a rank may run, its start not counted.

    Raises:
        AssertionError: with the traceback of the rank that failed first.
        TimeoutError: with the line at which each rank hangs.
    """
    results: dict[int, Any] = {}
    with _reports(world_size, function, args, timeout_s) as reports:
        for report in reports:
            assert report.error is None, f"rank {report.rank} failed:\n{report.details}"
            results[report.rank] = report.result
    return [results[rank] for rank in range(world_size)]


def launch_expecting_errors(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[str]:
    """Run ``function(rank, *args)`` on each rank, where each must raise, and return "module.Type: message" of each."""
    errors: dict[int, str] = {}
    with _reports(world_size, function, args, timeout_s) as reports:
        for report in reports:
            assert report.error != _LOST, f"rank {report.rank} failed:\n{report.details}"
            assert report.error is not None, f"rank {report.rank} raised nothing and returned {report.result!r}"
            errors[report.rank] = report.error
    return [errors[rank] for rank in range(world_size)]


def run_on(world_size: int, timeout_s: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make pytest run the body of ``test(rank, ...)`` on each rank; fixtures and parameters are passed on."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**params: Any) -> None:
            launch(world_size, _run_test, test.__module__, test.__name__, params, timeout_s=timeout_s)

        functools.update_wrapper(run, test)
        _, *rest = inspect.signature(test).parameters.values()  # pytest must not look for a fixture "rank"
        run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in rest])  # type: ignore[attr-defined]
        return run

    return decorate


def _run_test(rank: int, module: str, name: str, params: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **params)


# --------------------------------------------------------------------------------------------- in the test's process

_LOST = "the process died without a traceback"


class _Report(NamedTuple):
    """How a rank ended."""

    rank: int
    time_s: float  # when, on the clock that all processes of a machine share
    result: Any = None
    error: str | None = None  # one line or so: "module.Type: message"
    details: str = ""  # the traceback


class _Orders(NamedTuple):
    """What a rank is told."""

    rank: int
    environment: dict[str, str]
    folder: str
    payload: bytes  # the function and its arguments
    trace: Path  # where to write down the stack when time is up
    timeout_s: float


class _Rank(NamedTuple):
    rank: int
    process: multiprocessing.process.BaseProcess
    trace: Path


@contextlib.contextmanager
def _reports(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> Iterator[Iterator[_Report]]:
    """Start the ranks, give an iterator over their reports, first one first, and end what still runs afterwards."""
    _start_forkserver()
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    payload = _to_bytes((function, args))
    running: dict[Connection, _Rank] = {}
    with tempfile.TemporaryDirectory(prefix="epl-ranks-") as folder:
        try:
            for rank in range(world_size):
                reader, writer = _CONTEXT.Pipe(duplex=False)
                environment = _environment(rank, world_size, store.port)
                orders = _Orders(rank, environment, os.getcwd(), payload, Path(folder, str(rank)), timeout_s)
                process = _CONTEXT.Process(target=_run_rank, args=(orders, writer))
                process.start()
                writer.close()  # now the rank holds the only writing end: its death reads as the end of the pipe
                running[reader] = _Rank(rank, process, orders.trace)
            yield _receive(dict(running), timeout_s)
        finally:
            for reader, started in running.items():
                started.process.kill()
                started.process.join()
                reader.close()


def _start_forkserver() -> None:
    """Start the process that ranks fork from, unless it runs already."""
    # Only what is imported here without an error: one would end the server, and with it every test.
    own = [name for name in ("epl",) if getattr(sys.modules.get(name), "__file__", None)]
    _CONTEXT.set_forkserver_preload([*_PRELOAD, *own])
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher on one machine would set, on top of what this process (not the fork server) has set now."""
    launcher = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store listens already: rank 0 must not start another
    }
    return {**os.environ, **_ONE_THREAD, **launcher}


def _receive(pending: dict[Connection, _Rank], timeout_s: float) -> Iterator[_Report]:
    """Yield each rank's report as it comes; of several that are there, the one that was written first."""
    for reader, started in pending.items():
        if not reader.poll(_START_S):
            raise TimeoutError(f"rank {started.rank} did not start in {_START_S} s")
        with contextlib.suppress(EOFError):  # met again below, where it becomes a report
            reader.recv()
    deadline_s = time.monotonic() + timeout_s + _TRACE_S
    while pending:
        ready = multiprocessing.connection.wait(list(pending), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise TimeoutError(_describe_hang(list(pending.values()), timeout_s))
        reports = [_read(reader, pending.pop(reader)) for reader in ready]
        yield from sorted(reports, key=lambda report: report.time_s)


def _read(reader: Connection, started: _Rank) -> _Report:
    try:
        time_s, result, error, details = reader.recv()
    except EOFError:
        started.process.join()
        details = f"{_LOST} (exit code {started.process.exitcode})"
        return _Report(started.rank, 0.0, error=_LOST, details=details)  # time 0: others failed because this one died
    return _Report(started.rank, time_s, None if error else _from_bytes(result), error, details)


def _describe_hang(hanging: list[_Rank], timeout_s: float) -> str:
    lines = [f"ranks {[started.rank for started in hanging]} did not finish in {timeout_s} s"]
    for started in hanging:
        trace = started.trace.read_text() if started.trace.exists() else ""
        lines.append(f"rank {started.rank} is at:\n{trace or '(it wrote no trace)'}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ in a rank's process


def _run_rank(orders: _Orders, writer: Connection) -> None:
    signal.setitimer(signal.ITIMER_REAL, orders.timeout_s + _START_S)  # ends a rank that nobody is left to end
    writer.send("started")
    os.environ.clear()
    os.environ.update(orders.environment)
    os.chdir(orders.folder)
    torch.set_num_threads(1)
    with orders.trace.open("w") as file:
        faulthandler.dump_traceback_later(orders.timeout_s, file=file)
        writer.send(_attempt(orders.rank, orders.payload))
        faulthandler.cancel_dump_traceback_later()


def _attempt(rank: int, payload: bytes) -> tuple[float, bytes, str | None, str]:
    """Call the function and say when it ended, with what result or what error and traceback."""
    try:
        function, args = _from_bytes(payload)
        result = _to_bytes(function(rank, *args))
        # Not after an error: there the other ranks wait elsewhere, and what went wrong should be known at once.
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        return time.monotonic(), b"", what, traceback.format_exc()
    finally:
        sys.stdout.flush()  # once the report is out, the process may be ended at any moment
        sys.stderr.flush()
    return time.monotonic(), result, None, ""


def _to_bytes(value: Any) -> bytes:
    """Pickle with torch.save: sent through a pipe as it is, a tensor would be shared memory of a process that ends."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
