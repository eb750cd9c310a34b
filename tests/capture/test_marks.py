"""Regions in which the user turns autocast off are in the graph, so that EPL's own mixed precision leaves them alone.

A region that is lost shows as an operator in low precision that its author wanted in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epl.batch import flatten
from epl.capture.capture import capture
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.passes.precision import mixed_precision

Wrap = Callable[[nn.Module, Tensor], Tensor]


def _with(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return module(x)


def _amp(module: nn.Module, x: Tensor) -> Tensor:
    with torch.amp.autocast("cpu", enabled=False):
        return module(x)


@torch.autocast("cpu", enabled=False)
def _decorated(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def _old(module: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = torch.cpu.amp.autocast(enabled=False)
    with region:
        return module(x)


class _Own(torch.autocast):
    """A user's subclass."""


def _subclass(module: nn.Module, x: Tensor) -> Tensor:
    with _Own("cpu", enabled=False):
        return module(x)


def _stacked(module: nn.Module, x: Tensor) -> Tensor:
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", enabled=False))
        return module(x)


@contextmanager
def _careful() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        yield


def _generator(module: nn.Module, x: Tensor) -> Tensor:
    with _careful():
        return module(x)


class Net(nn.Module):
    """Three layers; the second is called in the user's way."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.wrap = (wrap,)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.wrap[0](self.second, self.first(x))).square().mean()


def _graph(wrap: Wrap) -> Graph:
    return capture(Net(wrap), loss_step(None), flatten({"x": torch.ones(2, 4)})).graph


def _autocasts(graph: Graph) -> list[str]:
    """Of the three linear operators."""
    return [op.autocast for op in graph.ops if op.target.startswith("aten.linear.")]


def _plain(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


ALL_FORMS: list[Any] = [_with, _amp, _decorated, _old, _subclass, _stacked, _generator]


@pytest.mark.parametrize("wrap", ALL_FORMS)
def test_a_region_without_autocast_is_marked_in_whatever_form_it_is_written(wrap: Wrap) -> None:
    assert _autocasts(_graph(wrap)) == ["", "cpu:", ""]


def test_a_model_without_regions_has_no_marks_and_autocast_is_as_before() -> None:
    before = torch.autocast.__enter__, torch.autocast.__exit__
    assert _autocasts(_graph(_plain)) == ["", "", ""]
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == before


@pytest.mark.parametrize("wrap", ALL_FORMS)
def test_mixed_precision_leaves_the_region_in_float32(wrap: Wrap) -> None:
    graph = mixed_precision(_graph(wrap), torch.bfloat16)
    kinds = [graph.type_of(op.reads[0]) for op in graph.ops if op.target.startswith("aten.linear.")]
    assert [getattr(kind, "dtype", None) for kind in kinds] == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_regions_inside_one_another_are_what_the_innermost_says() -> None:
    def nested(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = module(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = module(x)
            x = module(x.float())
        return module(x)

    assert _autocasts(_graph(nested)) == ["", "cpu:", "cpu:bfloat16", "cpu:", "", ""]


def test_a_region_of_another_kind_of_device_marks_nothing() -> None:
    def elsewhere(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("xpu", enabled=False):
            return module(x)

    assert _autocasts(_graph(elsewhere)) == ["", "", ""]


def test_an_error_inside_a_region_ends_it() -> None:
    def failing(module: nn.Module, x: Tensor) -> Tensor:
        try:
            with torch.autocast("cpu", enabled=False):
                raise KeyError
        except KeyError:
            return module(x)

    assert _autocasts(_graph(failing)) == ["", "", ""]
