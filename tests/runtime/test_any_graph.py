"""Any graph can be a pipeline: each case is one that torch.distributed.pipelining 2.13 refuses or gets wrong.

A mistake shows as the name of the first loss, gradient or weight that is not the one of a plain process.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import epl
from tests.parity import assert_close
from tests.ranks import launch
from tests.runtime.odd_nets import Chain, Frozen, LateInput, Normed, Selecting, batch_of, draw
from tests.runtime.problems import Outcome, Problem, Way, check, my_share, seeded, start
from tests.runtime.training import Job, check_parity
from tests.zoo import CASES, annotate

FOUR_STAGES = [["a"], ["b"], ["c"], ["d"]]
TWO_STAGES = [["a", "b"], ["c", "d"]]
BATCHES = [batch_of(8, seed) for seed in range(3)]


def test_none_int_and_dict_cross_stages() -> None:
    check_parity(Job("none_int", world=3, num_stages=3, micro_batches=2))


def test_a_sequence_length_that_changes_between_steps() -> None:
    check_parity(Job("tied", world=2, num_stages=2, micro_batches=2, steps=4, lengths=(8, 5, 11, 8)))


def test_seven_samples_in_four_micro_batches() -> None:
    check_parity(Job("tied", world=2, num_stages=2, micro_batches=4, size=7))


def test_a_skip_over_four_stages() -> None:
    problem = Problem(partial(seeded, Chain, skip=True), BATCHES)
    check(problem, Way(4, FOUR_STAGES, micro_batches=4), Way(4, TWO_STAGES, micro_batches=2))


def test_inputs_used_in_a_late_stage() -> None:
    late = {"scale": draw(8, 6, seed=7), "shift": 0.5, "unused": None}
    problem = Problem(partial(seeded, LateInput), [{**batch, "late": late} for batch in BATCHES])
    check(problem, Way(3, [["a"], ["b"], ["c"]], micro_batches=3))


def test_values_whose_size_is_known_only_when_they_are_there_cross_stages() -> None:
    """Rows that are chosen by value (none of them, in one micro-batch) and an int travel between values of fixed size."""
    problem = Problem(partial(seeded, Selecting), BATCHES)
    first = problem.build().get_submodule("a")
    rows = [(first(part)[:, 0] > 0).sum().item() for part in BATCHES[0]["x"].tensor_split(4)]
    assert 0 in rows
    assert max(rows) > 0
    check(problem, Way(2, [["a"], ["b"]], micro_batches=4), Way(4, [["a"], ["b"]], micro_batches=2), num_parts=4)


@pytest.mark.parametrize(
    "trained",
    [("b", "c", "d"), ("a", "d"), ("a", "b"), ("b.bias",), ("a.bias",), ("d.weight",)],
    ids=lambda trained: "+".join(trained),
)
def test_frozen_stages(trained: tuple[str, ...]) -> None:
    """The first, the middle and the last stage frozen; then all but one bias or weight, in any stage."""
    problem = Problem(partial(seeded, Frozen, *trained), BATCHES)
    check(problem, Way(3, [["a"], ["b", "c"], ["d"]], micro_batches=2))


def accumulate(rank: int, problem: Problem, way: Way) -> Outcome:
    """Two accumulation steps before one update."""
    engine = start(problem, way)
    losses = [engine.forward_backward(my_share(engine, rank, batch)).item() for batch in problem.batches]
    gradients = {name: value for name, value in engine.gradients().items() if value is not None}
    norms = [engine.clip_grad_norm_(1e9).item()]
    engine.optimizer_step()
    return Outcome(losses, norms, gradients, engine.state_dict())


def plainly_accumulated(problem: Problem) -> Outcome:
    model = problem.build()
    losses = []
    for batch in problem.batches:
        loss = model(**batch)
        loss.backward()
        losses.append(loss.item())
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    problem.optimize(model)[0].step()
    return Outcome(losses, [norm], gradients, model.state_dict())


@pytest.mark.parametrize(
    "way", [Way(2, TWO_STAGES, micro_batches=4), Way(4, TWO_STAGES, micro_batches=2), Way(2)], ids=str
)
def test_two_accumulation_steps_add_up(way: Way) -> None:
    """An engine that scales what is in ``.grad`` already would divide the first step's gradients twice."""
    problem = Problem(partial(seeded, Chain), BATCHES[:2])
    for outcome in launch(way.world, accumulate, problem, way):
        assert_close(outcome, plainly_accumulated(problem), torch.float64)


def own_tied_weights(rank: int) -> list[torch.Tensor]:
    """This rank's own tensor, not the gathered one, after each step."""
    case = CASES["tied"]
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "run.print_plan": False}))
    model = annotate(case.build(torch.float64), case.stages[2])
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    weights = []
    for step in range(3):
        engine.train_step(case.batch(4, step, dtype=torch.float64))
        weights.append(model.get_parameter("embedding.weight").detach().clone())
    return weights


def test_tied_weights_are_the_same_on_both_stages_after_each_step() -> None:
    first, last = launch(2, own_tied_weights)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert not torch.equal(first[0], first[1]), "the weights must move for this to mean anything"


def test_batch_normalisation_counts_each_micro_batch_once_and_in_the_stage_that_has_it() -> None:
    problem = Problem(partial(seeded, Normed), BATCHES)
    check(problem, Way(3, [["a"], ["b"], ["c"]], micro_batches=4), num_parts=4)
    check(problem, Way(2, [["a"], ["b", "c"]], micro_batches=2), Way(1, micro_batches=2), num_parts=2)


def test_replicas_of_batch_normalisation_train_alike_and_keep_the_first_ones_statistics() -> None:
    problem = Problem(partial(seeded, Normed), BATCHES)
    way = Way(4, [["a"], ["b", "c"]], micro_batches=2)
    check(problem, way, num_parts=4, counted=2)
