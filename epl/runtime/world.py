"""The ranks of a job, the groups they talk in, and what becomes of a wait that fails.

One rank is the degenerate case: a world of one has groups of one, whose collectives do nothing. How the ranks meet is
said in `epl.runtime.meeting`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epl.errors import RunError, bulleted
from epl.runtime.record import Recorder
from epl.runtime.watch import Watch

__all__ = ["Group", "World"]

_NO_TAG = 2**30  # of a message that nobody sends


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective; ``handle`` is None where nothing has to be sent."""

    ranks: tuple[int, ...]
    handle: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class World:
    """All ranks of the job, seen from one of them.

    Args:
        rank: This rank.
        size: Ranks in all.
        device: Where this rank computes.
        timeout_s: Limit on each wait for another rank, in seconds.
        control: All ranks, over the CPU: checks and small messages.
        watch: What this rank is doing, for the others.
        recorder: What this rank did and when, for traces.
        owns_process_group: True if `connect` made torch's process group.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    control: Group
    watch: Watch
    recorder: Recorder = field(default_factory=Recorder)
    owns_process_group: bool = False
    _groups: dict[tuple[tuple[int, ...], str], Group] = field(default_factory=dict)

    def group(self, ranks: Iterable[int], purpose: str = "") -> Group:
        """The group of these ranks; all ranks of the world must ask for the same groups in the same order.

        Args:
            ranks: Members, in any order.
            purpose: Groups of the same ranks and different purposes are different communicators.
        """
        members = tuple(sorted(set(ranks)))
        key = (members, purpose)
        if key not in self._groups:
            handle = None
            if len(members) > 1:
                with self.waiting(f"the group of ranks {list(members)}", self.control.ranks):
                    handle = dist.new_group(list(members), timeout=timedelta(seconds=self.timeout_s))
            self._groups[key] = Group(members, handle)
        return self._groups[key]

    def set_timeout(self, timeout_s: float) -> None:
        """Change the limit on each wait, also in the groups that there are."""
        if timeout_s == self.timeout_s:
            return
        self.timeout_s = timeout_s
        for group in self._joined(with_default=self.owns_process_group):
            group.handle.set_timeout(timedelta(seconds=timeout_s))

    def _joined(self, *, with_default: bool) -> list[Group]:
        """The groups that this rank talks in; torch's default group among them or not."""
        groups = [self.control, *list(self._groups.values())]
        if with_default and dist.is_initialized():
            groups.append(Group(tuple(range(self.size)), dist.group.WORLD))
        return [group for group in groups if group.handle is not None and self.rank in group.ranks]

    # -- small messages -----------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, by rank. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.waiting("the values of all ranks", self.control.ranks):
            dist.all_gather_object(values, value, group=self.control.handle)
        return values

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, on every rank; as many from each. Cheaper than `gather`."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = torch.empty(self.size * len(numbers), dtype=torch.int64)
        with self.waiting("the step's numbers of all ranks", self.control.ranks):
            dist.all_gather_single(everyone, mine, group=self.control.handle)
        return everyone.view(self.size, -1).tolist()

    def sum_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a small CPU tensor, in place."""
        if self.size > 1:
            with self.waiting("the sum over all ranks", self.control.ranks):
                dist.all_reduce(numbers, group=self.control.handle)
        return numbers

    # -- failures -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, what: str, ranks: Sequence[int] = ()) -> Any:
        """Turn a failed wait into an error that says what was waited for, and why the other rank is gone.

        Args:
            what: What is waited for.
            ranks: Ranks each of which has to do something for the wait to end; empty: not known. If one of them has
                ended its script, the wait is cut short.
        """
        if self.watch.own_failure is not None:
            raise RunError(
                f"rank {self.rank} has failed before, with {self.watch.own_failure}. Since then the ranks are out of step "
                "with one another, and nothing that they do together can be done: end the script, and start it again."
            )
        with self.watch.waiting(what, ranks), self.recorder.other(what, "wait"):
            try:
                yield
            except RunError:
                raise
            except BaseException as error:
                lost = self._lost(what, ranks, error) if _is_of_communication(error) else error
                # even if a signal's handler has raised it: the other ranks wait for this one to do its part
                self.watch.report_failure(lost)
                if lost is error:
                    raise
                raise lost from error

    def _lost(self, what: str, ranks: Sequence[int], error: BaseException) -> RunError:
        """The error of a rank whose wait failed: the first failure that a rank reported, else what the others do."""
        ran_out = "imed out" in str(error)
        cause, lines = self.watch.find_reason(ranks, ran_out=ran_out)
        if cause is not None:
            return RunError(f"{cause}\n  (rank {self.rank} was waiting for {what})")
        *_, reason = str(error).strip().splitlines() or [type(error).__name__]
        reason = re.sub(r"^\[\S+:\d+\] ", "", reason)  # where in gloo's sources
        return RunError(
            bulleted(
                f"rank {self.rank} waited for {what} and "
                + (f"{self.timeout_s:g} s (communication.timeout) have passed" if ran_out else "lost the connection")
                + f": {reason.rstrip('.')}. The other ranks, those to look at first:",
                lines,
            )
        )

    def hang_up(self) -> None:
        """Close this rank's connections over the CPU, which ends every wait that its main thread is in with an error.

        gloo closes all connections of a group when a wait in it runs out, and there is no other way to end a wait in
        progress (``ProcessGroup.abort`` does nothing for gloo in torch 2.13). So one is let run out.
        """
        for group in self._joined(with_default=True):
            other = next(rank for rank in group.ranks if rank != self.rank)
            with contextlib.suppress(RuntimeError, ValueError):
                work = dist.irecv(torch.empty(1), other, group=group.handle, tag=_NO_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Take leave of the other ranks, and end torch's process group if `connect` made it."""
        self.watch.close()
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._groups.clear()


def _is_of_communication(error: BaseException) -> bool:
    """True if torch's communication raised it, and not the handler of a signal that came during the wait.

    A data loader's handler raises a RuntimeError, too, when one of its processes has died.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return isinstance(error, RuntimeError) and f"{name}.".startswith(("epl.", "torch.distributed."))
