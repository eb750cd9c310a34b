"""What a split stage does, in words and numbers: for the plan and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from epl.cost.communication import bytes_sent
from epl.ir.graph import Graph
from epl.planner.plan import SplitPlan, StagePlan
from epl.planner.split import SplitChoice
from epl.planner.split_items import Edge, Item
from epl.planner.split_reference import megatron_bytes
from epl.sharding.conversions import Conversion, Move
from epl.sharding.options import Option
from epl.sharding.placements import Shard
from epl.sharding.rules import is_discovered

__all__ = ["describe_split", "mib"]


def describe_split(graph: Graph, stage: StagePlan, choice: SplitChoice) -> SplitPlan:
    """The summary of a choice for the plan."""
    is_searched = all(
        graph.tasks[task].kind == "split" for task in stage.taskgraphs
    )  # beside replicate it says nothing
    megatron = megatron_bytes(graph, frozenset(stage.taskgraphs), choice.problem.num_ranks) if is_searched else 0.0
    sent = sum(
        _sent(choice, edge, conversion)
        for edge in choice.problem.edges
        for conversion in set(choice.conversions(edge))
        if not choice.sums_later(edge)
    )
    return SplitPlan(
        stage.index,
        choice.solution.time_s,
        sent,
        megatron,
        (*_choices(choice), *_without_rules(graph, choice), *_gathering(graph, choice)),
        _communication(choice),
    )


def _sent(choice: SplitChoice, edge: Edge, conversion: Conversion) -> float:
    ranks = choice.problem.num_ranks
    return sum(bytes_sent(move.kind, edge.size_bytes, ranks) for move in (conversion.value, conversion.gradient))


def _choices(choice: SplitChoice) -> tuple[str, ...]:
    """Operators that are cut, like ones together, in the order of the graph: those with weights, attention and losses.

    What follows them as they leave it (views, activations, sums) is not told.
    """
    items = choice.problem.items
    weighted = {use.item for edge in choice.problem.edges if items[edge.maker].kind == "stored" for use in edge.uses}
    lines: Counter[str] = Counter()
    for place, (item, option) in enumerate(zip(items, choice.solution.options, strict=True)):
        tells = place in weighted or "attention" in item.label[-1] or "loss" in item.label[-1]
        if item.kind == "op" and tells and not option.is_whole:
            lines[f"{_where(item)}: {_option_text(option)}"] += 1
    return tuple(f"{count} x {line}" for line, count in lines.items())


def _without_rules(graph: Graph, choice: SplitChoice) -> tuple[str, ...]:
    """Operators on real numbers that no rule knows: those that were tried out, and those that stay whole."""
    found: dict[str, bool] = {}
    for item in choice.problem.items:
        op = graph.op_by_name.get(item.name)
        if item.kind == "op" and op is not None and op.name in graph.needs_grad and is_discovered(op.target):
            found[op.target] = found.get(op.target, False) or len(item.options) > 1
    tried = [target for target, has_options in found.items() if has_options]
    whole = [target for target, has_options in found.items() if not has_options]
    return (
        *([f"cuts found by trial, as no rule knows them: {', '.join(tried)}"] if tried else []),
        *([f"whole on every rank, as no rule knows them and none was found: {', '.join(whole)}"] if whole else []),
    )


def _gathering(graph: Graph, choice: SplitChoice) -> tuple[str, ...]:
    """Operators of ``replicate`` that cannot work on a part of the batch alone, and run whole on gathered values."""
    found: dict[str, None] = {}
    items, options = choice.problem.items, choice.solution.options
    for edge in choice.problem.edges:
        for use in edge.uses if isinstance(options[edge.maker].outputs[edge.result], Shard) else ():
            op = graph.op_by_name.get(items[use.item].name)
            is_copied = op is not None and graph.tasks[op.task or 0].kind == "replicate"
            if is_copied and options[use.item].is_whole and items[edge.maker].kind != "stored":
                found[_where(items[use.item])] = None
    return (f"under replicate, but whole on every rank, on gathered values: {', '.join(found)}",) if found else ()


def _where(item: Item) -> str:
    return " ".join(str(part) for part in item.label if part)


def _option_text(option: Option) -> str:
    return f"{', '.join(map(str, option.inputs))} -> {', '.join(map(str, option.outputs))}"


def _communication(choice: SplitChoice) -> tuple[str, ...]:
    """What travels, like things together, in the order of the graph."""
    lines = Counter(line for edge in choice.problem.edges for line in _travels(choice, edge))
    return tuple(f"{count} x {line}" for line, count in lines.items())


def _travels(choice: SplitChoice, edge: Edge) -> Iterator[str]:
    maker = f"{_where(choice.problem.items[edge.maker])}, {mib(edge.size_bytes)}"
    if choice.sums_later(edge):
        yield f"all_reduce of the gradient of {maker}, once a step"
        return
    for conversion in dict.fromkeys(choice.conversions(edge)):
        for move, of in ((conversion.value, ""), (conversion.gradient, "the gradient of ")):
            if sent := bytes_sent(move.kind, edge.size_bytes, choice.problem.num_ranks):
                yield f"{move.kind} of {of}{maker} ({_arrow(move)}): each rank sends {mib(sent)}"


def mib(size_bytes: float) -> str:
    """Bytes in MiB, so that sums can be compared: ``1,568.0 MiB``."""
    return f"{size_bytes / 2**20:,.1f} MiB" if size_bytes >= 2**18 else f"{size_bytes:,.0f} B"


def _arrow(move: Move) -> str:
    return f"{move.source} -> {move.target}"
