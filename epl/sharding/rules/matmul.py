"""Products of matrices: what is cut is a letter of an Einstein sum.

Every operator here multiplies its operands and sums over the letters that its result does not have. A letter of the
result that is cut comes out cut; one that is summed over leaves summands. Addends go with the result. Source: GSPMD
(Xu et al. 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from epl.sharding.options import PARTIAL, WHOLE, Call, Option, Rule
from epl.sharding.placements import Placement, Shard
from epl.sharding.rules.common import aligned, cut_with, table

__all__ = ["RULES"]

Operands = Mapping[str, Sequence[str]]  # letters of each tensor, by argument


def products(call: Call, operands: Operands, result: str, addends: Sequence[str] = ()) -> Iterator[Option]:
    """All cuts of a sum of products.

    Args:
        call: The operator.
        operands: What is multiplied.
        result: Letters of the result.
        addends: Arguments that are added to it.
    """
    given = [name for name in addends if call.has(name)]
    everything = "".join(letters for tensors in operands.values() for letters in tensors)
    for letter in dict.fromkeys(everything):
        used = {name: _cut(call, name, tensors, letter) for name, tensors in operands.items()}
        if any(isinstance(place, Shard) for places in used.values() for place in places):
            yield _with_addends(call, used, result.find(letter), given)
    for name, tensors in operands.items():
        for place in range(len(tensors)):
            summands = [PARTIAL if other == place else WHOLE for other in range(len(tensors))]
            yield call.option({name: summands, **dict.fromkeys(given, PARTIAL)}, PARTIAL)


def _cut(call: Call, name: str, tensors: Sequence[str], letter: str) -> list[Placement]:
    """Tensors without the letter, and those that are broadcast along it, stay whole."""
    kinds = zip(tensors, call.types(name), strict=True)
    return [
        Shard(letters.index(letter)) if letter in letters and kind.sizes[letters.index(letter)] != 1 else WHOLE
        for letters, kind in kinds
    ]


def _with_addends(call: Call, used: dict[str, list[Placement]], dim: int, addends: list[str]) -> Option:
    if dim < 0:
        return call.option({**used, **dict.fromkeys(addends, PARTIAL)}, PARTIAL)
    rank = len(call.results[0].shape)
    added = {name: aligned(call.shape(name), dim, rank) for name in addends}
    return call.option({**used, **added}, Shard(dim))


def linear(call: Call) -> Iterator[Option]:
    """x[..., i] weight[o, i] + bias[o]; a weight of one dimension gives no ``o``."""
    batch = "abcdefgh"[: call.rank("input") - 1]
    outputs = "o" * (call.rank("weight") - 1)
    yield from products(call, {"input": [f"{batch}i"], "weight": [f"{outputs}i"]}, batch + outputs, ["bias"])


def matmul(call: Call) -> Iterator[Option]:
    """Matrices beside each other are broadcast, and vectors are rows on the left and columns on the right."""
    left, right = call.rank("self"), call.rank("other")
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    rows, columns = "m" * (left > 1), "n" * (right > 1)
    first = batch[len(batch) - max(0, left - 2) :] + rows + "k"
    second = batch[len(batch) - max(0, right - 2) :] + "k" + columns
    yield from products(call, {"self": [first], "other": [second]}, batch + rows + columns)


def inner(call: Call) -> Iterator[Option]:
    """Every row of the one with every row of the other."""
    left, right = "abcdefgh"[: call.rank("self") - 1], "ijlmnopq"[: call.rank("other") - 1]
    yield from products(call, {"self": [f"{left}k"], "other": [f"{right}k"]}, left + right)


def bilinear(call: Call) -> Iterator[Option]:
    """x[..., i] weight[o, i, j] y[..., j] + bias[o]."""
    batch = "abcdefgh"[: call.rank("input1") - 1]
    operands = {"input1": [f"{batch}i"], "input2": [f"{batch}j"], "weight": ["oij"]}
    yield from products(call, operands, f"{batch}o", ["bias"])


def distances(call: Call) -> Iterator[Option]:
    """``cdist``: every row of the one with every row of the other; not a product, but cut like one."""
    rank = len(call.results[0].shape)
    yield call.option({"x1": Shard(call.rank("x1") - 2)}, Shard(rank - 2))
    yield call.option({"x2": Shard(call.rank("x2") - 2)}, Shard(rank - 1))
    for dim in range(rank - 2):
        yield call.option(cut_with(call, dim, rank), Shard(dim))


def _fixed(result: str, addend: str = "", **operands: str) -> Rule:
    """The rule of an operator whose letters are always the same."""

    def rule(call: Call) -> Iterator[Option]:
        factors = {name: [letters] for name, letters in operands.items()}
        yield from products(call, factors, result, [addend] if addend else [])

    return rule


def einsum(call: Call) -> Iterator[Option]:
    """Any equation in which no tensor has a letter twice; ``...`` becomes letters of its own."""
    left, arrow, result = call["equation"].replace(" ", "").partition("->")
    spare = list("αβγδεζηθ")  # what no equation may use
    longest = max(_hidden(term, kind.shape) for term, kind in zip(left.split(","), call.types("tensors"), strict=True))
    hidden = "".join(spare[:longest])
    terms = [
        term.replace("...", hidden[longest - _hidden(term, kind.shape) :])
        for term, kind in zip(left.split(","), call.types("tensors"), strict=True)
    ]
    if not arrow:
        once = "".join(
            sorted(letter for letter in set("".join(terms)) - set(hidden) if "".join(terms).count(letter) == 1)
        )
        result = hidden + once
    if all(len(set(term)) == len(term) for term in terms):
        yield from products(call, {"tensors": terms}, result.replace("...", hidden))


def _hidden(term: str, shape: Sequence[int | None]) -> int:
    """Number of dimensions that ``...`` stands for."""
    return len(shape) - len(term.replace("...", "")) if "..." in term else 0


def grouped(call: Call) -> Iterator[Option]:
    """Rows by experts, ``x[t, i] weight[e, i, o]`` with the expert of each row; with cut experts, a row is 0 elsewhere."""
    yield call.option({"weight": Shard(0)}, PARTIAL, form="experts")
    yield call.option({"weight": Shard(2)}, Shard(1))
    yield call.option({"input": Shard(1), "weight": Shard(1)}, PARTIAL)
    yield call.option({"input": PARTIAL}, PARTIAL)
    yield call.option({"weight": PARTIAL}, PARTIAL)


RULES: dict[str, Rule] = {
    **table(linear, "linear"),
    **table(matmul, "matmul linalg_matmul"),
    **table(_fixed("mn", self="mk", mat2="kn"), "mm"),
    **table(_fixed("bmn", self="bmk", mat2="bkn"), "bmm"),
    **table(_fixed("m", self="mk", vec="k"), "mv"),
    **table(_fixed("", self="k", tensor="k"), "dot"),
    **table(_fixed("", self="k", other="k"), "vdot"),
    **table(_fixed("mn", self="m", vec2="n"), "outer ger"),
    **table(_fixed("mn", "self", mat1="mk", mat2="kn"), "addmm"),
    **table(_fixed("m", "self", mat="mk", vec="k"), "addmv"),
    **table(_fixed("bmn", "self", batch1="bmk", batch2="bkn"), "baddbmm baddbmm_"),
    **table(_fixed("mn", "self", batch1="bmk", batch2="bkn"), "addbmm"),
    **table(einsum, "einsum"),
    **table(inner, "inner"),
    **table(bilinear, "bilinear"),
    **table(distances, "cdist"),
    "transformers.grouped_mm_fallback.default": grouped,
}
