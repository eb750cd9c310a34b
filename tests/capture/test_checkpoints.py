"""Checkpointed calls, which export dissolves without a word, are recompute segments of the graph.

A mistake shows as memory that is not saved, or as a recomputation that draws other random numbers than the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import epl
from epl.errors import CaptureError
from tests.program.local_run import check_parity, lower
from tests.program.staged import batch_of, staged
from tests.zoo import CASES, annotate

X = batch_of()


def with_dropout(m: Any, x: Tensor) -> Any:
    return m.b(checkpoint(lambda y: F.dropout(m.a(y), 0.5), x, use_reentrant=False)).pow(2).mean()


def reentrant(m: Any, x: Tensor) -> Any:
    return m.b(checkpoint(lambda y: F.dropout(m.a(y), 0.5), m.a(x), use_reentrant=True)).pow(2).mean()


def with_plain_arguments_and_results(m: Any, x: Tensor) -> Any:
    def inner(y: Tensor, factor: int = 2, mask: Tensor | None = None) -> Any:
        return (m.a(y) * factor).tanh(), y * 2, mask, factor

    h, z, mask, factor = checkpoint(inner, x, factor=3, use_reentrant=False)  # type: ignore[misc]
    assert mask is None
    return m.b(h + z).pow(2).mean() * factor


def nested(m: Any, x: Tensor) -> Any:
    def inner(y: Tensor) -> Any:
        return checkpoint(lambda z: m.a(z).tanh(), y, use_reentrant=False) * 2  # type: ignore[operator]

    return m.b(checkpoint(inner, x, use_reentrant=False)).pow(2).mean()


def over_two_stages(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: m.b(m.a(y)).tanh(), x, use_reentrant=False).pow(2).mean()  # type: ignore[union-attr]


def a_scope_inside(m: Any, x: Tensor) -> Any:
    def inner(y: Tensor) -> Tensor:
        y = m.a(y)
        with m.scopes[1]:
            y = y.tanh()
        return y * 2

    return m.b(checkpoint(inner, x, use_reentrant=False)).pow(2).mean()


def a_default_strategy_inside(m: Any, x: Tensor) -> Any:
    def inner(y: Tensor) -> Tensor:
        epl.set_default_strategy(m.scopes[1])
        return y.tanh()

    return m.b(checkpoint(inner, m.a(x), use_reentrant=False) * 2).pow(2).mean()  # type: ignore[operator]


def autocast_inside(m: Any, x: Tensor) -> Any:
    def inner(y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.a(y).mean()
        return m.a(y) * scale

    return m.b(checkpoint(inner, x, use_reentrant=False)).pow(2).mean()


def in_place_inside(m: Any, x: Tensor) -> Any:
    def inner(y: Tensor) -> Tensor:
        z = m.a(y)
        z[:, 0] = 1
        return z.mul_(2)

    return m.b(checkpoint(inner, x, use_reentrant=False)).pow(2).mean()


def sequential(m: Any, x: Tensor) -> Any:
    return checkpoint_sequential([m.a, torch.nn.Tanh(), m.b], 2, x, use_reentrant=False).pow(2).mean()


FORWARDS: list[Callable[..., Any]] = [
    value for value in list(globals().values()) if getattr(value, "__code__", None) and value.__module__ == __name__
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_a_checkpointed_call_is_recomputed_with_the_same_numbers(forward: Callable[..., Any]) -> None:
    lowered = check_parity(staged(forward, 2), X, num_stages=2)
    assert any(op.segment is not None for op in lowered.graph.ops)
    assert any("recompute(segment_" in stage.code.source for stage in lowered.stages)


def test_what_is_not_checkpointed_is_in_no_segment() -> None:
    graph = lower(staged(with_dropout, 2), X).captured.graph
    assert [op.segment for op in graph.ops] == [0, 0, None, None, None]


def test_each_call_is_a_segment_of_its_own_and_an_inner_one_ends_where_it_ended() -> None:
    graph = lower(staged(nested, 2), X).captured.graph
    assert [(op.target.split(".")[1], op.segment) for op in graph.ops][:4] == [
        ("linear", 1),
        ("tanh", 1),
        ("mul", 0),
        ("linear", None),
    ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_without_a_tensor_that_asks_for_gradients_gives_none() -> None:
    """torch warns and trains nothing there; the parallel run must not train more than one process would."""
    model = staged(lambda m, x: m.b(checkpoint(lambda y: m.a(y).tanh(), x, use_reentrant=True)).pow(2).mean(), 2)
    check_parity(model, X)
    assert model.a.weight.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_checkpointing_makes_a_segment_of_each_layer(reentrant: bool) -> None:
    case = CASES["bert"]
    model: Any = annotate(case.build(torch.float64, dropout=0.2), case.stages[2])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    lowered = check_parity(model, case.batch(2, dtype=torch.float64))
    segments = {op.segment for op in lowered.graph.ops} - {None}
    assert len(segments) == 4
    assert all("recompute(segment_" in stage.code.source for stage in lowered.stages)


def test_selective_checkpoints_are_refused() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

        return m.b(checkpoint(m.a, x, use_reentrant=False, context_fn=contexts)).mean()

    with pytest.raises(CaptureError, match=r"with a context_fn \(selective recompute\) cannot be captured yet"):
        lower(staged(forward, 2), X)


def test_an_error_in_a_checkpoint_leaves_no_mark_on_the_next_capture() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        def inner(y: Tensor) -> Tensor:
            raise ValueError("no")

        return m.b(checkpoint(inner, m.a(x), use_reentrant=False))

    with pytest.raises(CaptureError, match="ValueError: no"):
        lower(staged(forward, 2), X)
    graph = lower(staged(lambda m, x: m.b(m.a(x)).mean(), 2), X).captured.graph
    assert {op.segment for op in graph.ops} == {None}
