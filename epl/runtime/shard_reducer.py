"""Sum the gradients of units: each rank gets the sum of its own shard, and no rank keeps what it does not need.

A gradient that backward has made is copied into its unit's bucket and dropped. When all gradients of the unit are there,
the bucket is sent around, the sum of the own shard is added to what earlier rounds have left, and the bucket's memory is
given back. Buckets are sent in one order, that of ``units``, so that all ranks agree; at most two are under way at once.

ZeRO v0 has one round a step, with the last backward pass; gradients of earlier micro-batches are added up whole. v1 and v2
have a round for each backward pass: more to send under accumulation, and never a whole set of gradients in memory.

Sources: ZeRO (Rajbhandari et al. 2020, section 5.2), PyTorch DDP (buckets, reverse order, hooks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from epl.planner.units import Slot
from epl.runtime.shards import Exchange
from epl.runtime.stored_unit import StoredUnit
from epl.runtime.world import World

__all__ = ["ShardReducer"]

_MOST_UNDER_WAY = 2


@dataclass
class _Bucket:
    """The gradients of a unit in a step.

    Args:
        stored: The unit.
        flat: Its memory in this round; None if no gradient has come yet.
        missing: Places of the slots whose gradient of this round has not come.
        shard: The sum of this rank's shard so far; None if there is none.
        present: For each slot 1 if this rank has had a gradient of it in this step.
    """

    stored: StoredUnit
    flat: torch.Tensor | None = None
    missing: set[int] = field(default_factory=set)
    shard: torch.Tensor | None = None
    present: list[float] = field(default_factory=list)

    def memory(self) -> torch.Tensor:
        """The flat memory, made when it is first needed; what is between the weights is of no use to anyone."""
        if self.flat is None:
            leaf = self.stored.leaves[0]
            self.flat = torch.empty(self.stored.unit.size, dtype=leaf.dtype, device=leaf.device)
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
        elif self.flat is None and self.stored.unit.is_one_weight and gradient.is_contiguous():
            self.flat = gradient.view(-1)
        else:
            self.view(slot).copy_(gradient)


@dataclass
class _Sent:
    bucket: _Bucket
    flat: torch.Tensor
    room: torch.Tensor | None
    exchange: Exchange


class ShardReducer:
    """Holds the buckets of one rank.

    Args:
        world: The ranks.
        units: The rank's units, in the order in which ranks meet over them.
        overlap: False to send after backward only, as of `epl.runtime.reducer.Reducer`.
    """

    def __init__(self, world: World, units: Sequence[StoredUnit], *, overlap: bool = True) -> None:
        self._world, self._overlap = world, overlap
        trained = [stored for stored in units if any(leaf.requires_grad for leaf in stored.leaves)]
        self._each = [_Bucket(stored) for stored in trained if stored.unit.each_backward]
        self._last = [_Bucket(stored) for stored in trained if stored.unit.is_tied]
        self._once = [_Bucket(stored) for stored in trained if not (stored.unit.each_backward or stored.unit.is_tied)]
        self._queue: deque[_Bucket] = deque()  # of this round, in order
        self._under_way: deque[_Sent] = deque()
        self._active: set[int] = set()  # ids of the buckets that take gradients as they come
        self._handles = [
            leaf.register_post_accumulate_grad_hook(self._hook(bucket, place))
            for bucket in self.buckets
            for place, leaf in enumerate(bucket.stored.leaves)
            if leaf.requires_grad
        ]

    @property
    def buckets(self) -> list[_Bucket]:
        return [*self._each, *self._once, *self._last]

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

    def start_round(self) -> None:
        """The next backward pass is summed by itself, for units that are summed after each."""
        self._open(self._each)

    def finish_round(self) -> None:
        """Send what is left of this round."""
        self._flush()

    def start(self) -> None:
        """The next backward pass is the last one: what it leaves of the other units is complete."""
        self._open(self._once)

    def finish(self) -> None:
        """Send the rest, wait for everything, and give the parameters their gradients."""
        self._flush()
        self._open(self._last)
        self._flush()
        while self._under_way:
            self._arrive()
        self._agree_on_present()
        for bucket in self.buckets:
            for place, (slot, parameter, leaf) in enumerate(bucket.stored.slots()):
                has_piece = bucket.shard is not None and bucket.present[place] > 0
                piece = bucket.stored.piece_of(slot, bucket.shard) if has_piece and bucket.shard is not None else None
                parameter.grad = None if piece is None else piece.to(parameter.device)
                leaf.grad = None
            bucket.shard = None

    def _open(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            leaves = bucket.stored.leaves
            bucket.missing = {place for place, leaf in enumerate(leaves) if leaf.requires_grad}
            if self._overlap:
                self._active.add(id(bucket))
        self._queue.extend(buckets)

    def _hook(self, bucket: _Bucket, place: int) -> Callable[[torch.Tensor], None]:
        def on_ready(_: torch.Tensor) -> None:
            if id(bucket) in self._active:
                self._fill(bucket, place)
                self._send_ready()

        return on_ready

    def _fill(self, bucket: _Bucket, place: int) -> None:
        leaf, slot = bucket.stored.leaves[place], bucket.stored.unit.slots[place]
        bucket.missing.discard(place)
        gradient, leaf.grad = leaf.grad, None
        bucket.put(slot, gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient)
        bucket.present[place] = max(bucket.present[place], float(gradient is not None))

    def _send_ready(self) -> None:
        while self._queue and not self._queue[0].missing:
            self._send(self._queue.popleft())

    def _flush(self) -> None:
        for bucket in list(self._queue):
            for place in sorted(bucket.missing):
                self._fill(bucket, place)
        self._send_ready()
        self._active.clear()

    # -- what travels ---------------------------------------------------------------------------------------------

    def _send(self, bucket: _Bucket) -> None:
        stored = bucket.stored
        unit, what = stored.unit, f"the gradients of {stored.name}"
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._arrive()
        flat, bucket.flat = bucket.memory(), None
        if unit.num_shards == 1:
            self._under_way.append(_Sent(bucket, flat, None, stored.summing.all_reduce(flat, what)))
            return
        room = torch.empty(stored.summing.room_size(unit.size), dtype=flat.dtype, device=flat.device)
        exchange = stored.summing.reduce_scatter(flat, room, what)
        self._under_way.append(_Sent(bucket, flat, room, exchange))

    def _arrive(self) -> None:
        """Wait for the oldest, and keep of it what is this rank's."""
        sent = self._under_way.popleft()
        sent.exchange.wait()
        bucket, unit = sent.bucket, sent.bucket.stored.unit
        mine = bucket.stored.shard_of(sent.flat)
        if bucket.shard is not None:
            bucket.shard.add_(mine)
        elif unit.num_shards == 1:
            bucket.shard = mine
        elif sent.room is not None and sent.room.numel() == unit.shard_size:
            bucket.shard = sent.room.copy_(mine)  # of two ranks: what came has been added, and its memory is free
        else:
            bucket.shard = mine.clone()

    def _agree_on_present(self) -> None:
        """A gradient that no rank has stays None: one number for each weight, once a step."""
        by_ranks: dict[tuple[int, ...], list[_Bucket]] = {}
        for bucket in self.buckets:
            by_ranks.setdefault(bucket.stored.unit.ranks, []).append(bucket)
        for buckets in by_ranks.values():
            flags = torch.tensor([flag for bucket in buckets for flag in bucket.present], device=self._world.device)
            buckets[0].stored.summing.all_reduce(flags, "word of which weights have gradients").wait()
            found = flags.tolist()
            for bucket in buckets:
                bucket.present, found = found[: len(bucket.present)], found[len(bucket.present) :]
