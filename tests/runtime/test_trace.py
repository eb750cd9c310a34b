"""A recording shows, for each rank, the actions of its program in their order, in a form that trace viewers read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import epl
from epl.runtime.record import Event
from epl.runtime.trace import bubble_of
from epl.schedule import generate
from tests.ranks import launch


def _net() -> nn.Module:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for stage in range(2):
        epl.replicate(1, name=f"stage_{stage}")(*layers[2 * stage : 2 * stage + 2])
    return nn.Sequential(*layers)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _traced(rank: int, path: str) -> None:
    epl.init(epl.Config({"pipeline.num_micro_batch": 4, "run.print_plan": False}))
    torch.manual_seed(0)
    model = _net()
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=_loss)
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    engine.train_step(batch)
    with engine.trace(path):
        engine.train_step(batch)


def test_a_trace_holds_the_actions_of_the_plan_in_order_for_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    launch(2, _traced, str(path))
    trace = json.loads(path.read_text())
    expected = generate("PreferBackward", 2, 4)
    for rank in range(2):
        events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]
        actions = sorted((e for e in events if e["cat"] in ("forward", "backward")), key=lambda e: e["ts"])
        assert [event["name"] for event in actions] == [str(action) for action in expected[rank]]
        assert all(event["args"]["stage"] == rank and event["dur"] >= 0 for event in actions)
        assert any(event["cat"] == "wait" for event in events)
    assert trace["otherData"]["schedule"] == "PreferBackward"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(8, 8), epl.nn.MoE(8, 16, num_experts=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, loss, _ = self.moe(torch.relu(self.first(x)))
        return output.square().mean() + loss


def _traced_experts(rank: int, path: str) -> None:
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True, "run.print_plan": False}))
    epl.set_default_strategy(epl.replicate(2))
    torch.manual_seed(0)
    model = _Mixture()
    epl.split(2)(model.moe.experts)
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))}
    engine.train_step(batch)
    with engine.trace(path):
        engine.train_step(batch)


def test_a_trace_shows_what_the_devices_of_a_stage_exchange_inside_its_actions(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    launch(2, _traced_experts, str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        mine = [event for event in events if event["pid"] == rank]
        for action in ("0F0", "0B0"):
            (around,) = (event for event in mine if event["name"] == action)
            inside = [
                event["name"]
                for event in mine
                if event["name"].startswith("all_to_all of ")
                and around["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= around["ts"] + around["dur"] + 1
            ]
            # room for 4 tokens of each of 2 samples in each of 4 experts, of 8 numbers of 4 bytes
            assert inside == ["all_to_all of 1,024 bytes within a stage"] * 2, action


def _traced_by_config(rank: int, path: str) -> None:
    config = epl.Config({"run.print_plan": False, "run.trace": path, "run.trace_steps": 2})
    epl.init(config)
    model = _net()
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=_loss)
    for step in range(4):
        assert Path(path).exists() == (step == 3)
        engine.train_step(torch.ones(4, 8))


def test_the_config_key_traces_the_steps_after_the_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    launch(1, _traced_by_config, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "0F0" for event in events) == 2


def test_the_bubble_is_the_idle_share_between_first_and_last_action() -> None:
    events = [
        Event("0F0", "forward", 0, 0.0, 1.0),
        Event("0B0", "backward", 0, 2.0, 2.0),
        Event("gradient", "wait", -1, 2.0, 1.0),  # inside the backward action: not computing
        Event("numbers", "wait", -1, 9.0, 5.0),  # after the last action: not counted
    ]
    assert bubble_of(events) == 0.5
    assert bubble_of([]) == 0.0
