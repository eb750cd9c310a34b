"""A model that is spread over the ranks says so when it is used by itself; elsewhere it is the user's own, as before."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from epl.errors import RunError
from epl.runtime.guard import CUT, is_whole
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, batch_of
from tests.runtime.problems import Problem, Way, my_share, seeded, start, user_model

HALVES = [["a", "b"], ["c", "d"]]
BATCH = batch_of(4)


def _said(call: Any) -> str:
    try:
        call()
    except RunError as error:
        return str(error)
    return ""


def _told(rank: int, way: Way) -> list[str]:
    """What the model says to one who uses it, and to one who uses a copy of it."""
    engine = start(Problem(partial(seeded, Chain), [BATCH]), way)
    share = my_share(engine, rank, BATCH)
    engine.train_step(share)
    model: nn.Module = user_model(engine)
    told = [_said(model.state_dict), _said(lambda: model(**BATCH)), _said(lambda: copy.deepcopy(model)(**BATCH))]
    # what goes through the engine goes on: another capture, a copy with whole weights, names
    engine.train_step(my_share(engine, rank, batch_of(6)))
    engine.eval_step(share)
    assert engine.verify(share).differences
    assert engine.state_dict().keys() == engine.model.state_dict().keys()
    return told


@pytest.mark.parametrize(
    "way",
    [
        Way(2, HALVES),
        Way(2, [["a", "b", "c", "d"]], devices=2, split=(0,)),
        Way(2, config={"zero.level": "v0"}),
        Way(2, config={"zero.level": "v2"}),
    ],
    ids=["pipeline", "split", "v0", "v2"],
)
def test_what_a_rank_cannot_give_by_itself_is_refused_with_what_to_do(way: Way) -> None:
    for names, call, of_a_copy in launch(2, _told, way):
        assert "Call engine.state_dict() on all ranks" in names
        assert "Call engine.model or engine.eval_step on all ranks" in call
        assert of_a_copy == call


@pytest.mark.parametrize("config", [{}, {"offload.level": "disk"}, {"amp.level": "O1"}], ids=str)
def test_a_model_that_each_rank_has_whole_may_be_used_as_before(config: dict[str, Any]) -> None:
    for told in launch(2, _told, Way(2, config=config)):
        assert told == ["", "", ""]


def test_whole_tensors_are_whole() -> None:
    cut = torch.ones(2)
    setattr(cut, CUT, True)
    assert not is_whole(cut)
    assert not is_whole(torch.full((), float("nan")).expand(3))
    wholes = [
        torch.full((3,), float("nan")),
        torch.ones(()).expand(3),
        torch.ones(0),
        torch.zeros((), dtype=torch.int64),
    ]
    assert all(is_whole(tensor) for tensor in wholes)


def test_looking_at_a_released_tensor_takes_no_memory_of_its_shape() -> None:
    released = torch.full((), float("nan")).expand(1 << 20, 1 << 20)  # 4 TiB
    assert not is_whole(released)
