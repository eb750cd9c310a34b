"""Units: every element of every weight is in one shard, and no rank has more than its share.

A mistake shows as an element that two ranks step, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.planner.units import Unit, shared_out, units_of

LEVELS = ("v0", "v1", "v2")


class Net(nn.Module):
    """Weights of odd sizes, a scalar, a frozen one, a tied one, two types, and one that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3, 7), requires_grad=False)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x + self.frozen.sum(0)))
        x = self.b(self.b(x)) * self.scale
        return self.c(x).square().mean() + torch.nn.functional.linear(x, self.a.weight.t()).mean() + self.wide.mean()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(7, 7), nn.Linear(7, 7)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x))).square().mean()


@cache
def _planned(
    num_devices: int, cuts: tuple[str, ...], make: type[nn.Module], config: tuple[tuple[str, Any], ...]
) -> Plan:
    settings = epl.Config(dict(config))
    epl.init(settings)
    model = make()
    for path in cuts:
        epl.replicate(1)(model.get_submodule(path))
    batch = flatten({"x": torch.ones(4, 7)})
    graph = build_taskgraphs(capture(model, loss_step(None), batch).graph)
    return make_plan(graph, Cluster((num_devices,)), settings)


def plan_of(
    num_devices: int, cuts: Sequence[str] = (), config: dict[str, Any] | None = None, make: type[nn.Module] = Net
) -> Plan:
    return _planned(num_devices, tuple(cuts), make, tuple((config or {}).items()))


def _trained(plan: Plan, rank: int) -> dict[str, int]:
    """Elements of each trained parameter that a rank's stage uses."""
    stage, _, _ = plan.place_of(rank)
    entries = (entry for entry in plan.parameters if entry.kind == "parameter" and entry.trainable)
    return {entry.path: torch.Size(entry.shape).numel() for entry in entries if stage in entry.stages}


def _pieces(plan: Plan, rank: int) -> list[tuple[str, int]]:
    """(path, element) of what a rank owns of trained weights."""
    found: list[tuple[str, int]] = []
    for unit in units_of(plan, rank):
        if unit.is_trained:
            for slot in unit.slots:
                found += [(slot.path, i) for i in range(*unit.piece(slot, unit.place_of(rank)))]
    return found


PLANS: list[Any] = [
    pytest.param(num_devices, cuts, id=f"{num_devices}{'-'.join(('', *cuts))}")
    for num_devices, cuts in ((2, ()), (3, ()), (4, ("a", "c")), (6, ("a", "c")), (6, ("a", "b", "c")), (16, ()))
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("num_devices", "cuts"), PLANS)
def test_every_element_of_every_weight_is_in_one_shard_of_each_of_its_groups(
    num_devices: int, cuts: Sequence[str], level: str
) -> None:
    plan = plan_of(num_devices, cuts, {"zero.level": level})
    groups = {unit.ranks for rank in range(num_devices) for unit in units_of(plan, rank)}
    assert groups
    for ranks in groups:
        owned = Counter(piece for rank in ranks for piece in _pieces(plan, rank) if _is_of(plan, rank, piece[0], ranks))
        assert set(owned.values()) == {1}
    for rank in range(num_devices):
        sizes = _trained(plan, rank)
        ours = Counter(slot.path for unit in units_of(plan, rank) if unit.is_trained for slot in unit.slots)
        assert ours == dict.fromkeys(sizes, 1), "each weight is in one unit"
    for path, size in {
        path: size for rank in range(num_devices) for path, size in _trained(plan, rank).items()
    }.items():
        elements = {i for rank in range(num_devices) for name, i in _pieces(plan, rank) if name == path}
        assert elements == set(range(size)), path


def _is_of(plan: Plan, rank: int, path: str, ranks: tuple[int, ...]) -> bool:
    return any(unit.ranks == ranks and path in [slot.path for slot in unit.slots] for unit in units_of(plan, rank))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("num_devices", "cuts"), PLANS)
def test_ranks_of_a_unit_see_the_same_unit_in_the_same_order(num_devices: int, cuts: Sequence[str], level: str) -> None:
    """Shards are equal, slots do not overlap, and no rank waits for one that meets over another unit first."""
    plan = plan_of(num_devices, cuts, {"zero.level": level})
    everywhere: dict[tuple[int, ...], list[list[Unit]]] = {}
    for rank in range(num_devices):
        units = units_of(plan, rank)
        for ranks in {unit.ranks for unit in units}:
            everywhere.setdefault(ranks, []).append([unit for unit in units if unit.ranks == ranks])
        sizes = [len(unit.ranks) for unit in units]
        assert sizes == sorted(sizes)
        for unit in units:
            _check_unit(unit)
    for ranks, seen in everywhere.items():
        assert len(seen) == len(ranks)
        assert all(units == seen[0] for units in seen)


def _check_unit(unit: Unit) -> None:
    assert unit.num_shards in (1, len(unit.ranks))
    assert unit.size == unit.shard_size * unit.num_shards
    assert unit.shard_size % 16 == 0
    ends = [0, *(slot.stop for slot in unit.slots)]
    assert all(slot.start >= end for slot, end in zip(unit.slots, ends, strict=False)), "slots overlap"
    assert ends[-1] <= unit.size
    for slot in unit.slots:
        pieces = [unit.piece(slot, place) for place in range(unit.num_shards)]
        assert sum(stop - start for start, stop in pieces) == slot.size


def test_states_are_shared_by_v0_gradients_by_v1_and_weights_by_v2() -> None:
    found = {level: units_of(plan_of(2, (), {"zero.level": level}), 0) for level in LEVELS}
    trained = {level: [unit for unit in units if unit.is_trained] for level, units in found.items()}
    assert {level: {(u.num_shards, u.each_backward, u.is_cut) for u in units} for level, units in trained.items()} == {
        "v0": {(2, False, False)},
        "v1": {(2, True, False)},
        "v2": {(2, True, True)},
    }
    frozen = {
        level: [slot.path for u in units if not u.is_trained for slot in u.slots] for level, units in found.items()
    }
    assert frozen == {"v0": [], "v1": [], "v2": ["frozen"]}, "what takes no gradient has no states, but it has memory"


def test_tied_weights_over_stages_are_not_cut() -> None:
    plan = plan_of(4, ("a", "c"), {"zero.level": "v2"}, Tied)
    tied = [unit for rank in range(4) for unit in units_of(plan, rank) if unit.is_tied]
    assert tied
    assert all(not unit.is_cut and not unit.each_backward and len(unit.ranks) == 4 for unit in tied)
    assert {slot.path for unit in tied for slot in unit.slots} == {"a.weight"}


def test_without_a_wish_or_without_a_twin_there_are_no_units() -> None:
    assert units_of(plan_of(2), 0) == ()
    assert units_of(plan_of(1, (), {"zero.level": "v2"}), 0) == ()
    assert shared_out(plan_of(2)) == frozenset()


def test_types_do_not_share_memory_and_idle_weights_are_nowhere() -> None:
    units = units_of(plan_of(2, (), {"zero.level": "v1"}), 0)
    doubles = [slot.path for unit in units if unit.dtype == "float64" for slot in unit.slots]
    assert doubles == ["wide"]
    assert not any(slot.path.startswith("idle") for unit in units for slot in unit.slots)


def test_weights_in_files_have_units_of_one_shard_and_are_lent() -> None:
    units = units_of(plan_of(1, (), {"offload.level": "disk"}), 0)
    assert units
    assert all(unit.num_shards == 1 and unit.is_lent and unit.home == "disk" for unit in units)
    only = units_of(plan_of(1, (), {"offload.level": "disk", "offload.parameters": r"^b\."}), 0)
    assert {slot.path for unit in only for slot in unit.slots} == {"b.weight", "b.bias"}


class Empty(nn.Module):
    """A weight without elements before all others, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.Parameter(torch.ones(0)), nn.Linear(7, 7)
        self.last = nn.Parameter(torch.ones(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean() + self.first.sum() + self.last.sum()


@pytest.mark.parametrize("level", LEVELS)
def test_no_unit_is_without_elements(level: str) -> None:
    units = units_of(plan_of(3, (), {"zero.level": level}, Empty), 1)
    assert {slot.path for unit in units for slot in unit.slots} == {"first", "a.weight", "a.bias", "last"}
    assert all(unit.size for unit in units)
