"""What cannot work is said on every rank, in words that name the cause; and what a branch on data does.

A mistake shows as a rank that hangs, or that reports the loss of its peer instead of the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epl
from epl.errors import EplError
from tests.ranks import launch, launch_expecting_errors
from tests.runtime.odd_nets import Branching, Chain, Tagger, batch_of
from tests.runtime.problems import Problem, Way, check, my_share, seeded, start, user_model
from tests.zoo import annotate

HALVES = [["a", "b"], ["c", "d"]]
QUIET = {"run.print_plan": False}


def engine_of(
    model: nn.Module, cut: list[list[str]], config: dict[str, Any] | None = None, **options: Any
) -> epl.Engine:
    epl.init(epl.Config({**QUIET, **(config or {})}))
    return epl.parallelize(annotate(model, cut), torch.optim.SGD(model.parameters(), lr=0.1), **options)


def three_devices(rank: int) -> None:
    engine_of(seeded(Chain), [["a"], ["b"], ["c", "d"]]).train_step(batch_of(4))


def other_model(rank: int) -> None:
    model = seeded(Chain)
    if rank == 1:
        model.c = nn.Linear(6, 6, bias=False).double()
    engine_of(model, []).train_step(batch_of(4))


def other_batch(rank: int, kind: str) -> None:
    engine = engine_of(seeded(Chain), HALVES, example_batch=batch_of(4))
    engine.train_step(batch_of(4))
    engine.train_step(batch_of(5 if rank and kind == "size" else 4, seed=rank if kind == "values" else 0))


def other_batch_of_devices(rank: int) -> None:
    engine = start(Problem(partial(seeded, Chain), [batch_of(4)]), Way(2, [["a", "b", "c", "d"]], devices=2))
    engine.train_step(batch_of(4, seed=rank))


def other_call(rank: int, call: str) -> None:
    engine = engine_of(seeded(Chain), HALVES, example_batch=batch_of(4))
    engine.train_step(batch_of(4))
    if rank == 0:
        getattr(engine, call)(*([batch_of(4)] if call in ("eval_step", "forward") else []))
    else:
        engine.train_step(batch_of(4))


def other_config(rank: int) -> None:
    engine_of(seeded(Chain), HALVES, {"pipeline.num_micro_batch": 1 + rank}).train_step(batch_of(4))


def other_frozen(rank: int) -> None:
    engine = engine_of(seeded(Chain), [], example_batch=batch_of(4))
    if rank:
        user_model(engine).b.weight.requires_grad_(False)
    engine.train_step(batch_of(4))


class Failing(Chain):
    """It cannot be captured on some ranks; on the others it can."""

    def __init__(self, rank: int, when: str) -> None:
        super().__init__()
        self.fails, self.when = bool(rank), when

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.fails and (self.when == "at once" or x.shape[0] == 3):
            raise KeyError("a mistake in forward")
        return super().forward(x, y)


def failing_capture(rank: int, when: str) -> None:
    engine = engine_of(seeded(Failing, rank, when), HALVES)
    engine.train_step(batch_of(4))
    engine.train_step(batch_of(3))


def failing_loss(rank: int) -> None:
    engine_of(seeded(Chain), [], loss_fn=partial(raise_on, rank)).train_step(batch_of(4))


def raise_on(rank: int, model: nn.Module, batch: Any) -> Tensor:
    if rank:
        raise KeyError("a mistake in loss_fn")
    return model(**batch)


def eval_mode(rank: int) -> None:
    engine = engine_of(seeded(Chain), [], example_batch=batch_of(4))
    user_model(engine).eval()
    engine.train_step(batch_of(4))


def no_optimizer(rank: int) -> None:
    epl.init(epl.Config(QUIET))
    epl.parallelize(seeded(Chain)).train_step(batch_of(4))


def foreign_optimizer(rank: int) -> None:
    epl.init(epl.Config(QUIET))
    epl.parallelize(seeded(Chain), torch.optim.SGD(seeded(Chain).parameters(), lr=0.1))


def vector_loss(rank: int) -> None:
    engine_of(seeded(Chain), HALVES, loss_fn=per_sample).train_step(batch_of(4))


def per_sample(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model.d(batch["x"]), batch["y"], reduction="none").mean(1)


def late_part(rank: int) -> None:
    """A batch reaches a layer of the second stage that the plan's own batch left out."""
    engine = engine_of(seeded(Tagger), [["embedding"], ["head"]], loss_fn=sometimes_middle, example_batch=(4, False))
    engine.train_step((4, True))


def sometimes_middle(model: Any, batch: Any) -> Tensor:
    size, more = batch
    z = model.embedding(torch.arange(size))
    return model.head(model.middle(z) if more else z).square().mean()


def empty_everywhere(rank: int) -> None:
    engine = engine_of(seeded(Chain), [], example_batch=batch_of(4))
    engine.train_step(batch_of(0))


def wrong_leaf(rank: int) -> None:
    engine = engine_of(seeded(Chain), HALVES, example_batch=batch_of(4))
    engine.train_step({**batch_of(4), "y": [object()]} if rank else batch_of(4))


def unequal_sizes(rank: int) -> None:
    engine_of(seeded(Chain), HALVES, {"pipeline.num_micro_batch": 2}).train_step({**batch_of(4), "y": batch_of(3)["y"]})


def list_of_numbers(rank: int) -> None:
    engine_of(seeded(Chain), HALVES).train_step({**batch_of(4), "y": [1.0, 2.0, 3.0, 4.0]})


def other_results(rank: int) -> None:
    engine = engine_of(seeded(Chain), [], loss_fn=partial(with_more_on, rank))
    engine.train_step(batch_of(4))


def with_more_on(rank: int, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    loss = model(**batch)
    return loss, {"twice": loss * 2} if rank else {"loss": loss}


WRONG: dict[str, tuple[Callable[[int], None], tuple[str, ...]]] = {
    "other model": (other_model, ("the ranks do not agree on the model's parameters", "c.bias")),
    "other size": (partial(other_batch, kind="size"), ("were given different batches", "(5, 6)")),
    "other values": (partial(other_batch, kind="values"), ("ranks [0, 1] run one replica, and were given different",)),
    "other values on devices": (other_batch_of_devices, ("ranks [0, 1] run one replica, and were given different",)),
    "eval_step": (partial(other_call, call="eval_step"), ("rank 0: eval_step on", "rank 1: a training step on")),
    "forward": (partial(other_call, call="forward"), ("rank 0: a forward pass on", "rank 1: a training step on")),
    "state_dict": (partial(other_call, call="state_dict"), ("rank 0: state_dict", "rank 1: a training step on")),
    "gradients": (partial(other_call, call="gradients"), ("rank 0: gradients", "rank 1: a training step on")),
    "other config": (other_config, ("the ranks do not agree on the settings", "'pipeline.num_micro_batch = 2'")),
    "other frozen": (other_frozen, ("the ranks do not agree on what a step gives", "'the gradient of b.weight'")),
    "failing at once": (
        partial(failing_capture, when="at once"),
        ("a mistake in forward", "in forward: raise KeyError"),
    ),
    "failing later": (partial(failing_capture, when="later"), ("a mistake in forward", "in forward: raise KeyError")),
    "failing loss_fn": (failing_loss, ("a mistake in loss_fn",)),
    "eval mode": (eval_mode, ("the model is in eval mode; call model.train()",)),
    "no optimizer": (no_optimizer, ("train_step needs an optimizer",)),
    "foreign optimizer": (foreign_optimizer, ("SGD holds 8 tensors that are not parameters of the model",)),
    "vector loss": (vector_loss, ("loss_fn is a tensor of shape (4,); a loss is one number",)),
    "late part": (late_part, ("middle.weight", "Pass example_batch=")),
    "empty": (empty_everywhere, ("the global batch is empty",)),
    "wrong leaf": (wrong_leaf, ("y.0 is a object",)),
    "unequal sizes": (unequal_sizes, ("tensors have different first dimensions", "  - 2: x", "  - 3: y")),
    "list of numbers": (list_of_numbers, ("the batch at y is a list of plain values, 4 of Python's float",)),
    "other results": (other_results, ("the ranks do not agree on what a step gives", "aux.twice")),
}


def do_wrong(rank: int) -> dict[str, str]:
    """All of them one after another: an error that is raised on all ranks leaves them in step."""
    messages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one TaskGraph that fails to be captured says so as well
        for name, (wrong, _) in WRONG.items():
            try:
                wrong(rank)
                messages[name] = "nothing was raised"
            except (EplError, KeyError) as error:
                messages[name] = f"{type(error).__name__}: {error}"
    return messages


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    """What each rank was told, by the wrong use."""
    return launch(2, do_wrong, timeout_s=100.0)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_gets_its_message_on_all_ranks(messages: list[dict[str, str]], name: str) -> None:
    for of_rank in messages:
        for text in WRONG[name][1]:
            assert text in of_rank[name]


def test_devices_that_do_not_divide_are_refused_with_the_numbers() -> None:
    for error in launch_expecting_errors(4, three_devices):
        assert "ClusterError: 4 devices are not divisible by 3, the devices of one replica" in error


# ------------------------------------------------------------------------------------------------- branches on data


def shifted(shift: float, seed: int) -> dict[str, Tensor]:
    """A batch whose mean has the sign of the shift."""
    batch = batch_of(8, seed)
    return {**batch, "x": batch["x"].clamp(-1, 1) + shift}


@pytest.mark.parametrize("cut", [[], [["a"], ["b"]]], ids=["data", "pipeline"])
def test_a_branch_on_the_batch_is_captured_again_for_the_other_way(cut: list[list[str]]) -> None:
    """Later batches, and single micro-batches, take the other way; the numbers are the plain ones each time."""
    mixed = {name: torch.cat([shifted(-2, 0)[name], shifted(2, 1)[name]]) for name in ("x", "y")}
    batches = [shifted(2, 0), shifted(-2, 1), shifted(2, 2), mixed]
    problem = Problem(partial(seeded, Branching, True), batches)
    check(problem, Way(2, cut, micro_batches=1 if not cut else 2), num_parts=2)


def change_branch(rank: int, cut: list[list[str]]) -> None:
    engine = start(Problem(partial(seeded, Branching, False), [shifted(0, 0)]), Way(2, cut))
    model = user_model(engine)
    for bias in (2.0, -2.0 if rank == 0 else 2.0):
        with torch.no_grad():
            model.a.bias.fill_(bias)
        engine.train_step(my_share(engine, rank, shifted(0, 0)))


@pytest.mark.parametrize("cut", [[], [["a"], ["b"]]], ids=["data", "pipeline"])
def test_a_branch_on_an_activation_that_changes_is_an_error_with_the_users_line(cut: list[list[str]]) -> None:
    """On the rank where it changed, and on the other one, which waits for it."""
    errors = launch_expecting_errors(2, change_branch, cut)
    for error in errors:
        assert "RunError" in error
        assert "went another way than when it was captured" in error
    assert "odd_nets.py" in errors[0]


def change_length(rank: int, problem: Problem) -> list[float]:
    """The same branch each time, and a new shape, for which the second stage captures without the first one's weights."""
    engine = start(problem, Way(2, [["a"], ["b"]]))
    with torch.no_grad():
        user_model(engine).a.bias.fill_(2.0)
    return [engine.train_step(batch_of(size)).item() for size in (8, 6)]


def test_a_branch_on_an_activation_in_a_pipeline_is_an_error_on_all_ranks_for_a_new_shape() -> None:
    problem = Problem(partial(seeded, Branching, False), [batch_of(8)])
    for error in launch_expecting_errors(2, change_length, problem):
        assert "captured different graphs of the model for the same batch" in error


def count_anew(rank: int) -> list[str]:
    """A count that is made an int, of another value in each batch."""
    engine = engine_of(seeded(Chain), [], loss_fn=int_count)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for count in range(1, 10):
            batch = batch_of(9)
            engine.train_step({**batch, "y": torch.where(torch.arange(9)[:, None] < count, batch["y"].abs(), -9.0)})
    return [str(warning.message) for warning in seen if "captured 8 times" in str(warning.message)]


def int_count(model: nn.Module, batch: dict[str, Tensor]) -> epl.SumLoss:
    count = int((batch["y"][:, 0] > 0).sum())
    return epl.SumLoss(model(**batch), count)


def test_captures_for_every_batch_are_warned_of_with_the_line() -> None:
    [[message]] = launch(1, count_anew)
    assert "test_wrong_uses.py" in message
