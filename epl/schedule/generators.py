"""The named pipeline schedules.

Each schedule says in which order a stage runs its forward and backward passes. All three here are one rule with one
number: a stage runs forward passes until it holds ``limit`` micro-batches whose backward pass has not run, then takes
turns, one backward pass and one forward pass, until the forward passes are used up, and runs the backward passes that
are left. Backward passes run in the order of the micro-batches, so that gradients are summed in the same order
whatever the schedule.

    name                     limit of stage s of S     M = 6, S = 4    source
    PreferForward            M                         6, 6, 6, 6      GPipe (Huang et al. 2019, section 2.3)
    PreferBackward           S - s                     4, 3, 2, 1      PipeDream-flush (Narayanan et al. 2021, "Memory-
                                                                       Efficient Pipeline-Parallel DNN Training"), the
                                                                       1F1B schedule of Megatron-LM
    PreferBackwardOptimizer  S - s + 1; last stage 1   5, 4, 3, 1      EPL, ``epl/strategies/scheduler.py``

M is the number of micro-batches; a limit above M is M. PreferForward and PreferBackward take the same time and differ
in memory; PreferBackwardOptimizer keeps one micro-batch more, which hides the time that a message between stages
takes. The names are those of EPL's ``pipeline.strategy``.

Why not the schedules of ``torch.distributed.pipelining``: there the order is worked out inside the class that also
runs it, so that it can be neither planned with nor checked before a process group exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from epl.errors import PlanError
from epl.schedule.actions import Action, Kind, Schedule

__all__ = [
    "DEFAULT_SCHEDULE",
    "SCHEDULE_NAMES",
    "forward_only",
    "generate",
    "prefer_backward",
    "prefer_backward_optimizer",
    "prefer_forward",
    "schedule_name",
]


def generate(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of :data:`SCHEDULE_NAMES`, in upper or lower case.
        num_stages: number of pipeline stages, 1 or more.
        num_micro_batches: number of micro-batches, 0 or more; with 0 no stage has anything to do.

    Returns:
        For each stage its actions in order.

    Raises:
        PlanError: an unknown name, or a number out of range.

    Example:
        >>> [" ".join(map(str, actions)) for actions in generate("PreferBackward", 2, 3)]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    return _GENERATORS[schedule_name(name)](num_stages, num_micro_batches)


def schedule_name(name: str) -> str:
    """The name as it is spelled in :data:`SCHEDULE_NAMES`.

    Args:
        name: a schedule's name in upper or lower case.

    Returns:
        The same name in its usual spelling.

    Raises:
        PlanError: no schedule has that name; the message has the nearest one and all of them.

    Example:
        >>> schedule_name("preferbackward")
        'PreferBackward'
    """
    spelling = {known.lower(): known for known in SCHEDULE_NAMES}
    if name.lower() in spelling:
        return spelling[name.lower()]
    # With a cutoff of 0 there is always a nearest name.
    nearest = spelling[difflib.get_close_matches(name.lower(), spelling, n=1, cutoff=0.0)[0]]
    raise PlanError(
        f"there is no pipeline schedule {name!r}: did you mean {nearest!r}? Schedules: {', '.join(SCHEDULE_NAMES)}"
    )


def prefer_forward(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe: every forward pass, then every backward pass. A stage holds all micro-batches at once.

    M = 4, S = 2, with a backward pass as long as a forward pass::

        stage 0 | F0 F1 F2 F3 .. .. B0 B1 B2 B3
        stage 1 | .. F0 F1 F2 F3 B0 B1 B2 B3 ..

    torchgpipe runs the backward passes in reverse. Here they run in order, as in EPL; time and memory are the same.

    Args:
        num_stages: number of pipeline stages, 1 or more.
        num_micro_batches: number of micro-batches, 0 or more.

    Returns:
        For each stage its actions in order.

    Raises:
        PlanError: a number out of range.
    """
    _check_sizes(num_stages, num_micro_batches)
    return tuple(_run_ahead(stage, num_micro_batches, num_micro_batches) for stage in range(num_stages))


def prefer_backward(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B (PipeDream-flush): a backward pass as soon as there is one. A stage holds as many as there are stages left.

    M = 4, S = 2, with a backward pass as long as a forward pass::

        stage 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    Args:
        num_stages: number of pipeline stages, 1 or more.
        num_micro_batches: number of micro-batches, 0 or more.

    Returns:
        For each stage its actions in order.

    Raises:
        PlanError: a number out of range.
    """
    _check_sizes(num_stages, num_micro_batches)
    return tuple(_run_ahead(stage, num_stages - stage, num_micro_batches) for stage in range(num_stages))


def prefer_backward_optimizer(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with one more micro-batch under way on every stage but the last, so that messages overlap with work.

    M = 4, S = 2, with a backward pass as long as a forward pass::

        stage 0 | F0 F1 F2 B0 F3 B1 .. B2 .. B3
        stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    Args:
        num_stages: number of pipeline stages, 1 or more.
        num_micro_batches: number of micro-batches, 0 or more.

    Returns:
        For each stage its actions in order.

    Raises:
        PlanError: a number out of range.
    """
    _check_sizes(num_stages, num_micro_batches)
    last = num_stages - 1
    limits = [1 if stage == last else num_stages - stage + 1 for stage in range(num_stages)]
    return tuple(_run_ahead(stage, limit, num_micro_batches) for stage, limit in enumerate(limits))


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Forward passes in order and nothing else, for evaluation.

    Args:
        num_stages: number of pipeline stages, 1 or more.
        num_micro_batches: number of micro-batches, 0 or more.

    Returns:
        For each stage its actions in order.

    Raises:
        PlanError: a number out of range.

    Example:
        >>> [" ".join(map(str, actions)) for actions in forward_only(2, 2)]
        ['0F0 0F1', '1F0 1F1']
    """
    _check_sizes(num_stages, num_micro_batches)
    return tuple(
        tuple(Action(stage, Kind.FORWARD, micro_batch) for micro_batch in range(num_micro_batches))
        for stage in range(num_stages)
    )


def _run_ahead(stage: int, limit: int, num_micro_batches: int) -> tuple[Action, ...]:
    """The rule of the module's docstring: never more than ``limit`` micro-batches between forward and backward."""
    forwards = [Action(stage, Kind.FORWARD, micro_batch) for micro_batch in range(num_micro_batches)]
    actions = forwards[:limit]
    for micro_batch in range(num_micro_batches):
        actions.append(Action(stage, Kind.BACKWARD, micro_batch))
        # Its place is free for the next forward pass, if one is left.
        actions.extend(forwards[limit + micro_batch : limit + micro_batch + 1])
    return tuple(actions)


def _check_sizes(num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}: a pipeline has 1 stage or more")
    if num_micro_batches < 0:
        raise PlanError(f"num_micro_batches is {num_micro_batches}: give 0 or more")


_GENERATORS: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        "PreferForward": prefer_forward,
        "PreferBackward": prefer_backward,
        "PreferBackwardOptimizer": prefer_backward_optimizer,
    }
)

SCHEDULE_NAMES: tuple[str, ...] = tuple(_GENERATORS)
"""The names that :func:`generate` takes."""

DEFAULT_SCHEDULE = "PreferBackward"
"""The schedule of a pipeline whose configuration names none."""
