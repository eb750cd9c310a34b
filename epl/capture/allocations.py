"""What torch.profiler notes of memory, as plain numbers in the order of time.

The profiler's own tables add memory up by operator; a curve by purpose needs each allocation, and where it is. Both are in
the tree of events that torch.profiler builds its memory timeline of, ``prof.profiler.kineto_results``: since torch 1.12,
without documentation. The public way is the exported Chrome trace: a file, and many times as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

__all__ = ["Allocation", "Span", "memory_profile", "read_profile"]


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
    """A profiler of this process's memory on the CPU."""
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
