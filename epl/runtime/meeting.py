"""How the ranks of a job meet: torch's process group, the store beside it, and the watch.

A launcher (``epl launch``, torchrun) says where: ``MASTER_ADDR`` and ``MASTER_PORT``. Slurm does not, so there both come
from its own variables: the first host of the step, where rank 0 runs, and a port that follows from the job's number.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epl.cluster import Cluster
from epl.config import Config
from epl.errors import ClusterError, ConfigError, EplError, RunError
from epl.runtime.bulletin import Bulletin
from epl.runtime.interface import choose_interface
from epl.runtime.orphan import end_with_launcher
from epl.runtime.watch import Link, Watch
from epl.runtime.world import Group, World

__all__ = ["connect", "slurm_address"]

_PORTS = range(61000, 65536)  # private ports (RFC 6335) that Linux gives to no connection by itself (up to 60999)


def connect(cluster: Cluster, config: Config) -> World:
    """Join the job that the launcher started; a process without a launcher is a world of one.

    Raises:
        ConfigError: ``cluster.run_visible_devices`` does not fit the machine.
        ClusterError: the environment does not say where to meet.
        RunError: the ranks did not meet within ``communication.timeout``.
    """
    device = _device(cluster, config)
    timeout_s = config.communication.timeout
    watch = Watch(cluster.rank, cluster.world_size)
    end_with_launcher(os.environ, watch)
    if cluster.world_size == 1 and not dist.is_initialized():
        return World(0, 1, device, timeout_s, Group((0,)), watch)
    owns = not dist.is_initialized()
    address = _address(cluster, os.environ) if owns else ("", 0)
    try:
        world, link = _meet(cluster, device, address, watch, timeout_s)
    except (RuntimeError, ValueError, OSError) as error:
        if owns and dist.is_initialized():
            dist.destroy_process_group()
        if isinstance(error, EplError):
            raise
        raise RunError(
            f"rank {cluster.rank} could not meet the other {cluster.world_size - 1} ranks within {timeout_s:g} s "
            f"(communication.timeout): {_without_frames(error)}. {_advice(error, address)}"
        ) from error
    watch.attach(link)
    atexit.register(watch.close)
    return world


def _meet(
    cluster: Cluster, device: torch.device, address: tuple[str, int], watch: Watch, timeout_s: float
) -> tuple[World, Link]:
    owns = not dist.is_initialized()
    if owns and cluster.worker_num > 1:
        choose_interface(address[0])
    store = _start_process_group(cluster, device, address, timeout_s) if owns else _store_beside(cluster, timeout_s)
    if dist.get_world_size() != cluster.world_size:
        raise RunError(
            f"torch's process group has {dist.get_world_size()} ranks, the environment says {cluster.world_size}; "
            "set WORLD_SIZE to match, or let epl.init() start the process group"
        )
    everyone = tuple(range(cluster.world_size))
    backend = "gloo" if dist.get_backend() != "gloo" else None
    handle = dist.new_group(list(everyone), backend=backend, timeout=timedelta(seconds=timeout_s))
    control = Group(everyone, handle)
    world = World(dist.get_rank(), len(everyone), device, timeout_s, control, watch, owns_process_group=owns)
    agent_has_store = owns and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return world, Link(
        # a connection of its own: the other one may be in use when the watch's thread needs it
        Bulletin(world.rank, world.size, store.clone()),
        world.hang_up,
        holds_store=world.rank == 0 and not agent_has_store,
        agent_has_store=agent_has_store,
        store=store,
    )


def _start_process_group(cluster: Cluster, device: torch.device, address: tuple[str, int], timeout_s: float) -> Any:
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    wait = timedelta(seconds=timeout_s)
    host, port = f"[{address[0]}]" if ":" in address[0] else address[0], address[1]
    # not "env://", which reads an address from the environment and from nowhere else
    meeting = dist.rendezvous(f"tcp://{host}:{port}", cluster.rank, cluster.world_size, timeout=wait)
    store, rank, size = next(meeting)
    # an elastic restart meets at the same store; what an earlier attempt left there must not count
    store = dist.PrefixStore(f"epl{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=wait)
    return store


def _store_beside(cluster: Cluster, timeout_s: float) -> Any:
    """A store of our own, beside a process group that the user's code has started."""
    host = os.environ.get("MASTER_ADDR", socket.gethostname()) if cluster.worker_num > 1 else "127.0.0.1"
    wait = timedelta(seconds=timeout_s)
    server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait) if cluster.rank == 0 else None
    address: list[Any] = [None if server is None else (host, server.port)]
    dist.broadcast_object_list(address, src=0)
    if server is not None:
        return server
    return dist.TCPStore(address[0][0], address[0][1], is_master=False, timeout=wait)


# -- where ----------------------------------------------------------------------------------------------------------


def _address(cluster: Cluster, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of the store at which the ranks meet."""
    derived = slurm_address(environ) if "SLURM_PROCID" in environ and "RANK" not in environ else None
    host = environ.get("MASTER_ADDR") or (derived[0] if derived else "")
    port = environ.get("MASTER_PORT") or (str(derived[1]) if derived else "")
    if not host or not port.isdecimal():
        raise ClusterError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}: the {cluster.world_size} ranks need the address of rank "
            "0's machine and a port that is free there. `epl launch` and torchrun set both"
        )
    return host, int(port)


def slurm_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Where the tasks of a Slurm step meet: the step's first host, and a port that follows from the job's number.

    Not ``SLURM_LAUNCH_NODE_IPADDR``: that is the node on which srun was called, which need not run any task.

    Args:
        environ: Slurm's variables.

    Raises:
        ClusterError: no variable names the hosts, or not in Slurm's form.

    Example:
        >>> slurm_address({"SLURM_JOB_NODELIST": "gpu[07-09,12],login", "SLURM_JOB_ID": "4711"})
        ('gpu07', 61175)
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((environ[name] for name in names if environ.get(name)), "")
    # "a[1-2,7]b[01-04],c": the first of each bracket, up to a comma that is in none
    first = re.match(r"(?:[^\[\],\s]|\[\w+(?:-\w+)?(?:,\w+(?:-\w+)?)*\])+(?=,|$)", hosts.strip())
    if first is None:
        raise ClusterError(
            f"Slurm's list of hosts is {hosts!r}, of which the first cannot be told; set MASTER_ADDR to the host of rank 0 "
            "and MASTER_PORT to a port that is free there"
        )
    numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdecimal() else 0 for number in numbers)
    # steps of one job may run side by side; the factor keeps them off the ports of the next jobs
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]), _PORTS[(job + 97 * step) % len(_PORTS)]


# -- what to say ----------------------------------------------------------------------------------------------------


def _without_frames(error: BaseException) -> str:
    """An error's text without the stack of C++ functions that torch puts after it."""
    return re.split(r"\n?Exception raised from ", str(error), maxsplit=1)[0].strip().rstrip(".")


def _advice(error: BaseException, address: tuple[str, int]) -> str:
    if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
        return (
            f"Port {address[1]} of {address[0]} is taken, perhaps by a job that has not ended: set MASTER_PORT, or "
            "--rdzv-endpoint, to another one"
        )
    return (
        "Start all ranks with `epl launch` or torchrun, and see in the others' logs whether one of them failed before"
    )


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
