"""Env is one for the whole process, is replaced as a whole, and starts from what the launcher set up."""

from __future__ import annotations

import os
import threading

import pytest

import epl.env
from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.errors import ClusterError


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch):
    """No settings, no launcher, and nothing set before."""
    launcher = ("EPL_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
    for variable in [name for name in os.environ if name.startswith(launcher)]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(epl.env, "_HOLDER", type(epl.env._HOLDER)())


def test_before_the_first_reset_there_are_defaults_and_one_device():
    assert Env.get().config == Config()
    assert Env.get().cluster == Cluster()
    assert Env.get() is Env.get()


def test_before_the_first_reset_the_launcher_and_the_environment_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPL_PIPELINE_NUM_MICRO_BATCH", "4")
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert Env.get().config.pipeline.num_micro_batch == 4
    assert (Env.get().cluster.rank, Env.get().cluster.total_gpu_num) == (1, 2)


def test_settings_do_not_leak_from_a_previous_reset():
    Env.reset(Config({"pipeline.num_micro_batch": 4}), Cluster((4, 4)))
    Env.reset(Config({"communication.max_splits": 3}), Cluster((2,)))
    assert Env.get().config == Config({"communication.max_splits": 3})
    assert Env.get().cluster == Cluster((2,))
    Env.reset()
    assert (Env.get().config, Env.get().cluster) == (Config(), Cluster())


def test_reset_returns_what_get_gives():
    assert Env.reset(Config(), Cluster((4,))) is Env.get()


def test_assignments_to_the_users_config_count_after_reset():
    config = Config()
    Env.reset(config)
    config.pipeline.num_micro_batch = 4
    assert Env.get().config.pipeline.num_micro_batch == 4


def test_other_threads_see_the_same_env():
    """With a ContextVar this thread would see the defaults."""
    Env.reset(Config(), Cluster((4, 4), rank=5))
    seen: list[Env] = []
    thread = threading.Thread(target=lambda: seen.append(Env.get()))
    thread.start()
    thread.join()
    assert seen == [Env.get()]
    assert seen[0].cluster.worker_index == 1


def test_threads_that_ask_first_at_once_get_one_env():
    barrier = threading.Barrier(8)
    seen: list[Env] = []

    def ask() -> None:
        barrier.wait()
        seen.append(Env.get())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1


def test_a_reset_that_fails_leaves_the_env_before(monkeypatch: pytest.MonkeyPatch):
    before = Env.reset(Config(), Cluster((4,)))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ClusterError, match="WORLD_SIZE"):
        Env.reset(Config())
    assert Env.get() is before


def test_an_env_cannot_be_changed_in_part():
    with pytest.raises(AttributeError, match="cluster"):
        Env.get().cluster = Cluster((4,))  # pyright: ignore[reportAttributeAccessIssue]
