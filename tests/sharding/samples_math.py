"""Calls of reductions, products, and operators that order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.sharding.samples import Sample, case, const, real, truth, whole


def samples() -> Iterator[Sample]:
    yield from _sums()
    yield from _extremes()
    yield from _other_reductions()
    yield from _products()
    yield from _ordered()


def _sums() -> Iterator[Sample]:
    for name in ("sum", "mean"):
        full = f"{name}.dim_IntList" if name == "sum" else "mean.dim"
        yield case(name, real(5, 4, 7))
        yield case(full, real(5, 4, 7), [1])
        yield case(full, real(5, 4, 7), [-1, 0], True)
        yield case(full, real(5, 4), None)
        yield case(full, real(5, 4), [])
        yield case(full, real(5, 7), [1], dtype=torch.float32)
    yield case("sum", whole(9, 5, 4))
    yield case("sum.dim_IntList", truth(5, 4), [0])
    yield case("count_nonzero", whole(3, 5, 4))
    yield case("count_nonzero.dim_IntList", whole(3, 5, 4), [1])
    yield case("nansum", real(5, 4), [1])


def _extremes() -> Iterator[Sample]:
    ties = whole(3, 7, 5).double().requires_grad_()
    for name in ("amax", "amin"):
        yield case(name, real(5, 4, 7), [1])
        yield case(name, ties, [-2], True)
        yield case(name, real(5, 4), [])
        yield case(name, ties, [0, 1])
    for name in ("max", "min"):
        yield case(name, real(5, 4))
        yield case(name, ties)
        yield case(f"{name}.dim", real(5, 4, 7), 1)
        yield case(f"{name}.dim", real(5, 4), -1, True)
    for name in ("argmax", "argmin"):
        yield case(name, const(5, 4, 7), 1)
        yield case(name, const(5, 7), -1, True)
        yield case(name, whole(3, 5, 7), 1)
    yield case("logsumexp", real(5, 4, 7), [1])
    yield case("logsumexp", real(5, 7), [-1], True)
    yield case("logsumexp", real(5, 7), [0, 1])


def _other_reductions() -> Iterator[Sample]:
    yield case("prod.dim_int", real(5, 4, 7), 1)
    for name in ("all", "any"):
        yield case(f"{name}.dim", truth(5, 4), -1)
        yield case(f"{name}.dims", truth(5, 4, 3), [0, 1], True)
    for name in ("var", "std"):
        yield case(f"{name}.dim", real(5, 4, 7), [1])
        yield case(f"{name}.correction", real(5, 4, 7), [-1, 0], correction=0, keepdim=True)
    yield case("var_mean.correction", real(5, 4), [1], correction=1)
    yield case("norm.ScalarOpt_dim", real(5, 4), 2, [1], True)
    yield case("linalg_vector_norm", real(5, 4, 7), 2, [-1])
    yield case("median.dim", real(5, 7), 1)
    yield case("histc", const(101), 7, 0, 1)
    yield case("cosine_similarity", real(5, 4), real(5, 4))
    yield case("cosine_similarity", real(5, 1, 4), real(7, 4), -1)
    yield case("pairwise_distance", real(5, 4), real(1, 4))


def _products() -> Iterator[Sample]:
    yield case("linear", real(5, 4, 7), real(6, 7), real(6))
    yield case("linear", real(5, 7), real(101, 7))
    yield case("linear", real(7), real(6, 7), real(6))
    for left, right in (((5, 7), (7, 4)), ((7,), (7, 4)), ((5, 7), (7,)), ((7,), (7,))):
        yield case("matmul", real(*left), real(*right))
    yield case("matmul", real(2, 5, 3, 7), real(2, 5, 7, 4))
    yield case("matmul", real(2, 5, 3, 7), real(5, 7, 4))
    yield case("matmul", real(5, 3, 7), real(4, 1, 7, 6))
    yield case("matmul", real(5, 3, 7), real(7, 4))
    yield case("matmul", real(5, 3, 7), real(7))
    yield case("matmul", real(7), real(5, 7, 4))
    yield case("linalg_matmul", real(5, 7), real(7, 4))
    yield case("mm", real(5, 7), real(7, 4))
    yield case("bmm", real(3, 5, 7), real(3, 7, 4))
    yield case("mv", real(5, 7), real(7))
    yield case("dot", real(7), real(7))
    yield case("vdot", real(7), real(7))
    yield case("outer", real(5), real(7))
    yield case("ger", real(5), real(7))
    yield case("addmm", real(4), real(5, 7), real(7, 4))
    yield case("addmm", real(5, 1), real(5, 7), real(7, 4), beta=2, alpha=3)
    yield case("addmm", real(5, 4), real(5, 7), real(7, 4))
    yield case("addmv", real(5), real(5, 7), real(7))
    yield case("baddbmm", real(3, 1, 4), real(3, 5, 7), real(3, 7, 4), alpha=2)
    yield case("baddbmm_", real(3, 5, 4), real(3, 5, 7), real(3, 7, 4))
    yield case("addbmm", real(5, 4), real(3, 5, 7), real(3, 7, 4))
    yield case("einsum", "bhld,bhsd->bhls", [real(2, 3, 5, 4), real(2, 3, 7, 4)])
    yield case("einsum", "i j, j", [real(5, 7), real(7)])
    yield case("einsum", "...ij,jk->...ik", [real(5, 3, 2, 4), real(4, 7)])
    yield case("einsum", "...i,...i->...", [real(5, 3, 4), real(3, 4)])
    yield case("einsum", "ab,bc,cd->ad", [real(5, 3), real(3, 4), real(4, 7)])
    yield case("einsum", "ij->ji", [real(5, 3)])
    yield case("einsum", "ij->j", [real(5, 3)])
    yield case("einsum", "ii->i", [real(5, 5)])
    yield case("inner", real(5, 7), real(4, 7))
    yield case("bilinear", real(5, 7), real(5, 4), real(3, 7, 4), real(3))
    yield case("cdist", real(2, 5, 3), real(2, 7, 3))
    offsets = torch.tensor([3, 3, 7], dtype=torch.int32)
    yield Sample("transformers.grouped_mm_fallback.default", (real(7, 5), real(3, 5, 4), offsets), {})


def _ordered() -> Iterator[Sample]:
    for name in ("sort", "argsort"):
        yield case(name, real(5, 7), -1)
        yield case(name, real(5, 7), 0, True)
    yield case("sort.stable", real(5, 7), stable=True, dim=1)
    yield case("argsort.stable", real(5, 7), stable=True, dim=1)
    yield case("cumsum_", real(5, 7), 1)
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield case(name, real(5, 7), -1)
    yield case("cumsum", whole(9, 5, 7), 0)
    yield case("diff", real(5, 7))
    yield case("diff", real(5, 7), 1, 0, real(1, 7), real(2, 7))
    yield case("topk", real(5, 7), 2)
    yield case("topk", real(7, 5), 6, 0)
    yield case("topk", real(5, 7), 3, 1, False)
    yield case("flip", real(5, 4, 7), [-2])
    yield case("roll", real(5, 7), [2], [1])
    yield case("roll", real(5, 7), [2])
    for name in ("tril", "triu", "tril_", "triu_"):
        yield case(name, real(5, 4, 4), 1)
    yield case("glu", real(5, 8))
    yield case("glu", real(6, 5), 0)
