"""The launcher: what ranks are given, what the user sees, how soon everything ends.

Ranks here are small scripts that do not import torch; each start of a launcher takes two seconds, in which it does. So
runs that end well are shared by several tests, and what needs no rank is called in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import epl.cli
from epl.cli import main
from epl.errors import ClusterError
from epl.launcher import LaunchOptions
from tests import jobs

REPORT = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS EPL_RUN_LOG_DIR".split()
seen = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "main": __name__}
print("out of rank", os.environ["RANK"])
print("err of rank", os.environ["RANK"], file=sys.stderr)
with open(f"seen_{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""

MINE = {"OMP_NUM_THREADS": "5", "EPL_RUN_LOG_DIR": "mine"}  # what the user has set, and keeps

# Notes its process id under a name, and stays.
STAY = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(name, pid):
    pathlib.Path(name + ".tmp").write_text(str(pid))
    os.rename(name + ".tmp", name + ".pid")
"""


class Run(NamedTuple):
    code: int
    out: str
    err: str
    folder: Path

    def seen(self, rank: int) -> dict[str, str]:
        return json.loads((self.folder / f"seen_{rank}.json").read_text())

    def log(self, name: str) -> str:
        (path,) = self.folder.glob(f"*logs/*/{name}")
        return path.read_text()


@contextlib.contextmanager
def started(folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher with its output in pipes; nothing of it is left behind."""
    with jobs.started(folder, "-m", "epl.cli", "launch", *arguments, environment=environment) as job:
        yield job.process


def run(folder: Path, *arguments: str, **environment: str) -> Run:
    with started(folder, *arguments, **environment) as process:
        return ended(process, folder)


def ended(process: subprocess.Popen[str], folder: Path) -> Run:
    out, err = process.communicate(timeout=60)
    return Run(process.returncode, out, err, folder)


def write(folder: Path, name: str, *parts: str) -> str:
    (folder / name).write_text("\n".join(parts))
    return name


def pids(folder: Path, *names: str) -> list[int]:
    """Wait until all of them are noted."""
    paths = [folder / f"{name}.pid" for name in names]
    give_up_s = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < give_up_s, f"{names} did not start"
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def assert_gone(processes: list[int]) -> None:
    deadline_s = time.monotonic() + 2
    while any(map(jobs.is_alive, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert [pid for pid in processes if jobs.is_alive(pid)] == []


@pytest.fixture(autouse=True)
def _ctrl_c_is_not_ignored() -> Iterator[None]:
    """A test run in the background of a script ignores SIGINT, and what it starts would inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three ranks of a script whose arguments look like the launcher's own."""
    folder = tmp_path_factory.mktemp("script")
    return run(
        folder, "--nproc", "3", write(folder, "train.py", REPORT), "--nproc", "7", "-m", "--", "--lr=1e-4", "a b"
    )


@pytest.fixture(scope="module")
def module_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of a module, with logs and threads as the user wants them."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "package").mkdir()
    write(folder / "package", "train.py", REPORT)
    return run(folder, "--nproc", "2", "--log-dir", "my_logs", "-m", "package.train", "-m", "x", **MINE)


class TestRunsThatEndWell:
    def test_exit_code_is_zero(self, script_run: Run, module_run: Run) -> None:
        assert (script_run.code, module_run.code) == (0, 0), script_run.err + module_run.err

    def test_arguments_reach_the_script_untouched(self, script_run: Run) -> None:
        for rank in range(3):
            assert script_run.seen(rank)["argv"] == ["--nproc", "7", "-m", "--", "--lr=1e-4", "a b"]

    def test_a_module_runs_as_python_m_does(self, module_run: Run) -> None:
        assert module_run.seen(1)["argv"] == ["-m", "x"]
        assert module_run.seen(1)["main"] == "__main__"

    def test_each_rank_knows_its_place(self, script_run: Run) -> None:
        for rank in range(3):
            seen = script_run.seen(rank)
            assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
            assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("3", "3")

    def test_all_ranks_are_told_the_same_address(self, script_run: Run) -> None:
        addresses = {(script_run.seen(rank)["MASTER_ADDR"], script_run.seen(rank)["MASTER_PORT"]) for rank in range(3)}
        assert len(addresses) == 1

    def test_cores_are_shared_out_to_the_ranks(self, script_run: Run) -> None:
        expected = max(1, len(os.sched_getaffinity(0)) // 3)
        assert {script_run.seen(rank)["OMP_NUM_THREADS"] for rank in range(3)} == {str(expected)}

    def test_a_number_of_threads_that_the_user_set_is_kept(self, module_run: Run) -> None:
        assert {module_run.seen(rank)["OMP_NUM_THREADS"] for rank in range(2)} == {"5"}

    def test_the_plan_is_written_beside_the_logs_unless_the_user_said_where(
        self, script_run: Run, module_run: Run
    ) -> None:
        folder = script_run.err.splitlines()[1].split(", logs in ")[1]
        assert {script_run.seen(rank)["EPL_RUN_LOG_DIR"] for rank in range(3)} == {folder}
        assert {module_run.seen(rank)["EPL_RUN_LOG_DIR"] for rank in range(2)} == {"mine"}

    def test_the_terminal_shows_rank_0_and_nothing_else(self, script_run: Run) -> None:
        assert script_run.out == "out of rank 0\n"
        assert [line for line in script_run.err.splitlines() if not line.startswith("[epl]")] == ["err of rank 0"]

    def test_the_first_line_says_where_the_logs_are(self, script_run: Run) -> None:
        said, folder = script_run.err.splitlines()[1].split(", logs in ")
        assert said == "[epl] 3 ranks on this node"
        assert Path(folder).parent == script_run.folder / "epl_logs"

    def test_flags_of_the_launcher_after_the_script_are_noted(self, script_run: Run, module_run: Run) -> None:
        assert "[epl] --nproc after the script: passed to the script" in script_run.err
        assert "after the script" not in module_run.err

    def test_every_rank_has_a_log(self, script_run: Run, module_run: Run) -> None:
        for rank in range(3):
            assert sorted(script_run.log(f"rank_{rank}.log").splitlines()) == [
                f"err of rank {rank}",
                f"out of rank {rank}",
            ]
        assert "out of rank 1" in module_run.log("rank_1.log")
        assert not (module_run.folder / "epl_logs").exists()


class TestFailures:
    def test_the_failed_rank_is_named_with_its_exit_code_and_the_end_of_its_log(self, tmp_path: Path) -> None:
        body = "for i in range(50): print('line', i)\nif rank == 1: sys.exit(3)\ntime.sleep(60)"
        result = run(tmp_path, "--nproc", "2", write(tmp_path, "train.py", STAY, body))
        assert result.code == 3
        said = result.err.splitlines()
        where = rf"\(process \d+ on {re.escape(socket.gethostname())}, local rank 1\)"
        assert re.fullmatch(rf"\[epl\] rank 1 failed with exit code 3 {where}; all other ranks are ended", said[1])
        path = re.fullmatch(r"\[epl\] the end of its log, (.*):", said[2])
        assert path is not None
        assert Path(path[1]).read_text().splitlines() == [f"line {i}" for i in range(50)]
        assert said[3:] == [f"[epl]     line {i}" for i in range(30, 50)]
        assert "Traceback" not in result.err

    def test_a_killed_rank_ends_all_even_those_that_will_not_listen(self, tmp_path: Path) -> None:
        """The others ignore SIGTERM, as a rank does that is stuck in a collective, and have started processes."""
        body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(f"helper_{rank}", subprocess.Popen(["sleep", "60"]).pid)
note(f"rank_{rank}", os.getpid())
time.sleep(60)
"""
        with started(tmp_path, "--nproc", "3", write(tmp_path, "train.py", STAY, body)) as process:
            processes = pids(tmp_path, *(f"{name}_{rank}" for name in ("rank", "helper") for rank in range(3)))
            killed_s = time.monotonic()
            os.kill(processes[1], signal.SIGKILL)
            result = ended(process, tmp_path)
            assert time.monotonic() - killed_s < 10 * jobs.patience()
        assert result.code == 128 + signal.SIGKILL
        assert f"rank 1 was killed by SIGKILL (process {processes[1]} on" in result.err
        assert "dmesg" in result.err
        assert "it wrote nothing to its log" in result.err
        assert "rank 0" not in result.err
        assert_gone(processes)

    def test_of_two_failed_ranks_the_first_is_named(self, tmp_path: Path) -> None:
        """Rank 0 fails for want of rank 1, at once; the launcher may see both in the same look."""
        body = """
if rank == 1:
    note("failed", 0)
    os._exit(5)
while not os.path.exists("failed.pid"): pass
time.sleep(0.01)
raise ConnectionError("rank 1 is gone")
"""
        result = run(tmp_path, "--nproc", "2", write(tmp_path, "train.py", STAY, body))
        assert result.code == 5
        assert "[epl] rank 1 failed with exit code 5" in result.err

    def test_all_ranks_start_anew_as_often_as_allowed(self, tmp_path: Path) -> None:
        body = """
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("start", restart)
if restart == 0 and rank == 1: sys.exit(1)
if restart == 0: time.sleep(60)
"""
        result = run(tmp_path, "--nproc", "2", "--max-restarts", "1", write(tmp_path, "train.py", STAY, body))
        assert result.code == 0
        assert result.out == "start 0\nstart 1\n"
        assert "rank 1 failed with exit code 1" in result.err
        assert "restart 1 of 1" in result.err
        assert result.log("rank_1.log") == "start 0\n"
        assert result.log("rank_1.restart_1.log") == "start 1\n"

    def test_a_failure_on_one_node_ends_the_other_with_the_same_message(self, tmp_path: Path) -> None:
        """Rank 2 fails; for want of it rank 1 on the other node, whose launcher is done first, as rank 3 is stuck."""
        body = """
if rank == 3: signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(f"rank_{rank}", os.getpid())
while not all(os.path.exists(f"rank_{other}.pid") for other in range(4)): time.sleep(0.1)
if rank == 1: time.sleep(0.5)
if rank in (1, 2): sys.exit(rank + 2)
time.sleep(60)
"""
        script = write(tmp_path, "train.py", STAY, body)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        common = ("--nnodes", "2", "--rdzv-endpoint", endpoint)
        with (
            started(tmp_path, *common, "--node-rank", "0", "--nproc", "2", script) as first,
            started(tmp_path, *common, "--node-rank", "1", "--nproc", "2", script) as second,
        ):
            results = [ended(process, tmp_path) for process in (first, second)]
        assert [result.code for result in results] == [4, 4], results
        for result in results:
            assert "[epl] rank 2 failed with exit code 4" in result.err
        assert_gone(pids(tmp_path, "rank_0", "rank_1", "rank_2", "rank_3"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_leaves_no_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    body = ('note(f"helper_{rank}", subprocess.Popen(["sleep", "60"]).pid)', 'note(f"rank_{rank}", os.getpid())')
    with started(tmp_path, "--nproc", "2", write(tmp_path, "train.py", STAY, *body, "time.sleep(60)")) as process:
        processes = pids(tmp_path, "rank_0", "rank_1", "helper_0", "helper_1")
        process.send_signal(number)
        result = ended(process, tmp_path)
    assert result.code == code
    assert f"stopped by {number.name}" in result.err
    assert_gone(processes)


def test_rank_0_is_heard_at_once(tmp_path: Path) -> None:
    """Each side waits for the other: output that is held back anywhere would be a deadlock."""
    body = """
if rank == 0: print("ready?")
while not os.path.exists("go"): time.sleep(0.02)
if rank == 0: print("step 1\\rstep 2", end="")
"""
    with started(tmp_path, "--nproc", "2", write(tmp_path, "train.py", STAY, body)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready?\n"
        (tmp_path / "go").touch()
        result = ended(process, tmp_path)
    assert (result.code, result.out) == (0, "step 1\nstep 2")  # the pipe is read as text, where \\r is a newline
    (log,) = tmp_path.glob("epl_logs/*/rank_0.log")
    assert log.read_bytes() == b"ready?\nstep 1\rstep 2"


class TestArguments:
    """Everything here is decided before a rank is started."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "no script was given: write `epl launch --nproc 2 train.py`"),
            (["nowhere.py"], "there is no script 'nowhere.py' in"),
            (["--nproc", "0", "train.py"], "--nproc is 0: give 1 or more"),
            (["--nnodes", "0", "train.py"], "--nnodes is 0: give 1 or more"),
            (["--max-restarts", "-1", "train.py"], "--max-restarts is -1: give 0 or more"),
            (["--nnodes", "2", "--node-rank", "0", "train.py"], "--nnodes needs --rdzv-endpoint HOST:PORT"),
            (["--nnodes", "2", "--rdzv-endpoint", "a:1", "train.py"], "--nnodes needs --node-rank: "),
            (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1", "train.py"], "it is 0 to 1"),
            (["--node-rank", "1", "train.py"], "--node-rank is 1: with --nnodes 1 it is 0"),
            (["--rdzv-endpoint", "host", "train.py"], "write HOST:PORT, as in node-0:29500"),
            (["--rdzv-endpoint", "host:0", "train.py"], "write HOST:PORT"),
            (["--rdzv-endpoint", "host:99999", "train.py"], "write HOST:PORT"),
            (["--log-dir", "train.py/logs", "train.py"], "--log-dir train.py/logs: no folder can be made there"),
        ],
    )
    def test_bad_arguments_start_nothing(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write(tmp_path, "train.py", "raise SystemExit(9)")
        assert main(["launch", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("epl launch: error: ")
        assert message in captured.err
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]

    def test_a_port_that_is_taken_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with socket.socket() as other:
            other.bind(("0.0.0.0", 0))
            other.listen()
            endpoint = f"127.0.0.1:{other.getsockname()[1]}"
            assert main(["launch", "--rdzv-endpoint", endpoint, write(tmp_path, "train.py", "")]) == 1
        error = capsys.readouterr().err
        assert f"the launchers did not meet at {endpoint} (600 s at most): the port is taken here" in error
        assert "frame #" not in error

    def test_all_mistakes_are_told_at_once(self) -> None:
        with pytest.raises(ClusterError) as error:
            LaunchOptions(script="nowhere.py", nproc=0, nnodes=2)
        assert str(error.value).count("\n  - ") == 4

    @pytest.mark.parametrize("arguments", [["--nproc", "x", "a.py"], ["--frobnicate", "a.py"], ["--npro", "2", "a.py"]])
    def test_unknown_and_unreadable_flags_are_refused(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as error:
            main(["launch", *arguments])
        assert error.value.code == 2

    @pytest.mark.parametrize("before", [[], ["--nproc", "2"], ["--log-dir=logs", "--nproc=2"]])
    @pytest.mark.parametrize(
        "after",
        [
            [],
            ["positional"],
            ["--nproc", "7"],
            ["--nproc=7", "--max-restarts", "3"],
            ["-m", "module"],
            ["-h"],
            ["--help"],
            ["--", "x"],
            ["x", "--", "--nproc", "7"],
            ["--unknown", "-1", "", "a b"],
        ],
    )
    @pytest.mark.parametrize("start", [[], ["-m"], ["--"]])
    def test_what_follows_the_script_is_the_scripts(
        self, monkeypatch: pytest.MonkeyPatch, before: list[str], start: list[str], after: list[str]
    ) -> None:
        given: list[LaunchOptions] = []
        monkeypatch.setattr(epl.cli, "launch", lambda options: given.append(options) or 0)
        # A path that exists; taken as a module's name it is as good as any.
        assert main(["launch", *before, *start, __file__, *after]) == 0
        (options,) = given
        assert (options.script, options.arguments) == (__file__, tuple(after))
        assert (options.is_module, options.max_restarts) == (start == ["-m"], 0)
        if before:
            assert options.nproc == 2
