"""Element by element: cut along any dimension; what is linear also takes summands."""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import WHOLE, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import broadcast_cuts, linear_in, table

__all__ = ["RULES"]


def pointwise(call: Call) -> Iterator[Option]:
    """Nothing but elements at the same place."""
    yield from broadcast_cuts(call)


def keeping(call: Call) -> Iterator[Option]:
    """The values themselves, perhaps of another type or elsewhere: linear."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self")


def adding(call: Call) -> Iterator[Option]:
    """Sums and differences of two tensors; with a number they are not linear."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self", "other")


def multiplying(call: Call) -> Iterator[Option]:
    """Products are linear in each factor."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self")
    yield from linear_in(call, "other")


def multiplying_itself(call: Call) -> Iterator[Option]:
    """An operator in place keeps the type of what it changes, and is linear in it."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self")


def dividing(call: Call) -> Iterator[Option]:
    """Linear in what is divided, unless rounded."""
    yield from broadcast_cuts(call)
    if not call["rounding_mode"]:
        yield from linear_in(call, "self")


def choosing(call: Call) -> Iterator[Option]:
    """``where`` and ``masked_fill`` are linear in what they choose from; a number must be 0 to be a sum of itself."""
    yield from broadcast_cuts(call)
    chosen = [name for name in ("self", "other", "value") if call[name] is not None]
    tensors = [name for name in chosen if call.has(name)]
    if tensors and all(call.has(name) or call[name] == 0 for name in chosen):
        yield from linear_in(call, *tensors)


def mixing(call: Call) -> Iterator[Option]:
    """``lerp``: linear in both ends together."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self", "end")


def adding_product(call: Call) -> Iterator[Option]:
    """``addcmul``: linear in the addend and one factor together."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self", "tensor1")


def copying(call: Call) -> Iterator[Option]:
    """``copy_``: what is written over does not matter, but stays cut as it was."""
    yield from broadcast_cuts(call)
    yield from linear_in(call, "self", "src")


def filling(call: Call) -> Iterator[Option]:
    """``fill_`` and ``zero_``; zeros are also a summand."""
    yield from broadcast_cuts(call)
    if call.has("value"):
        yield from linear_in(call, "self", "value")
    elif not call["value"]:
        yield from linear_in(call, "self")


def retyping(call: Call) -> Iterator[Option]:
    """``type_as`` and ``to.other``: the other tensor, of any shape and cut like the one or not, only lends its type."""
    yield from broadcast_cuts(call, ["self"])
    yield from linear_in(call, "self")
    if call.shape("other") == call.shape("self"):
        yield from broadcast_cuts(call)
        yield from linear_in(call, "self", "other")


def channelwise(call: Call) -> Iterator[Option]:
    """``prelu``: one weight for all, or one for each channel, dimension 1."""
    yield from broadcast_cuts(call, ["self"], skip={1})
    if call.rank("self") > 1:
        yield call.option(
            {"self": Shard(1), "weight": WHOLE if call.shape("weight") in ((), (1,)) else Shard(0)}, Shard(1)
        )


def with_all(call: Call) -> Iterator[Option]:
    """``isin``: every element is looked for among all the others."""
    yield from broadcast_cuts(call, ["elements"])


KEEPING = """neg negative positive clone alias contiguous detach detach_ neg_ negative_ lift_fresh_copy to.device to.dtype
to.dtype_layout _to_copy deg2rad rad2deg deg2rad_ rad2deg_ mul.Scalar mul_.Scalar multiply.Scalar"""
SMOOTH = """acosh acos asin asinh atan atanh cos cosh digamma elu erf erfc erfinv exp exp2 expm1 gelu hardsigmoid hardswish
hardtanh leaky_relu lgamma log log10 log1p log2 logit mish nan_to_num reciprocal relu relu6 rsqrt selu sigmoid silu sin
sinc sinh sqrt square tan tanh celu abs absolute clamp clamp_min clamp_max frac i0 ceil floor round sign sgn trunc fix
logical_not"""  # each also in place
NEW_ONLY = """log_sigmoid softplus softshrink hardshrink isfinite isinf isnan signbit bitwise_not threshold pow.Scalar
rsub.Scalar where.Scalar"""
NUMBERS = """add sub subtract remainder fmod eq ne lt le gt ge greater less not_equal bitwise_and bitwise_or
bitwise_xor"""
PAIRS = """remainder.Tensor fmod.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor greater.Tensor
less.Tensor not_equal.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor
__xor__.Tensor floor_divide maximum minimum fmax fmin max.other min.other atan2 logical_and logical_or logical_xor hypot
copysign.Tensor pow.Tensor_Tensor clamp.Tensor clamp_min.Tensor clamp_max.Tensor xlogy.Tensor logaddexp isclose heaviside
lerp.Tensor addcdiv"""
PAIRS_IN_PLACE = """remainder_.Tensor fmod_.Tensor eq_.Tensor ne_.Tensor lt_.Tensor le_.Tensor gt_.Tensor ge_.Tensor
bitwise_and_.Tensor bitwise_or_.Tensor __iand__.Tensor __ior__.Tensor logical_and_ logical_or_ logical_xor_
pow_.Tensor clamp_.Tensor floor_divide_.Tensor addcdiv_ lerp_.Tensor"""
POWERS = "pow.Tensor_Scalar pow_.Scalar __and__.Scalar __or__.Scalar __iand__.Scalar __ior__.Scalar"


def _in_place(names: str) -> str:
    return " ".join(f"{name}_" for name in names.split())


def _with_number(names: str) -> str:
    return " ".join(f"{name}.Scalar {name}_.Scalar" for name in names.split())


RULES: dict[str, Rule] = {
    **table(
        pointwise, f"{SMOOTH} {_in_place(SMOOTH)} {NEW_ONLY} {_with_number(NUMBERS)} {PAIRS} {PAIRS_IN_PLACE} {POWERS}"
    ),
    **table(keeping, KEEPING),
    **table(adding, "add.Tensor sub.Tensor subtract.Tensor rsub.Tensor add_.Tensor sub_.Tensor subtract_.Tensor"),
    **table(multiplying, "mul.Tensor multiply.Tensor"),
    **table(multiplying_itself, "mul_.Tensor multiply_.Tensor"),
    **table(
        dividing,
        """div.Tensor divide.Tensor true_divide.Tensor div.Scalar true_divide.Scalar div_.Tensor div_.Scalar
        true_divide_.Tensor div.Tensor_mode div.Scalar_mode div_.Tensor_mode""",
    ),
    **table(
        choosing,
        """where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar masked_fill.Tensor
        masked_fill_.Scalar masked_fill_.Tensor""",
    ),
    **table(mixing, "lerp.Scalar lerp_.Scalar"),
    **table(adding_product, "addcmul addcmul_"),
    **table(copying, "copy_"),
    **table(filling, "fill_.Scalar fill_.Tensor zero_ fill.Scalar"),
    **table(retyping, "type_as to.other"),
    **table(channelwise, "prelu"),
    **table(with_all, "isin.Tensor_Tensor isin.Tensor_Scalar"),
}
