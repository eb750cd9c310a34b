"""Custom autograd functions keep their own backward, whatever they take and give, or are refused.

Export traces through their forward and forgets their backward without a word: a mistake shows as a gradient that is the
one autograd would derive, and not the one that the user wrote. So each backward here is wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from epl.errors import CaptureError, RunError
from tests.capture.odd_functions import (
    AddOne,
    CheckpointInside,
    Constant,
    Containers,
    Cube,
    Drawing,
    GradientInside,
    Once,
    Outer,
    Reversed,
    ReversedView,
    Scaled,
    Several,
    Sorted,
    WithSetup,
    cube,
)
from tests.program.local_run import check_parity, lower, run_stages
from tests.program.staged import batch_of, staged

X = batch_of()


TABLE = torch.arange(6, dtype=torch.float64)


def a_gradient(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Cube.apply(a)  # type: ignore[return-value]


def bound_early(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return cube(a)  # type: ignore[return-value]


def plain_arguments(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Scaled.apply(a, 2, "mode", None) + Scaled.apply(x, 3, "mode", a)  # type: ignore[operator]


def several_results(m: Any, a: Tensor, x: Tensor) -> Tensor:
    product, nothing, total, three = Several.apply(a, x)  # type: ignore[misc]
    assert nothing is None
    return product + total * three


def a_result_that_nobody_uses(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Several.apply(a, x)[0]  # type: ignore[index]


def results_that_are_not_differentiable(m: Any, a: Tensor, x: Tensor) -> Tensor:
    values, places, mask = Sorted.apply(a)  # type: ignore[misc]
    assert values.requires_grad
    assert not mask.requires_grad
    return (values * mask).gather(1, places)


def in_place(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return AddOne.apply(a * 1)  # type: ignore[return-value]


def in_place_with_the_result_ignored(m: Any, a: Tensor, x: Tensor) -> Tensor:
    y = a * 1
    AddOne.apply(y)
    return y


def in_place_on_another_stages_value(m: Any, a: Tensor, x: Tensor) -> Tensor:
    y = a * 1
    with m.scopes[1]:
        AddOne.apply(y)
    return y * 2


def differentiable_once(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Once.apply(a)  # type: ignore[return-value]


def with_a_setup_function(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return WithSetup.apply(a) + WithSetup.apply(a, 3)  # type: ignore[operator]


def its_argument_returned(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Reversed.apply(a) + ReversedView.apply(a)  # type: ignore[operator]


def nested(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Outer.apply(a)  # type: ignore[return-value]


def gradients_inside(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return GradientInside.apply(a)  # type: ignore[return-value]


def tensors_in_containers(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Containers.apply([a, x], {"scale": x, "factor": 2}, a)  # type: ignore[return-value]


def random_numbers(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return F.dropout(Drawing.apply(a), 0.3)  # type: ignore[arg-type]


def a_constant(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return Constant.apply(TABLE, a)  # type: ignore[return-value]


def without_gradients(m: Any, a: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = Cube.apply(a).mean()  # type: ignore[union-attr]
    return a * scale


def in_a_checkpoint(m: Any, a: Tensor, x: Tensor) -> Any:
    return checkpoint(lambda y: cube(m.a(y)).tanh(), x, use_reentrant=False)  # type: ignore[union-attr]


def in_a_reentrant_checkpoint(m: Any, a: Tensor, x: Tensor) -> Any:
    return checkpoint(lambda y: F.dropout(cube(y), 0.3), a, use_reentrant=True)  # type: ignore[arg-type]


def a_checkpoint_inside(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return CheckpointInside.apply(a)  # type: ignore[return-value]


USES: list[Callable[..., Any]] = [
    value for value in list(globals().values()) if getattr(value, "__code__", None) and value.__module__ == __name__
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_function_keeps_its_own_backward(use: Callable[..., Any]) -> None:
    check_parity(staged(lambda m, x: m.b(use(m, m.a(x), x)).pow(2).mean(), 2), X, num_stages=2)


def test_a_result_that_is_not_differentiable_asks_for_no_gradient_when_it_crosses() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        values, places, mask = Sorted.apply(m.a(x))  # type: ignore[misc]
        return (m.b(values) * mask).gather(1, places).pow(2).mean()

    check_parity(staged(forward, 2), X)


def test_one_call_is_one_operator() -> None:
    graph = lower(staged(lambda m, x: m.b(cube(m.a(x))).mean(), 2), X).graph
    (call,) = [op for op in graph.ops if op.target.startswith("function.")]
    assert (call.target, call.task, call.random) == ("function.call_0", 0, None)
    assert not [op for op in graph.ops if op.target.startswith("aten.pow")]


def test_what_a_function_does_beside_computing_is_in_the_graph() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = AddOne.apply(m.a(x) * 1)
        return m.b(F.dropout(Drawing.apply(Reversed.apply(y)), 0.5)).mean()  # type: ignore[arg-type]

    calls = [op for op in lower(staged(forward, 2), X).captured.graph.ops if op.target.startswith("function.")]
    dirty, drawing, reversing = calls[0], calls[2], calls[1]
    assert (dirty.writes, dirty.views) == (("mul",), ("mul",))
    assert (reversing.writes, len(reversing.views)) == ((), 1)
    assert (drawing.random, drawing.views) == (0, ())


def test_the_functions_of_two_captures_do_not_mix() -> None:
    one = staged(lambda m, x: m.b(cube(m.a(x))).pow(2).mean(), 2)
    other = staged(lambda m, x: m.b(Once.apply(m.a(x))).pow(2).mean(), 2)
    lowered = [lower(one, X), lower(other, X), lower(one, X)]
    losses = [run_stages(each, X).parts["loss"] for each in lowered]
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def test_torch_is_as_before_after_a_capture() -> None:
    before = dict(vars(Function.__mro__[1])), Function.apply.__func__, vars(Cube).get("apply")
    lower(staged(lambda m, x: m.b(cube(m.a(x))).mean(), 2), X)
    assert (dict(vars(Function.__mro__[1])), Function.apply.__func__, vars(Cube).get("apply")) == before


# --------------------------------------------------------------------------------------------------------- refusals


class ThroughAModule(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Any:
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def test_a_parameter_that_a_function_gets_from_a_module_is_refused() -> None:
    """The stage might not hold it, and nothing would reduce its gradient."""
    model = staged(lambda m, x: m.b(ThroughAModule.apply(m.a(x), m.b)).mean(), 2)
    with pytest.raises(CaptureError, match=r"ThroughAModule.forward uses a tensor of shape \(6, 6\) that is not among"):
        lower(model, X)


def test_an_activation_that_a_function_gets_from_an_object_is_refused() -> None:
    class Holder:
        value: Tensor

    class FromHolder(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, holder: Holder) -> Tensor:
            return x * holder.value

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0], None

    def forward(m: Any, x: Tensor) -> Tensor:
        holder = Holder()
        holder.value = m.a(x)
        return m.b(FromHolder.apply(x, holder)).mean()

    with pytest.raises(CaptureError, match=r"FromHolder.forward uses a tensor of shape"):
        lower(staged(forward, 2), X)


def test_keywords_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"Scaled.apply was called with keywords \['mode'\]"):
        lower(staged(lambda m, x: m.b(Scaled.apply(m.a(x), 2, mode="mode")).mean(), 2), X)


def test_a_plain_result_that_changes_is_an_error_at_the_step_where_it_does() -> None:
    class Counting(Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            Counting.calls += 1
            return x * 1, Counting.calls

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    lowered = lower(staged(lambda m, x: m.b(Counting.apply(m.a(x))[0]).mean(), 2), X)  # type: ignore[index]
    with pytest.raises(RunError, match=r"Counting.forward returned tuple\(tensor, 2\), but tuple\(tensor, 1\) when"):
        run_stages(lowered, X)
