"""Batches come apart and together again, whatever they are nested in; parts hold each sample once.

A mistake shows as a sample that is trained on twice or never, or as a plain value that a model gets as a tensor.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from epl.batch import Flat, Structure, batch_size_of, call_model, cut, flatten, note_on_sizes, take
from epl.errors import RunError

X, Y = torch.arange(6.0).view(3, 2), torch.tensor([1, 2, 3])
Pair = namedtuple("Pair", ["left", "right"])


class Kind(enum.Enum):
    TRAIN = "train"


@dataclass
class Sample:
    x: Tensor
    depth: int = 2
    mask: Tensor | None = None


@dataclass(frozen=True)
class Derived:
    x: Tensor
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", self.x.shape[0])


def same(one: Any, other: Any) -> bool:
    """Equal, with tensors that are the same objects."""
    if isinstance(one, Tensor):
        return one is other
    if isinstance(one, Mapping | UserDict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (vars(one) == vars(other) if hasattr(one, "x") else one == other)


NESTS: list[Any] = [
    X,
    (X, Y),
    [X, (Y, [X])],
    {"x": X, "y": {"z": [Y, None, 3, True, 1.5, "s", 2j]}},
    {0: X, (1, 2): Y},
    OrderedDict(b=X, a=Y),
    Pair(X, Y),
    Pair(X, None),
    torch.Size([2, 3]),
    UserDict(x=X),
    BatchEncoding({"input_ids": Y}),
    SequenceClassifierOutput(logits=X),
    Sample(X),
    Sample(X, 3, Y),
    {"kind": Kind.TRAIN, "dtype": torch.float16, "device": torch.device("cpu")},
    {},
    (),
    None,
    7,
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_what_is_taken_apart_comes_together_the_same(nest: Any) -> None:
    flat = flatten(nest)
    again = flat.structure.unflatten(flat.tensors)
    assert type(again) is type(nest)
    assert same(nest, again)


def test_a_default_dict_becomes_a_dict() -> None:
    """Its constructor wants a function, which no structure keeps."""
    flat = flatten(defaultdict(list, x=X))
    assert flat.structure.unflatten(flat.tensors) == {"x": X}


def test_a_computed_field_of_a_dataclass_is_that_of_the_whole_batch() -> None:
    flat = flatten(Derived(X))
    again = flat.structure.unflatten((X[:1],))
    assert again.x.shape == (1, 2)
    assert again.length == 3


def test_paths_say_where_each_tensor_is() -> None:
    assert flatten({"a": X, "b": [Y, {"c": X}], "d": Sample(Y, mask=X)}).paths == ("a", "b.0", "b.1.c", "d.x", "d.mask")
    assert flatten(X).paths == ("",)


def test_structures_are_equal_exactly_when_the_plain_values_are_of_one_type_and_value() -> None:
    """A graph is kept for each structure: ``1``, ``1.0`` and ``True`` are not the same to a model."""
    values: list[Any] = [1, 1.0, True, "1", None, 2, float("inf")]
    structures = [flatten({"x": X, "value": value}).structure for value in values]
    assert len(set(structures)) == len(values)
    assert flatten({"x": X, "value": float("nan")}).structure == flatten({"x": Y, "value": float("nan")}).structure


@pytest.mark.parametrize(
    "wrong", [{1, 2}, b"bytes", object(), range(3), print, Sample], ids=lambda wrong: type(wrong).__name__
)
def test_what_cannot_be_in_a_batch_is_refused_with_its_path(wrong: Any) -> None:
    with pytest.raises(RunError, match=rf"a\.1\.b is a {type(wrong).__name__}; what goes into a model"):
        flatten({"a": [X, {"b": wrong}]})
    with pytest.raises(RunError, match=f"the batch is a {type(wrong).__name__}"):
        flatten(wrong)


def test_a_numpy_array_is_refused_rather_than_baked_in() -> None:
    with pytest.raises(RunError, match=r"the batch at x is a numpy\.ndarray; .*torch\.as_tensor"):
        flatten({"x": X.numpy()})


def test_a_structure_reads_like_the_batch() -> None:
    assert str(flatten({"x": X, "k": [2, None]}).structure) == "dict(x: tensor, k: list(2, None))"


class _Echo:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X, None], (X, None), {}),
        ({"x": X, "n": 2}, (), {"x": X, "n": 2}),
        (UserDict(x=X), (), {"x": X}),
        (3, (3,), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_is_called_by_the_kind_of_its_batch(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert call_model(_Echo(), batch) == (args, kwargs)


def test_a_dataclass_is_one_argument() -> None:
    sample = Sample(X)
    assert call_model(_Echo(), sample)[0][0] is sample


@pytest.mark.parametrize("num_parts", range(1, 10))
@pytest.mark.parametrize("size", range(9))
def test_parts_cover_each_sample_once_in_order_and_differ_by_one_at_most(size: int, num_parts: int) -> None:
    parts = cut(size, num_parts)
    assert [place for start, stop in parts for place in range(start, stop)] == list(range(size))
    sizes = [stop - start for start, stop in parts]
    assert all(sizes)
    assert len(parts) == min(size, num_parts)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_the_batch_size_is_that_of_the_first_tensor_with_dimensions() -> None:
    assert batch_size_of([torch.ones(()), X, torch.ones(7)]) == 3
    assert batch_size_of([torch.ones(())]) == 1
    assert batch_size_of([]) == 1


def test_only_tensors_with_a_batch_dimension_are_cut() -> None:
    scalar, other = torch.ones(()), torch.ones(5)
    assert [list(tensor.shape) for tensor in take([X, Y, scalar, other], 3, (1, 3))] == [[2, 2], [2], [], [5]]
    assert take([X, other], 3, (0, 3)) == (X, other), "the whole batch is not copied"


def test_a_flat_batch_is_a_plain_value() -> None:
    assert flatten((X, 1)) == Flat(
        (X,), ("0",), Structure("sequence", tuple, ("0", "1"), flatten((X, 1)).structure.children)
    )


@pytest.mark.parametrize("values", [[1, 2], [0.5], ["a", "b"], [True]], ids=str)
def test_a_list_of_plain_values_in_a_batch_is_refused_with_its_path(values: list[Any]) -> None:
    """It may have a value for each sample, and would go whole into every part, and be captured anew for every batch."""
    with pytest.raises(RunError, match=rf"the batch at a\.1\.y is a list of plain values, {len(values)} of"):
        flatten({"a": [X, {"y": values}]})
    assert flatten({"a": [X, {"y": tuple(values)}]}).tensors == (X,)
    assert flatten({"y": values}, "the model's output", refuse_lists=False).tensors == ()


def test_tensors_of_other_first_dimensions_are_listed() -> None:
    scalar = torch.ones(())
    note = note_on_sizes(flatten({"x": X, "s": scalar, "y": [torch.ones(7), X], "z": torch.ones(1)}))
    assert note.splitlines()[1:4] == ["  - 3: x, y.1", "  - 7: y.0", "  - 1: z"]
    assert "The samples are counted in the first tensor, x," in note
    assert note_on_sizes(flatten({"x": X, "s": scalar, "y": Y})) == ""
