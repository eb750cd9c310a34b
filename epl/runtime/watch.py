"""Who is doing what: so that a rank that fails ends the others, and a rank that hangs is named with what it owes.

Each rank keeps one line about itself (the instruction it runs, or what it waits for, and since when). A thread beside
the main one answers when another rank asks for it, through the job's key-value store. So a rank whose wait ran out can
say which ranks are waiting like itself, which one is computing, and which one does not answer at all.

The same thread sees that another rank has reported a failure. The main thread usually loses its connection to that rank
and raises by itself; if it is still stuck in a wait after a grace period, where Python cannot interrupt it, the thread
ends the process with the other rank's error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

__all__ = ["Watch"]

_FAILURE, _QUESTION = "failure", "question"
_PERIOD_S = 0.5
_GRACE_S = 5.0
_ANSWER_S = 3.0  # how long a rank has for its answer; the thread looks twice a second


class Watch:
    """One rank's line about itself, and the thread that tells it to others.

    Args:
        rank: This rank.
        size: Ranks in all.
        store: The job's key-value store; None in a world of one, where nothing is watched.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._doing: object = "starting"
        self._since = time.monotonic()
        self._waiting_for: str | None = None
        self._answered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None:
            # a connection of its own: the main thread may be inside a call on the other one
            self._thread = threading.Thread(target=self._run, args=(store.clone(),), name="epl watch", daemon=True)
            self._thread.start()

    # -- this rank ----------------------------------------------------------------------------------------------

    def now(self, doing: object) -> None:
        """Say what the main thread does from here on; text is made only when somebody asks."""
        self._doing, self._since = doing, time.monotonic()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Any:
        """Say that the main thread waits."""
        before = self._waiting_for, self._since
        self._waiting_for, self._since = what, time.monotonic()
        try:
            yield
        finally:
            self._waiting_for, self._since = before

    def line(self) -> str:
        """What this rank is doing, as text."""
        passed = time.monotonic() - self._since
        if self._waiting_for is not None:
            return f"has been waiting for {self._waiting_for} for {passed:.0f} s, in {self._doing}"
        return f"has been computing in {self._doing} for {passed:.0f} s"

    # -- failures -----------------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> None:
        """Leave word of this rank's error; the first one that any rank reports counts."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_FAILURE, "", f"{self._rank}|{type(error).__name__}: {error}")

    def failure(self, wait_s: float) -> str | None:
        """The first failure that another rank reported, looked for until ``wait_s`` have passed."""
        deadline = time.monotonic() + wait_s
        while self._store is not None:
            found = self._read_failure(self._store)
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)
        return None

    def _read_failure(self, store: Any) -> str | None:
        with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that held it
            if store.check([_FAILURE]):
                rank, _, text = store.get(_FAILURE).decode().partition("|")
                return None if int(rank) == self._rank else f"rank {rank} failed with {text}"
        return None

    # -- questions ----------------------------------------------------------------------------------------------

    def ask_all(self) -> list[str]:
        """What every other rank says it is doing: first those that keep the others waiting, by all one can see."""
        if self._store is None:
            return []
        answers: dict[int, str] = {}
        others = [rank for rank in range(self._size) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            number = self._store.add(_QUESTION, 1)
            deadline = time.monotonic() + _ANSWER_S
            while len(answers) < len(others) and time.monotonic() < deadline:
                time.sleep(0.1)
                for rank in set(others) - set(answers):
                    answered, _, line = self._read_line(rank).partition("|")
                    if int(answered or 0) >= number:
                        answers[rank] = line
        silent = "does not answer: its process has ended, or hangs outside Python"
        lines = [f"rank {rank} {answers.get(rank, silent)}" for rank in others]
        return sorted(lines, key=lambda line: "has been waiting" in line)

    def _read_line(self, rank: int) -> str:
        key = f"line.{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _run(self, store: Any) -> None:
        failed_at: float | None = None
        while not self._stop.wait(_PERIOD_S):
            try:
                self._answer(store)
            except RuntimeError:
                return  # the store is gone; waits will fail by themselves
            if self._read_failure(store) is not None:
                failed_at = failed_at or time.monotonic()
                if self._waiting_for is not None and time.monotonic() - failed_at > _GRACE_S:
                    self._end_process(store)

    def _answer(self, store: Any) -> None:
        asked = store.add(_QUESTION, 0)
        if asked != self._answered:
            self._answered = asked
            store.set(f"line.{self._rank}", f"{asked}|{self.line()}")

    def _end_process(self, store: Any) -> None:
        print(f"epl: rank {self._rank} ends: {self._read_failure(store)}", file=sys.stderr, flush=True)
        os._exit(1)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _PERIOD_S)
            self._thread = None
