"""What a split stage does, in words and numbers: for the plan and its table."""

from __future__ import annotations

from collections import Counter

from epl.cost.communication import bytes_sent
from epl.planner.plan import SplitPlan
from epl.planner.split import SplitChoice
from epl.planner.split_problem import Edge, Item
from epl.sharding.conversions import Conversion, Move
from epl.sharding.options import Option

__all__ = ["describe_split"]


def describe_split(stage: int, choice: SplitChoice) -> SplitPlan:
    """The summary of a choice for the plan."""
    sent = sum(
        _sent(choice, edge, conversion)
        for edge in choice.problem.edges
        for conversion in set(choice.conversions(edge))
        if not choice.sums_later(edge)
    )
    return SplitPlan(stage, choice.solution.time_s, sent, _choices(choice), _communication(choice))


def _sent(choice: SplitChoice, edge: Edge, conversion: Conversion) -> float:
    ranks = choice.problem.num_ranks
    return sum(bytes_sent(move.kind, edge.size_bytes, ranks) for move in (conversion.value, conversion.gradient))


def _choices(choice: SplitChoice) -> tuple[str, ...]:
    """Operators that are cut, like ones together, in the order of the graph."""
    lines: Counter[str] = Counter()
    for item, option in zip(choice.problem.items, choice.solution.options, strict=True):
        if item.kind == "op" and not option.is_whole:
            lines[f"{_where(item)}: {_option_text(option)}"] += 1
    return tuple(f"{count} x {line}" for line, count in lines.items())


def _where(item: Item) -> str:
    return " ".join(str(part) for part in item.label if part)


def _option_text(option: Option) -> str:
    return f"{', '.join(map(str, option.inputs))} -> {', '.join(map(str, option.outputs))}"


def _communication(choice: SplitChoice) -> tuple[str, ...]:
    lines: Counter[tuple[str, str, int, float]] = Counter()
    for edge in choice.problem.edges:
        maker = _where(choice.problem.items[edge.maker])
        if choice.sums_later(edge):
            lines["all_reduce of the gradient, once a step", maker, edge.size_bytes, 0.0] += 1
            continue
        for conversion in dict.fromkeys(choice.conversions(edge)):
            for move, of in ((conversion.value, ""), (conversion.gradient, " of the gradient")):
                if sent := bytes_sent(move.kind, edge.size_bytes, choice.problem.num_ranks):
                    lines[f"{move.kind}{of} ({_arrow(move)})", maker, edge.size_bytes, sent] += 1
    return tuple(
        f"{count} x {kind} of {maker}, {size_bytes:,} B whole" + (f", {sent:,.0f} B sent each" if sent else "")
        for (kind, maker, size_bytes, sent), count in lines.items()
    )


def _arrow(move: Move) -> str:
    return f"{move.source} -> {move.target}"
