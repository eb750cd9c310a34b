"""Where the launchers of several nodes tell one another of success and failure: keys in the store that node 0 holds.

A store whose host is off, or behind a cut cable, does not answer, and a call to it does not end: for as long as the
system repeats its packets, a quarter of an hour. So calls are made by a thread, and the launcher waits for them only
so long; meanwhile it watches its own ranks, and Ctrl-C works.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

__all__ = ["Board", "Failure", "SilentError"]

_ASK_EVERY_S = 0.5  # how often a node asks whether another one failed, which is a message to node 0 each time
_SILENCE_S = 30.0  # how long node 0 may not answer: much longer than a busy machine or network takes
_POST_S = 6.0  # how long a node that has failed waits for the failure of one that failed before it
_LINGER_S = 5.0  # how long node 0 stays for the others to read why all stop

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """Why the run ends, as every node reports it."""

    exit_code: int
    text: str


class SilentError(Exception):
    """Node 0 is not there any more, or not to be reached."""


class Board:
    """One node's access to the keys.

    Failures of separate starts of the ranks do not meet: each start has keys of its own.

    Args:
        store: Held by node 0.
        node: This node.
        num_nodes: Nodes in all.
        start: The number of this start of the ranks.
    """

    def __init__(self, store: Store, node: int, num_nodes: int, start: int) -> None:
        self._store = store
        self._num_nodes = num_nodes
        self._is_host = node == 0
        self._me = str(node)
        names = ("claimed", "failed", "done", "seen")
        self._claimed, self._failed, self._done, self._seen = (f"epl/{start}/{name}" for name in names)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_silent = False
        self._looking: Future[Failure | None] | None = None
        self._looked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="epl board", daemon=True)
        self._thread.start()

    def claim(self) -> None:
        """Be the node whose failure it is, if no other one is yet.

        To be called before the other ranks are ended: that takes seconds, in which ranks of other nodes fail for want
        of these.
        """
        self._start(lambda: self._store.compare_set(self._claimed, "", self._me))

    def post(self, failure: Failure) -> Failure:
        """Make a failure known. Returns that of the node that was first, for which it waits if that is another one.

        Raises:
            SilentError: node 0 does not answer.
        """
        first = self._call(lambda: self._store.compare_set(self._claimed, "", self._me).decode(), _POST_S)
        stop_by_s = time.monotonic() + _POST_S
        while first != self._me and not self._call(self._has_failed, _POST_S) and time.monotonic() < stop_by_s:
            time.sleep(0.1)
        mine = json.dumps(dataclasses.asdict(failure))
        return _read(self._call(lambda: self._store.compare_set(self._failed, "", mine), _POST_S))

    def look(self) -> Failure | None:
        """A failure of any node, if one is known by now; does not wait.

        Raises:
            SilentError: node 0 has not answered for a long time.
        """
        now_s = time.monotonic()
        if self._looking is None and now_s > self._looked_s + _ASK_EVERY_S:
            self._looking, self._looked_s = self._start(self._read_failure), now_s
        if self._looking is None:
            return None
        if not self._looking.done() and now_s < self._looked_s + _SILENCE_S:
            return None
        looking, self._looking = self._looking, None
        return self._result(looking, 0.0)

    def await_success(self) -> Failure | None:
        """Wait for the ranks of all nodes: for a failure of one of them, or None when all have succeeded.

        Raises:
            SilentError: node 0 has not answered for a long time.
        """
        num_done = self._call(lambda: self._store.add(self._done, 1), _SILENCE_S)
        while num_done < self._num_nodes:
            if failure := self.look():
                return failure
            time.sleep(_ASK_EVERY_S)
            num_done = self._call(lambda: self._store.add(self._done, 0), _SILENCE_S)
        return None

    def linger(self) -> None:
        """On node 0, with which the store ends: wait a little until the other nodes have read the failure."""
        stop_by_s = time.monotonic() + _LINGER_S
        try:
            num_seen = self._call(lambda: self._store.add(self._seen, 1), _LINGER_S)
            while self._is_host and num_seen < self._num_nodes and time.monotonic() < stop_by_s:
                time.sleep(0.1)
                num_seen = self._call(lambda: self._store.add(self._seen, 0), _LINGER_S)
        except SilentError:
            return

    def close(self) -> None:
        """End the thread, if it is not in a call: one that came back while the interpreter ends would crash it."""
        self._calls.put(None)
        self._thread.join(timeout=0.0 if self._is_silent else 1.0)

    # -- calls that may not end -------------------------------------------------------------------------------------

    def _has_failed(self) -> bool:
        return self._store.check([self._failed])

    def _read_failure(self) -> Failure | None:
        return _read(self._store.get(self._failed)) if self._has_failed() else None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _start(self, function: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def _call(self, function: Callable[[], _T], limit_s: float) -> _T:
        return self._result(self._start(function), limit_s)

    def _result(self, future: Future[_T], limit_s: float) -> _T:
        try:
            return future.result(0.0 if self._is_silent else limit_s)
        except dist.DistError as error:
            raise SilentError("is gone") from error
        except TimeoutError as error:
            self._is_silent = True  # the thread is in a call that does not end; no later one can be made
            raise SilentError(f"does not answer, for {limit_s or _SILENCE_S:g} s by now") from error


def _read(text: bytes) -> Failure:
    return Failure(**json.loads(text))
