"""A stage's function is plain Python that a person can read: it deletes what is used up and says where each line is from.

A mistake shows as memory that is held to the end of the stage, as a mode that leaks to the next operator, or as random
numbers that hang on where an operator runs.
"""

from __future__ import annotations

import re
import traceback
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from epl.errors import RunError
from epl.ir.graph import Op, Ref
from epl.ir.types import TensorType
from epl.stage.codegen import generate_code, resolve, same_branch
from tests.program.local_run import lower
from tests.program.staged import batch_of, staged

X = batch_of()
F32 = TensorType(torch.float32, (2,))


def sources(forward: Any, num_stages: int = 2) -> list[str]:
    """The stages' code without comments."""
    lowered = lower(staged(forward, num_stages), X)
    return [re.sub(r"  #.*", "", stage.code.source) for stage in lowered.stages]


def op(name: str, *reads: str, **fields: Any) -> Op:
    target = fields.pop("target", "aten.relu.default" if len(reads) < 2 else "aten.add.Tensor")
    return Op(name, F32, target, tuple(map(Ref, reads)), **fields)


def test_a_stage_reads_like_a_function_and_deletes_what_is_used_up() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = F.dropout(m.a(x).tanh(), 0.1)
        return m.b(a).pow(2).mean()

    assert sources(forward) == [
        "def stage_0(p_model_a_weight, p_model_a_bias, in_tensors_0, reseed):\n"
        "    linear = aten_linear_default(in_tensors_0, p_model_a_weight, p_model_a_bias)\n"
        "    tanh = aten_tanh_default(linear)\n"
        "    del linear\n"
        "    reseed(0)\n"
        "    dropout = aten_dropout_default(tanh, 0.1, True)\n"
        "    del tanh\n"
        "    return (dropout, )\n",
        "def stage_1(p_model_b_weight, p_model_b_bias, dropout, reseed):\n"
        "    linear_1 = aten_linear_default(dropout, p_model_b_weight, p_model_b_bias)\n"
        "    pow_1 = aten_pow_Tensor_Scalar(linear_1, 2)\n"
        "    del linear_1\n"
        "    mean = aten_mean_default(pow_1)\n"
        "    del pow_1\n"
        "    return (mean, )\n",
    ]


def test_each_line_names_the_users_line_and_module() -> None:
    lowered = lower(staged(lambda m, x: m.b(m.a(x)).mean(), 2), X)
    code = lowered.stages[0].code
    assert re.search(r"linear = .*  # \S+\.py:\d+ a$", code.source, re.MULTILINE)
    line = next(number for number, text in enumerate(code.source.splitlines(), 1) if "linear = " in text)
    found = code.op_at(line)
    assert found is not None
    assert (found.name, found.module) == ("linear", "a")
    assert code.op_at(1) is None


def test_regions_without_gradients_and_with_autocast_are_brackets() -> None:
    ops = (
        op("a", "x"),
        op("b", "a", grad=False),
        op("c", "b", grad=False, autocast="cpu:bfloat16"),
        op("d", "c", autocast="cpu:"),
        op("e", "d"),
    )
    assert generate_code("f", ops, ("x",), ("e",)).source == (
        "def f(x, reseed):\n"
        "    a = aten_relu_default(x)  #\n"
        "    with no_grad():\n"
        "        b = aten_relu_default(a)  #\n"
        "        del a\n"
        "        with autocast('cpu:bfloat16'):\n"
        "            c = aten_relu_default(b)  #\n"
        "            del b\n"
        "    with autocast('cpu:'):\n"
        "        d = aten_relu_default(c)  #\n"
        "        del c\n"
        "    e = aten_relu_default(d)  #\n"
        "    del d\n"
        "    return (e, )\n"
    )


def test_autocast_is_turned_on_and_off_and_both_end() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return x

    ops = tuple(
        op(name, read, target="function.look", autocast=setting)
        for name, read, setting in (("a", "x", "cpu:bfloat16"), ("b", "a", "cpu:"), ("c", "b", ""))
    )
    function = generate_code("f", ops, ("x",), ("c",)).compile({"function.look": look})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function(X, None)
    function(X, None)
    assert seen == [True, False, True, True, False, False]


def test_a_segment_is_an_inner_function_that_sees_the_arguments_of_the_stage() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.b(checkpoint(lambda y: m.a(y).tanh(), x, use_reentrant=False)).mean()

    assert sources(forward)[0] == (
        "def stage_0(p_model_a_weight, p_model_a_bias, in_tensors_0, reseed):\n"
        "    def segment_0_0():\n"
        "        linear = aten_linear_default(in_tensors_0, p_model_a_weight, p_model_a_bias)\n"
        "        tanh = aten_tanh_default(linear)\n"
        "        del linear\n"
        "        return (tanh, )\n"
        "    (tanh, ) = recompute(segment_0_0)\n"
        "    return (tanh, )\n"
    )


def test_a_segment_that_is_interrupted_is_two_functions_of_different_names() -> None:
    ops = (op("a", "x", segment=3), op("b", "a"), op("c", "b", segment=3))
    source = generate_code("f", ops, ("x",), ("c",)).source
    assert re.findall(r"def (segment_\w+)\(", source) == ["segment_3_0", "segment_3_2"]


def test_a_segment_draws_again_what_it_drew() -> None:
    seeds: list[int] = []
    ops = (op("a", "x", segment=0, random=4), op("b", "a"))
    function = generate_code("f", ops, ("x",), ("b",)).compile({})
    (result,) = function(X.clone().requires_grad_(), seeds.append)
    result.sum().backward()
    assert seeds == [4, 4]


def test_results_and_arguments_are_not_deleted() -> None:
    source = generate_code("f", (op("a", "x"), op("b", "a", "x")), ("x",), ("a", "b")).source
    assert "del" not in source


def test_what_nobody_uses_is_deleted_at_once() -> None:
    source = generate_code("f", (op("a", "x"), op("b", "x")), ("x",), ("b",)).source
    assert "a = aten_relu_default(x)  #\n    del a\n" in source


def test_memory_is_free_when_its_last_user_is_done() -> None:
    alive: list[bool] = []
    made: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        result = x.clone()
        made.append(weakref.ref(result))
        return result

    def look(x: Tensor) -> Tensor:
        alive.append(made[0]() is not None)
        return x + 1

    ops = (
        op("a", "x", target="function.make"),
        op("b", "a"),
        op("c", "b", target="function.look"),
    )
    generate_code("f", ops, ("x",), ("c",)).compile({"function.make": make, "function.look": look})(X, None)
    assert alive == [False]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (float("inf"), "float('inf')"),
        (float("nan"), "float('nan')"),
        (torch.float16, "torch.float16"),
        ("a'b", '"a\'b"'),
    ],
)
def test_odd_constants_are_written_so_that_python_reads_them(argument: Any, text: str) -> None:
    ops = (replace(op("a", "x"), kwargs=(("k", argument),)),)
    code = generate_code("f", ops, ("x",), ("a",))
    assert f"k={text}" in code.source
    compile(code.source, "f", "exec")


def test_targets_are_torchs_and_pythons_operators() -> None:
    assert resolve("aten.relu.default") is torch.ops.aten.relu.default
    assert resolve("python.getitem")([5], 0) == 5
    assert resolve("python.sym_max") is torch.sym_max


def test_a_traceback_shows_the_generated_line() -> None:
    code = generate_code("f", (op("a", "x", "y"),), ("x", "y"), ("a",))
    with pytest.raises(RuntimeError, match="must match") as caught:
        code.compile({})(torch.ones(2), torch.ones(3), None)
    frame = next(frame for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == code.file)
    assert (frame.line or "").startswith("a = aten_add_Tensor(x, y)")


def test_a_branch_that_goes_another_way_is_an_error() -> None:
    same_branch(True, "")
    with pytest.raises(RunError, match="went another way than when it was captured: u0 > 0"):
        same_branch(False, "u0 > 0")
