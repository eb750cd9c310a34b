"""The harness that multi-rank tests stand on: were it wrong, a failing rank could pass or a hang could say nothing."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import launch, launch_expecting_errors, run_on


def _environment(rank: int) -> tuple[int, list[str], int]:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    return rank, [os.environ[name] for name in names], torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_finds_what_a_launcher_sets_and_computes_on_one_thread(world_size):
    expected = [(r, [str(r), str(r), str(world_size), str(world_size), "127.0.0.1"], 1) for r in range(world_size)]
    assert launch(world_size, _environment) == expected


def _sum_of_ranks(rank: int, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    total = scale * rank
    dist.all_reduce(total)
    return {"total": total, "part": torch.full((2,), rank, dtype=torch.int32)[:1]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_meet_through_their_environment_and_tensors_travel_by_copy(world_size):
    results = launch(world_size, _sum_of_ranks, torch.ones(3, dtype=torch.float64))
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["total"], torch.full((3,), sum(range(world_size)), dtype=torch.float64))
        assert result["part"].tolist() == [rank]
        assert not result["total"].is_shared()


def _fail_while_others_wait(rank: int) -> None:
    dist.init_process_group("gloo")
    if rank == 2:
        raise ValueError("the cause")
    dist.barrier()


def test_the_first_failure_is_told_and_not_what_it_did_to_the_others():
    with pytest.raises(AssertionError, match=r"(?s)rank 2 failed:.*_fail_while_others_wait.*the cause"):
        launch(3, _fail_while_others_wait)
    assert not multiprocessing.active_children()


def _die(rank: int) -> None:
    dist.init_process_group("gloo")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named_with_its_exit_code():
    with pytest.raises(AssertionError, match=r"rank 1 failed:\nthe process died without a traceback \(exit code -9\)"):
        launch(2, _die)
    with pytest.raises(AssertionError, match="the process died"):
        launch_expecting_errors(2, _die)


def _hang(rank: int) -> None:
    while rank != 0:
        time.sleep(0.01)


def test_a_hang_shows_the_line_of_each_rank_that_hangs():
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[1, 2\] did not finish.*rank 1 is at:.*_hang.*rank 2 is at:"):
        launch(3, _hang, timeout_s=0.5)
    assert not multiprocessing.active_children()


def _refuse(rank: int, willing: list[int]) -> str:
    if rank in willing:
        return "went on"
    raise KeyError(f"rank {rank} refuses")


def test_expected_errors_come_back_from_every_rank():
    assert launch_expecting_errors(2, _refuse, []) == ["KeyError: 'rank 0 refuses'", "KeyError: 'rank 1 refuses'"]
    with pytest.raises(AssertionError, match="rank 1 raised nothing and returned 'went on'"):
        launch_expecting_errors(2, _refuse, [1])


def _lambda(rank: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_travel_is_a_failure_with_its_reason():
    with pytest.raises(AssertionError, match=r"(?s)rank 0 failed:.*pickle"):
        launch(1, _lambda)


def _setting_and_folder(rank: int) -> tuple[str | None, str]:
    return os.environ.get("EPL_TESTS_SETTING"), os.getcwd()


def test_ranks_see_the_environment_and_folder_of_this_moment(monkeypatch, tmp_path):
    """The process that ranks fork from is older than both."""
    assert launch(1, _setting_and_folder) == [(None, os.getcwd())]
    monkeypatch.setenv("EPL_TESTS_SETTING", "on")
    monkeypatch.chdir(tmp_path)
    assert launch(1, _setting_and_folder) == [("on", str(tmp_path))]


@pytest.mark.parametrize("factor", [2, 5])
@run_on(2)
def test_a_decorated_body_gets_its_rank_parameters_and_fixtures(rank, factor, tmp_path: Path):
    dist.init_process_group("gloo")
    (tmp_path / str(rank)).write_text(str(factor * rank))
    dist.barrier()
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["0", str(factor)]


@run_on(2)
def _decorated_failure(rank):
    assert rank == 0, "rank 1 disagrees"


def test_a_decorated_body_that_fails_on_one_rank_fails_the_test():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed:.*rank 1 disagrees"):
        _decorated_failure()
