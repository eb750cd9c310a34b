"""The whole model's tensors out of an engine and into another one, whatever their plans.

A mistake shows as a name that is missing or not the model's own, or as a training that goes on from other numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.parity import assert_close
from tests.ranks import launch, launch_expecting_errors
from tests.runtime.odd_nets import Counting, Named, batch_of
from tests.runtime.problems import Problem, Way, my_share, plain, seeded, start, user_model

CUT = [["a"], ["b"]]


def named(steps: int) -> Problem:
    return Problem(partial(seeded, Named), [batch_of(8, seed) for seed in range(steps)])


def train_and_save(rank: int, problem: Problem, way: Way) -> dict[str, Tensor]:
    engine = start(problem, way)
    for batch in problem.batches:
        engine.train_step(my_share(engine, rank, batch))
    return engine.state_dict()


def test_the_state_dict_has_the_models_own_names_in_their_order() -> None:
    """Both names of a tied tensor are there, also of a buffer; what is not persistent is not."""
    problem = named(2)
    expected = plain(problem, 2).state
    assert {"a.0.weight", "tied.weight", "scale", "b.scale", "b.mask", "idle.weight"} < set(expected)
    assert "b.passing" not in expected
    for way in (Way(2, CUT, micro_batches=2), Way(1, micro_batches=2)):
        for state in launch(way.world, train_and_save, problem, way):
            assert list(state) == list(expected)
            assert_close(state, expected, torch.float64)


def load_and_go_on(rank: int, problem: Problem, way: Way, state: dict[str, Tensor]) -> dict[str, Tensor]:
    engine = start(problem, way)
    model = user_model(engine)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if any(tensor.stride()) or tensor.numel() == 1:  # not what was given up
                tensor.zero_()
        model.b.passing.fill_(1)
    engine.load_state_dict(state)
    for batch in problem.batches:
        engine.train_step(my_share(engine, rank, batch))
    return engine.state_dict()


def test_a_state_dict_goes_into_any_other_plan_and_into_a_plain_model() -> None:
    problem = named(3)
    first, rest = Problem(problem.build, problem.batches[:1]), Problem(problem.build, problem.batches[1:])
    expected = plain(problem, 2).state
    state = launch(2, train_and_save, first, Way(2, CUT, micro_batches=2))[0]
    for way in (Way(2, CUT, micro_batches=2), Way(1, micro_batches=2)):
        for found in launch(way.world, load_and_go_on, rest, way, state):
            assert_close(found, expected, torch.float64)
    model = problem.build()
    model.load_state_dict(state)
    assert plain(Problem(lambda: model, rest.batches), 2).state.keys() == expected.keys()
    assert_close(model.state_dict(), expected, torch.float64)


def load_wrongly(rank: int, problem: Problem, way: Way) -> None:
    engine = start(problem, way)
    before = engine.state_dict()
    state: dict[str, Any] = {
        name: value + 1 for name, value in before.items() if name not in ("a.0.bias", "idle.weight")
    }
    state |= {
        "b.weight": torch.ones(2, 3),
        "tied.weight": torch.ones(1),
        "more": torch.ones(1),
        "c.weight": torch.ones(1),
    }
    try:
        engine.load_state_dict(state)
    finally:
        assert_close(engine.state_dict(), before, torch.float64)  # nothing of it was loaded


def test_a_state_dict_that_does_not_fit_is_refused_whole_with_all_its_faults() -> None:
    for error in launch_expecting_errors(2, load_wrongly, named(1), Way(2, CUT)):
        lines = error.splitlines()
        assert lines[0] == "epl.errors.RunError: the state dict does not fit the model:"
        assert lines[1:] == [
            "  - a.0.bias is missing",
            "  - idle.weight is missing",
            "  - c.weight is not in the model",
            "  - more is not in the model",
            "  - b.weight has shape (2, 3); the model has (6, 6)",
            "  - tied.weight has shape (1,); the model has (6, 6)",
        ]


def keep_extra_state(rank: int) -> tuple[int, int]:
    engine = start(Problem(partial(seeded, Counting), [batch_of(4)]), Way(2, [["a", "b"], ["c", "d"]]))
    user_model(engine).seen = 3
    state = engine.state_dict()
    engine.load_state_dict({**state, "_extra_state": 5})
    return state["_extra_state"], user_model(engine).seen


def test_what_a_module_adds_to_its_state_is_kept() -> None:
    assert launch(2, keep_extra_state) == [(3, 5), (3, 5)]


def released(rank: int, problem: Problem) -> set[str]:
    """Which tensors this rank has given up: one element is left of each."""
    engine = start(problem, Way(2, CUT, micro_batches=2))
    engine.train_step(problem.batches[0])
    tensors = {**dict(user_model(engine).named_parameters()), **dict(user_model(engine).named_buffers())}
    sizes = {name: tensor.untyped_storage().nbytes() // tensor.element_size() for name, tensor in tensors.items()}
    gone = {name for name, tensor in tensors.items() if sizes[name] < tensor.numel()}
    assert all(sizes[name] == 1 for name in gone)
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel() > 1}
    assert {name for name, tensor in floats.items() if tensor.isnan().any()} == gone & set(floats)
    return gone


def test_a_rank_keeps_the_tensors_of_its_stage_only() -> None:
    """What nothing uses stays with the first stage; a NaN is left where a tensor was, so that a use would show."""
    first, second = launch(2, released, named(1))
    assert first == {"b.weight", "b.bias", "b.mask", "b.passing"}
    assert second == {"a.1.weight", "a.1.bias", "idle.weight", "idle.bias", "a.1.running_mean", "a.1.running_var"}
