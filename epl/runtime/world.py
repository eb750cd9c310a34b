"""The ranks of a job and the groups they talk in: the only place that makes process groups.

One rank is the degenerate case: a world of one has groups of one, whose collectives do nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epl.cluster import Cluster
from epl.config import Config
from epl.errors import ConfigError, RunError, bulleted
from epl.runtime.record import Recorder
from epl.runtime.watch import Watch

__all__ = ["Group", "World", "connect"]

_GRACE_S = 5.0  # how long a rank that lost its peer looks for the reason


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
                handle = dist.new_group(list(members), timeout=timedelta(seconds=self.timeout_s))
            self._groups[key] = Group(members, handle)
        return self._groups[key]

    # -- small messages -----------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, by rank. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.waiting("the values of all ranks"):
            dist.all_gather_object(values, value, group=self.control.handle)
        return values

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, on every rank; as many from each. Cheaper than `gather`."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = torch.empty(self.size * len(numbers), dtype=torch.int64)
        with self.waiting("the step's numbers of all ranks"):
            dist.all_gather_single(everyone, mine, group=self.control.handle)
        return everyone.view(self.size, -1).tolist()

    def sum_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a small CPU tensor, in place."""
        if self.size > 1:
            with self.waiting("the sum over all ranks"):
                dist.all_reduce(numbers, group=self.control.handle)
        return numbers

    # -- failures -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, what: str) -> Any:
        """Turn a failed wait into an error that says what was waited for, and why the other rank is gone."""
        with self.watch.waiting(what), self.recorder.other(what, "wait"):
            try:
                yield
            except RuntimeError as error:
                if isinstance(error, RunError):
                    raise
                raise self._lost(what, error) from error

    def _lost(self, what: str, error: BaseException) -> RunError:
        """The error of a rank whose wait failed: the first failure that a rank reported, else what the others do."""
        ran_out = "imed out" in str(error)
        reported = self.watch.failure(0.0 if ran_out else min(_GRACE_S, self.timeout_s))
        if reported is not None:
            return RunError(f"{reported}\n  (rank {self.rank} was waiting for {what})")
        reason = str(error).strip().splitlines()
        return RunError(
            bulleted(
                f"rank {self.rank} waited for {what} and "
                + (f"{self.timeout_s:g} s (communication.timeout) have passed" if ran_out else "lost the connection")
                + f": {reason[-1] if reason else type(error).__name__}. The other ranks, those to look at first:",
                self.watch.ask_all(),
            )
        )

    def close(self) -> None:
        """End torch's process group, if `connect` made it."""
        self.watch.close()
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._groups.clear()


def connect(cluster: Cluster, config: Config) -> World:
    """Join the job that the launcher started; a process without a launcher is a world of one.

    Raises:
        ConfigError: ``cluster.run_visible_devices`` does not fit the machine.
        RunError: the ranks did not meet within ``communication.timeout``.
    """
    device = _device(cluster, config)
    timeout_s = config.communication.timeout
    if cluster.world_size == 1 and not dist.is_initialized():
        return World(0, 1, device, timeout_s, Group((0,)), Watch(0, 1, None))
    owns = not dist.is_initialized()
    store = _start_process_group(cluster, device, timeout_s) if owns else _store_beside(cluster, timeout_s)
    if dist.get_world_size() != cluster.world_size:
        raise RunError(
            f"torch's process group has {dist.get_world_size()} ranks, the environment says {cluster.world_size}; "
            "set WORLD_SIZE to match, or let epl.init() start the process group"
        )
    everyone = tuple(range(cluster.world_size))
    backend = "gloo" if dist.get_backend() != "gloo" else None
    handle = dist.new_group(list(everyone), backend=backend, timeout=timedelta(seconds=timeout_s))
    watch = Watch(dist.get_rank(), len(everyone), store)
    atexit.register(watch.close)  # a thread inside the store must not outlive the interpreter
    return World(
        dist.get_rank(), len(everyone), device, timeout_s, Group(everyone, handle), watch, owns_process_group=owns
    )


def _start_process_group(cluster: Cluster, device: torch.device, timeout_s: float) -> Any:
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    wait = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(dist.rendezvous("env://", cluster.rank, cluster.world_size, timeout=wait))
        # an elastic restart meets at the same store; what an earlier attempt left there must not count
        store = dist.PrefixStore(f"epl{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=wait
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {cluster.rank} could not meet the other {cluster.world_size - 1} ranks within {timeout_s:g} s "
            f"(communication.timeout): {error}. Start all ranks with `epl launch` or torchrun."
        ) from error
    return store


def _store_beside(cluster: Cluster, timeout_s: float) -> Any:
    """A store of our own, beside a process group that the user's code has started."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1") if cluster.worker_num > 1 else "127.0.0.1"
    wait = timedelta(seconds=timeout_s)
    server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait) if cluster.rank == 0 else None
    address: list[Any] = [None if server is None else (host, server.port)]
    dist.broadcast_object_list(address, src=0)
    if server is not None:
        return server
    return dist.TCPStore(address[0][0], address[0][1], is_master=False, timeout=wait)


def _device(cluster: Cluster, config: Config) -> torch.device:
    visible = config.cluster.run_visible_devices
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        if visible:
            raise ConfigError(
                f"cluster.run_visible_devices={visible!r} chooses accelerators, and this machine has none; leave it empty"
            )
        return torch.device("cpu")
    indices = [int(part) for part in visible.split(",")] if visible else list(range(torch.accelerator.device_count()))
    if cluster.local_rank >= len(indices):
        raise ConfigError(
            f"local rank {cluster.local_rank} has no device: this machine offers {indices}. Start at most "
            f"{len(indices)} ranks here (epl launch --nproc {len(indices)}), or see cluster.run_visible_devices."
        )
    torch.accelerator.set_device_index(indices[cluster.local_rank])
    return torch.device(accelerator.type, indices[cluster.local_rank])
