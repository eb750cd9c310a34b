"""Env: the config and the cluster in force, for code that was handed neither.

EPL's public API includes ``epl.Env.get().cluster.worker_num``, callable from anywhere. Inside the package config and
cluster are passed as arguments; only the facade reads the Env.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from epl.cluster import Cluster
from epl.config import Config

__all__ = ["Env"]


class _Holder:
    """The place of the current Env.

    It is the one piece of ambient state behind ``Env.get()``. A ContextVar would not do: a new thread starts with an
    empty context, and data loaders, autograd hooks and servers call from threads that they start themselves.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.env: Env | None = None


_HOLDER = _Holder()


@dataclass(frozen=True, eq=False)
class Env:
    """The settings and the devices of the run.

    Args:
        config: The settings; the very object that ``epl.init`` was given, so that later assignments to it count.
        cluster: The workers and devices, as this rank sees them.

    Example:
        >>> Env.reset(Config(), Cluster((4, 4))).cluster.worker_num
        2
        >>> Env.get().cluster.total_gpu_num
        8
        >>> _ = Env.reset()  # back to the defaults and the launcher's cluster
    """

    config: Config
    cluster: Cluster

    @staticmethod
    def get() -> Env:
        """The current Env; before the first ``reset``, one with the defaults and what the launcher set up.

        Raises:
            ConfigError: No Env was set, and the environment has settings that cannot be used.
            ClusterError: No Env was set, and the environment describes a cluster that does not add up.
        """
        with _HOLDER.lock:
            if _HOLDER.env is None:
                _HOLDER.env = _new(None, None)
            return _HOLDER.env

    @staticmethod
    def reset(config: Config | None = None, cluster: Cluster | None = None) -> Env:
        """Replace the current Env as a whole, so that nothing of the one before is left.

        Args:
            config: The settings; None: the defaults and the environment's.
            cluster: The workers and devices; None: what the launcher's environment describes.

        Returns:
            The new Env. If this raises, the one before stays.

        Raises:
            ConfigError: ``config`` is None, and the environment has settings that cannot be used.
            ClusterError: ``cluster`` is None, and the environment describes a cluster that does not add up.
        """
        env = _new(config, cluster)
        with _HOLDER.lock:
            _HOLDER.env = env
        return env


def _new(config: Config | None, cluster: Cluster | None) -> Env:
    return Env(
        config=Config() if config is None else config,
        cluster=Cluster.from_environment(os.environ) if cluster is None else cluster,
    )
