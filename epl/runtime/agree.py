"""Check on every rank, before anything is sent, that the ranks are about to do the same thing.

A mistake is then an error on all ranks, with the text of the rank that made it, and never a hang on one.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from epl.batch import Flat, batch_size_of
from epl.errors import RunError, bulleted
from epl.planner.plan import Plan
from epl.runtime.world import World

__all__ = ["StepNumbers", "agree_on", "agree_on_example", "agree_on_step", "all_succeed", "content_of", "digest"]

_T = TypeVar("_T")
_SAMPLE_BYTES = 1 << 16  # of each tensor of a batch; enough to tell batches apart, little enough to be free


def digest(text: str) -> int:
    """A 63-bit number for a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def content_of(tensors: Sequence[torch.Tensor]) -> int:
    """A number for the values of a batch's CPU tensors (of accelerators' it would cost a synchronisation: 0)."""
    total = 0
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_sparse:
            flat = tensor.detach().reshape(-1)[: _SAMPLE_BYTES // tensor.element_size()].contiguous()
            total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), total)
    return total


def all_succeed(world: World, make: Callable[[], _T]) -> _T:
    """Run ``make`` on every rank; if it fails on any, raise on all.

    The rank that failed raises its own error, the others a RunError with its text.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = make()
    except Exception as caught:  # the user's code runs in there: any error of one rank must reach the others
        error = caught
    texts = world.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise RunError(f"rank {failed[0][0]} failed with {failed[0][1]}")
    return result


def agree_on(world: World, what: str, description: Sequence[str]) -> None:
    """Raise on every rank unless all ranks give the same description; names the first line that differs.

    Args:
        world: The ranks.
        what: What is compared, for the message ("the model").
        description: Lines that must be equal everywhere.
    """
    numbers = world.gather_numbers([digest("\n".join(description))])
    if all(number == numbers[0] for number in numbers):
        return
    texts = world.gather(list(description))
    lines: list[str] = []
    for rank, other in enumerate(texts):
        if other != texts[0]:
            place = next((i for i, (a, b) in enumerate(zip(texts[0], other, strict=False)) if a != b), None)
            if place is None:
                lines.append(f"rank 0 has {len(texts[0])} entries, rank {rank} has {len(other)}")
            else:
                lines.append(f"rank 0 has {texts[0][place]!r}, rank {rank} has {other[place]!r}")
    raise RunError(
        bulleted(f"the ranks do not agree on {what}; all must be started with the same script and data:", lines)
    )


class StepNumbers(NamedTuple):
    """What a rank tells the others at the start of a step."""

    ok: int
    kind: int
    form: int = 0  # of the result
    signature: int = 0  # of the batch
    content: int = 0
    num_samples: int = 0
    graphs: int = 0  # of the micro-batches
    work: int = 0  # the operators that the rank's stage makes of them
    lending: int = 0  # the order in which its stage is lent weights
    factor: int = 0  # by which its gradients were scaled since the last backward
    updates: int = 0  # steps that its optimizers have taken, if ranks share out weights


def agree_on_example(world: World, flat: Flat) -> Flat:
    """The batch that a plan is made with, alike on all ranks: of unequal ones (what does not divide) the largest."""
    shapes = digest(" ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in flat.tensors))
    everyone = world.gather_numbers([batch_size_of(flat.tensors), shapes])
    if len({number for _, number in everyone}) == 1:
        return flat
    chosen = max(range(len(everyone)), key=lambda rank: everyone[rank][0])
    return world.gather(flat if chosen == world.rank else None)[chosen]


def agree_on_step(
    world: World, plan: Plan, mine: StepNumbers, texts: tuple[str, str], error: Exception | None = None
) -> list[StepNumbers]:
    """Every rank's numbers; raises on every rank if one has failed or those of one replica differ.

    Args:
        world: The ranks.
        plan: Says which ranks work on the same part of the batch.
        mine: This rank's numbers.
        texts: This rank's call and batch in words, and what the step gives, line by line.
        error: What went wrong on this rank, if anything did; it is raised here, and told to the others.
    """
    everyone = [StepNumbers(*numbers) for numbers in world.gather_numbers(mine)]
    if not all(numbers.ok for numbers in everyone):
        failures = world.gather(f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = next(rank for rank, numbers in enumerate(everyone) if not numbers.ok)
        raise RunError(f"rank {rank} failed with {failures[rank]}")
    if len({numbers.kind for numbers in everyone}) > 1:
        raise RunError(bulleted("the ranks are in different calls:", _by_rank(world, texts[0])))
    if len({numbers.form for numbers in everyone}) > 1:
        agree_on(world, "what a step gives", texts[1].splitlines())
    if len({numbers.updates for numbers in everyone}) > 1:
        steps = [f"rank {rank}: {numbers.updates}" for rank, numbers in enumerate(everyone)]
        raise RunError(
            bulleted("the ranks' optimizers have not taken the same number of steps; call step() on all ranks:", steps)
        )
    for replica in range(plan.num_replicas):
        ranks = plan.ranks_of_replica(replica)
        seen = {everyone[rank][3:6] for rank in ranks}
        if len(seen) > 1:
            raise RunError(
                bulleted(
                    f"ranks {list(ranks)} run one replica, and were given different batches (of other "
                    "values where the lines below are equal: a loader that shuffles differently). Give all ranks of a "
                    "replica the same batch, as epl.data_loader does:",
                    _by_rank(world, texts[0]),
                )
            )
    _refuse_other_graphs(plan, everyone)
    _refuse_other_work(plan, everyone)
    return everyone


def _refuse_other_graphs(plan: Plan, everyone: Sequence[StepNumbers]) -> None:
    for column in range(plan.num_columns):
        ranks = plan.ranks_of_replica(column) if plan.num_shares == 1 else plan.ranks_of_column(column)
        if len({everyone[rank].graphs for rank in ranks}) > 1:
            raise RunError(
                f"ranks {list(ranks)} run one replica, and captured different graphs of the model for the same batch: it "
                "branches on a random number, or on values that only some of them have (a later stage does not hold the "
                "weights of an earlier one). Branch on the batch or on plain values, or use torch.where."
            )


def _refuse_other_work(plan: Plan, everyone: Sequence[StepNumbers]) -> None:
    for stage in plan.sharded_stages:
        for ranks in stage.ranks:
            if len({everyone[rank].work for rank in ranks}) > 1:
                raise RunError(
                    f"ranks {list(ranks)} share out stage {stage.index}, and chose different placements for the same "
                    "graph; they must run the same versions of EPL, torch and scipy"
                )


def _by_rank(world: World, text: str) -> list[str]:
    return [f"rank {rank}: {text}" for rank, text in enumerate(world.gather(text))]
