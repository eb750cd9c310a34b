"""The public functions: init, parallelize, data_loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.errors import ConfigError
from epl.loss import LossFunction
from epl.runtime.data import ReplicaLoader, Share
from epl.runtime.engine import Engine
from epl.runtime.meeting import connect
from epl.runtime.world import World
from epl.scopes import reset_scopes

__all__ = ["data_loader", "init", "parallelize"]


class _Job:
    """What `init` has set up in this process: the connection to the other ranks, and the engine made last.

    A process has one connection, as torch has one default process group; this is where it is kept.
    """

    world: World | None = None
    engine: Engine | None = None


def init(config: Config | None = None) -> None:
    """Join the job that the launcher started, or be a world of one.

    Called again without settings, it changes nothing. Called again with settings, it forgets annotations and the engine
    made before, which goes on with its own settings; the new ones hold for what is made from then on.

    Args:
        config: The settings; if not given, those of an earlier call, else the defaults and the environment.

    Raises:
        ConfigError: a setting is unknown, wrong or not yet available.
        ClusterError: the launcher's environment is incomplete.
        RunError: the ranks did not meet within ``communication.timeout``.

    Example:
        >>> import epl
        >>> epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"epl.init takes an epl.Config, got a {type(config).__name__}: epl.init(epl.Config({{...}}))")
    if config is None and _Job.world is not None:
        return
    env = Env.reset(config or Config(), Cluster.from_environment(os.environ))
    reset_scopes()
    _Job.engine = None
    if _Job.world is None:
        _Job.world = connect(env.cluster, env.config)
    _Job.world.set_timeout(env.config.communication.timeout)


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    example_batch: Any = None,
) -> Engine:
    """Put a model under a plan.

    Args:
        model: Any module. Annotated with `replicate` and `split`, or not at all: then it is trained data-parallel.
        optimizer: One or several ``torch.optim`` optimizers built on ``model.parameters()``; None to evaluate only.
        loss_fn: ``loss_fn(model, batch)`` gives the loss: a tensor of one element, an object with ``.loss``,
            ``SumLoss(total, count)``, or ``(loss, aux)`` with a dict of tensors. None for the model's own.
        example_batch: A batch like those of one replica, to plan before the first step; None to plan at the first step.

    Returns:
        The engine.

    Raises:
        ConfigError: an argument is of the wrong kind, or `init` has not been called.

    Example:
        >>> engine = epl.parallelize(model, torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        >>> loss = engine.train_step(batch)  # doctest: +SKIP
    """
    if _Job.world is None:
        raise ConfigError("call epl.init() before epl.parallelize")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"epl.parallelize takes an nn.Module, got a {type(model).__name__}")
    optimizers = _optimizers(model, optimizer)
    env = Env.get()
    engine = Engine(model, optimizers, loss_fn, _Job.world, env.cluster, env.config)
    _Job.engine = engine
    if example_batch is not None:
        engine.prepare(example_batch)
    return engine


def _optimizers(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    optimizers = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    known = {id(parameter) for parameter in model.parameters()}
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"epl.parallelize takes torch.optim optimizers, got a {type(each).__name__}")
        foreign = sum(id(p) not in known for group in each.param_groups for p in group["params"])
        if foreign:
            raise ConfigError(
                f"{type(each).__name__} holds {foreign} tensors that are not parameters of the model; build it on "
                "model.parameters(), after the model is complete"
            )
    return optimizers


def data_loader(
    dataset: Dataset[Any],
    global_batch_size: int,
    *,
    engine: Engine | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> ReplicaLoader:
    """Batches of a dataset: each replica gets its part of every global batch, all ranks of a replica the same part.

    Args:
        dataset: A map-style dataset (with a length).
        global_batch_size: Samples in a step over all replicas.
        engine: Whose plan says how many replicas there are; the one that `parallelize` made last if not given. It is
            asked when the iteration begins.
        shuffle: Draw a new order for each pass, the same on all ranks.
        seed: Of that order.
        drop_last: Leave out a last batch that is not full.
        **options: Passed to ``torch.utils.data.DataLoader`` (num_workers, collate_fn, ...).

    Raises:
        ConfigError: an option is set that this loader sets itself; or, when the iteration begins, there is no engine.

    Example:
        >>> for batch in epl.data_loader(dataset, global_batch_size=64, shuffle=True):  # doctest: +SKIP
        ...     loss = engine.train_step(batch)
    """

    def share(example: Callable[[int], Any]) -> Share:
        chosen = engine or _Job.engine
        if chosen is None:
            raise ConfigError("epl.data_loader needs to know the replicas: call epl.parallelize before you iterate")
        return chosen.share_of_data(example)

    return ReplicaLoader(dataset, global_batch_size, share, shuffle=shuffle, seed=seed, drop_last=drop_last, **options)
