"""Scopes say where modules belong, and leave nothing else behind.

A mistake shows as a module under the wrong strategy (a stage with the wrong layers), or as a mark that outlives its scope
and drags later modules along.
"""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.errors import StrategyError
from epl.loss import loss_step
from epl.scopes import Strategy, Tracer, reset_scopes, strategies_of, tag_of, tags_of_parameters, tracing

HERE = re.escape(__file__)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    reset_scopes()
    plain = nn.Module.__init__
    yield
    reset_scopes()
    assert nn.Module.__init__ is plain, "a scope left its mark on torch"


def names(model: nn.Module) -> dict[str, str | None]:
    """The strategy's name of each module, by path."""
    tags = {path: tag_of(module) for path, module in model.named_modules()}
    return {path: None if tag is None else tag.strategy.name for path, tag in tags.items()}


# ------------------------------------------------------------------------------------------------- construction scopes


def test_modules_made_in_a_scope_belong_to_it_and_others_do_not() -> None:
    before = nn.Linear(2, 2)
    with epl.replicate(1, name="a") as a:
        inside = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    after = nn.Linear(2, 2)
    assert names(inside) == {"": "a", "0": "a", "1": "a"}
    assert {id(tag.strategy) for tag in map(tag_of, inside.modules()) if tag is not None} == {id(a)}
    assert (tag_of(before), tag_of(after)) == (None, None)


def test_two_scopes_after_one_another_are_two_strategies_even_if_they_look_the_same() -> None:
    scopes = []
    for _ in range(2):
        with epl.replicate(1, name="same") as scope:
            scopes.append((scope, nn.Linear(2, 2)))
    (one, first), (other, second) = scopes
    assert one is not other
    assert one != other
    assert tag_of(first) == tag_of(first)
    assert tag_of(first) != tag_of(second)


def test_a_strategy_that_is_entered_again_is_one_taskgraph() -> None:
    stage = epl.replicate(1, name="a")
    with stage:
        first = nn.Linear(2, 2)
    with stage:
        second = nn.Linear(2, 2)
    assert strategies_of(nn.Sequential(first, second)) == [stage]


def test_a_deep_copied_layer_stays_with_the_strategy_of_its_original() -> None:
    """nn.TransformerEncoder makes its layers by deep copies, whose ``__init__`` never runs."""
    with epl.replicate(1, name="a") as a:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        inside = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    outside = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert strategies_of(inside) == [a]
    assert set(names(inside).values()) == {"a"}
    assert names(outside)["layers.2.linear1"] == "a"
    assert names(outside)[""] is None


def test_a_module_from_outside_belongs_to_the_scope_that_registers_it() -> None:
    with epl.replicate(1, name="old"):
        layer = nn.Linear(2, 2)
    parent = nn.Module()
    with epl.replicate(1, name="new"):
        parent.layer = copy.deepcopy(layer)
    assert names(parent) == {"": None, "layer": "new"}
    assert names(layer) == {"": "old"}


def test_a_bare_parameter_of_a_module_from_outside_belongs_to_the_scope() -> None:
    model = nn.Module()
    with epl.replicate(1, name="a") as a:
        model.scale = nn.Parameter(torch.ones(2))
        layer = nn.Linear(2, 2)
    model.other = nn.Parameter(torch.ones(2))
    model.layer = layer
    tags = tags_of_parameters(model)
    assert tags == {id(model.scale): tag_of(model.scale)}, "parameters of a module in the scope go with their module"
    assert tags[id(model.scale)].strategy is a
    assert strategies_of(model) == [a]


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda model: model.to("meta").to_empty(device="cpu")], ids=["copy", "meta"]
)
def test_a_parameters_strategy_survives_what_makes_new_parameters(change: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Module()
    with epl.replicate(1, name="a") as a:
        model.scale = nn.Parameter(torch.ones(2))
    changed = change(model)
    assert [tag.strategy for tag in tags_of_parameters(changed).values()] == [a]


def test_a_lazy_module_and_a_module_list_are_marked() -> None:
    with epl.replicate(1, name="a"):
        model = nn.ModuleList([nn.LazyLinear(3), nn.ModuleDict({"x": nn.ReLU()})])
    assert set(names(model).values()) == {"a"}


def test_what_is_marked_survives_pickling() -> None:
    with epl.replicate(1, name="a"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loaded = pickle.loads(pickle.dumps(model))
    assert names(loaded) == names(model)
    assert len(strategies_of(loaded)) == 1


# ------------------------------------------------------------------------------------------------ modules that exist


def test_a_strategy_takes_modules_that_exist_with_all_that_is_in_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), nn.ReLU())
    stage = epl.replicate(1, name="a")
    assert stage(model[0], model[2]) is model[0]
    assert names(model) == {"": None, "0": "a", "0.0": "a", "1": None, "2": "a"}


def test_the_last_strategy_that_takes_a_module_has_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    epl.replicate(1, name="all")(model)
    epl.replicate(1, name="head")(model[1])
    assert names(model) == {"": "all", "0": "all", "1": "head"}


def test_a_strategy_takes_one_parameter() -> None:
    layer = nn.Linear(2, 2)
    stage = epl.split(1, name="vocabulary")
    assert stage(layer.weight) is layer.weight
    assert [tag.strategy for tag in tags_of_parameters(layer).values()] == [stage]


@pytest.mark.parametrize("wrong", [torch.ones(2), "layer", [nn.Linear(2, 2)], nn.Linear])
def test_a_strategy_refuses_what_is_neither_module_nor_parameter(wrong: Any) -> None:
    with pytest.raises(StrategyError, match="takes modules or one parameter"):
        epl.replicate(1)(wrong)
    with pytest.raises(StrategyError, match=f"name='a'.*{HERE}"):
        epl.replicate(1, name="a")(nn.Linear(2, 2), wrong)


# -------------------------------------------------------------------------------------------------- default strategy


def test_the_default_takes_what_no_scope_takes_until_the_next_default() -> None:
    first, second = epl.replicate(1, name="first"), epl.replicate(1, name="second")
    epl.set_default_strategy(first)
    a = nn.Linear(2, 2)
    with epl.replicate(1, name="scope"):
        b = nn.Linear(2, 2)
    c = nn.Linear(2, 2)
    epl.set_default_strategy(second)
    d = nn.Linear(2, 2)
    assert [names(module)[""] for module in (a, b, c, d)] == ["first", "scope", "first", "second"]
    assert strategies_of(nn.Sequential(a, b, c, d), with_defaults=False) == [tag_of(b).strategy]  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [epl.split(1), None, "replicate"])
def test_only_replicate_can_be_the_default(wrong: Any) -> None:
    with pytest.raises(StrategyError, match="only replicate is supported as the default strategy"):
        epl.set_default_strategy(wrong)


def test_a_default_cannot_be_set_inside_a_scope() -> None:
    with (
        epl.replicate(1, name="outer"),
        pytest.raises(StrategyError, match=r"set_default_strategy.*inside.*'outer'.*leave the scope first"),
    ):
        epl.set_default_strategy(epl.replicate(1))
    assert tag_of(nn.Linear(2, 2)) is None


def test_reset_forgets_the_default() -> None:
    """``epl.init`` resets, so that a second run in one process starts clean."""
    epl.set_default_strategy(epl.replicate(1))
    reset_scopes()
    assert tag_of(nn.Linear(2, 2)) is None


# ----------------------------------------------------------------------------------------------------------- nesting


@pytest.mark.parametrize("outer", [epl.replicate, epl.split])
@pytest.mark.parametrize("inner", [epl.replicate, epl.split])
def test_nesting_is_refused_with_both_creation_lines(outer: Any, inner: Any) -> None:
    one, other = outer(1, name="outer"), inner(1, name="inner")
    with one:
        with pytest.raises(StrategyError, match="cannot be nested") as caught:
            other.__enter__()
        layer = nn.Linear(2, 2)
    assert names(layer)[""] == "outer", "the refused scope must not disturb the one that is entered"
    lines = re.findall(rf"{HERE}:(\d+)", str(caught.value))
    assert len(lines) == 2
    assert "'outer'" in str(caught.value)
    assert "'inner'" in str(caught.value)


def test_a_strategy_inside_itself_is_refused() -> None:
    stage = epl.replicate(1)
    with stage, pytest.raises(StrategyError, match="cannot be nested"):
        stage.__enter__()


def test_leaving_a_scope_that_was_not_entered_last_is_refused() -> None:
    with pytest.raises(StrategyError, match="is left, but it is not the strategy that was entered last"):
        epl.replicate(1).__exit__(None, None, None)


def test_an_exception_in_a_scope_leaves_it() -> None:
    with pytest.raises(ZeroDivisionError), epl.replicate(1, name="a"):
        _ = 1 / 0
    assert tag_of(nn.Linear(2, 2)) is None
    with epl.replicate(1, name="b"):
        assert names(nn.Linear(2, 2))[""] == "b"


def test_a_constructor_that_fails_in_a_scope_leaves_it() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with epl.replicate(1):
                self.layer = nn.Linear(-1, 2)

    with pytest.raises(RuntimeError, match="negative dimension"):
        Broken()
    assert tag_of(nn.Linear(2, 2)) is None


def test_a_scope_of_one_thread_does_not_reach_another() -> None:
    found: list[Any] = []
    with epl.replicate(1):
        thread = threading.Thread(target=lambda: found.append(tag_of(nn.Linear(2, 2))))
        thread.start()
        thread.join()
    assert found == [None]


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("make", [epl.replicate, epl.split])
@pytest.mark.parametrize("count", [0, -1, 1.0, "2", None, True])
def test_device_count_is_a_positive_int(make: Any, count: Any) -> None:
    with pytest.raises(StrategyError, match=rf"{make.__name__}\(device_count=.*must be an int of at least 1"):
        make(count)


@pytest.mark.parametrize("make", [epl.replicate, epl.split])
def test_what_is_not_yet_available_is_refused(make: Any) -> None:
    with pytest.raises(StrategyError, match="choosing a kind of device is not yet available"):
        make(1, device="gpu")


def test_a_name_is_a_string() -> None:
    with pytest.raises(StrategyError, match="name must be a string"):
        epl.replicate(1, name=3)  # type: ignore[arg-type]


def test_a_strategy_says_what_it_is_and_where_it_was_made() -> None:
    text = str(epl.replicate(2, name="stage_0"))
    assert re.fullmatch(rf"replicate\(2, name='stage_0'\) made at {HERE}:\d+", text)
    assert epl.split(2).name == "split"


# -------------------------------------------------------------------------------------------- torch outside of scopes


def test_torch_is_untouched_outside_of_scopes() -> None:
    plain = nn.Module.__init__
    with epl.replicate(1):
        assert nn.Module.__init__ is not plain
    assert nn.Module.__init__ is plain
    epl.set_default_strategy(epl.replicate(1))
    assert nn.Module.__init__ is not plain
    reset_scopes()
    assert nn.Module.__init__ is plain


def test_another_librarys_patch_of_torch_survives_a_scope() -> None:
    """Libraries that build models without memory replace ``nn.Module.__init__``, too."""
    plain, made = nn.Module.__init__, []

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        made.append(self)

    try:
        nn.Module.__init__ = patched
        with epl.replicate(1, name="a"):
            layer = nn.Linear(2, 2)
        assert nn.Module.__init__ is patched
        assert made == [layer]
        assert names(layer)[""] == "a"
    finally:
        nn.Module.__init__ = plain


# ---------------------------------------------------------------------------------------------------- while capturing


class _Notes(Tracer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, strategy: Strategy) -> None:
        self.seen.append(f"enter {strategy.name}")

    def exit(self, strategy: Strategy) -> None:
        self.seen.append(f"exit {strategy.name}")

    def set_default(self, strategy: Strategy) -> None:
        self.seen.append(f"default {strategy.name}")


def test_while_a_model_is_captured_scopes_tell_the_tracer_and_mark_nothing() -> None:
    notes = _Notes()
    epl.set_default_strategy(epl.replicate(1, name="outside"))
    with tracing(notes):
        with epl.replicate(1, name="a"):
            layer = nn.Linear(2, 2)
        epl.set_default_strategy(epl.replicate(1, name="b"))
        other = nn.Sequential(layer)
    assert notes.seen == ["enter a", "exit a", "default b"]
    assert (tag_of(layer), tag_of(other)) == (None, None)
    assert names(nn.Linear(2, 2))[""] == "outside", "the default of before holds again"


def test_a_model_cannot_be_captured_inside_a_scope() -> None:
    with (
        epl.replicate(1, name="outer"),
        pytest.raises(StrategyError, match=r"a model cannot be captured inside a scope; leave .*'outer'"),
    ):
        capture(nn.Linear(2, 1), loss_step(None), flatten(torch.ones(1, 2)))


def test_what_is_given_to_a_part_stays_when_the_whole_is_given_to_another():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    inner, outer, later = epl.split(2, name="inner"), epl.replicate(2, name="outer"), epl.replicate(2, name="later")
    inner(model[1])
    outer(model)
    strategies = [tag.strategy if (tag := tag_of(module)) else None for module in model.modules()]
    assert strategies == [outer, outer, inner, inner, inner]
    later(model)
    strategies = [tag.strategy if (tag := tag_of(module)) else None for module in model.modules()]
    assert strategies == [later, later, inner, inner, inner]
    later(model[1])
    strategies = [tag.strategy if (tag := tag_of(module)) else None for module in model.modules()]
    assert strategies == [later] * 5
