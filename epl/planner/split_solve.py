"""Solve the choice of placements exactly, as a 0-1 program.

    minimise    sum over groups g, options o of   n_g * time(g, o) * x[g, o]
              + sum over edges e, conversions c of n_e * time(e, c) * z[e, c]
    such that   each group takes one option                          sum over o of x[g, o] = 1
                a use meets its maker and its user                   the flow y[u, a, b] has the marginals of both
                a conversion is paid once for all its uses           z[e, c] >= y[u, a, b] wherever (a, b) needs c
                what each rank stores fits                           sum of n_g * size(g, o) * x[g, o] <= memory

Written with flows, the relaxation is tight for chains and trees, which most of a network is, so that the solver (HiGHS,
by ``scipy.optimize.milp``) hardly branches. Operators of repeated blocks are one group, so the size of the program is that
of one block.

Source: Alpa (Zheng et al. 2022, section 4.2) chooses shardings by an integer program over edge costs; conversions in both
directions, their sharing between uses and the units of cuts are added here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from epl.cost.communication import collective_s
from epl.errors import PlanError
from epl.planner.split_items import STATES, Edge, Item, Problem, Use
from epl.sharding.conversions import Conversion, Move
from epl.sharding.options import WHOLE, Option, gradient_expected, gradient_handed_back
from epl.sharding.placements import Partial, Placement, Replicated

__all__ = ["Solution", "conversion_of", "conversion_s", "find", "solve", "why_not"]

_TIME_LIMIT_S = 60.0
_GAP = 1e-3  # a plan within a thousandth of the best is good enough


@dataclass(frozen=True)
class Solution:
    """The option of each item, and what the choice costs in all."""

    options: tuple[Option, ...]
    time_s: float
    size_bytes: float


def conversion_of(edge: Edge, made: Placement, use: Use, option: Option) -> Conversion | None:
    """What stands between the maker of a value and one use of it; None if that cannot be."""
    handed_back = gradient_handed_back(option, use.place) if edge.needs_grad else gradient_expected(made)
    conversion = Conversion.of(made, option.inputs[use.place], handed_back)
    if use in edge.fixed and not conversion.is_nothing:
        return None
    return conversion


def conversion_s(problem: Problem, edge: Edge, conversion: Conversion) -> float:
    """Seconds of both directions, for one micro-batch."""
    if edge.is_weight and conversion == _SUMMED_LATER:
        return _move_s(problem, edge, conversion.gradient) / problem.group.num_micro_batches
    return _move_s(problem, edge, conversion.value) + _move_s(problem, edge, conversion.gradient)


_SUMMED_LATER = Conversion(Move(WHOLE, WHOLE), Move(Partial(), WHOLE))


def _move_s(problem: Problem, edge: Edge, move: Move) -> float:
    if move.kind == "nothing":
        return 0.0
    time_s = collective_s(move.kind, edge.size_bytes, problem.num_ranks, problem.group.device.link)
    is_copied = move.kind != "all_reduce"
    return time_s + edge.size_bytes * problem.group.device.copy_s_per_byte * is_copied


@dataclass
class _Program:
    """The 0-1 program while it is written, column by column and row by row."""

    costs: list[float] = field(default_factory=list)
    is_integer: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def variable(self, cost: float, *, integer: bool = False) -> int:
        self.costs.append(cost)
        self.is_integer.append(int(integer))
        return len(self.costs) - 1

    def row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        self.rows += [len(self.lower)] * len(terms)
        self.columns += terms.keys()
        self.values += terms.values()
        self.lower.append(lower)
        self.upper.append(upper)

    def solve(self) -> np.ndarray | None:
        matrix = coo_array((self.values, (self.rows, self.columns)), shape=(len(self.lower), len(self.costs)))
        found = milp(
            np.array(self.costs),
            integrality=np.array(self.is_integer),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix.tocsr(), self.lower, self.upper),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": _GAP, "time_limit": _TIME_LIMIT_S},
        )
        return found.x


@dataclass(frozen=True)
class _Link:
    """Edges between the same groups, which decide alike."""

    edge: Edge
    count: int


class _Writer:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.memory_bytes = problem, problem.group.device.memory_bytes
        self.program = _Program()
        self.groups: dict[Hashable, list[Item]] = {}
        for item in problem.items:
            self.groups.setdefault(item.group, []).append(item)
        self.choice: dict[Hashable, list[int]] = {}

    def write(self) -> None:
        for group, items in self.groups.items():
            first = items[0]
            unit = 1e6  # microseconds: near 1, as solvers like it
            self.choice[group] = [
                self.program.variable(len(items) * time_s * unit, integer=True) for time_s in first.times_s
            ]
            self.program.row(dict.fromkeys(self.choice[group], 1.0), 1.0, 1.0)
        for link in self._links():
            self._write_link(link)
        if self.memory_bytes:
            self.program.row(dict(self._sizes()), 0.0, self.memory_bytes)

    def _sizes(self) -> Iterator[tuple[int, float]]:
        for group, items in self.groups.items():
            for place, variable in enumerate(self.choice[group]):
                if size := sum(item.sizes_bytes[place] for item in items):
                    yield variable, size

    def _links(self) -> list[_Link]:
        found: dict[Hashable, list[Edge]] = {}
        for edge in self.problem.edges:
            found.setdefault(self._key(edge), []).append(edge)
        return [_Link(edges[0], len(edges)) for edges in found.values()]

    def _key(self, edge: Edge) -> Hashable:
        items = self.problem.items
        uses = frozenset((items[use.item].group, use.place, use in edge.fixed) for use in edge.uses)
        return items[edge.maker].group, edge.result, uses, edge.needs_grad, edge.size_bytes

    def _write_link(self, link: _Link) -> None:
        edge, items = link.edge, self.problem.items
        made = self._by_placement(items[edge.maker], lambda option: option.outputs[edge.result])
        paid: dict[Conversion, int] = {}
        seen: set[Hashable] = set()
        for use in edge.uses:
            key = (items[use.item].group, use.place)
            if key in seen:
                continue
            seen.add(key)
            used = self._by_placement(items[use.item], lambda option, use=use: _needs(option, use.place, edge))
            self._write_use(link, use, made, used, paid)

    def _by_placement(self, item: Item, of: object) -> dict[object, tuple[Option, list[int]]]:
        """What the options of an item come to in one respect -> one of them, and the variables of all."""
        found: dict[object, tuple[Option, list[int]]] = {}
        for option, variable in zip(item.options, self.choice[item.group], strict=True):
            found.setdefault(of(option), (option, []))[1].append(variable)  # type: ignore[operator]
        return found

    def _write_use(self, link: _Link, use: Use, made: dict, used: dict, paid: dict[Conversion, int]) -> None:
        flows: dict[tuple[object, object], int] = {}
        for source in made:
            for target, (option, _) in used.items():
                conversion = conversion_of(link.edge, source, use, option)
                if conversion is not None:
                    flows[source, target] = flow = self.program.variable(0.0)
                    self._pay(link, conversion, flow, paid)
        for source, (_, variables) in made.items():
            terms = {flow: 1.0 for (a, _), flow in flows.items() if a == source}
            self.program.row(terms | dict.fromkeys(variables, -1.0), 0.0, 0.0)
        for target, (_, variables) in used.items():
            terms = {flow: 1.0 for (_, b), flow in flows.items() if b == target}
            self.program.row(terms | dict.fromkeys(variables, -1.0), 0.0, 0.0)

    def _pay(self, link: _Link, conversion: Conversion, flow: int, paid: dict[Conversion, int]) -> None:
        time_s = conversion_s(self.problem, link.edge, conversion)
        if not time_s:
            return
        if conversion not in paid:
            paid[conversion] = self.program.variable(link.count * time_s * 1e6)
        self.program.row({paid[conversion]: 1.0, flow: -1.0}, 0.0, 1.0)


def _needs(option: Option, place: int, edge: Edge) -> tuple[Placement, Placement]:
    """What one use asks for: how it takes the value, and how it hands the gradient back."""
    handed_back = gradient_handed_back(option, place) if edge.needs_grad else Replicated()
    return option.inputs[place], handed_back


def solve(problem: Problem) -> Solution:
    """The best choice.

    Raises:
        PlanError: the weights and what belongs to them do not fit the devices; says by how much.
    """
    solution = find(problem)
    if solution is None:
        raise PlanError(why_not(problem))
    return solution


def find(problem: Problem) -> Solution | None:
    """The best choice; None if there is none."""
    writer = _Writer(problem)
    writer.write()
    values = writer.program.solve()
    if values is None:
        return None
    options: list[Option] = []
    time_s = size_bytes = 0.0
    for item in problem.items:
        place = int(np.argmax([values[variable] for variable in writer.choice[item.group]]))
        options.append(item.options[place])
        time_s += item.times_s[place]
        size_bytes += item.sizes_bytes[place]
    time_s += sum(_edge_s(problem, edge, options) for edge in problem.edges)
    return Solution(tuple(options), time_s, size_bytes)


def _edge_s(problem: Problem, edge: Edge, options: list[Option]) -> float:
    made = options[edge.maker].outputs[edge.result]
    conversions = {conversion_of(edge, made, use, options[use.item]) for use in edge.uses}
    return sum(conversion_s(problem, edge, c) for c in conversions if c is not None)


def why_not(problem: Problem) -> str:
    """How much is missing, by category; weights, gradients and the states of Adam are alike in size."""
    least = sum(min(item.sizes_bytes) for item in problem.items)
    there = problem.group.device.memory_bytes
    if not 0 < there < least:
        return (
            f"no placements were found for a split over {problem.num_ranks} devices: what split(placements=...) asks for "
            "may contradict itself, or a weight that is changed in place. Leave placements out, or use replicate."
        )
    each = least / STATES
    return (
        f"a split over {problem.num_ranks} devices does not fit: each rank would hold {_gib(each)} of weights, "
        f"{_gib(each)} of gradients and {_gib(2 * each)} of optimizer states (two moments), {_gib(least)} in all without "
        f"activations, and a {problem.group.device.name} has {_gib(there)}: {_gib(least - there)} are missing. Split over "
        "more devices."
    )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
