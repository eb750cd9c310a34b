"""A warning of EPL points at the user's line, however it was reached.

A mistake shows as a warning that points into EPL, where the reader can change nothing.
"""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.lines import is_users
from tests.ranks import launch

PACKAGE = Path(epl.__file__).parent
ALLOWED = {  # what warns, what passes on warnings of others, and what still counts frames by hand
    *("lines.py", "capture/export.py"),
}


def _line_of(text: str) -> int:
    """The line of this file that ends with a mark."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def test_a_variable_that_is_no_setting_is_told_at_the_line_that_makes_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EPL_PIPELIN_NUM_MICRO_BATCH", "4")
    with pytest.warns(UserWarning, match="EPL_PIPELIN_NUM_MICRO_BATCH is not a setting") as seen:
        epl.Config()  # config
    assert (seen[0].filename, seen[0].lineno) == (__file__, _line_of("config"))


class Noting(nn.Linear):
    """Cannot be captured without loss: it leaves a tensor in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last.square().mean()


def places_of_warnings(rank: int) -> list[tuple[str, str, int]]:
    """Of the same warning, reached by a step, by the model in the user's own loop, and by a plan without a step."""
    epl.init(epl.Config({"run.print_plan": False}))
    batch = torch.ones(4, 3)
    engines = []
    for _ in range(3):
        model = Noting(3, 2)
        engines.append(epl.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engines[0].train_step(batch)  # step
        engines[1].model(batch)  # call
        engines[2].prepare(batch)  # prepare
    return [(str(warning.message), warning.filename, warning.lineno) for warning in seen]


def test_a_warning_points_at_the_users_line_whichever_way_it_was_reached() -> None:
    [found] = launch(1, places_of_warnings)
    assert all("forward leaves tensors in attributes (last)" in message for message, _, _ in found)
    assert [(file, line) for _, file, line in found] == [
        (__file__, _line_of(mark)) for mark in ("step", "call", "prepare")
    ]


def test_files_of_libraries_are_not_the_users() -> None:
    theirs = (torch.__file__, epl.__file__, re.__file__, "<string>")
    assert [is_users(file) for file in (__file__, *theirs)] == [True, False, False, False, False]


def test_every_warning_takes_this_way() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        names = [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        if {"warn", "warn_explicit"} & set(names) and str(path.relative_to(PACKAGE)) not in ALLOWED:
            found.append(str(path))
    assert not found, f"these warn by themselves; use epl.lines.warn: {found}"
