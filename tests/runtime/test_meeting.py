"""How ranks meet: under Slurm's variables, torchrun's, none at all; and what they say when they do not."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epl
import epl.runtime.interface as interface
from epl.errors import ClusterError, RunError
from epl.runtime.meeting import slurm_address
from tests.jobs import ROOT, Job, patience, started
from tests.ranks import launch, launch_expecting_errors, run_on

FAULTY = str(ROOT / "tests" / "faulty.py")  # without a fault it is a small training job

pytestmark = pytest.mark.timeout(300)  # processes that import torch may start slowly


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node", "node"),
        ("node1,node2", "node1"),
        ("node[01-04,07]", "node01"),
        ("node[7]", "node7"),
        ("gpu-a[09,11-12].cluster,login", "gpu-a09.cluster"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("a1,b[1-2]", "a1"),
    ],
)
def test_slurms_tasks_meet_at_the_first_host_of_the_step(hosts: str, first: str) -> None:
    environ = {"SLURM_STEP_NODELIST": hosts, "SLURM_JOB_NODELIST": "other", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}
    assert slurm_address(environ)[0] == first
    assert slurm_address({"SLURM_JOB_NODELIST": hosts})[0] == first


@pytest.mark.parametrize("hosts", ["", "node[01-04", "[", "a b"])
def test_a_list_of_hosts_that_cannot_be_read_is_refused(hosts: str) -> None:
    with pytest.raises(ClusterError, match="set MASTER_ADDR to the host of rank 0"):
        slurm_address({"SLURM_JOB_NODELIST": hosts})


def test_each_slurm_job_has_a_port_of_its_own() -> None:
    """All tasks of a job find the same one; jobs on one host, which follow one another closely, find others."""
    environ = {"SLURM_JOB_NODELIST": "node", "SLURM_STEP_ID": "0"}
    ports = [slurm_address(environ | {"SLURM_JOB_ID": str(job)})[1] for job in range(70_000, 70_500)]
    assert len(set(ports)) == 500
    assert all(61_000 <= port < 65_536 for port in ports)  # none that the system gives to connections
    assert slurm_address(environ | {"SLURM_JOB_ID": "70000", "SLURM_STEP_ID": "1"})[1] not in ports[:97]


def slurm_task(folder: Path, task: int, *fault: str) -> AbstractContextManager[Job]:
    """One of two tasks of a step on this host."""
    environment = {
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "localhost",
    }
    return started(folder, FAULTY, *fault, environment=environment)


@pytest.mark.slow
def test_a_step_of_slurm_trains_without_any_other_variable(tmp_path: Path) -> None:
    """As srun would start it: one process a task, and nothing but its own variables."""
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(slurm_task(tmp_path, task, "none", "none", "0")) for task in range(2)]
        ended = [task.end() for task in tasks]
    for each in ended:
        assert (each.code, "done" in each.out) == (0, True), each
        assert "c10d" not in each.err  # the store ends with rank 0, and nobody is still talking to it
    assert losses(ended[0].out) == losses(ended[1].out)


@pytest.mark.slow
def test_without_a_launcher_the_others_learn_of_an_error_all_the_same(tmp_path: Path) -> None:
    """Rank 0 holds the store: if it left at once, its last word would leave with it."""
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(slurm_task(tmp_path, task, "between", "raise", "0")) for task in range(2)]
        begin_s = tasks[0].fault_s()
        ended = [task.end() for task in tasks]
        time_s, limit_s = time.time() - begin_s, 10 * patience()
    assert [each.code for each in ended] == [1, 1]
    assert "RunError: rank 0 failed with ValueError: a planted fault" in ended[1].err, ended[1].err
    assert time_s < limit_s, f"after {time_s:.1f} s, not {limit_s:.1f}"


def test_a_script_alone_and_under_torchrun_computes_the_same(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with (
        started(tmp_path, FAULTY, "none", "none", "0") as alone,
        started(tmp_path, *torchrun, FAULTY, "none", "none", "0", environment={"OMP_NUM_THREADS": "1"}) as two,
    ):
        ended = alone.end(), two.end()
    assert [each.code for each in ended] == [0, 0], ended
    both = losses(ended[1].out)
    assert both[::2] == both[1::2]  # the ranks print in turn, or nearly so: every loss is there twice
    assert sorted(both[::2]) == pytest.approx(sorted(losses(ended[0].out)), rel=1e-5)


def losses(out: str) -> list[float]:
    return [float(text) for text in re.findall(r"step \d+ (\S+)", out)]


@run_on(2)
def test_a_later_init_changes_the_limit_and_leaves_nothing_behind(rank: int) -> None:
    """A group keeps the limit that it was made with, unless it is told."""
    seen: set[tuple[int, int]] = set()
    for _ in range(3):
        _engine(limit_s=60.0).train_step(torch.ones(4, 4))
        seen.add(_resources())
    assert len(seen) == 1
    engine = _engine(limit_s=0.5)
    if rank == 1:
        threading.Event().wait(2.0)
        return
    with pytest.raises(RunError, match=r"0\.5 s \(communication.timeout\) have passed(.|\n)*- rank 1 has "):
        engine.train_step(torch.ones(4, 4))
    with pytest.raises(RunError, match="rank 0 has failed before, with RunError"):
        engine.train_step(torch.ones(4, 4))


def _engine(limit_s: float = 60.0) -> Any:
    epl.init(epl.Config({"communication.timeout": limit_s, "run.print_plan": False}))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return epl.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=lambda m, x: m(x).square().mean())


def _resources() -> tuple[int, int]:
    """Threads and open files."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _init_beside_torchs_group(rank: int) -> list[float]:
    dist.init_process_group("gloo")
    engine = _engine()
    return [engine.train_step(torch.ones(4, 4)).item() for _ in range(2)]


def test_a_process_group_of_the_scripts_own_is_used() -> None:
    first, second = launch(2, _init_beside_torchs_group)
    assert first == second


def _meet_with_too_few(rank: int) -> None:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    epl.init(epl.Config({"communication.timeout": 1.0}))


def test_ranks_that_wait_for_one_that_does_not_come_say_so() -> None:
    for error in launch_expecting_errors(2, _meet_with_too_few):
        assert re.search(
            r"RunError: rank \d could not meet the other 2 ranks within 1 s \(communication.timeout\)", error
        )
        assert "frame #" not in error


def _meet_at_a_taken_port(rank: int) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        os.environ |= {"MASTER_PORT": str(other.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        epl.init(epl.Config({"communication.timeout": 2.0}))


def test_a_port_that_is_taken_is_named() -> None:
    (error,) = launch_expecting_errors(1, _meet_at_a_taken_port)
    assert re.search(r"Port \d+ of 127.0.0.1 is taken, perhaps by a job that has not ended: set MASTER_PORT", error)


def _meet_nowhere(rank: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    epl.init()


def test_a_missing_address_is_asked_for() -> None:
    for error in launch_expecting_errors(2, _meet_nowhere):
        assert "ClusterError: MASTER_ADDR is '' and MASTER_PORT '': the 2 ranks need the address" in error


class TestInterfaces:
    """This machine has a loopback interface and, with luck, another one; names are looked up in a table here."""

    @pytest.fixture(autouse=True)
    def _unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    @pytest.mark.parametrize("own", ["127.0.1.1", "192.0.2.1"])
    def test_a_name_that_leads_nowhere_is_replaced_by_the_way_to_rank_0(
        self, monkeypatch: pytest.MonkeyPatch, own: str
    ) -> None:
        """127.0.1.1 is what Debian writes for a machine's own name; 192.0.2.1 belongs to no machine (RFC 5737)."""
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", (own, 0))])
        interface.choose_interface("127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"

    def test_what_the_user_has_set_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        interface.choose_interface("127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"

    def test_a_host_that_is_not_known_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
        interface.choose_interface("no.such.host.invalid")
        assert "GLOO_SOCKET_IFNAME" not in os.environ
