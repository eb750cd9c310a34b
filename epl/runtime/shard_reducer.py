"""Sum the gradients of units: each rank gets the sum of its own shard, and no rank keeps what it does not need.

A gradient that backward has made is copied into its unit's bucket and dropped. When all gradients of the unit are there,
the bucket is sent around, the sum of the own shard is added to what earlier rounds have left, and the bucket's memory is
given back. :mod:`epl.program.unit_rounds` has the order.

ZeRO v0 has one round a step, with the last backward pass; gradients of earlier micro-batches are added up whole. v1 and v2
have a round for each backward pass: more to send under accumulation, and never a whole set of gradients in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from epl.planner.units import Slot
from epl.program.unit_rounds import UnitBucket, UnitRounds
from epl.runtime.shards import Exchange
from epl.runtime.stored_unit import StoredUnit
from epl.runtime.world import World

__all__ = ["ShardReducer"]


@dataclass(eq=False)
class _Bucket(UnitBucket):
    """The gradients of a unit in a step.

    Args:
        stored: The unit on this rank.
        flat: Its memory in this round; None if no gradient has come yet.
        shard: The sum of this rank's shard so far; None if there is none.
        present: For each slot 1 if this rank has had a gradient of it in this step.
    """

    stored: StoredUnit = field(kw_only=True)
    flat: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    present: list[float] = field(default_factory=list)

    def memory(self) -> torch.Tensor:
        """The flat memory, made when it is first needed; what is between the weights is of no use to anyone."""
        if self.flat is None:
            leaf = self.stored.leaves[0]
            self.flat = torch.empty(self.unit.size, dtype=leaf.dtype, device=leaf.device)
            for slot, _, leaf in self.stored.slots():
                if not leaf.requires_grad:
                    self.view(slot).zero_()
        return self.flat

    def view(self, slot: Slot) -> torch.Tensor:
        """Where a gradient goes."""
        return self.memory()[slot.start : slot.stop].view(slot.shape)

    def put(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Take a gradient in; of a unit of one weight it becomes the bucket."""
        if gradient is None:
            self.view(slot).zero_()
        elif self.flat is None and self.unit.is_one_weight and gradient.is_contiguous():
            self.flat = gradient.view(-1)
        else:
            self.view(slot).copy_(gradient)


@dataclass
class _Sent:
    bucket: _Bucket
    flat: torch.Tensor
    room: torch.Tensor | None
    exchange: Exchange


class ShardReducer(UnitRounds[_Bucket]):
    """Holds the buckets of one rank.

    Args:
        world: The ranks.
        units: The rank's units, in the order in which ranks meet over them.
        overlap: False to send after backward only, as of `epl.runtime.reducer.Reducer`.
    """

    def __init__(self, world: World, units: Sequence[StoredUnit], *, overlap: bool = True) -> None:
        trained = [stored for stored in units if any(leaf.requires_grad for leaf in stored.leaves)]
        super().__init__([_Bucket(stored.unit, stored=stored) for stored in trained])
        self._world, self._overlap = world, overlap
        self._handles = [
            leaf.register_post_accumulate_grad_hook(self._hook(bucket, place))
            for bucket in self.buckets
            for place, leaf in enumerate(bucket.stored.leaves)
            if leaf.requires_grad
        ]

    def close(self) -> None:
        """Take the hooks off the leaves."""
        for handle in self._handles:
            handle.remove()

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: nothing has been summed."""
        for bucket in self.buckets:
            bucket.shard, bucket.flat = None, None
            bucket.present = [0.0] * len(bucket.stored.leaves)
            for leaf in bucket.stored.leaves:
                leaf.grad = None

    def finish(self) -> None:
        """Send the rest, wait for everything, and give the parameters their gradients."""
        super().finish()
        self._agree_on_present()
        for bucket in self.buckets:
            for place, (slot, parameter, leaf) in enumerate(bucket.stored.slots()):
                has_piece = bucket.shard is not None and bucket.present[place] > 0
                piece = bucket.stored.piece_of(slot, bucket.shard) if has_piece and bucket.shard is not None else None
                parameter.grad = None if piece is None else piece.to(parameter.device)
                leaf.grad = None
            bucket.shard = None

    def _hook(self, bucket: _Bucket, place: int) -> Callable[[torch.Tensor], None]:
        def on_ready(_: torch.Tensor) -> None:
            if self._overlap and place in bucket.missing:
                self._take(bucket, place)

        return on_ready

    def _expected(self, bucket: _Bucket) -> set[int]:
        return {place for place, leaf in enumerate(bucket.stored.leaves) if leaf.requires_grad}

    def _fill(self, bucket: _Bucket, place: int) -> None:
        leaf, slot = bucket.stored.leaves[place], bucket.unit.slots[place]
        gradient, leaf.grad = leaf.grad, None
        bucket.put(slot, gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient)
        bucket.present[place] = max(bucket.present[place], float(gradient is not None))

    # -- what travels ---------------------------------------------------------------------------------------------

    def _send(self, bucket: _Bucket) -> _Sent:
        unit, summing, what = bucket.unit, bucket.stored.summing, f"the gradients of {bucket.stored.name}"
        flat, bucket.flat = bucket.memory(), None
        if unit.num_shards == 1:
            return _Sent(bucket, flat, None, summing.all_reduce(flat, what))
        room = torch.empty(summing.room_size(unit.size), dtype=flat.dtype, device=flat.device)
        return _Sent(bucket, flat, room, summing.reduce_scatter(flat, room, what))

    def _arrive(self, sent: _Sent) -> None:
        sent.exchange.wait()
        bucket, mine = sent.bucket, sent.bucket.stored.shard_of(sent.flat)
        if bucket.shard is not None:
            bucket.shard.add_(mine)
        elif bucket.unit.num_shards == 1:
            bucket.shard = mine
        elif sent.room is not None and sent.room.numel() == bucket.unit.shard_size:
            bucket.shard = sent.room.copy_(mine)  # of two ranks: what came has been added, and its memory is free
        else:
            bucket.shard = mine.clone()

    def _agree_on_present(self) -> None:
        """A gradient that no rank has stays None: one number for each weight, once a step."""
        by_ranks: dict[tuple[int, ...], list[_Bucket]] = {}
        for bucket in self.buckets:
            by_ranks.setdefault(bucket.unit.ranks, []).append(bucket)
        for buckets in by_ranks.values():
            flags = torch.tensor([flag for bucket in buckets for flag in bucket.present], device=self._world.device)
            buckets[0].stored.summing.all_reduce(flags, "word of which weights have gradients").wait()
            found = flags.tolist()
            for bucket in buckets:
                bucket.present, found = found[: len(bucket.present)], found[len(bucket.present) :]
