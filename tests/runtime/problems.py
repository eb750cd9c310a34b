"""One training, done twice: by plain PyTorch in one process, and under EPL on the ranks of a test.

Where ``training.py`` takes the zoo's models as they are, a problem here may bring any model, loss, optimizers and
annotations, so that odd ones are as short to write as usual ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import epl
from tests.parity import assert_close, cut_batch, num_samples
from tests.ranks import launch
from tests.runtime.training import share_of
from tests.zoo import annotate

__all__ = ["Outcome", "Problem", "Way", "check", "plain", "seeded", "sgd", "start", "train", "user_model"]


def sgd(model: nn.Module) -> list[Optimizer]:
    """Plain gradient descent: an error in a gradient stays as large as it is."""
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Args:
        build: Makes the model; the same one each time.
        batches: The global batch of each step.
        loss_fn: As in ``epl.parallelize``.
        optimize: Makes the optimizers.
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimize: Callable[[nn.Module], list[Optimizer]] = sgd


@dataclass(frozen=True)
class Way:
    """How it is cut: ranks, the module paths of each stage, devices of each stage, micro-batches, further settings.

    ``split`` names the stages whose devices share out the weights, where others share out the batch; the first paths may
    be [""], the whole model.
    """

    world: int
    cut: list[list[str]] = field(default_factory=list)
    micro_batches: int = 1
    devices: int | tuple[int, ...] = 1
    config: dict[str, Any] = field(default_factory=dict)
    split: tuple[int, ...] = ()

    @property
    def counts(self) -> list[int]:
        """Devices of each stage."""
        return [self.devices] * len(self.cut) if isinstance(self.devices, int) else list(self.devices)

    @property
    def num_replicas(self) -> int:
        shared = self.config.get("cluster.colocate_split_and_replicate", False)
        return max(1, self.world // ((max if shared else sum)(self.counts or [1])))

    @property
    def num_parts(self) -> int:
        """Parts that a global batch that divides is cut into."""
        is_shared = not self.split and len(set(self.counts)) == 1
        return self.num_replicas * (self.counts[0] if is_shared else 1) * self.micro_batches


class Outcome(NamedTuple):
    """What a training gave; gradients are those of the last step, and have no entry where there is none."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def seeded(make: Callable[..., nn.Module], *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> nn.Module:
    """A model in training mode with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args, **kwargs).to(dtype).train()


# ----------------------------------------------------------------------------------------------- plain, in one process


def plain(problem: Problem, num_parts: int = 1, counted: int | None = None) -> Outcome:
    """Train in this process.

    Args:
        problem: What is trained.
        num_parts: Parts of each batch that forward runs on, for layers that mix samples.
        counted: How many of them, the first ones, update running statistics; all if not given.
    """
    model = problem.build()
    optimizers = problem.optimize(model)
    losses, norms, gradients = [], [], {}
    for batch in problem.batches:
        model.zero_grad()
        loss = plain_loss(problem, model, batch, num_parts, counted)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([_dense(p.grad) for p in model.parameters() if p.grad is not None]))
        gradients = {name: _dense(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        for optimizer in optimizers:
            optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Outcome(losses, [norm.item() for norm in norms], gradients, state)


def plain_loss(
    problem: Problem, model: nn.Module, batch: Any, num_parts: int = 1, counted: int | None = None
) -> Tensor:
    """The loss of a global batch as one expression: sum over count, or the mean over samples."""
    parts = cut_batch(batch, num_parts)
    others = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})  # other buffers
    counted = len(parts) if counted is None else counted
    results = [_call(problem, model if i < counted else others, part) for i, part in enumerate(parts)]
    if isinstance(results[0], epl.SumLoss):
        totals, counts = ([getattr(result, name) for result in results] for name in ("total", "count"))
        return torch.stack(totals).sum() / sum(counts)
    size = num_samples(batch)
    return torch.stack([result * (num_samples(part) / size) for result, part in zip(results, parts, strict=True)]).sum()


def _call(problem: Problem, model: nn.Module, batch: Any) -> Any:
    if problem.loss_fn is not None:
        result = problem.loss_fn(model, batch)
        return result[0] if isinstance(result, tuple) else result
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    return output if isinstance(output, Tensor) else output.loss


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


# ------------------------------------------------------------------------------------------------------- on the ranks


def start(problem: Problem, way: Way) -> epl.Engine:
    """The engine of this rank, with its plan made."""
    settings = {"pipeline.num_micro_batch": way.micro_batches, "run.print_plan": False, **way.config}
    epl.init(epl.Config(settings))
    model = problem.build()
    for place, (paths, count) in enumerate(zip(way.cut, way.counts, strict=True)):
        annotate(model, [paths], [count], epl.split if place in way.split else epl.replicate)
    engine = epl.parallelize(model, problem.optimize(model), loss_fn=problem.loss_fn)
    engine.prepare(share_of(problem.batches[0], 0, way.num_replicas))
    return engine


def user_model(engine: epl.Engine) -> Any:
    """The model that the engine was made with."""
    return engine.model.module


def my_share(engine: epl.Engine, rank: int, batch: Any) -> Any:
    """The part of a global batch that is this rank's replica's."""
    _, replica, _ = engine.plan.place_of(rank)
    return share_of(batch, replica, engine.plan.num_replicas)


def train(rank: int, problem: Problem, way: Way) -> Outcome:
    """Train on one rank."""
    engine = start(problem, way)
    losses, norms, gradients = [], [], {}
    for batch in problem.batches:
        engine.zero_grad()
        result = engine.forward_backward(my_share(engine, rank, batch))
        losses.append((result[0] if isinstance(result, tuple) else result).item())
        gradients = {name: value for name, value in engine.gradients().items() if value is not None}
        norms.append(engine.clip_grad_norm_(1e9).item())
        engine.optimizer_step()
    return Outcome(losses, norms, gradients, engine.state_dict())


def train_each(rank: int, jobs: list[tuple[Problem, Way]]) -> list[Outcome]:
    """Several trainings one after another, for the price of one start."""
    return [train(rank, problem, way) for problem, way in jobs]


def check(
    problem: Problem, *ways: Way, num_parts: int = 1, counted: int | None = None, dtype: torch.dtype = torch.float64
) -> None:
    """Assert that each way gives, on every rank, what one plain process gives: losses, norms, gradients, weights.

    Args:
        problem: What is trained.
        ways: How it is cut; those with the same number of ranks share one start.
        num_parts, counted: As for `plain`.
        dtype: How exact.
    """
    expected = plain(problem, num_parts, counted)
    for world in dict.fromkeys(way.world for way in ways):
        jobs = [(problem, way) for way in ways if way.world == world]
        for outcomes in launch(world, train_each, jobs, timeout_s=100.0):
            for outcome in outcomes:
                assert_close(outcome, expected, dtype)
