"""The weights of a rank that lie in units: where they are stored, what forward is given of them, how they stay the same.

With it each model parameter is the *piece* that this rank's optimizer steps: of a unit that is shared out a flat part of
its elements (none, if none are in this rank's shard), else the weight in its own shape. What a stage computes with is the
*leaf*: of weights that every rank keeps whole a view of the unit's memory, of lent ones a tensor without memory, which
tells shape and type, and takes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from epl.errors import RunError, StrategyError
from epl.lines import warn
from epl.planner.plan import Plan
from epl.planner.units import Unit, shared_out, units_of
from epl.program.unit_memory import looks_ahead
from epl.runtime.disk import DiskSpace
from epl.runtime.guard import CUT, Guard, is_whole
from epl.runtime.lane import Lane
from epl.runtime.shards import Exchange, ShardTalk
from epl.runtime.stored_unit import Arriving, StoredUnit
from epl.runtime.world import World
from epl.stage.leases import UnitCache

__all__ = ["Weights", "refuse_odd"]

_Talks = dict[tuple[int, ...], tuple[ShardTalk, ShardTalk]]  # by ranks: for weights and for gradients


class Weights:
    """The units of one rank.

    Args:
        world: The ranks.
        plan: The plan.
        model: The model, of which this rank has what its stage uses. Its parameters become pieces.
        space: Where weights on disk go; None if there are none.
    """

    def __init__(self, world: World, plan: Plan, model: nn.Module, space: DiskSpace | None) -> None:
        self.world, self._space, self._lane = world, space, Lane(world.device)
        self.num_updates = 0
        self._caches: dict[tuple[int, ...], UnitCache] = {}
        self._handles: list[Any] = []
        self._guard, self._has_warned = Guard(), False
        self._coming: dict[int, Exchange] = {}  # updates on their way
        self._whole: dict[int, Arriving] = {}  # of a step in which all are here
        self._read: tuple[int, torch.Tensor] | None = None
        self._model = model
        talks = _talks(world, plan)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            self.units = tuple(self._store(unit, parameters, talks) for unit in units_of(plan, world.rank))
        if not all(is_whole(tensor) for tensor in (*model.parameters(), *model.buffers())):
            self._guard.put_on(model)
        self._places = {
            slot.path: (number, place)
            for number, stored in enumerate(self.units)
            for place, slot in enumerate(stored.unit.slots)
        }

    def _store(
        self,
        unit: Unit,
        parameters: Mapping[str, nn.Parameter],
        talks: _Talks,
    ) -> StoredUnit:
        own = tuple(parameters[slot.path] for slot in unit.slots)
        gathering, summing = talks[unit.ranks]
        size = unit.shard_size if unit.is_cut else unit.size
        memory = self._memory(unit, size, own[0])
        stored = StoredUnit(
            unit,
            unit.place_of(self.world.rank),
            gathering,
            summing,
            memory,
            own,
            (),
            self._lane,
            self._space if unit.home == "disk" else None,
        )
        leaves: list[torch.Tensor] = []
        for slot, parameter in zip(unit.slots, own, strict=True):
            gradient = None if parameter.grad is None else stored.cut(slot, parameter.grad)
            piece = stored.piece_of(slot, memory if unit.is_cut else stored.shard_of(memory))
            if unit.is_cut:
                piece.copy_(stored.cut(slot, parameter.detach()))
                leaf = parameter.new_empty(()).expand(slot.shape)
            else:
                whole = memory[slot.start : slot.stop].view(slot.shape)
                whole.copy_(parameter)
                leaf = parameter.new_empty(()).expand(slot.shape) if unit.is_lent else whole
            leaves.append(leaf.detach().to(self.world.device).requires_grad_(parameter.requires_grad))
            parameter.grad = None
            parameter.data = piece
            parameter.grad = gradient
            if unit.num_shards > 1:
                setattr(parameter, CUT, True)
        stored.leaves = tuple(leaves)
        return stored

    def _memory(self, unit: Unit, size: int, like: torch.Tensor) -> torch.Tensor:
        if unit.home == "disk":
            assert self._space is not None
            return self._space.tensor((size,), like.dtype)
        if unit.home == "host":
            return torch.zeros(size, dtype=like.dtype, pin_memory=self.world.device.type != "cpu")
        return torch.zeros(size, dtype=like.dtype, device=self.world.device)

    def __contains__(self, path: str) -> bool:
        return path in self._places

    @property
    def paths(self) -> frozenset[str]:
        """The weights that lie in units."""
        return frozenset(self._places)

    def leaf(self, path: str, parameter: torch.Tensor) -> torch.Tensor:
        """What a stage computes with: of a weight in no unit the parameter itself."""
        if path not in self._places:
            return parameter
        number, place = self._places[path]
        return self.units[number].leaves[place]

    def piece(self, path: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor like a weight, such as a state of its optimizer."""
        if path not in self._places:
            return whole
        number, place = self._places[path]
        stored = self.units[number]
        return stored.cut(stored.unit.slots[place], whole)

    def follow(self, trainable: frozenset[str]) -> None:
        """Take gradients of these parameters, and of no others."""
        for stored in self.units:
            for slot, _, leaf in stored.slots():
                leaf.requires_grad_(slot.path in trainable)

    # -- forward and backward -------------------------------------------------------------------------------------

    def lender(self, runs: Sequence[int]) -> UnitCache:
        """Brings the units of a stage's runs: the same for all graphs that use them in one order.

        So what is at hand when a micro-batch begins is the same on ranks whose batches have other shapes.
        """
        units = [stored.unit for stored in self.units]
        ahead = looks_ahead(units, on_accelerator=self.world.device.type != "cpu")

        def start(unit: int) -> Arriving:
            self._wait(unit)
            return self._whole.get(unit) or self.units[unit].start(self.world.device)

        return self._caches.setdefault(tuple(runs), UnitCache(runs, start, ahead=ahead))

    def gather_all(self) -> None:
        """Bring all weights of other ranks until `clear`: for steps in which ranks do not use them in the same order."""
        cut = [number for number, stored in enumerate(self.units) if stored.unit.is_cut]
        self._whole = {number: self.units[number].start(self.world.device) for number in cut}
        for arriving in self._whole.values():
            arriving.get()
        if cut and not self._has_warned and self.world.rank == 0:
            self._has_warned = True
            warn(
                "in this step replicas have unequal numbers of micro-batches, or different graphs; with zero.level 'v2' "
                "each rank then holds all weights for the length of the step. Batches that divide evenly avoid it."
            )

    def clear(self) -> None:
        """Let go of lent units."""
        self._whole = {}
        self.settle()
        for cache in self._caches.values():
            cache.clear()
        if self._space is not None:
            self._space.give_back_pages()

    # -- updates --------------------------------------------------------------------------------------------------

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of these optimizers: all ranks have to take the same."""

        def stepped(*_: object) -> None:
            self.num_updates += 1

        if self.units:
            self._handles += [optimizer.register_step_post_hook(stepped) for optimizer in optimizers]

    def refresh(self) -> None:
        """Start to gather what the other ranks have in their shards; all ranks call it together.

        Whether anything has changed is not asked: optimizers of the user's own, averages put in for a while and edits by
        hand would go unnoticed.
        """
        if not self.units:
            return
        self.settle()
        self._take_in()
        for number, stored in reversed(list(enumerate(self.units))):  # the first weights first
            if stored.unit.num_shards > 1 and not stored.unit.is_cut:
                what = f"the updated weights of {stored.name}"
                self._coming[number] = stored.gathering.gather(stored.stored, what)

    def _take_in(self) -> None:
        """Make what the user has put in place of a parameter's memory this rank's piece.

        Raises:
            RunError: a parameter was replaced, or has another shape now.
        """
        now = dict(self._model.named_parameters())  # a module may have been replaced, too
        for stored in self.units:
            shard = stored.stored if stored.unit.is_cut else stored.shard_of(stored.stored)
            for slot, parameter, _ in stored.slots():
                piece = stored.piece_of(slot, shard)
                is_same = now.get(slot.path) is parameter and parameter.shape == piece.shape
                if not is_same:
                    raise RunError(
                        f"{slot.path} was replaced, or given another shape, and its memory is EPL's: it is stored "
                        "elsewhere or shared out (zero.level, offload.level). Change its values in place, or load a state "
                        "by engine.load_state_dict()."
                    )
                if parameter.numel() and parameter.data_ptr() != piece.data_ptr():
                    piece.copy_(parameter.detach())
                    parameter.data = piece

    def arrival(self, unit: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that gives a weight of the unit once that is up to date."""

        def arrive(weight: torch.Tensor) -> torch.Tensor:
            self._wait(unit)
            return weight

        return arrive

    def _wait(self, unit: int) -> None:
        if unit in self._coming:
            self._coming.pop(unit).wait()

    def settle(self) -> None:
        """Wait for all that is being gathered."""
        for unit in list(self._coming):
            self._wait(unit)

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- whole weights --------------------------------------------------------------------------------------------

    def whole(self, path: str) -> torch.Tensor:
        """All that this rank's stage uses of a weight.

        The ranks of its unit call it for the same weights in the same order.
        """
        number, place = self._places[path]
        stored = self.units[number]
        if self._read is None or self._read[0] != number:
            self._wait(number)
            self._read = (number, stored.start(self.world.device).get() if stored.unit.is_cut else stored.stored)
        slot = stored.unit.slots[place]
        return self._read[1][slot.start : slot.stop].view(slot.shape).to(self.world.device)

    def is_cut(self, path: str) -> bool:
        """True if this rank stores a shard of a weight, and no more."""
        return path in self._places and self.units[self._places[path][0]].unit.is_cut

    def own_whole(self, path: str, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank itself has of a weight that it stores whole."""
        return self.whole(path) if path in self._places else parameter

    def end_reading(self) -> None:
        """Let go of what `whole` has brought."""
        self._read = None

    def reading(self) -> AbstractContextManager[None]:
        """While it lasts, the model may be run and its own ``state_dict()`` called: for a capture, for names."""
        return self._guard.open()

    def whole_gradient(self, path: str) -> torch.Tensor | None:
        """The same of a gradient; None if no rank has one."""
        number, place = self._places[path]
        stored = self.units[number]
        slot, parameter = stored.unit.slots[place], stored.parameters[place]
        if stored.unit.num_shards == 1:
            return None if parameter.grad is None else parameter.grad.to(self.world.device)
        flat = torch.zeros(stored.unit.size, dtype=parameter.dtype, device=self.world.device)
        if parameter.grad is not None:
            stored.piece_of(slot, stored.shard_of(flat)).copy_(parameter.grad)
        present = torch.tensor([float(parameter.grad is not None)], device=self.world.device)
        stored.gathering.all_reduce(present, f"word of the gradient of {path}").wait()
        stored.gathering.gather(flat, f"the gradient of {path}").wait()
        return flat[slot.start : slot.stop].view(slot.shape) if present.item() else None

    def load(self, path: str, whole: torch.Tensor) -> None:
        """Set a weight, of which ``whole`` is all that this rank's stage uses."""
        self.settle()
        number, place = self._places[path]
        stored = self.units[number]
        slot = stored.unit.slots[place]
        if stored.unit.is_cut:
            stored.piece_of(slot, stored.stored).copy_(stored.cut(slot, whole))
        else:
            stored.stored[slot.start : slot.stop].view(slot.shape).copy_(whole)


def refuse_odd(model: nn.Module, plan: Plan) -> None:
    """Refuse weights that cannot lie in units: with sparse gradients, hooks, or memory that a buffer uses, too.

    Raises:
        StrategyError: names one.
    """
    in_units = shared_out(plan)
    level = f"zero.level {plan.zero!r}" if plan.zero else "offload.level"
    buffers = {buffer.untyped_storage().data_ptr(): name for name, buffer in model.named_buffers() if buffer.numel()}
    for path, parameter in model.named_parameters():
        if path not in in_units:
            continue
        shared = buffers.get(parameter.untyped_storage().data_ptr()) if parameter.numel() else None
        if shared is not None:
            raise StrategyError(
                f"the buffer {shared} uses the memory of {path}, which {level} moves. Make the buffer a copy, or leave "
                "that level out."
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise StrategyError(
                f"{path} has a hook on its gradient, and with {level} each rank has a part of that only. Remove the hook, "
                "or leave that level out."
            )
    weights = {id(module.weight): name for name, module in model.named_modules() if getattr(module, "sparse", False)}
    found = [path for path, parameter in model.named_parameters() if path in in_units and id(parameter) in weights]
    if found and not plan.sparse_as_dense:
        raise StrategyError(
            f"{found[0]} has sparse gradients, and {level} stores it and its gradient in flat memory. Set "
            "communication.sparse_as_dense, build the embedding without sparse=True, or leave that level out."
        )


def _talks(world: World, plan: Plan) -> _Talks:
    """For each set of ranks that hold the same; all ranks of the world make all groups, in the same order."""
    if not plan.zero and all(entry.home == "device" for entry in plan.parameters):
        return {}
    sets = {
        ranks
        for entry in plan.parameters
        if entry.kind == "parameter" and entry.stages
        for ranks in plan.holders(entry)
    }
    found: _Talks = {}
    for ranks in sorted(sets, key=lambda ranks: (len(ranks), ranks)):
        groups = [world.group(ranks, purpose) for purpose in ("weights", "gradients of units")]
        if world.rank in ranks:
            found[ranks] = (ShardTalk(world, groups[0]), ShardTalk(world, groups[1]))
    return found
