"""Leases: a weight is brought for each use, given back after it, and brought again for backward.

A mistake shows as a weight that stays in memory from forward to backward, or as a gradient of a weight that has changed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epl.stage.leases import Lease, Leases, UnitCache

SHAPES = ((5, 4), (6, 5), (3, 6))  # of three layers, each a unit


class _Coming:
    """A unit that is there at once."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self.was_taken = False

    def get(self) -> Tensor:
        self.was_taken = True
        return self._whole


class Store:
    """Units with copies of weights; remembers what was brought, and which of it is alive."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [weight.detach().clone() for weight in weights]
        self.brought: list[int] = []
        self._alive: list[weakref.ref[Any]] = []

    def start(self, unit: int) -> _Coming:
        self.brought.append(unit)
        whole = self.weights[unit].flatten().clone()
        self._alive.append(weakref.ref(whole.untyped_storage()))
        return _Coming(whole)

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self._alive)


def _weights(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype) for shape in SHAPES]


def _leaf(weight: Tensor) -> Tensor:
    """What a stage is given of a weight that is elsewhere: no memory of its own."""
    return weight.new_empty(()).expand(weight.shape).detach().requires_grad_()


def _stage(
    store: Store, leases: Leases, *, ahead: bool = False, dtype: torch.dtype | None = None
) -> tuple[Callable[..., Tensor], UnitCache]:
    cache = UnitCache(range(len(SHAPES)), store.start, ahead=ahead)
    table = {f"lease.{i}": Lease(i, 0, shape, dtype) for i, shape in enumerate(SHAPES)}
    lend = leases.bind(table, cache)

    def run(x: Tensor, *leaves: Tensor) -> Tensor:
        for i, leaf in enumerate(leaves):
            x = torch.tanh(F.linear(x, lend[f"lease.{i}"](leaf)))
        return x

    return leases.around(run), cache


X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)


def test_gradients_are_those_of_weights_that_are_at_hand() -> None:
    weights = _weights()
    plain = [weight.clone().requires_grad_() for weight in weights]
    x = X
    for weight in plain:
        x = torch.tanh(F.linear(x, weight))
    x.square().sum().backward()
    for ahead in (False, True):
        leaves = [_leaf(weight) for weight in weights]
        run, _ = _stage(Store(weights), Leases(), ahead=ahead)
        run(X, *leaves).square().sum().backward()
        assert all(torch.equal(leaf.grad, weight.grad) for leaf, weight in zip(leaves, plain, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
def test_between_forward_and_backward_only_the_unit_in_use_is_alive_and_after_clear_none(ahead: bool) -> None:
    store = Store(_weights())
    run, cache = _stage(store, Leases(), ahead=ahead)
    leaves = [_leaf(weight) for weight in store.weights]
    result = run(X, *leaves)
    assert store.num_alive == 1
    cache.clear()
    assert store.num_alive == 0
    result.sum().backward()
    cache.clear()
    assert store.num_alive == 0


@pytest.mark.parametrize(("ahead", "most"), [(False, 1), (True, 2)])
def test_at_most_the_unit_in_use_and_the_next_one_are_alive(ahead: bool, most: int) -> None:
    alive: list[int] = []
    store = Store(_weights())
    run, _ = _stage(store, Leases(), ahead=ahead)
    start = store.start

    def watched(unit: int) -> _Coming:
        found = start(unit)
        alive.append(store.num_alive)
        return found

    cache = UnitCache(range(3), watched, ahead=ahead)
    lend = Leases().bind({f"lease.{i}": Lease(i, 0, shape) for i, shape in enumerate(SHAPES)}, cache)
    x = X
    for i, weight in enumerate(store.weights):
        x = F.linear(x, lend[f"lease.{i}"](_leaf(weight)).detach())
    assert max(alive) <= most
    assert run is not None


def test_forward_brings_units_in_order_and_backward_brings_them_back_again() -> None:
    store = Store(_weights())
    run, cache = _stage(store, Leases())
    run(X.requires_grad_(), *(_leaf(weight) for weight in store.weights)).sum().backward()
    X.requires_grad_(False)
    assert store.brought == [0, 1, 2, 1, 0], "the last unit is still there when backward begins"
    cache.clear()


def test_a_weight_that_changes_between_forward_and_backward_is_seen_anew() -> None:
    """Which is why the runtime clears caches when weights change: backward is of the weights of its own step."""
    store = Store(_weights())
    run, cache = _stage(store, Leases())
    leaves = [_leaf(weight) for weight in store.weights]
    result = run(X.clone().requires_grad_(), *leaves)
    cache.clear()
    before = store.brought.copy()
    result.sum().backward()
    assert len(store.brought) > len(before)


def test_a_cast_is_not_kept_and_its_gradient_has_the_type_of_what_is_stored() -> None:
    weight = _weights(torch.float32)[0].requires_grad_()
    made: list[weakref.ref[Any]] = []
    leases = Leases()
    lend = leases.bind(
        {"lease.0": Lease(-1, 0, SHAPES[0], torch.bfloat16)}, UnitCache((), Store([]).start, ahead=False)
    )

    def run(x: Tensor, w: Tensor) -> Tensor:
        cast = lend["lease.0"](w)
        assert cast.dtype == torch.bfloat16
        made.append(weakref.ref(cast.untyped_storage()))
        return F.linear(x.bfloat16(), cast).float()

    x = X.float().requires_grad_()
    result = leases.around(run)(x, weight)
    gc.collect()
    assert made[0]() is None
    result.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    expected = weight.detach().clone().requires_grad_()
    F.linear(X.float().bfloat16(), expected.bfloat16()).float().square().sum().backward()
    assert expected.grad is not None
    assert torch.equal(weight.grad, expected.grad)


def test_views_of_a_leased_weight_are_brought_again_as_they_were() -> None:
    weights = _weights()
    store = Store([weights[0]])
    cache = UnitCache((0,), store.start, ahead=False)
    leases = Leases()
    lend = leases.bind({"lease.0": Lease(0, 0, SHAPES[0])}, cache)

    def run(x: Tensor, leaf: Tensor) -> Tensor:
        weight = lend["lease.0"](leaf)
        return x[:, :3] @ weight.t()[1:, ::2] + x @ weight[:3].t()

    leaf = _leaf(weights[0])
    x = X.clone().requires_grad_()
    result = leases.around(run)(x, leaf)
    cache.clear()
    result.square().sum().backward()
    plain, y = weights[0].clone().requires_grad_(), X.clone().requires_grad_()
    (y[:, :3] @ plain.t()[1:, ::2] + y @ plain[:3].t()).square().sum().backward()
    assert torch.equal(leaf.grad, plain.grad)  # type: ignore[arg-type]
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_an_in_place_change_of_a_kept_tensor_raises_as_in_plain_torch() -> None:
    """With hooks on what autograd saves, torch itself does not look."""

    def run(x: Tensor) -> Tensor:
        y = x * 2
        z = y.exp()
        z.add_(1)  # exp's backward needs what it gave
        return z

    def loss(function: Callable[[Tensor], Tensor]) -> str:
        with pytest.raises(RuntimeError) as error:
            function(X.clone().requires_grad_()).sum().backward()
        return str(error.value)

    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert words in loss(run)
    assert words in loss(Leases().around(run))


def test_what_backward_does_not_need_may_change_in_place() -> None:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return y.square()

    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    Leases().around(run)(x).sum().backward()
    run(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_a_unit_that_is_dropped_has_arrived_first() -> None:
    """The other ranks send it: memory that is given back while something comes into it is anyone's."""
    coming: list[_Coming] = []

    def start(unit: int) -> _Coming:
        coming.append(_Coming(torch.zeros(1)))
        return coming[-1]

    cache = UnitCache((0, 1, 2), start, ahead=True)
    cache.bring(0, 1)
    assert [each.was_taken for each in coming] == [True, False]
    cache.bring(2, 1)
    assert [each.was_taken for each in coming] == [True, True, True]
    cache.bring(2, 0)
    cache.bring(0, 0)
    assert len(coming) == 4, "no direction, none ahead"
    cache.clear()
    assert all(each.was_taken for each in coming)
