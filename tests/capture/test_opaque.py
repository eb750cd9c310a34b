"""A model that no graph can follow still trains as one TaskGraph, with a warning; with more of them it is an error.

A mistake shows as annotations that are ignored, as a first batch's number that is reported for ever, or as a model that
has changed before its first step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.errors import CaptureError, RunError
from epl.loss import loss_step, output_step
from epl.scopes import reset_scopes, tag_of
from tests.program.local_run import check_parity
from tests.program.staged import batch_of

X = batch_of()
RUNS_AS_IT_IS = pytest.mark.filterwarnings("ignore:the model runs as it is")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    reset_scopes()
    yield
    reset_scopes()


class Numpy(nn.Module):
    """Leaves torch for a moment, which export cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.calls = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scale = float(abs(x.numpy()).sum())
        return self.b(self.norm(self.a(x))).pow(2).mean() * scale


def captured(model: nn.Module, batch: Any = X, loss_fn: Any = None) -> Captured:
    return capture(model, loss_step(loss_fn), flatten(batch))


def call(found: Captured, model: nn.Module, batch: Tensor) -> list[Any]:
    held = [*model.parameters(), *model.buffers()]
    return found.functions["function.call_0"]([batch], held)


def test_the_warning_says_why_and_where() -> None:
    with pytest.warns(
        UserWarning, match=rf"runs as it is, as one TaskGraph.*(.|\n)*numpy(.|\n)*at {__file__}:\d+ in forward"
    ):
        found = captured(Numpy())
    assert found.is_opaque


@RUNS_AS_IT_IS
def test_it_computes_what_the_model_computes() -> None:
    lowered = check_parity(Numpy(), X, num_stages=1)
    assert lowered.plan.is_opaque
    assert any("without a graph" in note for note in lowered.plan.notes)


@RUNS_AS_IT_IS
def test_one_strategy_around_the_model_needs_no_graph() -> None:
    with epl.replicate(1, name="all"):
        model = Numpy()
    lowered = check_parity(model, X)
    assert [stage.name for stage in lowered.plan.stages] == ["all"]


def test_two_strategies_need_a_graph() -> None:
    model = Numpy()
    epl.replicate(1)(model.a)
    epl.replicate(1)(model.b)
    with pytest.raises(CaptureError, match=r"the model cannot be captured as a graph: .*numpy"):
        captured(model)


def test_two_scopes_in_forward_need_a_graph() -> None:
    """They are seen only when forward runs: to train such a model as one TaskGraph would ignore what the user wrote."""

    class Called(Numpy):
        def forward(self, x: Tensor) -> Tensor:
            scale = float(x.numpy().sum())
            with epl.replicate(1, name="first"):
                y = self.a(x) * scale
            with epl.replicate(1, name="second"):
                return self.b(y).mean()

    with pytest.raises(CaptureError, match=r"the model cannot be captured as a graph: .*numpy"):
        captured(Called())


@RUNS_AS_IT_IS
def test_a_default_that_forward_sets_ends_with_it() -> None:
    class Defaults(Numpy):
        def forward(self, x: Tensor) -> Tensor:
            epl.set_default_strategy(epl.replicate(1))
            return super().forward(x)

    model = Defaults()
    call(captured(model), model, X)
    assert tag_of(nn.Linear(2, 2)) is None


@RUNS_AS_IT_IS
def test_the_trial_leaves_the_model_and_the_generators_as_they_were() -> None:
    class Counting(Numpy):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(nn.functional.dropout(x, 0.5))

    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    captured(model)
    assert model.calls == 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@RUNS_AS_IT_IS
def test_numbers_beside_the_loss_are_those_of_each_batch() -> None:
    """The first batch's count of tokens must not divide the sums of all later ones."""

    def loss_fn(model: Any, batch: Tensor) -> Any:
        return epl.SumLoss(model(batch), int((batch.numpy() > 0).sum())), {"largest": float(batch.max())}

    model = Numpy()
    found = captured(model, X, loss_fn)
    for batch in (X, -X):
        _, count, largest = call(found, model, batch)
        assert (count, largest) == (int((batch > 0).sum()), float(batch.max()))


@RUNS_AS_IT_IS
def test_text_that_changes_is_refused_since_the_graph_keeps_it() -> None:
    def loss_fn(model: Any, batch: Tensor) -> Any:
        return model(batch), {"sign": "plus" if batch.numpy().sum() > 0 else "minus"}

    model = Numpy()
    found = captured(model, X.abs(), loss_fn)
    with pytest.raises(RunError, match=r"the model gave .*'minus'.*'plus'.* for the first batch of this kind"):
        call(found, model, -X.abs())


@RUNS_AS_IT_IS
def test_an_output_is_given_leaf_by_leaf() -> None:
    class Output(Numpy):
        def forward(self, x: Tensor) -> Any:
            return {"y": self.a(x) * float(x.numpy().sum()), "n": 3}

    found = capture(Output(), output_step(), flatten(X))
    assert [output.role for output in found.graph.outputs] == ["out.y"]
    assert str(found.structure) == "dict(y: tensor, n: 3)"


def test_a_model_that_fails_by_itself_says_so() -> None:
    class Broken(Numpy):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("label")

    with pytest.raises(CaptureError, match=rf"forward fails: KeyError: 'label'\n  at {__file__}:\d+ in forward"):
        captured(Broken())


@RUNS_AS_IT_IS
def test_what_a_graph_would_freeze_runs_as_it_is() -> None:
    """Random numbers of Python's and hooks are no obstacle where nothing is captured."""
    seen: list[int] = []

    class Random(Numpy):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).mean() * random.random()

    model = Random()
    model.a.register_forward_hook(lambda *_: seen.append(1))
    found = captured(model)
    losses = {call(found, model, X)[0].item() for _ in range(3)}
    assert len(losses) == 3
    assert len(seen) == 4, "three calls and the trial"
