"""Which TaskGraphs there are, and in which order: the user's strategies, as far as they take part in the step."""

from __future__ import annotations

from dataclasses import replace

from epl.errors import StrategyError, bulleted
from epl.ir.graph import Graph, StrategySpec

__all__ = ["number_strategies", "take_numbers_of"]


def number_strategies(graph: Graph) -> Graph:
    """The graph with its strategies in the order in which dataflow reaches them; at equal rank, in order of first use.

    A default strategy that is left without operators is no TaskGraph.

    Raises:
        StrategyError: a strategy of the user's takes no part in the step; names all of them.
    """
    used = {op.tag for op in graph.ops if op.tag is not None}
    idle = [spec for tag, spec in enumerate(graph.strategies) if tag not in used and not spec.is_default]
    if idle:
        raise StrategyError(
            bulleted(
                "nothing that the step needs is computed under these strategies, so they would be TaskGraphs without work. "
                "Remove them, or put modules under them that take part in the loss:",
                [str(spec) for spec in idle],
            )
        )
    order = _by_dataflow(graph, sorted(used))
    numbers = {tag: number for number, tag in enumerate(order)}
    return _renumbered(graph, numbers, tuple(graph.strategies[tag] for tag in order))


def _by_dataflow(graph: Graph, tags: list[int]) -> list[int]:
    """Tags so that each comes after those that feed it; where they feed each other, in order of first use."""
    before = _feeding_tags(graph)
    order: list[int] = []
    left = list(tags)
    while left:
        ready = next((tag for tag in left if not (before.get(tag, set()) & set(left)) - {tag}), left[0])
        left.remove(ready)
        order.append(ready)
    return order


def _feeding_tags(graph: Graph) -> dict[int, set[int]]:
    """The strategies that each one takes values from, through untagged operators too."""
    upstream: dict[str, set[int]] = {}
    before: dict[int, set[int]] = {}
    for op in graph.ops:
        reached = set[int]().union(*(upstream[name] for name in graph.feeders[op.name]))
        if op.tag is not None:
            before.setdefault(op.tag, set()).update(reached)
            reached = {op.tag}
        upstream[op.name] = reached
    return before


def take_numbers_of(graph: Graph, tasks: tuple[StrategySpec, ...]) -> Graph:
    """The graph with its tags renumbered to the plan's TaskGraphs; equal strategies are matched in order.

    Raises:
        StrategyError: the graph has operators under a strategy that the plan does not know.
    """
    used = {op.tag for op in graph.ops if op.tag is not None}
    numbers: dict[int, int] = {}
    for tag, spec in enumerate(graph.strategies):
        place = next((i for i, known in enumerate(tasks) if known == spec and i not in numbers.values()), None)
        if place is not None:
            numbers[tag] = place
        elif tag in used:
            raise StrategyError(
                f"a batch of this kind enters {spec}, which the plan does not know: the first batch did not enter it. Let "
                "every batch enter the same scopes."
            )
    return _renumbered(graph, numbers, tasks)


def _renumbered(graph: Graph, numbers: dict[int, int], strategies: tuple[StrategySpec, ...]) -> Graph:
    ops = tuple(replace(op, tag=None if op.tag is None else numbers[op.tag]) for op in graph.ops)
    return replace(graph, ops=ops, strategies=strategies)
