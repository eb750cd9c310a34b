"""What the ranks of a job tell one another beside their computations: keys in the job's key-value store.

    news         a counter; it rises with every word that is left here, so that one cheap look shows if there is any
    failure      the first failure of any rank: "2|ValueError: ..."
    gone         the ranks whose scripts have ended: a line "2|..." for each
    line.<rank>  what a rank is doing: "17|...", written when the counter stood at 17

Nothing here waits for another rank. A call can still hang: a store whose host is unreachable does not answer. So only
the watch's thread makes these calls (`epl.runtime.watch`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Bulletin", "Failure"]

_NEWS, _FAILURE, _GONE, _LINE = "news", "failure", "gone", "line."
_MAX_CHARACTERS = 4000  # of an error's text; a message may hold a whole tensor


class Failure(NamedTuple):
    """The failure of a rank."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed with {self.text}"


class Bulletin:
    """One rank's access to the keys.

    Args:
        rank: This rank.
        size: Ranks in all.
        store: The job's store. Its keys here are those of one start of the ranks.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._seen = 0
        store.set(f"{_LINE}{rank}", "0|")

    def changed(self) -> int | None:
        """The counter, if it has risen since the last call."""
        number = int(self._store.add(_NEWS, 0))
        if number == self._seen:
            return None
        self._seen = number
        return number

    def ask(self) -> int:
        """Ask all ranks what they are doing; lines of this number or a higher one are answers."""
        return int(self._store.add(_NEWS, 1))

    def answer(self, number: int, line: str) -> None:
        """Say what this rank is doing."""
        self._store.set(f"{_LINE}{self._rank}", f"{number}|{line}")

    def answers(self, number: int) -> dict[int, str]:
        """The answers to a question that are there by now, by rank."""
        keys = [f"{_LINE}{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # a rank has not come so far
            keys = [key for key in keys if self._store.check([key])]
        found: dict[int, str] = {}
        for key, value in zip(keys, self._store.multi_get(keys), strict=True):
            stamp, _, line = value.decode().partition("|")
            if int(stamp) >= number:
                found[int(key.removeprefix(_LINE))] = line
        return found

    def tell_failure(self, text: str) -> None:
        """Leave word of this rank's failure; the first one that any rank tells counts."""
        self._store.compare_set(_FAILURE, "", f"{self._rank}|{text[:_MAX_CHARACTERS]}")
        self._store.add(_NEWS, 1)

    def failure(self) -> Failure | None:
        """The first failure, if there is one."""
        if not self._store.check([_FAILURE]):
            return None
        rank, _, text = self._store.get(_FAILURE).decode().partition("|")
        return Failure(int(rank), text)

    def tell_gone(self, how: str) -> None:
        """Leave word that this rank's script has ended."""
        self._store.append(_GONE, f"{self._rank}|{how[:_MAX_CHARACTERS]}".replace("\n", " ") + "\n")
        self._store.add(_NEWS, 1)

    def gone(self) -> dict[int, str]:
        """How the scripts of ranks ended that have, by rank."""
        if not self._store.check([_GONE]):
            return {}
        lines = self._store.get(_GONE).decode().split("\n")
        return {int(rank): how for rank, _, how in (line.partition("|") for line in lines if line)}
