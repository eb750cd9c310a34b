"""Which operators a mixed graph runs in which precision, and where its casts stand.

A mistake shows as an operator in another type than its numerics want, or as a number that differs from the same casts
written by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from epl.ir.types import TensorType
from epl.loss import output_step
from epl.passes.precision import is_weight_cast, mixed_precision, precision_lines
from tests.passes.mixed import WIDTH, Mixed, gradients, mixed, numbers

LOW, FULL = torch.bfloat16, torch.float32
X = numbers()


def one(ours: Mixed, target: str) -> Any:
    (op,) = ours.ops(target)
    return op


# ------------------------------------------------------------------------------------------------- kinds of operators

ALLOWED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "aten.linear": lambda m, x: m.a(x),
    "aten.matmul": lambda m, x: x @ m.a.weight,
    "aten.mm": lambda m, x: torch.mm(x, m.a.weight),
    "aten.bmm": lambda m, x: torch.bmm(x[None], m.a.weight[None]),
    "aten.addmm": lambda m, x: torch.addmm(m.a.bias, x, m.a.weight),
    "aten.baddbmm": lambda m, x: torch.baddbmm(m.a.bias, x[None], m.a.weight[None]),
    "aten.einsum": lambda m, x: torch.einsum("ij,jk->ik", x, m.a.weight),
    "aten.conv1d": lambda m, x: F.conv1d(x[:, None], m.a.weight[:, None]),
    "aten.conv_transpose1d": lambda m, x: F.conv_transpose1d(x[:, None], m.a.weight[:1, None]),
    "aten.scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x, m.a.weight, m.b.weight),
    "aten.prelu": lambda m, x: F.prelu(x, m.a.bias),
}
DENIED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "aten.softmax": lambda m, h: h.softmax(-1),
    "aten.log_softmax": lambda m, h: h.log_softmax(-1),
    "aten.exp": lambda m, h: h.exp(),
    "aten.log": lambda m, h: h.abs().log(),
    "aten.pow": lambda m, h: h.pow(2),
    "aten.reciprocal": lambda m, h: h.reciprocal(),
    "aten.rsqrt": lambda m, h: h.abs().rsqrt(),
    "aten.sum": lambda m, h: h.sum(-1),
    "aten.mean": lambda m, h: h.mean(-1),
    "aten.var": lambda m, h: h.var(-1),
    "aten.prod": lambda m, h: h.prod(-1),
    "aten.cumsum": lambda m, h: h.cumsum(-1),
    "aten.linalg_vector_norm": lambda m, h: torch.linalg.vector_norm(h, dim=-1),
    "aten.layer_norm": lambda m, h: F.layer_norm(h, (WIDTH,)),
    "aten.group_norm": lambda m, h: F.group_norm(h, 2),
    "aten.mse_loss": lambda m, h: F.mse_loss(h, torch.zeros_like(h)),
    "aten.cross_entropy_loss": lambda m, h: F.cross_entropy(h, torch.zeros(4, dtype=torch.long)),
    "aten.rand_like": lambda m, h: h * torch.rand_like(h),
}
FOLLOWING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "aten.relu": lambda m, h: h.relu(),
    "aten.gelu": lambda m, h: F.gelu(h),
    "aten.tanh": lambda m, h: h.tanh(),
    "aten.mul": lambda m, h: h * 2.0,
    "aten.add": lambda m, h: h + h,
    "aten.dropout": lambda m, h: F.dropout(h, 0.5),
    "aten.transpose": lambda m, h: h.transpose(0, 1),
    "aten.cat": lambda m, h: torch.cat([h, h]),
    "aten.index": lambda m, h: h[h > 0],
    "aten.chunk": lambda m, h: h.chunk(2)[0],
    "aten.masked_fill": lambda m, h: h.masked_fill(h > 0, -1.0),
}


TABLES = {"allowed": ALLOWED, "denied": DENIED, "following": FOLLOWING}


@cache
def _together(table: str) -> Mixed:
    """All operators of a table in one net, which has run once: captures are what takes the time."""

    def forward(m: Any, x: Tensor) -> Tensor:
        given = x if table == "allowed" else m.a(x)
        results = (make(m, given) for make in TABLES[table].values())
        return torch.stack([result.float().square().mean() for result in results]).sum()

    ours = mixed(forward)
    ours.step()
    return ours


def _types_taken(table: str, target: str) -> set[torch.dtype]:
    ops = _together(table).ops(f"{target}.")
    assert ops
    return {dtype for op in ops for dtype in _together(table).dtypes(op) if dtype.is_floating_point}


@pytest.mark.parametrize("target", ALLOWED)
def test_products_and_convolutions_get_low_precision(target: str) -> None:
    assert _types_taken("allowed", target) == {LOW}
    assert all(op.type.dtype == LOW for op in _together("allowed").ops(f"{target}."))  # type: ignore[union-attr]


@pytest.mark.parametrize("target", DENIED)
def test_what_is_delicate_gets_float32(target: str) -> None:
    assert _types_taken("denied", target) == {FULL}


@pytest.mark.parametrize("target", FOLLOWING)
def test_everything_else_takes_what_comes(target: str) -> None:
    assert _types_taken("following", target) == {LOW}


def test_recurrent_nets_are_in_low_precision_as_a_whole() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        states, _ = torch.gru(
            x[None], X.new_zeros(1, 4, WIDTH), [m.a.weight.repeat(3, 1)] * 2, False, 1, 0.0, True, False, False
        )
        return states.float().square().mean()

    ours = mixed(forward)
    assert set(ours.dtypes(one(ours, "gru"))) == {LOW}
    ours.step()


def test_what_the_batch_alone_decides_stays_exact() -> None:
    """Rotary positions: 257 is no bfloat16 number."""

    def forward(m: Any, x: Tensor) -> Tensor:
        angles = torch.arange(1024.0)[:, None] @ torch.ones(1, WIDTH)
        return (m.a(x) * angles[1023]).float().mean()

    ours = mixed(forward)
    assert set(ours.dtypes(one(ours, "matmul"))) == {FULL}


def test_operators_that_refuse_several_types_get_what_they_had() -> None:
    ours = mixed(lambda m, x: torch.lerp(m.a(x), x, 0.5).square().mean())
    assert set(ours.dtypes(one(ours, "lerp"))) == {FULL}
    ours = mixed(lambda m, x: x.scatter_add(1, torch.zeros(4, WIDTH, dtype=torch.long), m.a(x)).square().mean())
    assert FULL in ours.dtypes(one(ours, "scatter_add"))
    assert LOW not in ours.dtypes(one(ours, "scatter_add"))
    ours.step()


def test_numbers_become_float32_before_they_leave_the_graph() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return (h * h.detach().abs().max().item()).float().mean()

    ours = mixed(forward)
    assert ours.dtypes(one(ours, "item")) == [FULL]
    ours.step()


# ------------------------------------------------------------------------------------------------ the same by hand

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
def test_the_same_casts_by_hand_give_the_same_bits(dtype: torch.dtype) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.gelu(m.a(x))
        h = F.layer_norm(h + m.b(x), (WIDTH,))
        return F.mse_loss(h @ m.a.weight.t() * 0.5, x)

    def by_hand(m: Any, x: Tensor) -> Tensor:
        def low(tensor: Tensor) -> Tensor:
            return tensor.to(dtype)

        given = low(x)
        h = F.gelu(F.linear(given, low(m.a.weight), low(m.a.bias)))
        h = h + F.linear(given, low(m.b.weight), low(m.b.bias))
        h = F.layer_norm(h.float(), (WIDTH,))
        return F.mse_loss((low(h) @ low(m.a.weight.t()) * 0.5).float(), x)

    ours = mixed(forward, dtype=dtype)
    plain = copy.deepcopy(ours.model)
    loss, found = ours.step()
    expected = by_hand(plain, X)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    theirs = gradients(plain)
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in theirs.items())


def test_the_same_graph_gives_the_same_mixed_graph() -> None:
    ours = mixed(lambda m, x: F.mse_loss(m.b(m.a(x) + m.a(x)), x))
    assert mixed_precision(ours.plain, LOW) == ours.graph


# --------------------------------------------------------------------------------------------------------- casts


def test_each_use_of_a_weight_has_its_own_cast() -> None:
    ours = mixed(lambda m, x: m.a(m.a(x)).square().mean())
    casts = [op for op in ours.casts() if is_weight_cast(ours.graph, op)]
    assert [op.args[0].name for op in casts] == ["p_model_a_weight", "p_model_a_bias"] * 2  # type: ignore[union-attr]
    assert all(len(ours.graph.readers[op.name]) == 1 for op in casts)


def test_a_view_of_a_weight_is_taken_of_its_cast() -> None:
    ours = mixed(lambda m, x: (x @ m.a.weight.t().contiguous() + x @ m.a.weight.t()).square().mean())
    casts = [op for op in ours.casts() if is_weight_cast(ours.graph, op)]
    assert [op.args[0].name for op in casts] == ["p_model_a_weight"] * 2  # type: ignore[union-attr]
    assert all(ours.graph.readers[op.name][0].target == "aten.t.default" for op in casts)
    assert len(ours.graph.readers["p_model_a_weight"]) == 2  # the views as captured are gone


def test_a_part_of_a_weight_is_cast_alone() -> None:
    ours = mixed(lambda m, x: (x @ m.a.weight[:4].t()).square().mean())
    (cast,) = [op for op in ours.casts() if is_weight_cast(ours.graph, op)]
    assert cast.type == TensorType(LOW, (4, WIDTH))
    (view,) = ours.graph.readers[cast.name]
    assert view.target == "aten.t.default"


def test_readers_of_an_activation_share_its_cast() -> None:
    ours = mixed(lambda m, x: (m.a(x) + m.b(x)).square().mean())
    (cast,) = [op for op in ours.casts() if op.args[0].name == "in_tensors_0"]  # type: ignore[union-attr]
    assert len(ours.graph.readers[cast.name]) == 2


def test_a_cast_is_not_shared_over_a_change_in_place() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = x * 2.0
        y = m.a(h)
        h[1:].add_(1.0)
        return F.mse_loss(m.a(h) - y, x)

    ours = mixed(forward)
    values = ours.run()
    first, second = (values[op.name] for op in ours.ops("linear"))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1:], second[1:])


def test_casts_are_not_shared_over_segments_or_modes_of_autograd() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).float()
        with torch.no_grad():
            scale = m.a(h).float()
        y: Any = checkpoint(lambda t: m.b(t).tanh().float(), h, use_reentrant=False)
        return F.mse_loss(m.b(h) * scale + y, x)

    ours = mixed(forward)
    casts = [op for op in ours.casts() if not is_weight_cast(ours.graph, op)]
    readers = [(op, reader) for op in casts for reader in ours.graph.readers[op.name]]
    assert {(op.segment, op.grad) for op in casts} >= {(None, True), (None, False), (0, True)}
    assert all((op.segment, op.grad) == (reader.segment, reader.grad) for op, reader in readers)
    _, found = ours.step()
    assert found["a.weight"].any()


def test_what_is_given_has_the_type_it_had() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        h = m.a(x)
        return {"hidden": h, "again": h, "logits": m.b(h), "rounded": m.b(h).bfloat16(), "count": (x > 0).sum()}

    ours = mixed(forward, step=output_step())
    dtypes = {role: value.dtype for role, value in ours.outputs().items()}
    expected = {"hidden": FULL, "again": FULL, "logits": FULL, "rounded": LOW, "count": torch.long}
    assert dtypes == {f"out.{name}": dtype for name, dtype in expected.items()}


# -------------------------------------------------------------------------------------------- what the user has said


def test_explicit_types_are_obeyed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return (h.float().tanh() + h.to(torch.float64).sin() + h.to(torch.float16).cos()).mean()

    ours = mixed(forward)
    assert [ours.dtypes(one(ours, name)) for name in ("tanh", "sin", "cos")] == [
        [FULL],
        [torch.float64],
        [torch.float16],
    ]
    assert ours.run()[ours.ops("mean")[0].name].dtype == torch.float64


def test_what_runs_under_the_users_own_autocast_gets_what_it_got() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        with torch.autocast("cpu", dtype=torch.float16):
            y = m.b(h)
        return F.mse_loss(y.float(), x)

    ours = mixed(forward)
    first, second = ours.ops("linear")
    assert set(ours.dtypes(first)) == {LOW}
    assert set(ours.dtypes(second)) == {FULL}
    assert ours.run()[second.name].dtype == torch.float16
    ours.step()


class Doubled(Function):
    """Refuses anything but float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype == FULL
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert gradient.dtype == FULL
        return gradient * 3


def test_custom_functions_get_what_they_were_captured_with() -> None:
    ours = mixed(lambda m, x: m.b(Doubled.apply(m.a(x))).square().mean())
    op = one(ours, "function.")
    assert ours.dtypes(op) == [FULL]
    assert op.type == ours.plain.op_by_name[op.name].type
    ours.step()


def test_float64_and_whole_numbers_are_left_alone() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(WIDTH) @ torch.ones(WIDTH, WIDTH, dtype=torch.long)
        return (m.a(x) * (x.double() @ m.a.weight.double()).float() + places).mean()

    ours = mixed(forward)
    assert [set(ours.dtypes(op)) for op in ours.ops("matmul")] == [{torch.long}, {torch.float64}]
    ours.step()


def test_random_operators_draw_the_numbers_they_drew() -> None:
    ours = mixed(lambda m, x: F.mse_loss(F.dropout(m.a(F.dropout(x)), 0.3), torch.rand_like(x)))
    draws = [(op.name, op.random) for op in ours.graph.ops if op.random is not None]
    assert draws == [(op.name, op.random) for op in ours.plain.ops if op.random is not None]
    assert len(draws) == 3


# ------------------------------------------------------------------------------------------------------------ report


def test_the_report_has_a_line_for_each_kind_of_operator() -> None:
    ours = mixed(lambda m, x: F.mse_loss(m.b(F.gelu(m.a(x)) + x), x))
    assert precision_lines(ours.graph) == [
        "aten.add.Tensor: 1 in bfloat16 and float32",
        "aten.broadcast_tensors.default: 1 in bfloat16 and float32",
        "aten.gelu.default: 1 in bfloat16",
        "aten.linear.default: 2 in bfloat16",
        "aten.mse_loss.default: 1 in float32",
        "casts: 4 of weights, one for each use, and 3 of other values",
    ]


def test_a_model_that_is_not_captured_stays_as_it_is() -> None:
    with pytest.warns(UserWarning, match="runs as it is"):
        ours = mixed(lambda m, x: F.mse_loss(m.a(x), x + float(x.numpy().sum())))
    assert ours.graph == ours.plain
