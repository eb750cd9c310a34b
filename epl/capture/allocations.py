"""What torch.profiler notes of memory, as plain numbers in the order of time.

The profiler's own tables add memory up by operator; a curve by purpose needs each allocation, and where it is. Both are in
the tree of events that torch.profiler builds its memory timeline of, ``prof.profiler.kineto_results``: since torch 1.12,
without documentation. The public way is the exported Chrome trace: a file, and many times as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

__all__ = ["Allocation", "Span", "memory_profile", "mended", "read_profile"]


class Allocation(NamedTuple):
    """Memory made, or given back if ``size_bytes`` is negative."""

    time_ns: int
    address: int
    size_bytes: int


class Span(NamedTuple):
    """A ``record_function`` block: from when to when."""

    name: str
    start_ns: int
    end_ns: int


def memory_profile() -> profile:
    """A profiler of this process's memory on the CPU.

    It sees what the calling thread makes and gives back. (With ``profile_all_threads``, torch 2.13 notes no memory at all.)
    """
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def read_profile(profiled: profile, prefix: str) -> tuple[list[Allocation], list[Span]]:
    """Each allocation, and the blocks whose name starts with ``prefix``, by time."""
    profiler: Any = profiled.profiler
    found: list[Allocation] = []
    spans: list[Span] = []
    stack = list(profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith(prefix):
            spans.append(Span(event.name.removeprefix(prefix), event.start_time_ns, event.end_time_ns))
    return sorted(found), sorted(spans, key=lambda span: span.start_ns)


def mended(allocations: Sequence[Allocation], left: Collection[int]) -> list[Allocation]:
    """The allocations with what the profiler has missed: memory that another thread has given back.

    A thread of gloo's may be the last to hold what a collective has sent. The profiler does not see it drop that; but later
    memory lies in the same place, or no one has it in the end. Such memory is gone as soon as the collective is over: what
    a collective receives is made after what it sends, so that is after the next event.

    Args:
        allocations: By time.
        left: Addresses of the memory that is there in the end.
    """
    live: list[tuple[int, int, int]] = []  # (address, size, place in allocations), by address
    missed: dict[int, list[Allocation]] = {}

    def miss(block: tuple[int, int, int]) -> None:
        address, size_bytes, place = block
        after = min(place + 1, len(allocations) - 1)
        missed.setdefault(after, []).append(Allocation(allocations[after].time_ns, address, -size_bytes))

    for place, (_, address, size_bytes) in enumerate(allocations):
        start = bisect_left(live, (address, 0, 0))
        if size_bytes < 0:
            if start < len(live) and live[start][0] == address:
                del live[start]
            continue
        if start and live[start - 1][0] + live[start - 1][1] > address:
            start -= 1
        while start < len(live) and live[start][0] < address + size_bytes:
            miss(live.pop(start))
        insort(live, (address, size_bytes, place))
    for block in live:
        if block[0] not in left:
            miss(block)
    return [each for place, event in enumerate(allocations) for each in (event, *missed.get(place, ()))]
