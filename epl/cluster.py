"""Cluster: the workers, their devices, which of them this process is, and who gets which device.

A worker is what the launcher starts once per machine; it has one process, and so one rank, for each of its devices.
Ranks count devices worker by worker. A cluster is a plain value and opens no connection: it comes from the environment
that torchrun or Slurm set up, or from a spec such as "2x8:V100-32GB" when a plan is made without any process.

A model with the TaskGraphs t = 0, 1, ... of device counts c_t is laid out in replicas of sum(c_t) devices. What comes
out is one :class:`VirtualDevice` per TaskGraph: its devices by replica. For counts [2, 2] on 2 workers of 4 devices:

    replica    w0d0 w0d1 | w0d2 w0d3      w1d0 w1d1 | w1d2 w1d3
               TaskGraph 0 TaskGraph 1    TaskGraph 0 TaskGraph 1
               ------ replica 0 ------    ------ replica 1 ------

The layouts are those of the original EPL (auto, all, specific, aware_row).
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epl.errors import ClusterError, bulleted

__all__ = ["Cluster", "Device", "VirtualDevice"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
_LAYOUTS = ("auto", "all", "specific", "aware_row")


@dataclass(frozen=True)
class Device:
    """One device: number ``index`` of worker ``worker``, driven by the process with this global rank."""

    worker: int
    index: int
    rank: int

    def __str__(self) -> str:
        return f"w{self.worker}d{self.index}"


@dataclass(frozen=True)
class VirtualDevice:
    """The devices of one TaskGraph: ``replicas[replica][position in the TaskGraph]``."""

    index: int
    replicas: tuple[tuple[Device, ...], ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, replica by replica."""
        return tuple(device for replica in self.replicas for device in replica)

    def __str__(self) -> str:
        return ",".join("{" + ",".join(str(device) for device in replica) + "}" for replica in self.replicas)


@dataclass(frozen=True)
class Cluster:
    """Workers and their devices, as one rank sees them.

    Args:
        devices_per_worker: The number of devices of each worker; they may differ.
        rank: The global rank of this process.
        hosts: Name or "name:port" of each worker; empty: "worker0", "worker1", ...
        device_kind: What the devices are, such as "V100-32GB"; empty: not said.

    Raises:
        ClusterError: The numbers contradict one another.

    Example:
        >>> cluster = Cluster((4, 4), rank=5)
        >>> str(cluster.devices[cluster.rank]), cluster.worker_index, cluster.local_rank
        ('w1d1', 1, 1)
        >>> [str(v) for v in cluster.virtual_devices([2, 2])]
        ['{w0d0,w0d1},{w1d0,w1d1}', '{w0d2,w0d3},{w1d2,w1d3}']
    """

    devices_per_worker: tuple[int, ...] = (1,)
    rank: int = 0
    hosts: tuple[str, ...] = ()
    device_kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices_per_worker", tuple(self.devices_per_worker))
        names = tuple(self.hosts) or tuple(f"worker{worker}" for worker in range(len(self.devices_per_worker)))
        object.__setattr__(self, "hosts", names)
        if not self.devices_per_worker or not all(_is_count(count) for count in self.devices_per_worker):
            counts = self.devices_per_worker
            raise ClusterError(f"devices_per_worker is one count of at least 1 for each worker, got {counts!r}")
        if len(self.hosts) != self.worker_num:
            raise ClusterError(f"{len(self.hosts)} hosts were given for {self.worker_num} workers; give one for each")
        if not 0 <= self.rank < self.world_size:
            raise ClusterError(f"rank {self.rank} is outside of the {self.world_size} ranks of the cluster")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Cluster:
        """The cluster that a launcher described, or one worker with one device if none did.

        Args:
            environ: ``os.environ`` or a mapping like it. torchrun's variables win over Slurm's, because torchrun is
                itself started by Slurm on many clusters.

        Raises:
            ClusterError: Variables are missing, are no numbers or contradict one another.

        Example:
            >>> Cluster.from_environment({}).world_size
            1
        """
        # A shell inside of a Slurm allocation has SLURM_NTASKS, but only what srun starts has SLURM_PROCID. Scripts
        # that srun starts often export WORLD_SIZE for torch: RANK tells the two launchers apart.
        if "SLURM_PROCID" in environ and "RANK" not in environ:
            return _from_slurm(environ)
        if any(name in environ for name in _TORCHRUN):
            return _from_torchrun(environ)
        return cls()

    @classmethod
    def from_spec(cls, spec: str) -> Cluster:
        """The cluster that a short text describes, for planning without processes; this process is rank 0.

        Args:
            spec: "workers x devices per worker", and optionally the kind of device: "2x4", "2x8:V100-32GB".

        Raises:
            ClusterError: The text has another form.

        Example:
            >>> Cluster.from_spec("2x8:V100-32GB").world_size
            16
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\S+))?", spec.strip())
        if match is None:
            raise ClusterError(f"{spec!r} is not a cluster; write '2x4' or '2x8:V100-32GB', workers x devices of each")
        workers, devices, kind = match.groups(default="")
        return cls((int(devices),) * int(workers), device_kind=kind)

    @property
    def worker_num(self) -> int:
        """The number of workers."""
        return len(self.devices_per_worker)

    @property
    def world_size(self) -> int:
        """The number of devices, and so of ranks, of all workers together."""
        return sum(self.devices_per_worker)

    @property
    def total_gpu_num(self) -> int:
        """The same as :attr:`world_size`: EPL's name for it. Devices of any kind count."""
        return self.world_size

    @property
    def gpu_num_per_worker(self) -> int:
        """The number of devices of each worker; a ClusterError if workers differ."""
        if len(set(self.devices_per_worker)) > 1:
            raise ClusterError(f"workers have {self.devices_per_worker} devices; read cluster.devices_per_worker")
        return self.devices_per_worker[0]

    @property
    def worker_index(self) -> int:
        """The worker that this process belongs to."""
        return self.devices[self.rank].worker

    @property
    def local_rank(self) -> int:
        """The number of this process's device within its worker."""
        return self.devices[self.rank].index

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices by rank: ``devices[rank].rank == rank``."""
        places = [(worker, index) for worker, count in enumerate(self.devices_per_worker) for index in range(count)]
        return tuple(Device(worker, index, rank) for rank, (worker, index) in enumerate(places))

    def virtual_devices(
        self,
        device_counts: Sequence[int],
        *,
        layout: str | Mapping[str, Any] = "auto",
        prefer_intra_node: bool = True,
        colocate: bool = False,
    ) -> tuple[VirtualDevice, ...]:
        """The devices of each TaskGraph.

        Args:
            device_counts: Devices per replica of each TaskGraph.
            layout: One of

                - "auto": devices one by one fill replica 0 of TaskGraph 0, of TaskGraph 1, ..., then replica 1.
                - "all": the same as ``colocate=True``; one slice of all devices, which all TaskGraphs share.
                - ``{"specific": [TaskGraph, ...]}``: a TaskGraph is a list of replicas, a replica a list of devices, a
                  device a global rank or a name such as "w0d1". Devices may be left out.
                - ``{"aware_row": n}``: workers in the order of their machines, and n consecutive ones hold a TaskGraph.
            prefer_intra_node: Count devices worker by worker; else the first device of each worker, then the second
                ones. In "aware_row" this is the order within the n workers; "specific" has its own order.
            colocate: TaskGraphs share the same devices. Then all device counts are equal.

        Raises:
            ClusterError: The devices cannot be shared out so; the message has the numbers.

        Example:
            >>> [str(v) for v in Cluster((4,)).virtual_devices([1, 1])]
            ['{w0d0},{w0d2}', '{w0d1},{w0d3}']
        """
        counts = tuple(device_counts)
        if not counts or not all(_is_count(count) for count in counts):
            raise ClusterError(f"device_counts is one count of at least 1 for each TaskGraph, got {device_counts!r}")
        name, value = _layout(layout)
        if name == "specific":
            rows = _specific(self, counts, value, colocate)
        elif name == "aware_row":
            if colocate:
                raise ClusterError("layout aware_row gives each TaskGraph its own workers; colocate shares them")
            rows = _aware_row(self, counts, value, prefer_intra_node)
        else:
            devices = _ordered(self.devices, prefer_intra_node)
            rows = _shared(devices, counts) if name == "all" or colocate else _auto(devices, counts)
        return tuple(VirtualDevice(index, row) for index, row in enumerate(rows))

    def __str__(self) -> str:
        counts = self.devices_per_worker
        size = f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else " + ".join(f"1x{count}" for count in counts)
        return f"{size}:{self.device_kind}" if self.device_kind else size


def _is_count(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


def _from_torchrun(environ: Mapping[str, str]) -> Cluster:
    given = _numbers(environ, _TORCHRUN)
    if given.get("WORLD_SIZE") == 1:  # then there is only one answer
        given = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **given}
    cure = "start the script with 'epl launch' or torchrun, or unset them all to run one process"
    _require(given, _TORCHRUN[:4], cure)
    rank, world_size, local_rank, local_size = (given[name] for name in _TORCHRUN[:4])
    if world_size % local_size:
        _require(given, _TORCHRUN, cure)
    worker = given.get("GROUP_RANK", rank // local_size)
    workers = given.get("GROUP_WORLD_SIZE", world_size // local_size)
    # A process knows only its own worker's count. With three workers or more, counts that differ are not known, and at
    # least one rank sees that they differ, so that no two ranks believe in different clusters.
    if workers * local_size == world_size:
        counts = (local_size,) * workers
    elif workers == 2:
        other = world_size - local_size
        counts = (other, local_size) if worker else (local_size, other)
    else:
        given_sizes = f"WORLD_SIZE={world_size}, GROUP_WORLD_SIZE={workers} and LOCAL_WORLD_SIZE={local_size}"
        raise ClusterError(f"{given_sizes}: the workers differ; start equal numbers of processes on all of them")
    return _placed(Cluster(counts, rank=rank), worker, local_rank, "start the ranks with 'epl launch' or torchrun")


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    names = (*_SLURM, "SLURM_NTASKS_PER_NODE")
    given = _numbers(environ, names)
    per_node = environ.get("SLURM_TASKS_PER_NODE", "")
    cure = "start the script with 'srun --distribution=block --ntasks-per-node=<devices of a node>'"
    _require(given, _SLURM if per_node or given.get("SLURM_NTASKS") == 1 else names, cure)
    rank, tasks, local_rank, worker = (given[name] for name in _SLURM)
    each = given.get("SLURM_NTASKS_PER_NODE", 1)
    counts = _tasks_per_node(per_node) if per_node else (each,) * max(1, tasks // each)
    if sum(counts) != tasks:
        raise ClusterError(f"SLURM_NTASKS={tasks}, but nodes of {counts} tasks have {sum(counts)}; {cure}")
    return _placed(Cluster(counts, rank=rank), worker, local_rank, cure)


def _tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's short form: "4(x2),3" is 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", part.strip())
        if match is None:
            raise ClusterError(f"SLURM_TASKS_PER_NODE={text!r} is not in Slurm's form, such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _numbers(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    given = {name: environ[name].strip() for name in names if name in environ}
    wrong = []
    for name, text in given.items():
        least = 1 if "SIZE" in name or "NTASKS" in name else 0
        if not text.isdecimal() or int(text) < least:
            wrong.append(f"{name}={text!r} is not a whole number of at least {least}")
    if wrong:
        raise ClusterError(bulleted("the environment does not describe a cluster:", wrong))
    return {name: int(text) for name, text in given.items()}


def _require(given: Mapping[str, int], names: Sequence[str], cure: str) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        present = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ClusterError(f"the environment has {present} but not {', '.join(missing)}; set the rest, or {cure}")


def _placed(cluster: Cluster, worker: int, local_rank: int, cure: str) -> Cluster:
    """The cluster, if the launcher numbers ranks as it does: worker by worker."""
    if (cluster.worker_index, cluster.local_rank) != (worker, local_rank):
        ours = f"rank {cluster.rank} of {cluster.devices_per_worker} devices is {cluster.devices[cluster.rank]}"
        raise ClusterError(f"{ours}, but w{worker}d{local_rank} by the environment; {cure}")
    return cluster


_Row = tuple[tuple[Device, ...], ...]  # the replicas of one TaskGraph


def _layout(layout: str | Mapping[str, Any]) -> tuple[str, Any]:
    named = {layout: None} if isinstance(layout, str) else dict(layout)
    name, value = next(iter(named.items()), ("", None))
    if len(named) != 1 or name not in _LAYOUTS or isinstance(layout, str) != (name in ("auto", "all")):
        close = difflib.get_close_matches(str(name), _LAYOUTS, n=1)
        nearest = f"; the nearest is {close[0]}" if close else ""
        forms = "'auto', 'all', {'specific': [[[0, 1]], [[2, 3]]]} or {'aware_row': 2}"
        raise ClusterError(f"layout {layout!r} is not supported{nearest}; write one of {forms}")
    return name, value


def _ordered(devices: Sequence[Device], prefer_intra_node: bool) -> list[Device]:
    """Worker by worker, or else all devices of index 0 first; the order of workers stays."""
    return list(devices) if prefer_intra_node else sorted(devices, key=lambda device: device.index)


def _auto(devices: Sequence[Device], counts: Sequence[int]) -> list[_Row]:
    replicas = _chunks(devices, sum(counts), f"one replica with device counts {list(counts)}")
    ends = list(itertools.accumulate(counts))
    return [tuple(replica[end - count : end] for replica in replicas) for count, end in zip(counts, ends, strict=True)]


def _shared(devices: Sequence[Device], counts: Sequence[int]) -> list[_Row]:
    if len(set(counts)) > 1:
        raise ClusterError(f"TaskGraphs that share the same devices need equal device counts, got {list(counts)}")
    return [_chunks(devices, counts[0], f"one replica with colocated device counts {list(counts)}")] * len(counts)


def _chunks(devices: Sequence[Device], size: int, what: str) -> _Row:
    if len(devices) % size:
        below = len(devices) // size * size
        totals = " or ".join(str(total) for total in (below, below + size) if total)
        cure = f"{totals} devices would do, or any other multiple of {size}"
        raise ClusterError(f"{len(devices)} devices are not divisible by {size}, the devices of {what}; {cure}")
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size))


def _aware_row(cluster: Cluster, counts: Sequence[int], size: Any, prefer_intra_node: bool) -> list[_Row]:
    """Slices of ``size`` workers, neighbours on the same machine; slice t is cut into the replicas of TaskGraph t."""
    machines: dict[str, list[list[Device]]] = {}  # in order of appearance, so that rank 0's machine is the first
    devices = iter(cluster.devices)
    for host, count in zip(cluster.hosts, cluster.devices_per_worker, strict=True):
        name = re.fullmatch(r"(\[.*\]|[^:]*):\d+", host)
        machines.setdefault(name[1] if name else host, []).append(list(itertools.islice(devices, count)))
    if len({len(workers) for workers in machines.values()}) > 1:
        each = ", ".join(f"{machine}: {len(workers)}" for machine, workers in machines.items())
        raise ClusterError(f"layout aware_row needs the same number of workers on each machine, got {each}")
    if not _is_count(size) or size * len(counts) != cluster.worker_num:
        given = f"layout aware_row: {size!r} workers for each of {len(counts)} TaskGraphs"
        raise ClusterError(f"{given} do not make the {cluster.worker_num} workers of the cluster")
    order = list(itertools.chain(*machines.values()))
    rows = []
    for index, count in enumerate(counts):
        part = list(itertools.chain(*order[index * size : (index + 1) * size]))
        rows.append(_chunks(_ordered(part, prefer_intra_node), count, f"one replica of TaskGraph {index}"))
    if len({len(row) for row in rows}) > 1:
        raise ClusterError(f"layout aware_row: TaskGraphs have {[len(row) for row in rows]} replicas, not the same")
    return rows


def _specific(cluster: Cluster, counts: Sequence[int], value: Any, colocate: bool) -> list[_Row]:
    def is_nested(part: object, depth: int) -> bool:
        return not depth or (isinstance(part, list | tuple) and all(is_nested(item, depth - 1) for item in part))

    if not is_nested(value, 3):
        raise ClusterError(f"a specific layout is such as [[[0, 1]], [['w0d2', 'w0d3']]] (2 TaskGraphs), got {value!r}")
    known = {str(name): device for device in cluster.devices for name in (device.rank, device)}
    names = [[str(name) for replica in row for name in replica] for row in value]
    problems = [f"there is no device {name}" for name in itertools.chain(*names) if name not in known]
    for group in names if colocate else [list(itertools.chain(*names))]:
        uses = Counter(known[name] for name in group if name in known)
        problems += [f"device {device} is used {count} times" for device, count in uses.items() if count > 1]
    if len(value) != len(counts):
        problems.append(f"it has {len(value)} TaskGraphs, but the model has {len(counts)}")
    if len({len(row) for row in value}) > 1 or not all(value):
        problems.append(f"TaskGraphs have {[len(row) for row in value]} replicas, not the same")
    for index, (row, count) in enumerate(zip(value, counts, strict=False)):
        if any(len(replica) != count for replica in row):
            sizes = [len(replica) for replica in row]
            problems.append(f"TaskGraph {index} needs {count} devices in each replica, got {sizes}")
    if problems:
        raise ClusterError(bulleted(f"the specific layout does not fit the cluster {cluster}:", problems))
    return [tuple(tuple(known[str(name)] for name in replica) for replica in row) for row in value]
