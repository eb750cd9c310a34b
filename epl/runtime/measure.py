"""Measure the memory of one step on one rank, by what it is for.

On the CPU torch.profiler notes each allocation with its address. What an allocation is for shows by the instruction in
which it is made and by how long it lives: made in a forward pass and there after it, an activation; made in a backward pass
and there after it, a gradient; made to receive or to send, communication. An accelerator tells the peak, undivided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from epl.capture.allocations import Allocation, Span, memory_profile, mended, read_profile
from epl.program.curve import MemoryCurve, Meter
from epl.program.instructions import Backward, Forward, Free, Instruction, PostReceive, Send

__all__ = ["curve_of", "measured_step", "storage_bytes"]

_PREFIX = "epl "  # of the executor's blocks
_AFTER = "optimizer"  # what comes after the last instruction: the merging of losses, clipping, the update


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the memory under these tensors, each piece of it once; ``seen`` are the addresses that have been counted."""
    total = 0
    for tensor in tensors:
        if tensor.is_sparse:
            total += tensor.values().nbytes + tensor.indices().nbytes if tensor.is_coalesced() else 0
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def measured_step(
    step: Callable[[], object],
    before: Mapping[str, int],
    left: Callable[[], Iterable[torch.Tensor]] | None,
    instructions: Sequence[Instruction],
    device: torch.device,
) -> MemoryCurve:
    """Run a step, and give its memory.

    Args:
        step: What is run.
        before: Bytes of each category before it.
        left: What may be there after it and was not before; None if the ranks of the stage do nothing together, and so no
            other thread has to do with memory.
        instructions: What the executor runs in it.
        device: Where.
    """
    if device.type != "cpu":
        return _on_accelerator(step, before, device)
    with memory_profile() as profiled:
        result = step()
    allocations, spans = read_profile(profiled, _PREFIX)
    if left is not None:
        allocations = mended(allocations, _addresses(left(), result))
    return curve_of(allocations, spans, before, instructions)


def _addresses(left: Iterable[torch.Tensor], result: object) -> set[int]:
    values = (*left, *(result if isinstance(result, tuple) else [result]))
    tensors = (value for value in values if isinstance(value, torch.Tensor) and not value.is_sparse)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _on_accelerator(step: Callable[[], object], before: Mapping[str, int], device: torch.device) -> MemoryCurve:
    """The peak that the device's allocator has seen; what is beyond what was there before counts as temporary."""
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    start = torch.accelerator.memory_allocated(device)
    step()
    torch.accelerator.synchronize(device)
    meter = Meter.starting_with(before)
    meter.begin("the whole step")
    meter.spike("temporaries", torch.accelerator.max_memory_allocated(device) - start)
    note = "on an accelerator the peak is measured, and not what it is for"
    return meter.curve([note])


@dataclass
class _Life:
    """One piece of memory: the event that made it, the one that gave it back if any did, and the phases they are in."""

    made_in: int
    gone_in: int | None = None
    category: str = "temporaries"


def curve_of(
    allocations: Sequence[Allocation],
    spans: Sequence[Span],
    before: Mapping[str, int],
    instructions: Sequence[Instruction],
) -> MemoryCurve:
    """The curve of a step from what the profiler noted.

    Args:
        allocations: By time.
        spans: The executor's blocks, by time: one for each instruction.
        before: Bytes of each category at the start.
        instructions: The instructions.
    """
    phases = _phases(allocations, spans)
    lives = _lives(allocations, phases)
    for life in {id(life): life for life in lives if life is not None}.values():
        life.category = _category(life, instructions)
    meter, phase = Meter.starting_with(before), -2  # no phase yet
    for allocation, place, life in zip(allocations, phases, lives, strict=True):
        if place != phase:
            phase = place
            meter.begin(str(instructions[place]) if 0 <= place < len(instructions) else _AFTER if place >= 0 else "")
        if life is not None:
            meter.add(life.category, allocation.size_bytes)
    return meter.curve()


def _phases(allocations: Sequence[Allocation], spans: Sequence[Span]) -> list[int]:
    """The instruction that each allocation belongs to: -1 before the first, ``len(spans)`` after the last."""
    found: list[int] = []
    place = -1
    for allocation in allocations:
        while place + 1 < len(spans) and allocation.time_ns >= spans[place + 1].start_ns:
            place += 1
        is_after = place == len(spans) - 1 and place >= 0 and allocation.time_ns > spans[place].end_ns
        found.append(len(spans) if is_after else place)
    return found


def _lives(allocations: Sequence[Allocation], phases: Sequence[int]) -> list[_Life | None]:
    """For each event the memory that it is about; None for memory that an earlier profile has seen made."""
    live: dict[int, _Life] = {}
    found: list[_Life | None] = []
    for allocation, phase in zip(allocations, phases, strict=True):
        if allocation.size_bytes >= 0:
            live[allocation.address] = _Life(phase)
            found.append(live[allocation.address])
        else:
            life = live.pop(allocation.address, None)
            if life is not None:
                life.gone_in = phase
            found.append(life)
    return found


def _category(life: _Life, instructions: Sequence[Instruction]) -> str:
    stays = life.gone_in is None or life.gone_in > life.made_in
    if life.made_in >= len(instructions):
        return "temporaries" if life.gone_in is not None else "optimizer"
    maker = instructions[life.made_in] if life.made_in >= 0 else None
    if isinstance(maker, (PostReceive, Send)):
        return "communication"
    if isinstance(maker, Forward) and stays:
        return "activations"
    if isinstance(maker, Backward) and stays:
        ends_with = None if life.gone_in is None or life.gone_in >= len(instructions) else instructions[life.gone_in]
        is_sent = isinstance(ends_with, Free) or (life.gone_in is not None and life.gone_in >= len(instructions))
        return "communication" if is_sent else "gradients"
    return "temporaries"
