"""Options that are found by trying, compared with rules, with the checker of rules, and with what an operator mixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epl.ir.graph import Op, Ref
from epl.ir.types import TensorType
from epl.sharding.discovery import discover, shape_class
from epl.sharding.options import PARTIAL, WHOLE, Call, Option
from epl.sharding.placements import Placement, Shard
from epl.sharding.rules import is_discovered, options_of
from tests.sharding import samples_math, samples_nets, samples_pointwise, samples_shape
from tests.sharding.checks import check
from tests.sharding.samples import Sample, case, const, real, truth, whole

S0, S1, S2, S3 = map(Shard, range(4))
RUNS: list[str] = []  # the counted operator's calls


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "epl" / "discovery"


def _operator(name: str, function: Any, *, differentiable: bool = True, **settings: Any) -> Any:
    """A user's operator, with the gradient that autograd finds of its code."""
    shape = settings.pop("shape", lambda *args: args[0].shape)
    made = torch.library.custom_op(
        f"epl_test::{name}", function, mutates_args=settings.pop("mutates_args", ()), **settings
    )
    made.register_fake(lambda *args: args[0].new_empty(shape(*args)))

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = function(*leaves, *ctx.others)
        return *torch.autograd.grad(result, leaves, gradient), *(None for _ in ctx.others)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*(each for each in inputs if isinstance(each, torch.Tensor)))
        ctx.others = [each for each in inputs if not isinstance(each, torch.Tensor)]

    if differentiable:
        made.register_autograd(backward, setup_context=setup)
    return made


def _swish_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    RUNS.append("swish_gate")
    return x * torch.sigmoid(x) * gate


def _row_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale


def _channel(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x * scale[None, :, None, None] + shift[None, :, None, None]


def _gated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, -1)
    return torch.sigmoid(gate) * value * scale


def _heads(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (scale.shape[0], -1)) * scale[:, None]


def _rotated(x: torch.Tensor) -> torch.Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * even - odd, odd + even], -1).flatten(-2)


def _running_sum(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().cumsum(0).view(x.shape)


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean()


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[-1] == 2
    return torch.stack([x[..., 1], x[..., 0]], -1)


def _scaled_by_largest(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return x * numbers.max()


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def _filled_in(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x * 2


_operator("swish_gate", _swish_gate)
_operator("row_norm", _row_norm)
_operator("channel", _channel)
_operator("gated", _gated, shape=lambda x, scale: x.shape[:-1] + scale.shape)
_operator("heads", _heads, shape=lambda x, scale: (*x.shape[:-1], scale.shape[0], x.shape[-1] // scale.shape[0]))
_operator("rotated", _rotated)
_operator("running_sum", _running_sum)
_operator("centred", _centred)
_operator("in_pairs", _in_pairs)
_operator("scaled_by_largest", _scaled_by_largest, differentiable=False)
_operator("noisy", _noisy)
_operator("filled_in", _filled_in, mutates_args=("x",), differentiable=False)
_operator("in_float32", _in_float32)
_operator("no_gradient", lambda x: x * 2, differentiable=False, schema="(Tensor x) -> Tensor")


@torch.library.custom_op("epl_test::own_backward", mutates_args=())
def _own_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _mixed_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient + gradient.mean()


_own_backward.register_autograd(_mixed_backward)


def own(name: str, *args: Any) -> Sample:
    return Sample(f"epl_test.{name}.default", args, {})


def _option(*places: Placement, to: Placement) -> Option:
    return Option(places, (to,))


LIKE_RULES = {
    "linear": (
        case("linear", real(5, 7, 9), real(11, 9), real(11)),
        [(S0, WHOLE, WHOLE, S0), (S1, WHOLE, WHOLE, S1), (WHOLE, S0, S0, S2), (S2, S1, PARTIAL, PARTIAL)],
    ),
    "add": (case("add.Tensor", real(5, 7), real(7)), [(S0, WHOLE, S0), (S1, S0, S1), (PARTIAL, PARTIAL, PARTIAL)]),
    "mul, broadcast": (
        case("mul.Tensor", real(5, 7), real(5, 1)),
        [(S0, S0, S0), (S1, WHOLE, S1), (PARTIAL, WHOLE, PARTIAL), (WHOLE, PARTIAL, PARTIAL)],
    ),
    "matmul": (
        case("matmul", real(3, 5, 7), real(3, 7, 9)),
        [(S0, S0, S0), (S1, WHOLE, S1), (WHOLE, S2, S2), (S2, S1, PARTIAL)],
    ),
    "layer_norm": (
        case("layer_norm", real(5, 7, 9), (9,), real(9), real(9)),
        [(S0, WHOLE, WHOLE, S0), (S1, WHOLE, WHOLE, S1)],
    ),
    "embedding": (
        case("embedding", real(11, 9), whole(11, 5, 7)),
        [(WHOLE, S0, S0), (WHOLE, S1, S1), (S1, WHOLE, S2)],
    ),
    "sum": (case("sum.dim_IntList", real(5, 7, 9), (1,)), [(S0, S0), (S2, S1), (S1, PARTIAL), (PARTIAL, PARTIAL)]),
    "transpose": (case("transpose.int", real(5, 7, 9), 1, 2), [(S0, S0), (S1, S2), (S2, S1), (PARTIAL, PARTIAL)]),
    "conv2d": (
        case("conv2d", real(5, 4, 9, 9), real(7, 4, 3, 3), real(7)),
        [(S0, WHOLE, WHOLE, S0), (WHOLE, S0, S0, S1), (S1, S1, PARTIAL, PARTIAL)],
    ),
    "softmax": (case("softmax.int", real(5, 7), -1), [(S0, S0)]),
    "where": (
        case("where.self", truth(5, 7), real(5, 7), real(7)),
        [(S0, S0, WHOLE, S0), (S1, S1, S0, S1), (WHOLE, PARTIAL, PARTIAL, PARTIAL)],
    ),
    "a weight without a gradient": (
        case("binary_cross_entropy_with_logits", real(5, 7), const(5, 7), const(7), None, 0),
        [(S0, S0, WHOLE, S0), (S1, S1, S0, S1)],
    ),
    "uneven numbers of results": (case("split.Tensor", real(5, 8), 4, 1), []),
    "nothing left of a small tensor": (case("slice.Tensor", real(5, 20), 1, 14, 20), []),
    "cat": (case("cat", (real(5, 7), real(5, 9)), 1), [(S0, S0, S0), (PARTIAL, PARTIAL, PARTIAL)]),
    "expand": (case("expand", real(5, 1, 7), (5, 6, 7)), []),
}


@pytest.mark.parametrize("name", LIKE_RULES)
def test_what_rules_say_is_found(name: str):
    sample, expected = LIKE_RULES[name]
    found = discover(sample.call)
    by_rule = set(options_of(sample.call))
    assert found
    for *inputs, output in expected:
        assert _option(*inputs, to=output) in found
        assert _option(*inputs, to=output) in by_rule, "the test expects what no rule says"


@pytest.mark.parametrize("name", LIKE_RULES)
def test_what_is_found_holds_for_other_numbers_and_sizes(name: str):
    sample, _ = LIKE_RULES[name]
    for option in discover(sample.call):
        for size in (2, 3):
            assert check(sample, option, size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of deprecated names and slow paths
def test_nothing_that_is_found_of_operators_with_rules_is_refuted():
    """Every ninth sample of the rules; all 843 of them held as well [3,172 checks, 18 s, 2026-11-29]."""
    families = (samples_pointwise, samples_shape, samples_math, samples_nets)
    samples = [sample for family in families for sample in family.samples()][::9]
    found = [(sample, option) for sample in samples for option in discover(sample.call)]
    assert len(found) > 100
    for sample, option in found:
        for size in (2, 3):
            check(sample, option, size)


OWN = {
    "swish_gate": (
        own("swish_gate", real(7, 5, 9), real(7, 5, 9)),
        {(S0, S0, S0), (S1, S1, S1), (S2, S2, S2), (WHOLE, PARTIAL, PARTIAL)},
    ),
    "row_norm": (
        own("row_norm", real(7, 5, 9), real(9), 1e-6),
        {(S0, WHOLE, S0), (S1, WHOLE, S1), (WHOLE, PARTIAL, PARTIAL)},
    ),
    "channel": (
        own("channel", real(5, 7, 11, 9), real(7), real(7)),
        {
            *((cut, WHOLE, WHOLE, cut) for cut in (S0, S2, S3)),
            (S1, S0, S0, S1),
            (PARTIAL, WHOLE, PARTIAL, PARTIAL),
            (WHOLE, PARTIAL, PARTIAL, PARTIAL),
        },
    ),
    "gated": (
        own("gated", real(7, 5, 18), real(9)),
        {
            *((cut, WHOLE, cut) for cut in (S0, S1)),
            (Shard(2, repeats=2), S0, S2),
            (WHOLE, PARTIAL, PARTIAL),
        },
    ),
    "heads": (
        own("heads", real(7, 18), real(3)),
        {(S0, WHOLE, S0), (Shard(1, unit=6), S0, S1), (PARTIAL, WHOLE, PARTIAL), (WHOLE, PARTIAL, PARTIAL)},
    ),
    "in_pairs": (own("in_pairs", real(7, 5, 2)), {(S0, S0), (S1, S1), (PARTIAL, PARTIAL)}),
    # its last dimension has a stand-in of 12, of which halves and thirds are whole pairs
    "rotated": (own("rotated", real(5, 7, 9, 14)), {(cut, cut) for cut in (S0, S1, S2)}),
    "running_sum": (own("running_sum", real(7, 5)), {(PARTIAL, PARTIAL)}),
    "centred": (own("centred", real(7, 5)), {(PARTIAL, PARTIAL)}),
    "scaled_by_largest": (own("scaled_by_largest", const(7, 5), whole(4, 7)), set()),
    "own_backward": (
        own("own_backward", real(7, 5)),
        {(PARTIAL, PARTIAL)},
    ),  # the gradient mixes what the value does not
    "noisy": (own("noisy", real(7, 5)), set()),
    "filled_in": (own("filled_in", const(7, 5)), set()),
    "in_float32": (own("in_float32", real(7, 5).detach().float()), set()),
    "no_gradient": (own("no_gradient", const(7, 5)), set()),
}


@pytest.mark.parametrize("name", OWN)
def test_an_operator_of_the_users_is_cut_where_it_does_not_mix(name: str):
    """All of its options and no other: a mistake would show as a cut of rows that are mixed, or as one that is missed."""
    sample, expected = OWN[name]
    found = discover(sample.call)
    assert {(*option.inputs, *option.outputs) for option in found} == expected
    for option in found:
        assert check(sample, option, 2)


def test_operators_without_a_rule_are_tried_and_the_others_not():
    sample, _ = OWN["row_norm"]
    assert is_discovered(sample.target)
    assert options_of(sample.call)[1:] == discover(sample.call)
    assert not is_discovered("aten.linear.default")


def test_without_gradients_only_the_value_matters():
    for name, cut in (("own_backward", S0), ("no_gradient", S1)):
        call = OWN[name][0].call
        without = Call(replace(call.op, grad=False), lambda _: TensorType(torch.float32, (7, 5)))
        assert _option(cut, to=cut) in discover(without)


def test_whole_numbers_that_are_mixed_are_not_taken_for_parts():
    """Halves often have the same largest number by chance; one draw would be too few."""
    call = OWN["scaled_by_largest"][0].call
    found = discover(Call(replace(call.op, grad=False), call._type_of))
    assert set(found) == {_option(cut, WHOLE, to=cut) for cut in (PARTIAL, S0, S1)}


def test_the_shape_of_a_part_is_put_in():
    found = discover(LIKE_RULES["expand"][0].call)
    assert Option((S0,), (S0,), sizes="size") in found
    assert Option((S2,), (S2,), sizes="size") in found


def test_sizes_stay_as_different_and_in_the_same_order():
    stand_in = shape_class(case("linear", real(128, 1, 768), real(3072, 768), real(3072)).call)
    assert str(stand_in) == "aten.linear.default(input=f64[4, 1, 6], weight=f64[8, 6], bias=f64[8])"
    assert stand_in.results == ((4, 1, 8),)
    assert shape_class(case("linear", real(7, 1, 64), real(65, 64), real(65)).call) == stand_in


def test_numbers_that_are_sizes_change_with_them():
    assert "size=(4, 5, 6)" in str(shape_class(case("expand", real(30, 1, 40), (30, 5, 40)).call))
    assert "normalized_shape=(6,)" in str(shape_class(case("layer_norm", real(30, 40), (40,)).call))
    assert "dim=(2,)" in str(shape_class(case("sum.dim_IntList", real(2, 30, 40), (2,)).call))


def test_calls_of_python_and_of_functions_are_not_tried():
    kind = TensorType(torch.float32, (4, 6))
    for target in ("python.neg", "function.call_0"):
        assert discover(Call(Op("y", kind, target, (Ref("x"),)), lambda _: kind)) == ()


def test_random_numbers_of_the_program_stay_as_they_are():
    before = torch.get_rng_state()
    for name in ("swish_gate", "noisy"):
        call = OWN[name][0].call
        torch.set_rng_state(before)  # a sample's call draws itself
        discover(call)
        assert torch.equal(torch.get_rng_state(), before)


def test_what_was_found_is_not_tried_again(folder: Path):
    """A call of other sizes of the same class is only looked at in its own sizes."""
    found = discover(OWN["swish_gate"][0].call)
    others = own("swish_gate", real(8, 6, 10), real(8, 6, 10)).call
    first = len(RUNS)
    del RUNS[:]
    assert discover(OWN["swish_gate"][0].call) == found
    assert len(RUNS) < first / 10  # it only looks whether the operator is still the same
    assert discover(others) == found
    assert len(list(folder.iterdir())) == 3  # of the class, and of the sizes


FACTOR = [torch.ones(())]  # the code of an operator that its author changes


def scaled_rows(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR[0] if FACTOR[0].ndim == 0 else x - x.mean(0)


def test_an_operator_whose_code_has_changed_is_tried_anew(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Before it scaled elements; now it mixes rows."""
    _operator("scaled_rows", scaled_rows)
    call = own("scaled_rows", real(4, 6)).call
    assert {option.outputs[0] for option in discover(call)} >= {S0, S1}
    monkeypatch.setattr(f"{__name__}.FACTOR", [torch.ones(2)])
    assert S0 not in {option.outputs[0] for option in discover(call)}
    assert S1 in {option.outputs[0] for option in discover(call)}


BROKEN = {
    "not JSON": lambda content: "{",
    "not a dict": lambda content: "[1]",
    "of another torch": lambda content: json.dumps(content | {"torch": "1.0"}),
    "of another format": lambda content: json.dumps(content | {"format": 0, "options": []}),
    "of another call": lambda content: json.dumps(content | {"call": "aten.relu.default(f64[4])"}),
    "no options": lambda content: json.dumps({key: content[key] for key in content if key != "options"}),
    "a placement that is none": lambda content: json.dumps(content).replace("S(0)", "S(x)"),
    "a dimension that is none": lambda content: json.dumps(content).replace("S(0)", "S(7)"),
    "an argument too few": lambda content: json.dumps(content).replace('"S(0)", "S(0)"', '"S(0)"'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_written_anew(folder: Path, how: str):
    call = OWN["swish_gate"][0].call
    found = discover(call)
    contents = {file: json.loads(file.read_text()) for file in folder.iterdir()}
    for file, content in contents.items():
        file.write_text(BROKEN[how](content))
    assert discover(call) == found
    assert {file: json.loads(file.read_text()) for file in folder.iterdir()} == contents


def test_without_a_folder_to_write_to_it_is_tried_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file stands in the place of the folder: unlike a mode, that stops root as well."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    call = OWN["swish_gate"][0].call
    found = discover(call)
    del RUNS[:]
    assert discover(call) == found
    assert RUNS
