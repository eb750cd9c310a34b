"""Values between the stages of a pipeline, over torch.distributed's point-to-point operations.

Order is the whole protocol: between two ranks and in one direction, values go in the order of the program on both sides.
NCCL runs the operations of one communicator one after another, so there each direction between two stages has a
communicator of its own; gloo matches by tag and needs no more than one group.

A value whose shape is not known to the plan travels behind a header of int64 sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from epl.ir.types import ScalarType, TensorType
from epl.planner.plan import Plan
from epl.program.instructions import Transfer
from epl.runtime.world import Group, World
from epl.schedule import Action, Kind

__all__ = ["Channels", "Pending"]

_SCALARS = {"int": torch.int64, "bool": torch.int64, "float": torch.float64}


@dataclass(eq=False)
class Pending:
    """A value on its way here; ``work`` is None until its turn on the way has come."""

    transfer: Transfer
    what: str
    tensor: torch.Tensor
    work: Any = None


class _Sent(NamedTuple):
    """A value on its way to another rank."""

    transfer: Transfer
    action: Action
    what: str
    tensor: torch.Tensor
    work: Any


class Channels:
    """Sends and receives for one rank. Sends are kept until they are done, so that their memory lives long enough."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._by_pair = world.device.type != "cpu"
        self._groups: dict[tuple[int, int, bool], Group] = {}
        self._sending: deque[_Sent] = deque()
        self._coming: dict[tuple[int, bool], list[Pending]] = {}  # from each rank, forward or backward, in order
        if self._by_pair:
            self._make_groups(plan)

    def _make_groups(self, plan: Plan) -> None:
        for pair, backward in _pairs(plan):
            group = self._world.group(pair, f"{'backward' if backward else 'forward'} {pair}")
            self._groups[(*pair, backward)] = group

    def _handle(self, source: int, target: int, backward: bool) -> Any:
        if not self._by_pair:
            return self._world.control.handle
        return self._groups[(source, target, backward)].handle

    def send(self, transfer: Transfer, value: Any, what: str, action: Action) -> None:
        """Start to send a value that ``action`` has made; does not wait."""
        self._drop_finished()
        backward = action.kind is Kind.BACKWARD
        handle = self._handle(self._world.rank, transfer.peer, backward)
        for tensor in self._as_tensors(transfer, value):
            with self._world.waiting(f"room to send {what}", (transfer.peer,)):
                work = dist.isend(tensor, transfer.peer, group=handle, tag=int(backward))
            self._sending.append(_Sent(transfer, action, what, tensor, work))

    def _as_tensors(self, transfer: Transfer, value: Any) -> list[torch.Tensor]:
        if isinstance(transfer.type, ScalarType):
            return [torch.tensor([value], dtype=_SCALARS[transfer.type.kind], device=self._world.device)]
        assert isinstance(value, torch.Tensor)
        tensor = value.detach().contiguous()
        if _is_dynamic(transfer):
            header = torch.tensor(tensor.shape, dtype=torch.int64, device=self._world.device)
            return [header, tensor] if tensor.numel() else [header]
        return [tensor]

    def post(self, transfer: Transfer, what: str, *, backward: bool) -> Pending:
        """Start to receive a value, or note that it is to be received."""
        kind = transfer.type
        if isinstance(kind, TensorType) and not kind.is_static:
            tensor = torch.empty(len(kind.shape), dtype=torch.int64, device=self._world.device)
        elif isinstance(kind, TensorType):
            tensor = torch.empty([size or 0 for size in kind.shape], dtype=kind.dtype, device=self._world.device)
        else:
            assert isinstance(kind, ScalarType)
            tensor = torch.empty(1, dtype=_SCALARS[kind.kind], device=self._world.device)
        pending = Pending(transfer, what, tensor)
        self._coming.setdefault((transfer.peer, backward), []).append(pending)
        self._start(transfer.peer, backward)
        return pending

    def _start(self, peer: int, backward: bool) -> None:
        """Receive what comes next from a rank, up to the first value whose size is still to be told.

        What follows that one on the way must not be received before it.
        """
        for pending in self._coming[(peer, backward)]:
            if pending.work is None:
                pending.work = self._receive(pending.transfer, pending.tensor, pending.what, backward)
            if _is_dynamic(pending.transfer):
                return

    def _receive(self, transfer: Transfer, tensor: torch.Tensor, what: str, backward: bool) -> Any:
        handle = self._handle(transfer.peer, self._world.rank, backward)
        with self._world.waiting(self._expecting(transfer, what), (transfer.peer,)):
            return dist.irecv(tensor, transfer.peer, group=handle, tag=int(backward))

    def wait(self, pending: Pending, *, backward: bool) -> Any:
        """The value, once it is here.

        Raises:
            RunError: it did not come within ``communication.timeout``, or its sender is gone.
        """
        transfer, tensor = pending.transfer, pending.tensor
        self._finish(transfer, pending.what, pending.work)
        if isinstance(transfer.type, TensorType) and not transfer.type.is_static:
            tensor = torch.empty(tensor.tolist(), dtype=transfer.type.dtype, device=self._world.device)
            if tensor.numel():
                self._finish(transfer, pending.what, self._receive(transfer, tensor, pending.what, backward))
        self._coming[(transfer.peer, backward)].remove(pending)
        self._start(transfer.peer, backward)
        if isinstance(transfer.type, ScalarType):
            return {"int": int, "bool": bool, "float": float}[transfer.type.kind](tensor.item())
        return tensor

    def _finish(self, transfer: Transfer, what: str, work: Any) -> None:
        with self._world.waiting(self._expecting(transfer, what), (transfer.peer,)):
            self._wait_for(work)

    def _wait_for(self, work: Any) -> None:
        if work.wait(timedelta(seconds=self._world.timeout_s)) is False:
            raise RuntimeError("Timed out")  # which `waiting` turns into an error that says more

    def _expecting(self, transfer: Transfer, what: str) -> str:
        return f"{what} from rank {transfer.peer} (stage {transfer.stage})"

    def _drop_finished(self) -> None:
        while self._sending and self._sending[0].work.is_completed():
            self._sending.popleft()

    def forget(self, action: Action, stage: int) -> None:
        """Let go of what ``action`` has sent to a stage, which has taken it."""
        rest: deque[_Sent] = deque()
        for sent in self._sending:
            if sent.action == action and sent.transfer.stage == stage:
                self._finish_send(sent)
            else:
                rest.append(sent)
        self._sending = rest

    def finish_sends(self) -> None:
        """Wait until everything that was sent has left."""
        while self._sending:
            self._finish_send(self._sending.popleft())

    def _finish_send(self, sent: _Sent) -> None:
        peer, stage = sent.transfer.peer, sent.transfer.stage
        with self._world.waiting(f"{sent.what} to be taken by rank {peer} (stage {stage})", (peer,)):
            self._wait_for(sent.work)


def _pairs(plan: Plan) -> Iterator[tuple[tuple[int, int], bool]]:
    """(sender, receiver) of every pair of ranks that talk, and whether they do in backward; alike on all ranks."""
    for source, target in sorted({(edge.source, edge.target) for edge in plan.edges}):
        for backward in (False, True):
            first, last = (target, source) if backward else (source, target)
            yield from ((pair, backward) for pair in plan.meetings(first, last))


def _is_dynamic(transfer: Transfer) -> bool:
    """True for a tensor whose shape is known only when it is there."""
    return isinstance(transfer.type, TensorType) and not transfer.type.is_static
