"""Calls of views, and of operators that pick and place."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.sharding.samples import Sample, case, const, real, truth, whole


def samples() -> Iterator[Sample]:
    yield from _reshapes()
    yield from _permutations()
    yield from _sections()
    yield from _slices()
    yield from _lookups()
    yield from _writes()


def _reshapes() -> Iterator[Sample]:
    for name in ("view", "_unsafe_view", "reshape"):
        yield case(name, real(2, 5, 24), [2, 5, 6, 4])
        yield case(name, real(2, 5, 6, 4), [2, 5, -1])
        yield case(name, real(4, 5, 6), [20, 6])
        yield case(name, real(6, 1, 4), [4, 6])
        yield case(name, real(2, 12, 3), [2, 1, 4, 9])
    yield case("view", real(3, 101), [303])
    yield case("flatten.using_ints", real(5, 4, 3, 2), 1, -2)
    yield case("flatten.using_ints", real(5, 4, 3), 1)
    yield case("unflatten.int", real(5, 24), -1, [4, 6])
    yield case("unflatten.int", real(12, 5), 0, [-1, 2])
    yield case("ravel", real(5, 4))
    yield case("unsqueeze", real(5, 7), -1)
    yield case("unsqueeze", real(5, 7), 1)
    yield case("squeeze", real(5, 1, 7, 1))
    yield case("squeeze.dim", real(5, 1, 7), 1)
    yield case("squeeze.dim", real(3, 7), 0)
    yield case("squeeze.dims", real(5, 1, 7, 1), [1, -1])
    for name in ("view_as", "reshape_as"):
        yield case(name, real(5, 24), const(5, 6, 4))
    for name in ("expand", "broadcast_to"):
        yield case(name, real(5, 1, 7), [5, 4, -1])
        yield case(name, real(7), [5, 7])
        yield case(name, real(1), [5, 6])
    yield case("expand_as", real(5, 1), const(3, 5, 7))
    yield case("broadcast_tensors", [real(5, 1), real(7), real(5, 7)])
    yield case("repeat", real(5, 4), [3, 2, 1])
    yield case("repeat", real(5, 4), [1, 3])
    yield case("tile", real(5, 4), [3])
    yield case("repeat_interleave.self_int", real(5, 4), 3, 1)
    yield case("repeat_interleave.self_int", real(5, 4), 3, -2, output_size=15)
    yield case("repeat_interleave.self_int", real(5, 4), 3)
    yield case("unfold", real(5, 7), 1, 3, 2)
    yield case("diagonal", real(5, 4, 4), 0, 1, 2)
    yield case("diagonal", real(4, 5, 4), 0, 0, -1)


def _permutations() -> Iterator[Sample]:
    yield case("permute", real(5, 4, 3), [2, 0, -2])
    yield case("transpose.int", real(5, 4, 3), 0, -1)
    yield case("transpose.int", real(5, 4), -1, -1)
    for name in ("swapaxes", "swapdims"):
        yield case(name, real(5, 4, 3), 0, 2)
    yield case("t", real(5, 4))
    yield case("t", real(5))
    yield case("matrix_H", real(5, 7))
    for name in ("mT", "adjoint"):
        yield case(name, real(5, 4, 3))
    yield case("numpy_T", real(5, 4))
    for name in ("movedim", "moveaxis"):
        yield case(f"{name}.int", real(5, 4, 3, 2), 0, -2)
        yield case(f"{name}.intlist", real(5, 4, 3, 2), [0, 1], [3, 0])


def _sections() -> Iterator[Sample]:
    yield case("split.Tensor", real(5, 12), 4, -1)
    yield case("split.Tensor", real(5, 7), 3, 1)
    yield case("unsafe_split.Tensor", real(5, 12), 4, 1)
    yield case("split.sizes", real(12, 5), [6, 6])
    yield case("split_with_sizes", real(5, 9), [3, 3, 3], -1)
    yield case("split_with_sizes", real(5, 9), [4, 3, 2], -1)
    yield case("split_with_sizes", real(5, 24), [12, 6, 6], -1)
    yield case("split_with_sizes", real(24, 5), [6, 0, 18])
    yield case("chunk", real(5, 14), 2, -1)
    yield case("chunk", real(5, 7), 2, 1)
    yield case("unsafe_chunk", real(5, 14), 2, -1)
    yield case("tensor_split.sections", real(5, 14), 2, 1)
    yield case("unbind.int", real(3, 5, 4), 0)
    yield case("unbind.int", real(5, 2), -1)
    for name in ("cat", "concat", "concatenate"):
        yield case(name, [real(5, 7), real(5, 7)], -1)
        yield case(name, [real(5, 4), real(3, 4)])
    yield case("cat", [real(0), real(5, 4)], 1)
    yield case("stack", [real(5, 7), real(5, 7), real(5, 7)], 1)
    yield case("stack", [real(5, 7), real(5, 7)], -1)


def _slices() -> Iterator[Sample]:
    yield case("select.int", real(5, 4, 3), 1, -1)
    yield case("select.int", real(5, 4), -1, 2)
    yield case("slice.Tensor", real(5, 12), 1, 0, 9223372036854775807)
    yield case("slice.Tensor", real(5, 12), 1, 0, 6)
    yield case("slice.Tensor", real(5, 12), -1, 6, 9223372036854775807)
    yield case("slice.Tensor", real(5, 12), 1, -6, 9223372036854775807)
    yield case("slice.Tensor", real(5, 12), 1, 3, -1)
    yield case("slice.Tensor", real(5, 12), 1, 1, 9223372036854775807, 2)
    yield case("slice.Tensor", real(5, 12), 1, None, None, 2)
    yield case("slice.Tensor", real(7, 5))
    yield case("narrow", real(5, 12), 1, 6, 6)
    yield case("narrow", real(5, 12), -1, -6, 3)
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield case("pad", real(5, 4, 7), [1, 2], mode)
    yield case("pad", real(5, 4, 7), [0, 0, 1, 2], "constant", 3.0)
    yield case("constant_pad_nd", real(5, 4), [1, 1])
    yield case("reflection_pad1d", real(5, 4, 7), [1, 2])
    yield case("reflection_pad2d", real(5, 4, 7, 7), [1, 2, 1, 1])
    yield case("replication_pad2d", real(5, 4, 7, 7), [1, 2, 1, 1])


def _lookups() -> Iterator[Sample]:
    yield case("gather", real(5, 4, 7), 1, whole(4, 5, 6, 7))
    yield case("gather", real(5, 7), -1, whole(7, 4, 5))
    yield case("index_select", real(5, 4, 7), 1, whole(4, 6))
    yield case("index_select", real(5, 4), -2, whole(5, 7))
    yield case("index.Tensor", real(5, 4), [whole(5, 7, 6)])
    yield case("index.Tensor", real(5, 4, 6), [None, whole(4, 7)])
    yield case("index.Tensor", real(5, 4, 6, 3), [None, whole(4, 7, 1), whole(6, 5)])
    yield case("index.Tensor", real(5, 4, 6), [whole(5, 7), None, whole(6, 7)])
    yield case("index.Tensor", real(5, 4, 6), [None, whole(4, 7), None])
    yield case("index.Tensor", real(5, 4), [truth(5)])
    yield case("embedding", real(101, 6), whole(101, 5, 4))
    yield case("embedding", real(11, 6), whole(11, 5, 4), 3)
    yield case("embedding", real(11, 5), whole(11, 7), -1, True)
    yield case("one_hot", whole(4, 5, 7), 4)
    yield case("one_hot", whole(4, 5, 7))


def _writes() -> Iterator[Sample]:
    for name in ("scatter", "scatter_"):
        yield case(f"{name}.src", real(5, 7), 1, _places(5, 7, 4), real(5, 4))
        yield case(f"{name}.value", real(5, 7), -1, _places(5, 7, 4), 0)
        yield case(f"{name}.value", real(5, 7), -1, _places(5, 7, 4), 3)
    yield case("scatter.src", real(5, 7), 0, whole(1, 1, 4), const(3, 4))
    yield case("scatter_reduce.two", real(5, 7), 1, _places(5, 7, 4), real(5, 4), "amax")
    for name in ("scatter_add", "scatter_add_"):
        yield case(name, real(5, 7), 1, whole(7, 5, 9), real(5, 9))
        yield case(name, real(5, 7), 0, whole(5, 9, 7), real(9, 7))
    for name in ("index_add", "index_add_"):
        yield case(name, real(5, 7), 0, whole(5, 6), real(6, 7))
        yield case(name, real(5, 7), -1, whole(7, 6), real(5, 6), alpha=2)
    for name in ("index_copy", "index_copy_"):
        yield case(name, real(5, 7), 0, torch.tensor([3, 0]), real(2, 7))
    for name in ("index_fill", "index_fill_"):
        yield case(f"{name}.int_Scalar", real(5, 7), 1, torch.tensor([3, 0]), 0)
        yield case(f"{name}.int_Scalar", real(5, 7), 1, torch.tensor([3, 0]), 2)
    yield case("slice_scatter", real(5, 7), real(5, 3), 1, 2, 5)
    yield case("select_scatter", real(5, 4, 7), real(5, 7), 1, 2)
    for name in ("index_put", "index_put_"):
        yield case(name, real(5, 7), [torch.tensor([3, 0])], real(2, 7))
        yield case(name, real(5, 4, 7), [None, torch.tensor([3, 0])], real(7))
        yield case(name, real(5, 4, 7), [torch.tensor([1, 2]), None, torch.tensor([3, 0])], real(2, 4))
        yield case(name, real(5, 7), [whole(5, 9)], real(9, 7), True)
        yield case(name, real(5, 7), [whole(5, 9)], real(), True)


def _places(rows: int, size: int, count: int) -> torch.Tensor:
    """Different places in each row."""
    return torch.stack(
        [torch.randperm(size, generator=torch.Generator().manual_seed(row))[:count] for row in range(rows)]
    )
