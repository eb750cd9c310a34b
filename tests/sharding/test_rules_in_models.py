"""The operators of real models, on the values that they have there: every option, as in ``test_rules``."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch

from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.ir.graph import Argument, Op, Ref
from epl.loss import loss_step
from epl.sharding.rules import RULES, options_of
from tests.sharding.checks import check, variants
from tests.sharding.samples import Sample
from tests.zoo import CASES, Case

MODELS = ("bert", "mixtral", "resnet", "unet")
WITHOUT_RULE = {  # arange is made whole; the others are about single numbers
    "aten.arange.default",
    "aten.arange.start",
    "aten._assert_scalar.default",
    "aten.item.default",
}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("case", [CASES[name] for name in MODELS], ids=MODELS)
def test_operators_of_models_give_on_shards_what_they_give(case: Case):
    model = case.build(torch.float64, dropout=0.1 if case.has_dropout else 0.0)
    batch = flatten(case.batch(4, dtype=torch.float64))
    captured = capture(model, loss_step(case.loss_fn), batch)
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    graph = captured.graph
    given = dict(zip(batch.paths, batch.tensors, strict=True))
    values: dict[str, Any] = {leaf.name: given[leaf.path] for leaf in graph.inputs}
    values |= {leaf.name: state[leaf.path].detach().clone() for leaf in (*graph.parameters, *graph.buffers)}
    values |= {leaf.name: captured.constants[leaf.name] for leaf in graph.constants}
    _walk(captured, values)


def _walk(captured: Captured, values: dict[str, Any]) -> None:
    """Run the graph, and check each operator that was not seen yet."""
    seen = set()
    for op in captured.graph.ops:
        args, kwargs = (
            [_filled(each, values) for each in op.args],
            {name: _filled(each, values) for name, each in op.kwargs},
        )
        if op.target.startswith("python."):
            values[op.name] = _python(op.target.removeprefix("python."))(*args, **kwargs)
            continue
        assert op.target in RULES or op.target in WITHOUT_RULE
        key = (
            op.target,
            *map(str, (captured.graph.type_of(name) for name in op.reads)),
            str([each for each in op.args if not isinstance(each, Ref)]),
        )
        if op.target in RULES and key not in seen:
            seen.add(key)
            _check_options(op, args, kwargs)
        space, packet, overload = op.target.split(".")
        values[op.name] = getattr(getattr(getattr(torch.ops, space), packet), overload)(*args, **kwargs)


def _check_options(op: Op, args: list[Any], kwargs: dict[str, Any]) -> None:
    fresh = {name: _fresh(each, op) for name, each in kwargs.items()}
    sample = Sample(op.target, tuple(_fresh(each, op) for each in args), fresh)
    for option in options_of(sample.call)[1:]:
        for variant, size in ((option, 3), *((variant, 2) for variant in variants(option))):
            check(sample, variant, size)


def _filled(argument: Argument, values: dict[str, Any]) -> Any:
    if isinstance(argument, tuple):
        return tuple(_filled(item, values) for item in argument)
    return values[argument.name] if isinstance(argument, Ref) else argument


def _fresh(argument: Any, op: Op) -> Any:
    """The same value as a leaf; statistics have no gradient."""
    if isinstance(argument, tuple):
        return tuple(_fresh(item, op) for item in argument)
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.is_floating_point() and "batch_norm" not in op.target)


def _python(name: str) -> Any:
    return next(getattr(place, name) for place in (operator, torch, math) if hasattr(place, name))
