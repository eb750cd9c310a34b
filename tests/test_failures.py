"""One rank of four goes wrong: everything ends soon, not with exit code 0, and it is said which rank it was and why.

Each case is a job under `epl launch` (tests/faulty.py), which takes some ten seconds on two cores. So the ordinary run
has each fault once, and each place once; the other combinations and the loop of random kills are marked ``slow``.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.jobs import ROOT, Job, patience, started

LIMIT_S = 10.0  # from a fault to the end of all processes, on a machine that is free
TIMEOUT_S = 6.0  # for which one rank waits for another
FAULTY = str(ROOT / "tests" / "faulty.py")
pytestmark = pytest.mark.timeout(300)  # a job may start slowly; what has to be soon is measured
slow = pytest.mark.slow


class Failed(NamedTuple):
    """A job that has ended after a fault."""

    code: int
    said: str  # by the launcher
    time_s: float  # from the fault to the end of the last process
    err: str  # all that was written to stderr, what rank 0 said included


@contextlib.contextmanager
def job(
    folder: Path,
    *fault: object,
    nproc: int = 4,
    options: Sequence[str] = (),
    num_steps: int = 6,
    layout: str = "pipeline",
) -> Iterator[Job]:
    command = ("-m", "epl.cli", "launch", "--nproc", str(nproc), *options, FAULTY, *map(str, fault))
    environment = {"EPL_COMMUNICATION_TIMEOUT": str(TIMEOUT_S), "FAULTY_NUM_STEPS": str(num_steps)}
    environment["FAULTY_LAYOUT"] = layout
    folder.mkdir(exist_ok=True)
    with started(folder, *command, environment=environment) as running:
        yield running


def after_fault(running: Job) -> Failed:
    """Wait for the end of everything."""
    begin_s = running.fault_s()
    ended = running.end()
    running.wait_until_gone(LIMIT_S)
    lines = [line.removeprefix("[epl] ") for line in ended.err.splitlines() if line.startswith("[epl]")]
    said = "\n".join(re.sub(r"^ *\[rank\d\]: ", "", line) for line in lines)  # torch's prefix of a traceback
    err = re.sub(r"^(\[epl\])? *(\[rank\d\]: )?", "", ended.err, flags=re.MULTILINE)
    return Failed(ended.code, said, time.time() - begin_s, err)


def fail(folder: Path, *fault: object, nproc: int = 4, layout: str = "pipeline") -> Failed:
    with job(folder, *fault, nproc=nproc, layout=layout) as running:
        return after_fault(running)


def assert_soon(failed: Failed, limit_s: float = LIMIT_S) -> None:
    limit_s *= patience()
    assert failed.time_s < limit_s, f"after {failed.time_s:.1f} s, not {limit_s:.1f}\n{failed.said}"


@pytest.mark.parametrize(
    ("place", "kind", "rank", "code", "reason"),
    [
        ("forward", "kill", 2, 137, "rank 2 was killed by SIGKILL"),
        pytest.param("backward", "raise", 1, 1, "ValueError: a planted fault", marks=slow),
        pytest.param("capture", "exit", 3, 3, "rank 3 failed with exit code 3", marks=slow),
        pytest.param(
            "loader",
            "kill",
            3,
            1,
            r"DataLoader worker \(pid.* (killed by signal: Killed|exited unexpectedly)",
            marks=slow,
        ),
        pytest.param("capture", "raise", 2, 1, "rank 2 failed with .*ValueError: a planted fault", marks=slow),
        pytest.param("capture", "kill", 0, 137, "rank 0 was killed by SIGKILL", marks=slow),
        pytest.param("forward", "exit", 1, 3, "rank 1 failed with exit code 3", marks=slow),
        pytest.param("backward", "term", 0, 143, "rank 0 was killed by SIGTERM", marks=slow),
        pytest.param("between", "term", 0, 143, "rank 0 was killed by SIGTERM", marks=slow),
        pytest.param("loader", "raise", 1, 1, "ValueError: a planted fault", marks=slow),
        pytest.param("between", "raise", 3, 1, "ValueError: a planted fault", marks=slow),
    ],
)
def test_a_rank_that_ends_badly_ends_all_and_is_named(
    tmp_path: Path, place: str, kind: str, rank: int, code: int, reason: str
) -> None:
    """A process that stays holds its device and its port; a reason that is not told costs an evening."""
    failed = fail(tmp_path, place, kind, rank)
    assert failed.code == code, failed.said
    # in all that is shown: another rank that ends with this one's error may be seen first, and has said it
    shown = failed.said + failed.err
    assert re.search(reason, shown), shown
    assert f"rank {rank}" in shown
    assert_soon(failed)


@pytest.mark.slow
def test_a_rank_that_computes_for_ever_is_named_with_its_instruction(tmp_path: Path) -> None:
    """Both jobs wait for the same limit at the same time. A rank that is named wrongly is one that only waits, too."""
    with (
        job(tmp_path / "forward", "forward", "loop", 1, nproc=2) as first,
        job(tmp_path / "capture", "capture", "loop", 0, nproc=2) as second,
        ThreadPoolExecutor() as pool,
    ):
        in_step, in_capture = pool.map(after_fault, (first, second))
    for failed, culprit in (
        (in_step, "rank 1 has been computing in 1F0"),
        (in_capture, "rank 0 has been computing in the ca"),
    ):
        assert failed.code == 1
        assert f"{TIMEOUT_S:g} s (communication.timeout) have passed" in failed.err
        assert re.search(f"look at first:\n *- {culprit}", failed.err), failed.err
        assert_soon(failed, TIMEOUT_S + LIMIT_S)


@slow
def test_a_stopped_rank_is_named_as_the_one_that_does_not_answer(tmp_path: Path) -> None:
    failed = fail(tmp_path, "backward", "stop", 3)
    assert failed.code == 1
    assert re.search(r"look at first:\n *- rank 3 does not answer: its process has ended, is stopped", failed.err), (
        failed.err
    )
    assert_soon(failed, TIMEOUT_S + LIMIT_S)


@slow
def test_an_error_that_the_script_catches_on_one_rank_still_ends_the_others(tmp_path: Path) -> None:
    """Its process lives on, so that no connection is lost; without word of it the others would wait for the limit."""
    failed = fail(tmp_path, "backward", "caught", 0, nproc=2)
    assert failed.code == 1
    assert re.search(r"RunError: rank 0 failed with ValueError: a planted fault \(in 0B0", failed.said), failed.said
    assert failed.time_s < TIMEOUT_S * patience(), failed


@slow
def test_a_rank_that_does_fewer_steps_is_named(tmp_path: Path) -> None:
    """Its exit code is 0: only the other ranks can say what is wrong."""
    failed = fail(tmp_path, "between", "leave", 1, nproc=2)
    assert failed.code == 1
    assert re.search(r"RunError: rank 1 has ended its script, after 2 steps, while other", failed.err), failed.err
    assert_soon(failed)


@slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """Nobody is left to end them; this rank computes for ever, and the others wait for it."""
    with job(tmp_path, "forward", "loop", 1, nproc=2) as running:
        running.fault_s()
        os.kill(running.process.pid, signal.SIGKILL)
        running.wait_until_gone(LIMIT_S)


# -- split: the others wait inside a collective ---------------------------------------------------------------------


@slow
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_of_a_split_stage_is_named(tmp_path: Path, place: str, rank: int) -> None:
    failed = fail(tmp_path, place, "kill", rank, nproc=3, layout="split")
    assert failed.code == 137, failed.said
    assert f"rank {rank} was killed by SIGKILL" in failed.said
    assert_soon(failed)


@slow
@pytest.mark.parametrize(("place", "rank"), [("forward", 1), ("backward", 0), ("between", 2)])
def test_a_stopped_rank_of_a_split_stage_is_named(tmp_path: Path, place: str, rank: int) -> None:
    """Its connections stay open, so the others learn of it by the limit of a wait."""
    failed = fail(tmp_path, place, "stop", rank, nproc=3, layout="split")
    assert failed.code == 1
    assert f"{TIMEOUT_S:g} s (communication.timeout) have passed" in failed.err
    assert re.search(f"look at first:\n *- rank {rank} does not answer", failed.err), failed.err
    assert_soon(failed, TIMEOUT_S + LIMIT_S)


@slow
def test_a_rank_of_a_split_stage_that_computes_for_ever_is_named(tmp_path: Path) -> None:
    failed = fail(tmp_path, "backward", "loop", 1, nproc=3, layout="split")
    assert failed.code == 1
    assert re.search(r"look at first:\n *- rank 1 has been computing in 0B", failed.err), failed.err
    assert_soon(failed, TIMEOUT_S + LIMIT_S)


@slow
@pytest.mark.parametrize(("layout", "rank"), [("beside", 1), ("bridge", 0), ("bridge", 2)])
def test_a_killed_rank_between_strategies_is_named(tmp_path: Path, layout: str, rank: int) -> None:
    failed = fail(tmp_path, "backward", "kill", rank, nproc=3, layout=layout)
    assert failed.code == 137, failed.said
    assert f"rank {rank} was killed by SIGKILL" in failed.said
    assert_soon(failed)


@slow
@pytest.mark.parametrize(("layout", "rank"), [("beside", 2), ("bridge", 1)])
def test_a_stopped_rank_between_strategies_is_named(tmp_path: Path, layout: str, rank: int) -> None:
    failed = fail(tmp_path, "forward", "stop", rank, nproc=3, layout=layout)
    assert failed.code == 1
    assert re.search(f"look at first:\n *- rank {rank} does not answer", failed.err), failed.err
    assert_soon(failed, TIMEOUT_S + LIMIT_S)


# -- random kills ---------------------------------------------------------------------------------------------------

NUM_ROUNDS = int(os.environ.get("EASY_PARALLEL_TEST_KILLS", "5"))
NUM_STEPS = 500  # so that a job spends about as long in its steps as before them
LENGTH_S = 12.0  # from the start of the ranks to the end, or a little more, so that some kills come too late


@slow
@pytest.mark.timeout(NUM_ROUNDS * 90)
def test_random_kills_leave_no_process_and_no_port(tmp_path: Path) -> None:
    """All jobs meet at the same port: one that stays taken fails the next job. Set EASY_PARALLEL_TEST_KILLS for more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    draw = random.Random(os.environ.get("EASY_PARALLEL_TEST_SEED", str(time.time())))
    for number in range(NUM_ROUNDS):
        folder = tmp_path / str(number)
        target = draw.choice([0, 1, 2, 3, "launcher"])
        sent = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        delay_s = draw.uniform(0, LENGTH_S) * patience()
        what = f"round {number}: {sent.name} to {target} after {delay_s:.1f} s"
        with job(
            folder, "none", "none", 0, options=("--rdzv-endpoint", f"127.0.0.1:{port}"), num_steps=NUM_STEPS
        ) as running:
            processes = {**all_ranks(running), "launcher": running.process.pid}
            time.sleep(delay_s)
            with contextlib.suppress(ProcessLookupError):  # the job may be over by now
                os.kill(processes[target], sent)
            begin_s = time.time()
            ended = running.end()
            running.wait_until_gone(LIMIT_S)
            time_s, limit_s = time.time() - begin_s, LIMIT_S * patience()
        print(f"{what}: exit code {ended.code} after {time_s:.1f} s{', done' if all_done(folder) else ''}", flush=True)
        assert ended.code != 0 or all_done(folder), f"{what}: {ended}"
        assert ended.code == 0 or time_s < limit_s, f"{what}: {ended}"
        assert "EADDRINUSE" not in ended.err, what
        assert is_free(port), what


def all_ranks(running: Job) -> dict[int, int]:
    """The ranks' process ids, as soon as there are four."""
    while len(ranks := running.ranks()) < 4:
        assert running.process.poll() is None, running.process.communicate()
        time.sleep(0.05)
    return ranks


def all_done(folder: Path) -> bool:
    logs = list(folder.glob("epl_logs/*/rank_?.log"))
    return len(logs) == 4 and all("done" in log.read_text() for log in logs)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    return True
