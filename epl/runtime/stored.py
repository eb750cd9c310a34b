"""Bring a model and its optimizers into the form that a plan wants of them: what is stored where, and who steps what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shutil import disk_usage
from tempfile import gettempdir

import torch.nn as nn
from torch.optim import Optimizer

from epl.config import Config
from epl.errors import ConfigError, RunError
from epl.planner.plan import Plan
from epl.planner.units import units_of
from epl.program.holdings import stepped_bytes
from epl.runtime.agree import all_succeed
from epl.runtime.disk import DiskSpace
from epl.runtime.optimizers import fit_optimizers
from epl.runtime.scaling import Scaling
from epl.runtime.state import release
from epl.runtime.state_home import DiskHome, HostHome, StateHome
from epl.runtime.weights import Weights, refuse_odd
from epl.runtime.world import World
from epl.units import size_bytes_of, size_text

__all__ = ["Stored", "refuse_gathers_in_host_memory", "store"]


@dataclass(frozen=True)
class Stored:
    """What was done.

    Args:
        weights: The weights that lie in units.
        home: Where optimizer states live between steps; None for beside the weights.
        undo: Takes all hooks off the optimizers.
    """

    weights: Weights
    home: StateHome | None
    undo: Callable[[], None]


def store(
    world: World, plan: Plan, config: Config, model: nn.Module, optimizers: Sequence[Optimizer], scaling: Scaling
) -> Stored:
    """Store weights and optimizer states as the plan says; all ranks call it together.

    Raises:
        ConfigError: the devices are CPUs, whose memory is host memory already.
        RunError: there is no room for the files.
        StrategyError: a gradient is sparse where flat memory is needed.
    """
    homes = {entry.home for entry in plan.parameters} | {entry.states_home for entry in plan.parameters}

    def make_weights() -> tuple[Weights, DiskSpace | None]:
        release(model, plan, world.rank)
        refuse_odd(model, plan)
        if "host" in homes and world.device.type == "cpu":
            raise ConfigError(
                f"offload.level is {config.offload.level!r}, which moves weights or states to host memory, and this rank "
                "computes on the CPU, whose memory that is. Use 'disk', or leave it out."
            )
        refuse_gathers_in_host_memory(world, plan)
        space = _space(world, plan, config) if "disk" in homes else None
        return Weights(world, plan, model, space), space

    weights, space = all_succeed(world, make_weights)
    home = _home(world, plan, model, space)
    undo = [fit_optimizers(optimizers, model, plan, world.rank, weights, home)]
    weights.watch(optimizers)
    undo.append(scaling.skip_overflows(optimizers))

    def undo_all() -> None:
        for each in reversed(undo):
            each()
        weights.close()

    return Stored(weights, home, undo_all)


def refuse_gathers_in_host_memory(world: World, plan: Plan) -> None:
    """Accelerators talk about their own memory: what is stored elsewhere and whole cannot be gathered there."""
    wrong = [
        unit for unit in units_of(plan, world.rank) if unit.home != "device" and unit.num_shards > 1 and not unit.is_cut
    ]
    if wrong and world.device.type != "cpu":
        raise ConfigError(
            f"zero.level is {plan.zero!r}, and {wrong[0].slots[0].path} is stored whole outside of the accelerator, where "
            "its ranks cannot gather it. Use zero.level 'v2', and leave weights that are tied over stages out of "
            "offload.parameters."
        )


def _space(world: World, plan: Plan, config: Config) -> DiskSpace:
    """Where the files are; states are made at the first step, and a disk that is too small should be known before."""
    folder, limit = config.offload.path or gettempdir(), size_bytes_of(config.offload.size_limit) or None
    space = DiskSpace(folder, limit)
    homes = {entry.path: entry.states_home for entry in plan.parameters}
    stepped = sum(size for path, size in stepped_bytes(plan, world.rank).items() if homes[path] == "disk")
    weights = sum(unit.stored_bytes for unit in units_of(plan, world.rank) if unit.home == "disk")
    needed, free = weights + int(plan.state_factor * stepped), disk_usage(folder).free
    if needed > (limit or free):
        what = f"offload.size_limit is {size_text(limit)}" if limit else f"{folder!r} has {size_text(free)} free"
        raise RunError(
            f"{what}, and the weights and optimizer states of rank {world.rank} take about {size_text(needed)} there. "
            "Allow more, set offload.path to a folder on a larger disk, share them out (zero.level), or offload fewer "
            "weights (offload.parameters)"
        )
    return space


def _home(world: World, plan: Plan, model: nn.Module, space: DiskSpace | None) -> StateHome | None:
    parameters = dict(model.named_parameters())
    stage, _, _ = plan.place_of(world.rank)
    away = {
        entry.states_home: []
        for entry in plan.parameters
        if entry.kind == "parameter" and entry.states_home != "device"
    }
    for entry in plan.parameters:
        # of a weight that is itself in host memory the optimizer makes states there
        if entry.states_home in away and stage in entry.stages and (entry.states_home, entry.home) != ("host", "host"):
            away[entry.states_home].append(parameters[entry.path])
    if "disk" in away:
        assert space is not None
        return DiskHome(space, away["disk"])
    return HostHome(world.device, away["host"]) if away.get("host") else None
