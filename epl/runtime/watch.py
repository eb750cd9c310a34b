"""Who is doing what: so that a rank that fails ends the others, and a rank that hangs is named with what it owes.

Each rank keeps one line about itself: the instruction it runs, or what it waits for, and since when. A thread beside
the main one reads and writes the job's bulletin (`epl.runtime.bulletin`): it answers when another rank asks what this
one does, and learns which rank has failed, or has ended its script early. It alone talks to the store, so that a store
that does not answer holds up nobody else.

When another rank has failed, or one that is waited for has ended, the main thread usually loses a connection and raises
by itself. If it stays in a wait all the same, where Python cannot interrupt it, the thread closes this rank's
connections, which ends the wait with an error; if even that does not help, it ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from epl.runtime.bulletin import Bulletin, Failure

__all__ = ["Link", "Reason", "Watch"]

_PERIOD_S = 0.5  # how often the thread looks: one small message to the store each time
_ASKING_PERIOD_S = 0.1  # while the main thread waits for answers
_ANSWERS_S = 3.0  # how long the other ranks have for an answer; each looks twice a second
_REPORT_S = 5.0  # how long a rank that lost a connection to living ranks waits for the one to report that closed it
_TOLD_S = 1.0  # how long the main thread waits until its own failure is told
_HANG_UP_S = 0.5  # in a wait after another rank's failure
_GONE_S = 2.0  # the same where a rank has ended in peace: what it sent last may still be on its way
_END_S = 6.0  # from a failure to the end of a process that nothing brings out of its wait
_PATIENCE_S = 30.0  # the same for one that computes, and will meet the failure at its next wait
_LINGER_S = 3.0  # how long rank 0 stays at its end, if the store ends with it, for others to read how it ended
_MAX_LINES = 8

_SILENT = "does not answer: its process has ended, is stopped, or hangs outside Python"
_STORE_GONE = "the launcher of node 0 has ended, and with it the store through which the ranks talk"


class Link(NamedTuple):
    """What joins this rank to the others.

    Args:
        bulletin: Where the ranks leave word.
        hang_up: Closes this rank's connections.
        holds_store: True if the store ends with this process.
        agent_has_store: True if the store ends with the launcher of node 0; else it ends with rank 0.
        store: What the bulletin's own connection was cloned from; where this rank serves it, it ends with this object.
    """

    bulletin: Bulletin
    hang_up: Callable[[], None]
    holds_store: bool
    agent_has_store: bool
    store: Any = None


class _Script(NamedTuple):
    """The user's code, outside of EPL's."""

    num_runs: int

    @property
    def place(self) -> str:
        return f"after {self.num_runs} {'step' if self.num_runs == 1 else 'steps'}"

    def __str__(self) -> str:
        return f"the script, {self.place}"


class Reason(NamedTuple):
    """Why a wait failed: the cause, if it is known; else what the other ranks say they are doing."""

    cause: str | None
    lines: list[str]


class Watch:
    """One rank's line about itself, and the thread that tells it to others. A world of one has no thread.

    Args:
        rank: This rank.
        size: Ranks in all.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._num_runs = 0
        # (what is done, since when, what is waited for, by which ranks): one tuple, which another thread reads whole
        self._state: tuple[object, float, str | None, Sequence[int]] = (_Script(0), time.monotonic(), None, ())
        self._own_failure: str | None = None
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._leave_by_s: float | None = None
        self._mail: deque[Callable[[Bulletin], None]] = deque()  # what the main thread has to tell
        # what the thread has learned; the condition guards it
        self._learned = threading.Condition()
        self._failure: Failure | None = None
        self._gone: dict[int, str] = {}
        self._store_is_gone = False
        self._learned_s = 0.0  # when one of the three above changed last
        self._asking = False
        self._answers: dict[int, str] = {}
        self._has_hung_up = False

    def attach(self, link: Link) -> None:
        """Start to listen to the other ranks."""
        self._link = link
        self._thread = threading.Thread(target=self._run, args=(link,), name="epl watch", daemon=True)
        self._thread.start()

    # -- this rank ----------------------------------------------------------------------------------------------

    def now(self, doing: object) -> None:
        """Say what the main thread does from here on; text is made only when somebody asks."""
        self._state = (doing, time.monotonic(), None, ())

    def after_run(self) -> None:
        """Say that a program has been run to its end."""
        self._num_runs += 1
        self.now(_Script(self._num_runs))

    @contextlib.contextmanager
    def waiting(self, what: str, ranks: Sequence[int] = ()) -> Any:
        """Say that the main thread waits.

        Args:
            what: For what.
            ranks: Each of them has to do something for the wait to end; empty: not known.
        """
        before = self._state
        self._state = (before[0], time.monotonic(), what, ranks)
        try:
            yield
        finally:
            self._state = before

    def line(self) -> str:
        """What this rank is doing, as text."""
        doing, since_s, waits_for, _ = self._state
        passed_s = time.monotonic() - since_s
        if waits_for is not None:
            return f"has been waiting for {waits_for} for {passed_s:.0f} s, in {doing}"
        return f"has been computing in {doing} for {passed_s:.0f} s"

    # -- failures -----------------------------------------------------------------------------------------------

    @property
    def own_failure(self) -> str | None:
        """Why this rank has failed, if it has: the ranks are out of step then, and none can wait for another."""
        return self._own_failure

    def report_failure(self, error: BaseException) -> None:
        """Leave word of this rank's error; the first one that any rank reports counts."""
        if self._link is None or self._own_failure is not None:
            return
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        self._own_failure = text = f"{type(error).__name__}: {error}{notes}"
        self._post(lambda bulletin: bulletin.tell_failure(text), _TOLD_S)

    def find_reason(self, ranks: Sequence[int], *, ran_out: bool) -> Reason:
        """Why a wait failed.

        Args:
            ranks: Those that were waited for.
            ran_out: True if time ran out; False if a connection was lost.
        """
        if self._link is None:
            return Reason(None, [])
        begin_s = time.monotonic()
        self._asking = True
        self._wake.set()
        with self._learned:
            while (cause := self._cause(ranks)) is None and not self._has_heard_enough(begin_s, ran_out):
                self._learned.wait(_ASKING_PERIOD_S)
            self._asking = False
            return Reason(cause, [] if cause else self._lines())

    def _cause(self, ranks: Sequence[int]) -> str | None:
        if self._failure is not None and self._failure.rank != self._rank:
            return str(self._failure)
        for rank in ranks:
            if rank in self._gone:
                return f"rank {rank} {self._gone[rank]}"
        if self._store_is_gone and self._link is not None and self._link.agent_has_store:
            return _STORE_GONE
        return None

    def _has_heard_enough(self, begin_s: float, ran_out: bool) -> bool:
        passed_s = time.monotonic() - begin_s
        if len(self._answers.keys() | self._gone.keys() | {self._rank}) < self._size:
            return passed_s > _ANSWERS_S  # the others are silent, which is what there is to say
        return ran_out or passed_s > _REPORT_S

    def _lines(self) -> list[str]:
        """What the other ranks do: first those that keep the others waiting, by all one can see."""
        said = {rank: (self._answers | self._gone).get(rank, _SILENT) for rank in range(self._size)}
        lines = [f"rank {rank} {line}" for rank, line in said.items() if rank != self._rank]
        lines.sort(key=lambda line: "has been waiting" in line)
        more = len(lines) - _MAX_LINES
        return lines if more <= 1 else [*lines[:_MAX_LINES], f"and {more} more; the last of them: {lines[-1]}"]

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell the other ranks that this one's script has ended, and how, and stop the thread."""
        thread, self._thread = self._thread, None
        if thread is None or self._link is None or os.getpid() != self._pid:  # the last: in a process forked off
            return
        error = getattr(sys, "last_value", None)
        if error is not None:  # nothing has caught it
            self.report_failure(error)
        how = f"has ended: {self._own_failure}" if self._own_failure else self._farewell()
        self._post(lambda bulletin: bulletin.tell_gone(how), 0.0)
        self._leave_by_s = time.monotonic() + (_LINGER_S if self._link.holds_store else 0.0)
        self._wake.set()
        # one that came back from the store while the interpreter ends would crash it
        thread.join(timeout=_LINGER_S + _TOLD_S)

    def _farewell(self) -> str:
        doing = self._state[0]
        where = doing.place if isinstance(doing, _Script) else f"in {doing}"
        return f"has ended its script, {where}, while other ranks wait for it: all ranks have to do the same steps"

    # -- the thread ---------------------------------------------------------------------------------------------

    def _post(self, message: Callable[[Bulletin], None], wait_s: float) -> None:
        """Let the thread tell something, and wait for that, but not for ever."""
        told = threading.Event()

        def tell(bulletin: Bulletin) -> None:
            message(bulletin)
            told.set()

        self._mail.append(tell)
        self._wake.set()
        if self._link is not None and not self._store_is_gone:
            told.wait(wait_s)

    def _run(self, link: Link) -> None:
        question: int | None = None
        while not self._may_leave(link):
            self._wake.wait(_ASKING_PERIOD_S if self._asking or self._leave_by_s is not None else _PERIOD_S)
            self._wake.clear()
            if not self._store_is_gone:
                try:
                    question = self._exchange(link.bulletin, question)
                except RuntimeError:
                    self._lose_store(link)
            self._enforce(link)

    def _may_leave(self, link: Link) -> bool:
        if self._leave_by_s is None:
            return False
        if self._store_is_gone or (not self._mail and not link.holds_store):
            return True
        return len(self._gone) == self._size or time.monotonic() > self._leave_by_s

    def _exchange(self, bulletin: Bulletin, question: int | None) -> int | None:
        """Tell and learn what there is; takes and gives the number of the question that is open."""
        while self._mail:
            self._mail.popleft()(bulletin)
        if not self._asking:
            question = None
        elif question is None:
            question = bulletin.ask()
        number = bulletin.changed()
        if number is not None:
            bulletin.answer(number, self.line())
            self._learn(bulletin.failure(), bulletin.gone())
        if question is not None:
            answers = bulletin.answers(question)
            with self._learned:
                self._answers = answers
                self._learned.notify_all()
        return question

    def _learn(self, failure: Failure | None, gone: dict[int, str]) -> None:
        with self._learned:
            if (failure, gone) != (self._failure, self._gone):
                self._learned_s = time.monotonic()
            self._failure, self._gone = failure, gone
            self._learned.notify_all()

    def _lose_store(self, link: Link) -> None:
        with self._learned:
            self._store_is_gone = True
            self._learned_s = time.monotonic()
            if not link.agent_has_store:
                self._gone.setdefault(0, "has ended, and with it the store through which the ranks talk")
            self._learned.notify_all()

    def _enforce(self, link: Link) -> None:
        """Bring the main thread out of a wait that cannot end, or end the process."""
        _, since_s, waits_for, ranks = self._state
        cause = self._cause(ranks)
        if cause is None or self._own_failure is not None or self._leave_by_s is not None:
            return  # nothing is wrong, or the main thread knows it
        passed_s = time.monotonic() - max(since_s, self._learned_s)
        grace_s = _GONE_S if self._failure is None else _HANG_UP_S
        if waits_for is not None and passed_s > grace_s and not self._has_hung_up:
            self._has_hung_up = True
            link.hang_up()
        if passed_s > (_PATIENCE_S if waits_for is None else grace_s + _END_S):
            self._end_process(cause)

    def _end_process(self, cause: str) -> None:
        with contextlib.suppress(OSError):  # nobody may be left to read it
            print(f"epl: rank {self._rank} ends, as {cause}", file=sys.stderr, flush=True)
        os._exit(1)
