"""Calls of operators that work element by element."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from epl.sharding.rules import pointwise
from tests.sharding.samples import Sample, case, const, real, truth, whole

MORE_ARGUMENTS = {
    "clamp": (0.3, 0.6),
    "clamp_min": (0.4,),
    "clamp_max": (0.6,),
    "threshold": (0.5, 0.1),
    "logit": (0.01,),
    "to.device": ("cpu", torch.float64),
    "to.dtype": (torch.float64,),
    "polygamma": (1,),
}
NO_DERIVATIVE = ("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "floor_divide", "floor_divide_", "heaviside")
WHOLE_NUMBERS = ("bitwise", "__", "logical")


def samples() -> Iterator[Sample]:
    yield from _unary()
    yield from _with_numbers()
    yield from _pairs()
    yield from _linear()
    yield from _odd()


def _unary() -> Iterator[Sample]:
    new_only = [name for name in pointwise.NEW_ONLY.split() if "Scalar" not in name]
    names = [*pointwise.SMOOTH.split(), *new_only, *pointwise.KEEPING.split()]
    for name in (name for name in names if "mul" not in name and "multiply" not in name):
        plain = name.removesuffix("_")
        tensor = whole(9, 5, 7) if name == "bitwise_not" else real(5, 7)
        yield case(name, tensor, *MORE_ARGUMENTS.get(plain, ()))
        if name in pointwise.SMOOTH.split():
            tensor = (
                const(5, 3) if name in ("acosh", "asinh", "atanh") else real(5, 3)
            )  # torch differentiates no asinh_
            yield case(f"{name}_", tensor, *MORE_ARGUMENTS.get(plain, ()))


def _with_numbers() -> Iterator[Sample]:
    for name in pointwise.NUMBERS.split():
        for ending in ("", "_"):
            bits = name.startswith("bitwise")
            keeps_type = (
                ending and name not in ("add", "sub", "subtract", "remainder", "fmod", "floor_divide") and not bits
            )
            tensor = whole(9, 5, 4) if bits else const(5, 4) if keeps_type else real(5, 4)
            yield case(f"{name}{ending}.Scalar", tensor, 2 if bits else 0.4)
    yield case("pow.Scalar", 2.0, real(5, 4))
    for name in pointwise.POWERS.split():
        yield case(name, *((whole(9, 5, 4), 3) if "__" in name else (real(5, 4), 3)))


def _pairs() -> Iterator[Sample]:
    for name in (*pointwise.PAIRS.split(), *pointwise.PAIRS_IN_PLACE.split()):
        if name.startswith(("lerp", "addcdiv")):
            yield case(name, real(5, 4), real(4), real(5, 1))
        elif name.startswith(WHOLE_NUMBERS):
            yield case(name, whole(9, 5, 4), whole(9, 1, 4))
        elif name.split(".")[0] in NO_DERIVATIVE:
            yield case(name, const(5, 4), const(4))
        else:
            yield case(name, real(5, 4), real(4))
            if not name.split(".")[0].endswith("_"):
                yield case(name, real(5, 1), real(7))
    yield case("clamp.Tensor", real(5, 4), None, real(5, 1))


def _linear() -> Iterator[Sample]:
    for name in ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"):
        yield case(f"{name}.Tensor", real(5, 4), real(5, 4))
        yield case(f"{name}.Tensor", real(3, 1, 4), real(7, 1))
        yield case(f"{name}.Tensor", real(5, 4), 0.7)
        yield case(f"{name}.Tensor", real(5, 4), real())
        if name != "divide":
            yield case(f"{name}_.Tensor", real(5, 4), real(1, 4))
    yield case("add.Tensor", real(5, 4), real(5, 4), alpha=3)
    yield case("add.Tensor", whole(9, 5, 4), whole(9, 5, 4))
    yield case("mul.Tensor", truth(5, 4), real(5, 4))
    yield case("mul.Tensor", whole(9, 5, 4), real(4))
    yield case("rsub.Tensor", real(5, 4), real(4))
    yield case("rsub.Scalar", real(5, 4), 1)
    for name in ("mul.Scalar", "mul_.Scalar", "multiply.Scalar", "div.Scalar", "true_divide.Scalar", "div_.Scalar"):
        yield case(name, real(5, 4), 0.7)
    for name in ("div.Tensor_mode", "div_.Tensor_mode"):
        yield case(name, const(5, 4), const(4), rounding_mode="floor")
        yield case(name, real(5, 4), real(4), rounding_mode=None)
    yield case("div.Scalar_mode", const(5, 4), 0.2, rounding_mode="trunc")
    yield case("lerp.Scalar", real(5, 4), real(4), 0.3)
    yield case("lerp_.Scalar", real(5, 4), real(4), 0.3)
    yield case("addcmul", real(5, 4), real(4), real(5, 1), value=2)
    yield case("addcmul_", real(5, 4), real(4), real(5, 1))


def _odd() -> Iterator[Sample]:
    yield case("where.self", truth(5, 4), real(5, 4), real(4))
    yield case("where.self", truth(5, 1), real(1, 4), real())
    yield case("where.ScalarOther", truth(5, 4), real(5, 4), 0)
    yield case("where.ScalarOther", truth(5, 4), real(5, 4), 2)
    yield case("where.ScalarSelf", truth(5, 4), 0, real(4))
    yield case("where.Scalar", truth(5, 4), 1.0, 2.0)
    for name in ("masked_fill", "masked_fill_"):
        yield case(f"{name}.Scalar", real(5, 4), truth(1, 4), 0)
        yield case(f"{name}.Scalar", real(5, 4), truth(5, 1), float("-inf"))
        yield case(f"{name}.Tensor", real(5, 4), truth(4), real())
    yield case("copy_", real(5, 4), real(4))
    yield case("copy_", real(5, 4), real(5, 4))
    yield case("fill_.Scalar", real(5, 4), 0)
    yield case("fill_.Scalar", real(5, 4), 3)
    yield case("fill_.Tensor", real(5, 4), real())
    yield case("fill.Scalar", real(5, 4), 3)
    yield case("zero_", real(5, 4))
    yield case("to.dtype", real(5, 4), torch.float32)
    yield case("to.dtype", real(5, 4), torch.int64)
    yield case("to.dtype", truth(5, 4), torch.int64)
    yield case("to.dtype", whole(9, 5, 4), torch.float64)
    yield case("to.dtype_layout", real(5, 4), dtype=torch.float32, device="cpu")
    yield case("type_as", real(5, 4), const(3))
    yield case("type_as", real(5, 4), real(5, 4))
    yield case("to.other", real(5, 4), const(3, 7, 2))
    yield case("prelu", real(5, 4, 3), real(4))
    yield case("prelu", real(5, 4), real(1))
    yield case("isin.Tensor_Tensor", whole(9, 5, 4), whole(9, 3))
    yield case("isin.Tensor_Scalar", whole(9, 5, 4), 3)
    yield case("gelu", real(5, 4), approximate="tanh")
