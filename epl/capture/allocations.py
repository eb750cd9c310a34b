"""What torch.profiler notes of memory, as plain numbers in the order of time.

The profiler's own tables add memory up by operator; a curve needs each allocation. They are its "[memory]" events, which it
hands out by ``prof.profiler.kineto_results`` (no underscore, and no documentation: torch 1.8 and later) and in the exported
Chrome trace, which takes a file and many times as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

__all__ = ["Span", "memory_profile", "read_profile"]


class Span(NamedTuple):
    """A ``record_function`` block: from when to when."""

    name: str
    start_ns: int
    end_ns: int


def memory_profile() -> profile:
    """A profiler of this process's memory on the CPU."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def read_profile(profiled: profile, prefix: str) -> tuple[list[tuple[int, int]], list[Span]]:
    """(time in ns, bytes made or given back) of each allocation, and the blocks whose name starts with ``prefix``."""
    results: Any = profiled.profiler
    sizes: list[tuple[int, int]] = []
    spans: list[Span] = []
    for event in results.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            sizes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(prefix):
            spans.append(Span(name.removeprefix(prefix), event.start_ns(), event.start_ns() + event.duration_ns()))
    # stable: of events of one moment, the order in which they were noted
    return sorted(sizes, key=lambda size: size[0]), sorted(spans, key=lambda span: span.start_ns)
