"""The memory of a step is what its instructions make and give back, each counted once and as long as it lives."""

from __future__ import annotations

from typing import Any

import torch

from epl.ir.types import TensorType
from epl.program.curve import MemoryCurve
from epl.program.instructions import (
    Backward,
    FinishReduce,
    Forget,
    Forward,
    Free,
    Instruction,
    PostReceive,
    Program,
    Send,
    StageProgram,
    StartReduce,
    Transfer,
)
from epl.program.memory import Holdings, StageMemory, Update, predict
from epl.schedule import Action, Kind
from epl.stage.simulate import Change, Given, StageProfile

WEIGHTS, KEPT, TEMPORARY, GRADIENT = 1000, 100, 30, 7
VALUE = 8  # bytes of what stages hand over
TRANSFER = Transfer("x", 1, 1, TensorType(torch.float32, (2,)), needs_grad=True)


def forward(i: int) -> Action:
    return Action(0, Kind.FORWARD, i)


def backward(i: int) -> Action:
    return Action(0, Kind.BACKWARD, i)


def _program(*instructions: Instruction) -> Program:
    return Program(0, 0, instructions)


def _memory(
    *, takes: tuple[Transfer, ...] = (), sends: tuple[Transfer, ...] = (), given: Given | None = None
) -> StageMemory:
    made = () if given is None or given.is_kept else (Change("given", VALUE),)
    profile = StageProfile(
        forward=(
            Change("activation", KEPT),
            Change("temporary", TEMPORARY),
            Change("temporary", -TEMPORARY),
            *made,
        ),
        backward=(
            Change("temporary", GRADIENT),
            Change("activation", -KEPT),
            Change("temporary", -GRADIENT),
            Change("gradient", GRADIENT, "p_w"),
        ),
        given={} if given is None else {"x": given},
    )
    program = StageProgram("stage_0", ("p_w",), (), takes, ("x",) if sends else (), sends, (), (), (), True)
    return StageMemory(program, profile, {"p_w": "w"})


def _predicted(program: Program, memory: StageMemory, holdings: Holdings | None = None, **update: Any) -> MemoryCurve:
    return predict(program, [memory] * 4, holdings or Holdings(WEIGHTS), Update(**update))


def _at_end_of(curve: MemoryCurve, instruction: str) -> int:
    return [sample for sample in curve.samples if sample.instruction == instruction][-1].total


def test_activations_of_each_micro_batch_in_flight_add_up() -> None:
    one_by_one = _program(*(step for i in range(4) for step in (Forward(forward(i), i), Backward(backward(i), i))))
    all_first = _program(*(Forward(forward(i), i) for i in range(4)), *(Backward(backward(i), i) for i in (0, 1, 2, 3)))
    assert _predicted(all_first, _memory()).peak_bytes == WEIGHTS + 4 * KEPT + TEMPORARY
    # the gradient of the first micro-batch is there by the second one's forward pass
    assert _predicted(one_by_one, _memory()).peak_bytes == WEIGHTS + GRADIENT + KEPT + TEMPORARY


def test_gradients_are_accumulated_once_and_leave_for_their_bucket_after_the_last_backward() -> None:
    steps = [step for i in range(2) for step in (Forward(forward(i), i), Backward(backward(i), i))]
    program = _program(*steps[:3], StartReduce(), steps[3], FinishReduce())
    alone = _predicted(program, _memory())
    assert alone.largest("gradients") == GRADIENT
    assert alone.samples[-1].total == WEIGHTS + GRADIENT
    reduced = _predicted(program, _memory(), Holdings(WEIGHTS, buckets=11, reduced=frozenset({"w"})))
    assert _at_end_of(reduced, "0B0") == WEIGHTS + 11 + GRADIENT
    assert _at_end_of(reduced, "0B1") == WEIGHTS + 11
    assert reduced.at_peak["communication"] == 11


def test_what_is_received_stays_from_the_posted_receive_until_the_micro_batch_is_freed() -> None:
    program = _program(
        PostReceive(forward(0), (TRANSFER,)), Forward(forward(0), 0), Backward(backward(0), 0), Free(backward(0))
    )
    curve = _predicted(program, _memory(takes=(TRANSFER,)))
    assert curve.samples[0].total == WEIGHTS
    assert _at_end_of(curve, str(program.instructions[0])) == WEIGHTS + VALUE
    assert _at_end_of(curve, "0B0") == WEIGHTS + GRADIENT + VALUE
    assert _at_end_of(curve, "FREE 0B0") == WEIGHTS + GRADIENT


def test_what_is_sent_stays_until_it_is_forgotten_or_the_step_ends() -> None:
    start = (Forward(forward(0), 0), Send(forward(0), (TRANSFER,)))
    memory = _memory(sends=(TRANSFER,), given=Given(VALUE, is_kept=False, is_copied=False))
    forgotten = _predicted(_program(*start, Forget(forward(0), 1), Backward(backward(0), 0)), memory)
    assert _at_end_of(forgotten, "0F0") == WEIGHTS + KEPT + VALUE
    assert _at_end_of(forgotten, str(Forget(forward(0), 1))) == WEIGHTS + KEPT
    kept = _predicted(_program(*start, Backward(backward(0), 0)), memory)
    assert _at_end_of(kept, "0B0") == WEIGHTS + GRADIENT + VALUE
    assert kept.samples[-1].total == WEIGHTS + GRADIENT


def test_what_backward_needs_is_counted_once_while_it_is_sent_as_well() -> None:
    program = _program(Forward(forward(0), 0), Send(forward(0), (TRANSFER,)), Backward(backward(0), 0))
    memory = _memory(sends=(TRANSFER,), given=Given(VALUE, is_kept=True, is_copied=False))
    curve = _predicted(program, memory)
    assert _at_end_of(curve, str(program.instructions[1])) == WEIGHTS + KEPT
    assert _at_end_of(curve, "0B0") == WEIGHTS + GRADIENT + VALUE  # the send is not over


def test_a_copy_is_sent_of_what_is_not_contiguous() -> None:
    program = _program(Forward(forward(0), 0), Send(forward(0), (TRANSFER,)), Backward(backward(0), 0))
    curve = _predicted(program, _memory(sends=(TRANSFER,), given=Given(VALUE, is_kept=True, is_copied=True)))
    assert _at_end_of(curve, str(program.instructions[1])) == WEIGHTS + KEPT + VALUE


def test_the_optimizers_step_comes_last_and_its_states_stay() -> None:
    changes = (Change("optimizer", 50), Change("temporary", 400), Change("temporary", -400))
    curve = _predicted(_program(Forward(forward(0), 0), Backward(backward(0), 0)), _memory(), changes=changes)
    assert curve.peak.instruction == "optimizer"
    assert curve.peak_bytes == WEIGHTS + GRADIENT + 450
    assert curve.samples[-1].total == WEIGHTS + GRADIENT + 50
