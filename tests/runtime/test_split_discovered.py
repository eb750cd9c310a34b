"""A model with operators that no rule knows, under split."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.odd_nets import batch_of
from tests.runtime.problems import Problem, Way, check, seeded
from tests.sharding import test_discovery  # registers the operators, in each rank too

ROW_NORM, SWISH_GATE = (test_discovery.OWN[name][0].target for name in ("row_norm", "swish_gate"))


class Gated(nn.Module):
    """A net whose norm and gate are a user's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.up, self.gate, self.down = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.ops.epl_test.row_norm(x, self.scale, 1e-6)
        return F.mse_loss(self.down(torch.ops.epl_test.swish_gate(self.up(x), self.gate(x))), y)


def test_a_model_with_such_operators_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks look for themselves, each in its own process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = Problem(partial(seeded, Gated), [batch_of(6, seed) for seed in range(2)])
    check(problem, Way(2, [[""]], devices=2, split=(0,)))
    texts = [file.read_text() for file in (tmp_path / "epl" / "discovery").iterdir()]
    assert any(ROW_NORM in text for text in texts)
    assert any(SWISH_GATE in text for text in texts)
