"""Choose placements for the TaskGraphs of a ``split`` stage.

The choice is made anew for each graph of a model (another sequence length, evaluation), with the placements of the weights
as the plan has them: where a weight lives is decided once, how a batch flows past it depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

from epl.errors import PlanError, StrategyError
from epl.ir.graph import Graph
from epl.planner.split_items import Edge, Problem, SplitGroup
from epl.planner.split_problem import split_problem
from epl.planner.split_solve import Solution, conversion_of, find, why_not
from epl.sharding.conversions import Conversion, Move
from epl.sharding.options import WHOLE, Option
from epl.sharding.placements import Partial, Placement, parse_placement

__all__ = ["Decided", "SplitChoice", "choose_split", "wished_placements"]


@dataclass(frozen=True)
class SplitChoice:
    """What was chosen for one stage and one graph.

    Args:
        problem: What there was to choose from.
        solution: What was chosen.
        summed: Weights of whose gradients each rank has a summand until the end of the step, as the plan has it; None if
            that is to be decided.
    """

    problem: Problem
    solution: Solution
    summed: frozenset[str] | None = None

    @cached_property
    def options(self) -> dict[str, Option]:
        """How each operator runs, and how each leaf is stored, by name."""
        return {item.name: option for item, option in zip(self.problem.items, self.solution.options, strict=True)}

    @cached_property
    def stored(self) -> dict[str, Placement]:
        """How each parameter, buffer and constant is stored, by name."""
        return {
            item.name: option.outputs[0]
            for item, option in zip(self.problem.items, self.solution.options, strict=True)
            if item.kind == "stored"
        }

    def crossing(self, value: str) -> Placement:
        """How a value comes from or goes to other stages; a plain number is whole."""
        return self._crossing.get(value, WHOLE)

    @cached_property
    def _crossing(self) -> dict[str, Placement]:
        chosen = list(zip(self.problem.items, self.solution.options, strict=True))
        coming = {item.name: option.outputs[0] for item, option in chosen if item.kind == "given"}
        leaving = {item.name.removeprefix("-> "): option.inputs[0] for item, option in chosen if item.kind == "out"}
        return coming | leaving

    @cached_property
    def summed_later(self) -> frozenset[str]:
        """The weights of whose gradients each rank has a summand until the end of the step."""
        return frozenset(edge.value for edge in self.problem.edges if self.sums_later(edge))

    def conversions(self, edge: Edge) -> list[Conversion]:
        """What stands before each use of a value, in the order of ``edge.uses``."""
        solved = self._solved(edge)
        if self.sums_later(edge):
            return [replace(each, gradient=Move(each.gradient.source, Partial())) for each in solved]
        return solved

    def sums_later(self, edge: Edge) -> bool:
        """True for a whole weight of whose gradient each rank has a summand, whatever uses it: summed once a step."""
        if not (edge.is_weight and edge.needs_grad):
            return False
        if self.summed is not None:
            return edge.value in self.summed
        if edge.value in self.problem.summed and self.stored[edge.value] == WHOLE:
            return True
        summand = Conversion(Move(WHOLE, WHOLE), Move(Partial(), WHOLE))
        return all(each == summand for each in self._solved(edge))

    def _solved(self, edge: Edge) -> list[Conversion]:
        made = self.solution.options[edge.maker].outputs[edge.result]
        found = [conversion_of(edge, made, use, self.solution.options[use.item]) for use in edge.uses]
        assert all(conversion is not None for conversion in found), f"{edge.value} cannot be used as chosen"
        return [conversion for conversion in found if conversion is not None]


@dataclass(frozen=True)
class Decided:
    """What is decided about weights before the choice, by their names in the graph.

    Args:
        pins: Placements of parameters and buffers as a plan has them.
        wishes: Placements that the user asks for (`wished_placements`).
        summed: Weights whose gradients a plan sums once a step: what holds for one graph holds for all of a plan.
        tied: Weights that other stages use too: if they are whole, their gradients are summed over all of them at once.
    """

    pins: Mapping[str, Placement] = field(default_factory=dict)
    wishes: Mapping[str, Placement] = field(default_factory=dict)
    summed: frozenset[str] | None = None
    tied: frozenset[str] = frozenset()


def choose_split(graph: Graph, tasks: frozenset[int], group: SplitGroup, decided: Decided | None = None) -> SplitChoice:
    """The best placements for some TaskGraphs on the same devices.

    Args:
        graph: A graph whose operators are in TaskGraphs.
        tasks: The TaskGraphs.
        group: The devices that share them.
        decided: What is decided about weights; None for nothing.

    Raises:
        StrategyError: a weight cannot be placed as the user asks.
        PlanError: the weights do not fit; says by how much.
    """
    decided = decided or Decided()
    problem = split_problem(graph, tasks, group, decided.pins, decided.wishes)
    solution = find(problem)
    if solution is None and any(graph.tasks[task].kind == "replicate" for task in tasks):
        # what is changed in place cannot be converted first: what touches it may run whole
        problem = split_problem(graph, tasks, group, decided.pins, decided.wishes, may_copy_work=True)
        solution = find(problem)
    if solution is None:
        raise PlanError(why_not(problem))
    return SplitChoice(replace(problem, summed=problem.summed | decided.tied), solution, decided.summed)


def wished_placements(graph: Graph, tasks: frozenset[int]) -> dict[str, Placement]:
    """What ``split(placements=...)`` asks for, by name in the graph.

    Raises:
        StrategyError: a name fits no weight of the TaskGraph.
    """
    found: dict[str, Placement] = {}
    for task in sorted(tasks):
        spec, parameters = graph.tasks[task], graph.parameters_of(task)
        for pattern, text in spec.placements:
            fitting = [leaf for leaf in parameters if any(fnmatchcase(p, pattern) for p in (leaf.path, *leaf.aliases))]
            if not fitting:
                names = ", ".join(leaf.path for leaf in parameters[:5])
                raise StrategyError(
                    f"{spec}: placements names {pattern!r}, which fits none of its weights: {names}, ..."
                )
            found.update({leaf.name: parse_placement(text) for leaf in fitting})
    return found
