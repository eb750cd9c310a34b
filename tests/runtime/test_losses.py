"""Losses that are sums over counts, losses with something beside them, and gradients that are summed.

A mistake shows in the loss or in every gradient at once: a factor of the number of parts, or weights that are those of
samples where tokens should count.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epl
from tests.marks import slow
from tests.parity import assert_close
from tests.ranks import launch, launch_expecting_errors
from tests.runtime.odd_nets import Chain, Tagger, TiedTagger, batch_of, tokens_of
from tests.runtime.problems import Outcome, Problem, Way, check, my_share, plain, seeded, start, train

CUT = [["embedding"], ["middle", "head"]]
WAYS = (Way(2, CUT, micro_batches=4), Way(2, micro_batches=2), Way(4, CUT, micro_batches=3))


def token_loss(model: Any, batch: Any) -> epl.SumLoss:
    logits, labels = model(batch["tokens"]), batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return epl.SumLoss(total, (labels != -100).sum())


def element_loss(model: Any, batch: Any) -> epl.SumLoss:
    """The count is an int of Python's."""
    total = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten(), reduction="sum")
    return epl.SumLoss(total, batch["tokens"].numel())


@pytest.mark.parametrize("make", [TiedTagger, *slow(Tagger)])
def test_a_sum_over_a_count_is_exact_however_unequal_the_parts(make: Any) -> None:
    """One micro-batch in three has no label at all; the replicas' counts differ."""
    problem = Problem(partial(seeded, make), [tokens_of(7, seed) for seed in range(3)], token_loss)
    check(problem, *WAYS)


def test_a_count_may_be_a_number_of_pythons() -> None:
    problem = Problem(partial(seeded, Tagger), [tokens_of(7, seed) for seed in range(3)], element_loss)
    check(problem, *WAYS)


def test_a_sum_over_a_count_in_float32() -> None:
    problem = Problem(
        partial(seeded, Tagger, dtype=torch.float32), [tokens_of(7, seed) for seed in range(3)], token_loss
    )
    check(problem, *WAYS[:2], dtype=torch.float32)


def test_a_count_of_zero_over_all_is_not_a_number_as_in_one_process() -> None:
    batch = {"tokens": tokens_of(4)["tokens"], "labels": torch.full((4, 5), -100)}
    problem = Problem(partial(seeded, Tagger), [batch], token_loss)
    assert torch.isnan(torch.tensor(plain(problem).losses)).all()
    for outcome in launch(2, train, problem, WAYS[0]):
        assert torch.isnan(torch.tensor(outcome.losses)).all()
        assert all(torch.isnan(gradient).all() for gradient in outcome.gradients.values())


# ------------------------------------------------------------------------------------------------- beside the loss


def loss_with_more(model: Chain, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    x, y = batch["x"], batch["y"]
    first = torch.tanh(model.a(x))
    z = model.d(torch.tanh(model.c(torch.tanh(model.b(first)))))
    loss = F.mse_loss(z, y)
    more = {"first": first, "last": z, "given": x, "scale": first.abs().mean(), "error": (z - y).abs().mean()}
    return loss, {**more, "rows": x.shape[0], "rate": 0.25, "whole": torch.tensor(3), "on": True, "name": "chain"}


def sum_with_more(model: Chain, batch: Any) -> tuple[epl.SumLoss, dict[str, Any]]:
    loss, more = loss_with_more(model, batch)
    count = batch["x"].shape[0]
    return epl.SumLoss(loss * count, count), {"last": more["last"], "error": more["error"]}


def results(rank: int, problem: Problem, way: Way) -> list[Any]:
    engine = start(problem, way)
    return [engine.forward_backward(my_share(engine, rank, batch)) for batch in problem.batches]


@pytest.mark.parametrize("loss_fn", [loss_with_more, sum_with_more])
@pytest.mark.parametrize("way", [Way(4, [["a"], ["b", "c", "d"]], micro_batches=3), Way(1, micro_batches=4)], ids=str)
def test_what_stands_beside_the_loss_is_merged_in_the_order_of_the_global_batch(loss_fn: Any, way: Way) -> None:
    """Scalars are averaged by samples, tensors with a sample in each row are joined, other values stay."""
    problem = Problem(partial(seeded, Chain), [batch_of(7, seed) for seed in range(2)], loss_fn)
    model = problem.build()
    expected = [loss_fn(model, batch) for batch in problem.batches]
    for ours in launch(way.world, results, problem, way):
        for (loss, aux), (whole, more) in zip(ours, expected, strict=True):
            assert aux.keys() == more.keys()
            tensors = {name for name, value in more.items() if isinstance(value, torch.Tensor) and value.ndim}
            assert_close({name: aux[name] for name in tensors}, {name: more[name] for name in tensors}, torch.float64)
            assert_close(aux["error"], more["error"], torch.float64)
            assert not any(value.requires_grad for value in aux.values() if isinstance(value, torch.Tensor))
            if loss_fn is loss_with_more:
                assert_close([loss, aux["scale"]], [whole, more["scale"]], torch.float64)
                assert aux["whole"].item() == 3
                assert aux["rate"].item() == 0.25
                assert (aux["on"], aux["name"]) == (True, "chain")
                sizes = torch.tensor([len(part) for part in torch.arange(7).tensor_split(way.num_parts)])
                assert_close(aux["rows"], (sizes.double() ** 2).sum() / 7, torch.float64)


def stateless(model: Chain, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return model(**batch), {"gram": batch["x"].T @ batch["x"]}


def test_a_tensor_beside_the_loss_that_has_no_samples_is_refused() -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(4)], stateless)
    for error in launch_expecting_errors(2, results, problem, Way(2)):
        assert "aux.gram has shape (6, 6) for 2 samples" in error


# -------------------------------------------------------------------------------------------------------- summing


def summed(problem: Problem, num_parts: int) -> Outcome:
    """Gradients of the sum, not the mean, of the parts' losses; the loss that is reported stays the mean."""
    one = plain(problem, num_parts)
    gradients = {name: gradient * num_parts for name, gradient in one.gradients.items()}
    return one._replace(gradients=gradients, norms=[norm * num_parts for norm in one.norms], state={})


def test_gradients_are_summed_over_micro_batches_and_replicas_if_so_configured() -> None:
    problem = Problem(partial(seeded, Chain), [batch_of(8)])
    config = {"communication.gradients_reduce_method": "sum"}
    cut = [["a", "b"], ["c", "d"]]
    for way in (Way(2, cut, micro_batches=4, config=config), Way(2, micro_batches=2, config=config)):
        for outcome in launch(way.world, train, problem, way):
            assert_close(outcome._replace(state={}), summed(problem, 4), torch.float64)


def test_summed_gradients_of_a_sum_over_a_count_are_not_divided() -> None:
    problem = Problem(partial(seeded, Tagger), [tokens_of(7)], token_loss)
    count = int((problem.batches[0]["labels"] != -100).sum())
    one = plain(problem)
    expected = {name: gradient * count for name, gradient in one.gradients.items()}
    way = Way(2, CUT, micro_batches=2, config={"communication.gradients_reduce_method": "sum"})
    for outcome in launch(2, train, problem, way):
        assert_close([outcome.losses, outcome.gradients], [one.losses, expected], torch.float64)
