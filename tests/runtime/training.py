"""Train a case of the zoo under EPL, on the ranks of a test, and bring back what a reference can be compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import epl
from tests.parity import Reference, assert_close, make_optimizer, reference_steps
from tests.ranks import launch
from tests.zoo import CASES, Batch, annotate

__all__ = ["Job", "check_parity", "share_of", "train"]


@dataclass(frozen=True)
class Job:
    """One training to compare: a case, how it is cut, and over how many ranks.

    Args:
        case: Name in the zoo.
        world: Ranks.
        num_stages: Stages of the cut; 1 for no annotation at all.
        split: Devices that share out the weights of each stage; 1 for none.
        micro_batches: Of each replica.
        schedule: Name of the schedule.
        size: Samples of the global batch.
        steps: Optimizer steps.
        dtype: float64 unless float32 is what is tested.
        config: Further settings.
        lengths: Length of the sequences at each step; None for the case's own.
    """

    case: str
    world: int
    num_stages: int = 1
    split: int = 1
    micro_batches: int = 1
    schedule: str = "PreferBackward"
    size: int = 8
    steps: int = 3
    dtype: torch.dtype = torch.float64
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int | None, ...] = (None,)

    @property
    def num_replicas(self) -> int:
        return max(1, self.world // (self.num_stages * self.split))

    def batches(self) -> list[Batch]:
        case = CASES[self.case]
        return [
            case.batch(self.size, seed=step, dtype=self.dtype, length=self.lengths[step % len(self.lengths)])
            for step in range(self.steps)
        ]


def share_of(batch: Any, replica: int, num_replicas: int) -> Any:
    """A replica's consecutive part of a global batch."""
    if isinstance(batch, torch.Tensor):
        return batch.tensor_split(num_replicas)[replica]
    if isinstance(batch, dict):
        return {key: share_of(value, replica, num_replicas) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(share_of(value, replica, num_replicas) for value in batch)
    return batch


def build(job: Job) -> nn.Module:
    """The case's model with its cut applied; every rank has another seed beside rank 0's weights."""
    model = CASES[job.case].build(job.dtype)
    kind = epl.split if job.split > 1 else epl.replicate
    if job.num_stages > 1:
        annotate(model, CASES[job.case].stages[job.num_stages], [job.split] * job.num_stages, kind)
    elif job.split > 1:
        epl.split(job.split)(model)
    return model


def train(rank: int, job: Job) -> tuple[Any, ...]:
    """Train on one rank; gives what `Reference` holds."""
    settings = {
        "pipeline.num_micro_batch": job.micro_batches,
        "pipeline.strategy": job.schedule,
        "run.print_plan": False,
    }
    epl.init(epl.Config({**settings, **job.config}))
    model = build(job)
    engine = epl.parallelize(model, make_optimizer(model), loss_fn=CASES[job.case].loss_fn)
    losses, norms, gradients = [], [], {}
    for batch in job.batches():
        engine.zero_grad()
        engine.prepare(share_of(batch, 0, job.num_replicas))
        _, replica, _ = engine.plan.place_of(rank)
        loss = engine.forward_backward(share_of(batch, replica, job.num_replicas))
        losses.append(loss.item())
        gradients = {name: value for name, value in engine.gradients().items() if value is not None}
        norms.append(engine.clip_grad_norm_(1e9).item())
        engine.optimizer_step()
    return losses, norms, gradients, engine.state_dict()


def check_parity(job: Job) -> None:
    """Assert that all ranks got what one plain process gets: losses, norms, gradients, weights after the steps."""
    case = CASES[job.case]
    results = [Reference(*result) for result in launch(job.world, train, job)]
    parts = None if case.independent_samples else job.num_replicas * job.micro_batches
    expected = reference_steps(case, job.dtype, job.batches(), job.steps, num_parts=parts)
    accuracy = case.accuracy(job.dtype)
    for result in results:
        assert result.losses == results[0].losses, "the loss must be the same number on every rank"
        assert_close(result.losses, expected.losses, accuracy)
        assert_close(result.norms, expected.norms, accuracy)
        assert_close(result.gradients, expected.gradients, accuracy)
        assert_close(_without_statistics(result.state, job), _without_statistics(expected.state, job), accuracy)


def _without_statistics(state: dict[str, torch.Tensor], job: Job) -> dict[str, torch.Tensor]:
    """Running statistics of several replicas are those of the first one, which one process does not have."""
    if job.num_replicas == 1:
        return state
    return {name: value for name, value in state.items() if "running_" not in name and "num_batches" not in name}
