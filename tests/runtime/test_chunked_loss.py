"""Training with losses in chunks equals plain training in one process, however the model is cut.

A mistake shows as a gradient that one of the ranks has not, as ranks that wait for one another in different chunks, or as
a tied weight with the gradient of one of its uses only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.config import Config
from epl.loss import loss_step
from epl.passes.chunked_operator import ChunkedLoss
from epl.planner.make import make_plan
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.lower import lower_stage
from tests.marks import slow
from tests.ranks import launch, launch_expecting_errors
from tests.runtime.problems import Problem, Way, check, seeded, start
from tests.runtime.training import Job, check_parity

ON = {"loss.chunked": "on", "loss.chunk_rows": 5}
VOCABULARY, WIDTH, IGNORED = 4001, 32, -1  # a prime, and a weight that is larger than all that is computed with it


class Wide(nn.Module):
    """Few rows of many classes: each device works on some of the classes."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens)))).flatten(0, 1)


def mean_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"].flatten(), ignore_index=IGNORED, label_smoothing=0.1)


def counted_loss(model: Any, batch: Any) -> epl.SumLoss:
    """For parts of a batch, which have different numbers of labels."""
    labels = batch["labels"].flatten()
    total = F.cross_entropy(model(batch["tokens"]), labels, ignore_index=IGNORED, reduction="sum")
    return epl.SumLoss(total, (labels != IGNORED).sum())


def tokens(size: int, seed: int, length: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    given, labels = torch.randint(VOCABULARY, (2, size, length), generator=generator)
    labels[0, :2] = torch.tensor([VOCABULARY - 1, 0])
    labels[1:3, 1:] = IGNORED
    return {"tokens": given, "labels": labels}


def wide(tied: bool, loss: Any = mean_loss, size: int = 4) -> Problem:
    return Problem(partial(seeded, Wide, tied), [tokens(size, seed) for seed in range(2)], loss)


# -------------------------------------------------------------------------------------------------- models of the zoo


@pytest.mark.parametrize("name", slow("bert", "gpt2", "t5", "tied"))
def test_data_parallelism_with_accumulation_equals_one_process(name: str) -> None:
    """Replicas have other numbers of labels that do not count."""
    check_parity(Job(name, world=2, micro_batches=2, config=ON))


@pytest.mark.parametrize("name", slow("gpt2", "bert", "llama", "t5", "mixtral"))
def test_a_pipeline_equals_one_process(name: str) -> None:
    """A weight that is tied over both stages."""
    check_parity(Job(name, world=2, num_stages=2, micro_batches=4, config=ON))


@pytest.mark.slow
def test_a_pipeline_inside_data_parallelism_with_the_forward_passes_first_equals_one_process() -> None:
    """Micro-batches wait for their backward pass, so they make their gradients there."""
    check_parity(Job("bert", world=4, num_stages=2, micro_batches=2, schedule="PreferForward", config=ON))


@pytest.mark.parametrize("name", slow("bert", "gpt2", "t5", "mixtral"))
def test_split_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=3, split=3, size=7, config=ON))


# ------------------------------------------------------------------------------------- classes that are cut unevenly


def operators(tied: bool, num_ranks: int) -> list[ChunkedLoss]:
    """What each rank of a split has in the place of its loss."""
    model = epl.split(num_ranks)(seeded(Wide, tied))
    graph = build_taskgraphs(capture(model, loss_step(mean_loss), flatten(tokens(4, 0))).graph)
    plan = make_plan(graph, Cluster((num_ranks,)), Config(ON))
    stages = [lower_stage(graph, plan, rank).stage for rank in range(num_ranks)]
    return [loss for stage in stages for loss in stage.functions.values() if isinstance(loss, ChunkedLoss)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ranks_have_a_part_of_the_classes_and_the_same_chunks(tied: bool) -> None:
    """Which is what the trainings below are to be of."""
    first, *others = operators(tied, 3)
    assert first.cut is not None
    assert len(others) == 2
    assert others == [first, first]


@pytest.mark.parametrize("tied", slow(True, False), ids=lambda tied: "tied" if tied else "untied")
def test_split_classes_equal_one_process(tied: bool) -> None:
    ways = (Way(size, [[""]], 1, size, ON, split=(0,)) for size in (2, 3))
    check(wide(tied), *ways)


@pytest.mark.slow
def test_split_classes_in_replicas_and_parts_of_a_batch_equal_one_process() -> None:
    check(wide(True, counted_loss, 8), Way(4, [[""]], 2, 2, ON, split=(0,)))


def test_a_head_that_is_split_behind_a_stage_of_its_own_equals_one_process() -> None:
    check(wide(False, counted_loss), Way(3, [["embedding", "body"], ["head"]], 2, (1, 2), ON, split=(1,)))


# ------------------------------------------------------------------------------------------------------------- the rest


def evaluate(rank: int, problem: Problem, way: Way) -> list[float]:
    engine = start(problem, way)
    return [float(engine.eval_step(batch)) for batch in problem.batches]


def test_an_evaluation_gives_the_loss_of_plain_pytorch() -> None:
    problem = wide(False)
    model = problem.build().eval()
    with torch.no_grad():
        expected = [float(mean_loss(model, batch)) for batch in problem.batches]
    for losses in launch(2, evaluate, problem, Way(2, [["embedding", "body"], ["head"]], config=ON)):
        assert losses == pytest.approx(expected, rel=1e-12)


def no_cross_entropy(model: Any, batch: Any) -> Tensor:
    return model(batch["tokens"]).square().mean()


def test_a_pipeline_whose_loss_cannot_be_in_chunks_is_an_error_on_all_ranks() -> None:
    problem = wide(False, no_cross_entropy)
    errors = launch_expecting_errors(2, evaluate, problem, Way(2, [["embedding", "body"], ["head"]], config=ON))
    assert all("no loss of stage 1 can be computed in chunks" in error for error in errors)
