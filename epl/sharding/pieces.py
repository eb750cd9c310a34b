"""A value that goes from one group of ranks to another, in the pieces that are needed.

Between TaskGraphs on the same devices a value changes its placement by a collective (:mod:`epl.sharding.conversions`).
Between TaskGraphs on different devices the same change is made of point-to-point pieces: each receiver gets, from those
that hold it, exactly what its own placement says. Gradients go the other way by the same table, with the placements
changed over.

Source: the bridges of Whale (Jia et al. 2022, section 3.3), cross-mesh resharding of Alpa (Zhuang et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epl.sharding.placements import Placement, Shard, local_shape

__all__ = ["Piece", "Side", "pieces_between"]

Span = tuple[int, int, int]  # dimension, start, size


@dataclass(frozen=True)
class Side:
    """A group of ranks and how it holds a value: whole, or cut along a dimension without repeats."""

    num_ranks: int
    placement: Placement

    def span(self, shape: Sequence[int], position: int) -> tuple[int, int, int] | None:
        """(dimension, start, stop) of what a rank holds; None if it holds all."""
        if not isinstance(self.placement, Shard):
            return None
        assert self.placement.repeats == 1, "what goes between groups is cut into one stretch a rank"
        dim = self.placement.dim
        return dim, *self.placement.span(shape[dim], self.num_ranks, position)

    def local_shape(self, shape: Sequence[int], position: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        return local_shape(shape, self.placement, self.num_ranks, position)


@dataclass(frozen=True)
class Piece:
    """What goes from one rank to another.

    Args:
        source: Position of the sender in its group.
        target: Position of the receiver in its group.
        shape: Of the piece.
        taken: Where it is in what the sender holds: (dimension, start, size), one after another; empty: all of it.
        put: Where it is in what the receiver is to hold.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    taken: tuple[Span, ...]
    put: tuple[Span, ...]


def pieces_between(shape: Sequence[int], source: Side, target: Side) -> tuple[Piece, ...]:
    """All pieces, by sender and then receiver; every element that a receiver needs comes once.

    Of a value that all senders hold whole, each receiver takes its part from one of them, in turn.

    Example:
        >>> two, one = Side(2, Shard(0)), Side(1, Shard(0))
        >>> [(p.source, p.target, p.shape) for p in pieces_between((5, 3), two, one)]
        [(0, 0, (3, 3)), (1, 0, (2, 3))]
    """
    found = (
        piece
        for position in range(source.num_ranks)
        for other in range(target.num_ranks)
        for piece in _piece(tuple(shape), source, target, position, other)
    )
    return tuple(found)


def _piece(shape: tuple[int, ...], source: Side, target: Side, position: int, other: int) -> Iterator[Piece]:
    held, needed = source.span(shape, position), target.span(shape, other)
    if held is None and position != other % source.num_ranks:
        return
    sizes = list(shape)
    taken: list[Span] = []
    put: list[Span] = []
    for dim in dict.fromkeys(span[0] for span in (held, needed) if span is not None):
        ours, theirs = (span[1:] if span and span[0] == dim else (0, shape[dim]) for span in (held, needed))
        start, stop = max(ours[0], theirs[0]), min(ours[1], theirs[1])
        if start >= stop:
            return
        sizes[dim] = stop - start
        taken += [(dim, start - ours[0], stop - start)] * ((start, stop) != ours)
        put += [(dim, start - theirs[0], stop - start)] * ((start, stop) != theirs)
    yield Piece(position, other, tuple(sizes), tuple(taken), tuple(put))
