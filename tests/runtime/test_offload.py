"""Weights and optimizer states in files, and the numbers are those of one process."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.errors import ConfigError, PlanError, RunError
from epl.runtime.stored import refuse_gathers_in_host_memory
from tests.marks import slow
from tests.nets import Deep
from tests.planner.test_units import plan_of
from tests.ranks import launch
from tests.runtime.training import Job, check_parity

DISK = {"offload.level": "disk"}


@pytest.mark.parametrize("name", slow("gpt2", "bert", "t5", "mixtral"))
def test_one_rank_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=1, micro_batches=2, config=DISK))


@pytest.mark.parametrize("name", ["t5", *slow("bert", "gpt2", "mixtral")])
def test_data_parallelism_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, config=DISK))


@pytest.mark.parametrize("name", slow("bert", "gpt2", "t5", "mixtral"))
def test_pipelines_beside_one_another_equal_one_process(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, micro_batches=2, config=DISK))


@pytest.mark.parametrize("name", slow("bert", "gpt2", "t5", "mixtral"))
def test_split_with_data_parallelism_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, split=2, config=DISK))


@pytest.mark.parametrize("pattern", ["weight", *slow(r"\.1\.")])
def test_only_weights_that_a_pattern_names_are_offloaded(pattern: str) -> None:
    check_parity(Job("gpt2", world=2, config={**DISK, "zero.level": "v1", "offload.parameters": pattern}))


_LIMIT = "16MiB"  # Adam needs 8 MiB of weights, of gradients, and 16 of states


def _limited(rank: int, config: dict[str, Any]) -> tuple[float, str, float]:
    epl.init(epl.Config({"run.memory_limit": _LIMIT, "run.print_plan": False, **config}))
    model = Deep(512, 8, bias=False)
    engine = epl.parallelize(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank))
    try:
        losses = [float(engine.train_step(batch)) for _ in range(3)]
    except PlanError as error:
        return float("nan"), str(error), 0.0
    report = engine.memory_report(batch)
    return losses[-1], "", max(rank.measured.peak_bytes for rank in report.ranks if rank.measured)


def test_a_model_over_the_limit_trains_with_v2_and_offload_and_is_refused_without() -> None:
    plain, text, _ = launch(2, _limited, {})[0]
    assert plain != plain
    assert "run.memory_limit is 16.0 MiB" in text
    assert "16.0 MiB of optimizer" in text
    assert "offload.level" in text
    both = launch(2, _limited, {"zero.level": "v2", **DISK})
    roomy = launch(2, _limited, {"run.memory_limit": ""})
    assert [loss for loss, _, _ in both] == pytest.approx([loss for loss, _, _ in roomy], rel=1e-5)
    assert max(peak for _, _, peak in both) <= 16 << 20
    assert max(peak for _, _, peak in roomy) > 16 << 20


def _error_of(rank: int, config: dict[str, Any]) -> str:
    epl.init(epl.Config({"run.print_plan": False, **config}))
    model = nn.Linear(64, 64)
    engine = epl.parallelize(model, torch.optim.Adam(model.parameters()), loss_fn=lambda m, b: m(b).square().mean())
    try:
        engine.train_step(torch.ones(4, 64))
    except (ConfigError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "it went well"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"offload.level": "v0"}, "ConfigError: offload.level is 'v0'.*the CPU, whose memory that is. Use 'disk'"),
        ({"offload.level": "optimizer"}, "ConfigError: offload.level is 'optimizer'"),
        (
            {**DISK, "offload.parameters": "no such"},
            "ConfigError: offload.parameters is 'no such'.*of no weight.*weight",
        ),
        ({**DISK, "offload.parameters": "("}, "ConfigError: .*no regular expression"),
        ({**DISK, "offload.path": "/no/such/folder"}, "RunError: .*offload.path"),
        ({**DISK, "offload.size_limit": "1KiB"}, "RunError: .*offload.size_limit"),
        ({"offload.path": "/tmp"}, "ConfigError: offload.path is set, and offload.level is not"),
        ({"offload.size_limit": "1GiB"}, "ConfigError: offload.size_limit is set, and offload.level is not"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_an_error_on_every_rank(config: dict[str, Any], words: str) -> None:
    for text in launch(2, _error_of, config):
        assert re.search(words, text, re.DOTALL), text


@pytest.mark.parametrize(("level", "is_refused"), [("v0", True), ("v1", True), ("v2", False)])
def test_accelerators_do_not_gather_what_lies_whole_in_host_memory(level: str, is_refused: bool) -> None:
    """Said before the first collective; the plan is all that it needs, so no accelerator is needed to see it."""
    plan = plan_of(2, config={"zero.level": level, "offload.level": "v0"})
    world: Any = SimpleNamespace(rank=0, device=torch.device("cuda"))
    with (
        pytest.raises(ConfigError, match=f"zero.level is '{level}'.*Use zero.level 'v2'")
        if is_refused
        else nullcontext()
    ):
        refuse_gathers_in_host_memory(world, plan)
