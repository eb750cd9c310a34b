"""The data loader: each replica gets its part of every global batch, and all ranks of a replica the same one."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import epl
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, batch_of
from tests.runtime.problems import Outcome, Problem, Way, plain, seeded
from tests.zoo import annotate

HALVES = [["a", "b"], ["c", "d"]]
# fork is the default in a user's script, and the ranks of a test have another one
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of one batch, one by one, each with its number."""

    def __init__(self, size: int, numbered: bool = True) -> None:
        self.batch = batch_of(size)
        self.numbered = numbered

    def __len__(self) -> int:
        return len(self.batch["x"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = {name: value[i] for name, value in self.batch.items()}
        return {**row, "number": i} if self.numbered else row


def numbered_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"], batch["y"])


class Read(NamedTuple):
    place: tuple[int, int, int]
    length: int
    epochs: list[list[list[int]]]


def read(rank: int, way: Way, size: int, options: dict[str, Any]) -> Read:
    """Two passes over the data: the numbers of the samples in each batch."""
    epl.init(epl.Config({"run.print_plan": False}))
    model = annotate(seeded(Chain), way.cut)
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=numbered_loss)
    loader = epl.data_loader(Rows(size), **options)
    epochs = [[batch["number"].tolist() for batch in loader] for _ in range(2)]
    return Read(engine.plan.place_of(rank), len(loader), epochs)


def joined(reads: list[Read], epoch: int) -> list[list[int]]:
    """The global batches of an epoch, from the first stage of each replica."""
    replicas = [read for read in reads if read.place[0] == 0]
    return [list(chain(*parts)) for parts in zip(*(read.epochs[epoch] for read in replicas), strict=True)]


@pytest.mark.parametrize("way", [Way(3), Way(4, HALVES)], ids=["data", "both"])
def test_replicas_share_each_batch_out_and_stages_see_the_same_one(way: Way) -> None:
    """Eleven samples in batches of five: a last batch of one leaves replicas without a sample."""
    reads = launch(way.world, read, way, 11, {"global_batch_size": 5})
    for epoch in range(2):
        assert joined(reads, epoch) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10]]
    for found in reads:
        assert found.length == 3
        sizes = [len(part) for part in found.epochs[0]]
        assert max(sizes) - min(sizes) <= (2 if way.world == 3 else 3)
        twins = [other for other in reads if other.place[1] == found.place[1]]
        assert all(other.epochs == found.epochs for other in twins)


def test_an_order_is_drawn_anew_for_each_pass_and_is_the_same_on_all_ranks() -> None:
    options = {"global_batch_size": 4, "shuffle": True, "drop_last": True, **WORKERS}
    reads = launch(4, read, Way(4, HALVES), 11, options)
    first, second = (list(chain(*joined(reads, epoch))) for epoch in range(2))
    assert len(set(first)) == len(set(second)) == 8  # two batches of four, nothing twice
    assert first != second
    assert sorted(first) != first
    again = launch(2, read, Way(2), 11, options)
    assert list(chain(*joined(again, 0))) == first  # the order hangs on the seed, not on the plan
    other = launch(2, read, Way(2), 11, {**options, "seed": 1})
    assert list(chain(*joined(other, 0))) != first


def train_from_loader(rank: int, cut: list[list[str]]) -> Outcome:
    """The loader is asked for its first batch before there is a plan."""
    epl.init(epl.Config({"run.print_plan": False, "pipeline.num_micro_batch": 2}))
    model = annotate(seeded(Chain), cut)
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [engine.train_step(batch).item() for batch in epl.data_loader(Rows(9, numbered=False), 4)]
    return Outcome(losses, [], {}, engine.state_dict())


def test_a_training_from_the_loader_is_the_plain_one() -> None:
    whole = batch_of(9)
    batches = [{name: value[start : start + 4] for name, value in whole.items()} for start in (0, 4, 8)]
    expected = plain(Problem(partial(seeded, Chain), batches))._replace(norms=[], gradients={})
    for world, cut in ((2, []), (4, HALVES)):
        for outcome in launch(world, train_from_loader, cut):
            assert_close(outcome, expected, torch.float64)


def pair(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("number", "x", "y")}


def test_options_go_to_torchs_loader() -> None:
    [found] = launch(1, read, Way(1), 5, {"global_batch_size": 2, "collate_fn": pair, **WORKERS})
    assert found.epochs[0] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: it must be an int of at least 1"),
        ({"global_batch_size": 4, "batch_size": 2}, "epl.data_loader sets batch_size itself"),
        ({"global_batch_size": 4, "sampler": [1], "batch_sampler": [2]}, "sets batch_sampler, sampler itself"),
    ],
)
def test_options_that_the_loader_owns_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(epl.ConfigError, match=message):
        epl.data_loader(Rows(4), **options)
