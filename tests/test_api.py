"""`epl.init` called again: without settings it changes nothing, with settings it says what changes by doing it.

A mistake shows as a library's second `init()` that puts the user's micro-batches back to one.
"""

from __future__ import annotations

import torch
from torch import nn

import epl
from tests.ranks import launch

QUIET = {"run.print_plan": False}


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def engine() -> epl.Engine:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mean_square)


def init_again(rank: int) -> list[int]:
    """Micro-batches: as asked for, after a second init, of an engine made then; and after new settings, of both."""
    config = epl.Config({**QUIET, "pipeline.num_micro_batch": 4})
    epl.init(config)
    first = engine()
    epl.init()
    assert epl.Env.get().config is config
    second = engine()
    epl.init(epl.Config({**QUIET, "pipeline.num_micro_batch": 2}))
    third = engine()
    batch = torch.ones(8, 3)
    return [each.prepare(batch).num_micro_batches for each in (first, second, third)]


def test_init_again_without_settings_keeps_those_of_before_and_an_engine_keeps_its_own() -> None:
    assert launch(2, init_again) == [[4, 4, 2], [4, 4, 2]]


def loader_after_init(rank: int) -> list[int]:
    epl.init(epl.Config(QUIET))
    engine()
    epl.init()
    return [len(batch) for batch in epl.data_loader(torch.ones(8, 3), 4)]  # type: ignore[arg-type]


def test_init_again_without_settings_keeps_the_engine_that_a_loader_asks() -> None:
    assert launch(2, loader_after_init) == [[2, 2], [2, 2]]


def annotations_after_init(rank: int) -> int:
    epl.init(epl.Config(QUIET))
    epl.set_default_strategy(epl.replicate(2))
    epl.init()
    return engine().prepare(torch.ones(8, 3)).num_replicas


def test_init_again_without_settings_keeps_the_default_strategy() -> None:
    assert launch(2, annotations_after_init) == [1, 1]
