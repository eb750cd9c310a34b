"""What ranks learn about one another, without ranks: several watches in one process, at one store."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from epl.runtime.bulletin import Bulletin
from epl.runtime.watch import Link, Watch


class Hub:
    """A store, and the watches at it; each notes when it hangs up."""

    def __init__(self) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.hung_up: list[int] = []
        self.watches: list[Watch] = []

    def join(self, size: int, *, agent_has_store: bool = True) -> list[Watch]:
        port, wait = self.store.port, timedelta(seconds=10)
        for rank in range(size):
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
            watch = Watch(rank, size)
            note = functools.partial(self.hung_up.append, rank)
            holds = rank == 0 and not agent_has_store
            watch.attach(Link(Bulletin(rank, size, store), note, holds_store=holds, agent_has_store=agent_has_store))
            self.watches.append(watch)
        return self.watches

    def hangs_up(self, rank: int, within_s: float) -> bool:
        deadline_s = time.monotonic() + within_s
        while rank not in self.hung_up and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return rank in self.hung_up


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    for watch in hub.watches:
        watch.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "epl watch"]


def test_a_line_says_what_is_done_or_waited_for_and_since_when() -> None:
    watch = Watch(0, 1)
    assert watch.line() == "has been computing in the script, after 0 steps for 0 s"
    watch.now("0F1")
    assert watch.line() == "has been computing in 0F1 for 0 s"
    with watch.waiting("x from rank 1", (1,)):
        assert watch.line() == "has been waiting for x from rank 1 for 0 s, in 0F1"
        with watch.waiting("y"):
            assert watch.line().startswith("has been waiting for y")
    watch.after_run()
    assert watch.line() == "has been computing in the script, after 1 step for 0 s"


def test_a_world_of_one_has_no_thread_and_leaves_nothing() -> None:
    before = threading.active_count()
    watch = Watch(0, 1)
    watch.report_failure(ValueError("x"))
    assert watch.find_reason((), ran_out=True) == (None, [])
    watch.close()
    assert (threading.active_count(), watch.own_failure) == (before, None)


def test_who_computes_is_named_before_who_waits(hub: Hub) -> None:
    first, second, third, _ = hub.join(4)
    third.now("2B0")
    with first.waiting("x", (1,)), second.waiting("y", (2,)):
        cause, lines = first.find_reason((1,), ran_out=True)
    assert cause is None
    assert [line.split(" for ")[0] for line in lines] == [
        "rank 2 has been computing in 2B0",
        "rank 3 has been computing in the script, after 0 steps",
        "rank 1 has been waiting",
    ]


def test_all_ranks_may_ask_at_once(hub: Hub) -> None:
    """Limits run out at the same time on all ranks that wait for one; each still gets every answer, and soon."""
    watches = hub.join(8)
    reasons: dict[int, list[str]] = {}

    def ask(rank: int) -> None:
        with watches[rank].waiting("the sum"):
            reasons[rank] = watches[rank].find_reason((), ran_out=True).lines

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(7)]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin_s < 3
    for rank in range(7):
        assert len(reasons[rank]) == 7
        assert reasons[rank][0].startswith("rank 7 has been computing")
        assert not any("does not answer" in line for line in reasons[rank])


def test_a_long_list_keeps_the_culprit_and_counts_the_rest(hub: Hub) -> None:
    """The launcher shows the end of a log: a line for each of a thousand ranks would push the first ones out."""
    watches = hub.join(16)
    with contextlib.ExitStack() as stack:
        for watch in watches[:-1]:
            stack.enter_context(watch.waiting("x"))
        _, lines = watches[0].find_reason((), ran_out=True)
    assert lines[0].startswith("rank 15 has been computing")
    assert len(lines) == 9
    assert lines[-1].startswith("and 7 more; the last of them: rank 14 has been waiting for x")


def test_the_first_failure_is_the_cause_for_every_other_rank(hub: Hub) -> None:
    first, second, third = hub.join(3)
    second.report_failure(ValueError("wrong"))
    third.report_failure(RuntimeError("for want of rank 1"))
    assert first.find_reason((2,), ran_out=False).cause == "rank 1 failed with ValueError: wrong"
    assert third.find_reason((), ran_out=False).cause == "rank 1 failed with ValueError: wrong"
    assert second.own_failure == "ValueError: wrong"


def test_a_wait_ends_soon_after_another_ranks_failure(hub: Hub) -> None:
    first, second = hub.join(2)
    with first.waiting("x"):
        second.report_failure(ValueError("wrong"))
        assert hub.hangs_up(0, within_s=3)
    assert not hub.hangs_up(1, within_s=0.5)  # it knows: it has raised the error itself


def test_a_rank_that_has_raised_is_left_alone(hub: Hub) -> None:
    """What its script does then, such as writing a checkpoint, is not EPL's to end."""
    first, second = hub.join(2)
    second.report_failure(ValueError("wrong"))
    first.report_failure(RuntimeError("rank 1 failed"))
    with first.waiting("something of the script's own"):
        assert not hub.hangs_up(0, within_s=2)


def test_only_a_wait_for_the_rank_that_has_ended_is_cut_short(hub: Hub) -> None:
    """Replicas may end one after the other: that one has left does not mean that another one cannot go on."""
    first, second, third = hub.join(3)
    third.after_run()
    with first.waiting("x", (1,)), second.waiting("y", (2,)):
        third.close()
        assert hub.hangs_up(1, within_s=5)
        assert 0 not in hub.hung_up
        cause = second.find_reason((2,), ran_out=False).cause
        assert cause is not None
        assert cause.startswith("rank 2 has ended its script, after 1 step, while other ranks wait for it")
        assert any(
            line.startswith("rank 2 has ended its script") for line in first.find_reason((1,), ran_out=True).lines
        )


def test_a_lost_store_ends_the_waits_for_whoever_held_it(hub: Hub) -> None:
    """With it goes the way in which a failure would be told: its end is all that the others will hear."""
    (watch,) = Hub.join(hub, 1, agent_has_store=False)[:1]
    watch._size = 2  # the other rank, 0, holds the store
    with watch.waiting("x", (0,)):
        hub.store = None
        assert hub.hangs_up(0, within_s=6)
    cause = watch.find_reason((0,), ran_out=False).cause
    assert cause == "rank 0 has ended, and with it the store through which the ranks talk"


def test_closing_does_not_hang_on_a_store_that_is_gone(hub: Hub) -> None:
    (watch,) = hub.join(1)
    hub.store = None
    begin_s = time.monotonic()
    watch.report_failure(ValueError("x"))
    watch.close()
    watch.close()
    assert time.monotonic() - begin_s < 3
