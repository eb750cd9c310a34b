"""Bytes and seconds of collectives, per rank, by ring algorithms.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 3 to 5.
"""

from __future__ import annotations

from epl.cost.devices import LinkModel

__all__ = ["bytes_sent", "collective_s", "transfer_s"]


def bytes_sent(kind: str, size_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``; anything else stays within a rank.
        size_bytes: Size of the whole tensor.
        num_ranks: Ranks in the group.
    """
    share = size_bytes * (num_ranks - 1) / num_ranks
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share / num_ranks,
    }.get(kind, 0.0)


def collective_s(kind: str, size_bytes: float, num_ranks: int, link: LinkModel) -> float:
    """Time of a collective in seconds."""
    steps = {"all_reduce": 2 * (num_ranks - 1), "all_to_all": 1}.get(kind, num_ranks - 1)
    sent = bytes_sent(kind, size_bytes, num_ranks)
    return steps * link.latency_s + sent / link.bandwidth_bytes_per_s if sent else 0.0


def transfer_s(size_bytes: float, link: LinkModel) -> float:
    """Time in seconds until a value of this size has gone from one rank to another."""
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s
