"""Ranks as threads of one process. One runs at a time, and hands over only where it waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

TIMEOUT_S = 10  # what no rank of a test ever waits for
SEED = 7

Result = TypeVar("Result")


class ThreadRank:
    """One of several threads that exchange tensors."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, baton: threading.Lock, board: list[Any]):
        self.rank, self.size = rank, size
        self._meeting, self._baton, self._board = meeting, baton, board

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        stacked = torch.stack(self._exchange(tensor))
        return stacked.sum(0) if operation == "sum" else stacked.amax(0)

    def all_gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        gathered = [each.clone() for each in self._exchange(tensor)]
        assert [tuple(each.shape) for each in gathered] == [tuple(shape) for shape in shapes]
        return gathered

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._exchange(pieces)]).sum(0)

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        received = [theirs[self.rank].clone() for theirs in self._exchange(pieces)]
        assert [tuple(each.shape) for each in received] == [tuple(shape) for shape in shapes]
        return received

    def _exchange(self, item: Any) -> list[Any]:
        """Everybody's item. The second meeting keeps the board until all have read it."""
        self._board[self.rank] = item
        self._meet()
        items = list(self._board)
        self._meet()
        return items

    def _meet(self) -> None:
        self._baton.release()
        try:
            self._meeting.wait(TIMEOUT_S)
        finally:
            self._baton.acquire()


def run_in_turn(size: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """The same as `run_ranks` for work that exchanges nothing."""
    results = []
    for rank in range(size):
        torch.manual_seed(SEED)
        results.append(work(ThreadRank(rank, size, threading.Barrier(1), threading.Lock(), [])))
    return results


def run_ranks(size: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """What each of some ranks makes of the work, each with the same seed at its start; the first mistake is raised."""
    meeting, baton, board = threading.Barrier(size), threading.Lock(), [None] * size
    results: list[Any] = [None] * size
    mistakes: list[BaseException] = []

    def run(rank: int) -> None:
        with baton:
            torch.manual_seed(SEED)
            try:
                results[rank] = work(ThreadRank(rank, size, meeting, baton, board))
            except BaseException as mistake:
                mistakes.append(mistake)
                meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    if mistakes:
        raise mistakes[0]
    assert not any(thread.is_alive() for thread in threads), "a rank still runs"
    return results
