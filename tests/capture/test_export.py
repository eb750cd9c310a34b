"""A capture gives the graph of the user's step, says where it cannot, and leaves the model and the process as they were.

A mistake shows as statistics that move before the first step, random numbers that differ because a model was planned, or
a graph of another branch than the one that the data takes.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.errors import CaptureError
from epl.loss import loss_step, output_step
from epl.program.guards import guard_of
from tests.program.local_run import check_parity, lower
from tests.program.staged import batch_of, staged
from tests.zoo import CASES

X = batch_of()


def captured(model: nn.Module, batch: Any, loss_fn: Any = None) -> Captured:
    return capture(model, loss_step(loss_fn), flatten(batch))


# ------------------------------------------------------------------------------------------------------------ batches


@dataclass
class Sample:
    x: Tensor
    mask: Tensor | None = None
    depth: int = 2
    scaled: bool = True
    mode: str = "mean"


def _loss_of(sample: Sample, layer: nn.Module) -> Tensor:
    y = layer(sample.x) / sample.depth
    y = y if sample.mask is None else y * sample.mask
    return getattr((y * 2 if sample.scaled else y).pow(2), sample.mode)()


class Net(nn.Module):
    """Takes a sample in any form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, sample: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        return _loss_of(
            sample if isinstance(sample, Sample) else Sample(*[sample, *args][kwargs != {} :], **kwargs), self.layer
        )


MASK = (X > 0).double()
BATCHES: list[Any] = [
    X,
    (X, MASK),
    [X, None, 3],
    {"x": X, "mask": None, "depth": 3, "scaled": False, "mode": "sum"},
    Sample(X, MASK),
    BatchEncoding({"x": X, "depth": 3}),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_of_any_kind_is_captured_with_its_plain_values(batch: Any) -> None:
    lowered = check_parity(Net(), batch)
    assert [leaf.path for leaf in lowered.graph.inputs] == list(flatten(batch).paths)


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    """``labels=input_ids`` of the first batch must not make the labels of later batches its ids."""
    model = staged(lambda m, x, y: (m.b(m.a(x)) - y).pow(2).mean(), 2)
    lowered = lower(model, (X, X))
    assert [len(lowered.captured.graph.readers[leaf.name]) for leaf in lowered.captured.graph.inputs] == [1, 1]


def test_parts_of_one_memory_are_captured() -> None:
    whole = batch_of(8, 6)

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        out = m.b(m.a(x))
        return out.pow(2).mean() if y.sum() > -1e9 else out.mean()

    check_parity(staged(forward, 2), (whole[:4], whole[4:]))


# -------------------------------------------------------------------------------------------- nothing is left behind


def _branching(m: Any, x: Tensor) -> Tensor:
    y = nn.functional.dropout(m.a(x), 0.5)
    return m.b(y).mean() if x.sum() > -1e9 else m.b(y).sum()


def _failing(m: Any, x: Tensor) -> Tensor:
    m.a(nn.functional.dropout(x, 0.5))
    raise ValueError("no")


@pytest.mark.parametrize(
    "forward", [lambda m, x: m.b(m.a(x)).mean(), _branching, _failing], ids=["plain", "data", "failing"]
)
def test_generators_and_statistics_are_as_before(forward: Callable[..., Any]) -> None:
    model = staged(forward, 2, layers=[nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))])
    generator = np.random.default_rng(0)
    states = (
        torch.random.get_rng_state(),
        random.getstate(),
        repr(np.random.get_state()),
        repr(generator.bit_generator.state),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        captured(model, X)
    except CaptureError:
        assert forward is _failing
    after = (
        torch.random.get_rng_state(),
        random.getstate(),
        repr(np.random.get_state()),
        repr(generator.bit_generator.state),
    )
    assert torch.equal(after[0], states[0])
    assert after[1:] == states[1:]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_printed_logged_or_written(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Export has much to say when it meets data: graphs, a warning of ten lines, a trace in a file."""
    folder = Path(tempfile.gettempdir())
    files = set(folder.glob("export_*/*"))
    with caplog.at_level(logging.WARNING):
        captured(staged(_branching, 2), X)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert set(folder.glob("export_*/*")) == files


def test_what_the_model_says_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        import sys
        import warnings

        print("hello", file=sys.stderr)
        warnings.warn("mind the gap", stacklevel=1)
        return m.b(m.a(x)).mean()

    with pytest.warns(UserWarning, match="mind the gap"):
        captured(staged(forward, 2), X)
    assert "hello" in capfd.readouterr().err


def test_gradients_that_are_off_around_a_capture_are_on_in_it() -> None:
    with torch.no_grad():
        graph = captured(staged(lambda m, x: m.b(m.a(x)).mean(), 2), X).graph
    assert all(op.grad for op in graph.ops)


def test_a_model_on_the_meta_device_is_captured() -> None:
    """A plan for a model that fits nowhere needs no memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        batch = torch.randn(4, 6)
    graph = captured(model, batch, lambda m, b: m(b).mean()).graph
    assert {"aten.linear.default", "aten.batch_norm.default"} <= {op.target for op in graph.ops}


# ------------------------------------------------------------------------------------------------- branches on values


def _guard(model: nn.Module, batch: Any) -> Callable[[Tensor], bool]:
    graph = captured(model, batch).graph
    guard = guard_of(graph)
    assert guard is not None
    function = guard.code.compile({})
    assert (guard.held, guard.inputs) == ((), (0,))
    return lambda x: all(function(x, lambda _: None))


def test_a_branch_on_the_batch_gives_a_guard_that_knows_the_other_branch() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.b(m.a(x))
        return y.mean() if x.sum() > 0 else y.sum()

    positive, negative = X.abs(), -X.abs()
    model = staged(forward, 2)
    for batch, other in ((positive, negative), (negative, positive)):
        check_parity(model, batch)
        holds = _guard(model, batch)
        assert holds(batch)
        assert holds(batch * 2)
        assert not holds(other)


def test_a_branch_on_an_activation_follows_the_real_weights() -> None:
    """torch 2.13 computes with uninitialised parameters beside fake ones; the capture gives them their values."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(y).mean() if y.mean() > 0 else m.b(y).sum()

    for bias in (10.0, -10.0):
        model = staged(forward, 2)
        nn.init.constant_(model.a.bias, bias)
        lowered = check_parity(model, X)
        last = lowered.graph.op_by_name[lowered.graph.output_names[0]]
        assert last.target.startswith("aten.mean" if bias > 0 else "aten.sum")
        assert guard_of(lowered.captured.graph) is None, "the batch alone does not decide it"


def test_a_number_of_the_batch_may_steer_python() -> None:
    def forward(m: Any, x: Tensor, depth: Tensor) -> Tensor:
        y = m.a(x)
        for _ in range(int(depth)):
            y = m.b(y)
        return y.mean() * float(depth)

    check_parity(staged(forward, 2), (X, torch.tensor(3)))


# ------------------------------------------------------------------------------------------------------------- errors


def to_numpy(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)).mean() * float(x.numpy().sum())


def a_float_of_an_activation(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y).mean() * float(y.detach().abs().max())


def the_data_of_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.a.weight.data.clamp_(-1, 1)
    return m.b(m.a(x)).mean()


def control_flow_operators(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: m.b(y), lambda y: m.b(y) * 2, (m.a(x),)).mean()


def transforms_of_functions(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.vmap(lambda row: row * row.sum())(m.a(x))).mean()


def a_generator_of_its_own(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) * torch.rand(6, generator=torch.Generator())).mean()


def its_own_mistake(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x.view(-1))).mean()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (to_numpy, rf"cannot be captured.*numpy(.|\n)*at {__file__}:\d+ in to_numpy: return m\.b"),
        (a_float_of_an_activation, r"forward makes a Python float of a tensor's value at .*take it with \.item\(\)"),
        (the_data_of_a_parameter, r"such as \.data \(use \.detach\(\)\)"),
        (control_flow_operators, rf"at {__file__}:\d+ in control_flow_operators"),
        (transforms_of_functions, r"operator \(torch.func: vmap, grad, jvp\), which EPL cannot run yet"),
        (a_generator_of_its_own, r"a Generator .*without a torch\.Generator"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_export_cannot_follow_is_refused_in_the_users_words(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(staged(forward, 2), X)


def test_a_mistake_of_the_models_own_is_shown_with_its_line() -> None:
    with pytest.raises(CaptureError, match=rf"RuntimeError: (.|\n)*at {__file__}:\d+ in its_own_mistake"):
        captured(staged(its_own_mistake, 2), X)


def test_a_trained_tensor_that_the_model_does_not_register_is_refused() -> None:
    """Export keeps the data of an unregistered parameter: nothing would ever train it, and nobody would know."""
    hidden = nn.Linear(6, 6).double()
    for forward in (lambda m, x: m.b(hidden(m.a(x))).mean(), lambda m, x: m.b(m.a(x) * m.plain[0]).mean()):
        model = staged(forward, 2)
        model.plain = (torch.ones(6, dtype=torch.float64, requires_grad=True),)
        with pytest.raises(CaptureError, match="requires a gradient and is no parameter of the model"):
            captured(model, X)
    hidden.requires_grad_(False)
    check_parity(staged(lambda m, x: m.b(hidden(m.a(x))).mean(), 2), X)


def test_a_capture_beside_real_values_leaves_parameters_that_forward_changes_as_they_are() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.a.weight.clamp_(-0.1, 0.1)
            m.a.bias.fill_(3)
        y = m.a(x)
        return m.b(y).mean() if y.sum() > 0 else m.b(y).sum()

    model = staged(forward, 2)
    nn.init.constant_(model.a.bias, -5.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lowered = lower(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert lowered.graph.op_by_name[lowered.graph.output_names[0]].target == "aten.mean.default"
    check_parity(model, X)


def test_an_output_step_captures_what_the_model_returns() -> None:
    case = CASES["bert"]
    step = output_step()
    graph = capture(case.build(), step, flatten(case.batch(2))).graph
    assert [output.role for output in graph.outputs] == ["out.loss", "out.logits"]
