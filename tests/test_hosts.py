"""Two hosts: network namespaces joined by a cable, with a launcher in each.

Only the network is apart: both hosts have one name, which stands for an address of neither, as on many real machines.
Needs root, `ip` (iproute2), and a kernel that has network namespaces and veth.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import ROOT, Ended, Job, patience, started

LIMIT_S = 10.0  # from a fault to the end of all processes on both hosts, on a machine that is free
TIMEOUT_S = 6.0  # for which one rank waits for another
PORT = 29512  # exists inside the namespaces only
pytestmark = pytest.mark.timeout(300)  # a job may start slowly; what has to be soon is measured
FAULTY = str(ROOT / "tests" / "faulty.py")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces; 10.78.0.1 and 10.78.0.2 are their addresses."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("run as root with iproute2 installed (the program `ip`) to test two hosts")
    names = [f"epl{os.getpid()}h{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v0", "netns", names[1])
            for number, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "v0")
                ip("-n", name, "link", "set", "v0", "up")
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode().strip()
            pytest.skip(
                "run where network namespaces and veth are allowed to test two hosts (in docker: --cap-add NET_ADMIN,"
                f"SYS_ADMIN); ip said: {reason}"
            )
        yield names


@contextlib.contextmanager
def two_hosts(hosts: list[str], folder: Path, *fault: object, nproc: int = 1) -> Iterator[list[Job]]:
    """One launcher on each host."""
    common = ("-m", "epl.cli", "launch", "--nnodes", "2", "--rdzv-endpoint", f"10.78.0.1:{PORT}", "--nproc", str(nproc))
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    folder,
                    *(*common, "--node-rank", str(number), FAULTY, *map(str, fault)),
                    prefix=("ip", "netns", "exec", host),
                    environment={"EPL_COMMUNICATION_TIMEOUT": str(TIMEOUT_S)},
                )
            )
            for number, host in enumerate(hosts)
        ]


def all_gone(jobs: list[Job], begin_s: float, limit_s: float = LIMIT_S) -> list[Ended]:
    """How both launchers ended, once nothing is left on either host."""
    ended = [job.end() for job in jobs]
    for job in jobs:
        job.wait_until_gone(limit_s)
    time_s, limit_s = time.time() - begin_s, limit_s * patience()
    assert time_s < limit_s, f"after {time_s:.1f} s, not {limit_s:.1f}\n{ended}"
    return ended


def losses(out: str) -> list[float]:
    return [float(text) for text in re.findall(r"step \d+ (\S+)", out)]


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(hosts: list[str], tmp_path: Path) -> None:
    with started(tmp_path, FAULTY, "none", "none", "0") as alone:
        plain = alone.end()
    with two_hosts(hosts, tmp_path, "none", "none", 0, nproc=2) as jobs:
        first, second = [job.end() for job in jobs]
    assert (plain.code, first.code, second.code) == (0, 0, 0), (plain, first, second)
    assert len(losses(plain.out)) == 6
    assert losses(first.out) == pytest.approx(losses(plain.out), rel=1e-5)


@pytest.mark.slow
def test_a_rank_killed_on_one_host_ends_both(hosts: list[str], tmp_path: Path) -> None:
    with two_hosts(hosts, tmp_path, "forward", "kill", 1) as jobs:
        ended = all_gone(jobs, jobs[0].fault_s())
    assert [each.code for each in ended] == [137, 137]
    for each in ended:
        assert "[epl] rank 1 was killed by SIGKILL" in each.err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_killed_on_one_host_ends_both(hosts: list[str], tmp_path: Path, victim: int) -> None:
    """Node 0's launcher takes the store with it; node 1's takes nothing, but leaves ranks that nobody ends."""
    with two_hosts(hosts, tmp_path, "forward", "loop", 1) as jobs:
        jobs[0].fault_s()
        killed_s = time.time()
        os.kill(jobs[victim].process.pid, signal.SIGKILL)
        ended = all_gone(jobs, killed_s)
    assert ended[victim].code == -signal.SIGKILL
    assert ended[1 - victim].code == 1
    reason = (
        "the launcher of node 0 at 10.78.0.1:29512 is gone",
        r"rank 1 failed with RunError: its launcher, process \d+",
    )
    assert re.search(reason[victim], ended[1 - victim].err), ended[1 - victim].err


@pytest.mark.slow
def test_a_cut_cable_ends_both_hosts_at_the_limit(hosts: list[str], tmp_path: Path) -> None:
    """Nothing tells either side: packets are lost, connections stay."""
    with two_hosts(hosts, tmp_path, "between", "sleep", 1) as jobs:
        begin_s = jobs[0].fault_s()
        ip("-n", hosts[1], "link", "set", "v0", "down")
        try:
            ended = all_gone(jobs, begin_s, TIMEOUT_S + 40)
        finally:
            ip("-n", hosts[1], "link", "set", "v0", "up")
    assert all(each.code for each in ended)
