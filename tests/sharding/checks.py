"""The whole call against the same call on shards, forward and backward, by the law of placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from epl.sharding.forms import FORMS, PLACED, Cut
from epl.sharding.options import Option, gradient_expected, gradient_handed_back
from epl.sharding.placements import Partial, Placement, Replicated, Shard, join_shards, local_shape, take_shard
from tests.sharding.samples import Sample
from tests.sharding.threads import SEED, ThreadRank, run_in_turn, run_ranks


class Run(NamedTuple):
    """Results, gradients of the arguments, and the arguments as they are afterwards."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor]
    arguments: list[torch.Tensor]


def check(sample: Sample, option: Option, size: int) -> bool:
    """Compare the parts of some ranks with the whole; False if there are fewer units than ranks."""
    cut = cut_of(sample, option)
    placed = zip((*cut.input_shapes, *cut.output_shapes), (*cut.inputs, *cut.outputs), strict=True)
    units = [place.num_units(shape[place.dim]) for shape, place in placed if isinstance(place, Shard)]
    if any(not count or count < size for count in units):
        return False
    changed = [name in sample.written for name, _ in sample.call.refs]
    upstream = [torch.rand(shape, dtype=torch.float64) for shape in cut.output_shapes]
    torch.manual_seed(SEED)
    whole = _run(lambda given: sample.operator(**sample.arguments(given)), sample.tensors, changed, upstream)
    parts = [_parts(tensor, place, size) for tensor, place in zip(sample.tensors, option.inputs, strict=True)]

    def work(ranks: ThreadRank) -> Run:
        mine = [part[ranks.rank] for part in parts]
        down = [
            take_shard(each, gradient_expected(place), size, ranks.rank)
            for each, place in zip(upstream, option.outputs, strict=True)
        ]
        return _run(partial(_local, sample, option, cut, ranks), mine, changed, down)

    runs = run_ranks(size, work) if option.form else run_in_turn(size, work)
    _compare(sample, option, whole, runs)
    return True


def _run(
    operator: Callable[[list[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    changed: Sequence[bool],
    upstream: Sequence[torch.Tensor],
) -> Run:
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    given = [leaf.clone() if change else leaf for leaf, change in zip(leaves, changed, strict=True)]
    made = operator(given)
    results = list(made) if isinstance(made, (list, tuple)) else [made]
    ends = [(result, up.to(result.dtype)) for result, up in zip(results, upstream, strict=True) if result.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = [None] * len(wanted)
    if ends and wanted:
        found = torch.autograd.grad([end for end, _ in ends], wanted, [up for _, up in ends], allow_unused=True)
    gradients = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(wanted, found, strict=True)]
    return Run([result.detach() for result in results], gradients, [tensor.detach() for tensor in given])


def _local(sample: Sample, option: Option, cut: Cut, ranks: ThreadRank, given: list[torch.Tensor]) -> Any:
    arguments = sample.arguments(given)
    if option.sizes:
        arguments[option.sizes] = local_shape(cut.output_shapes[0], option.outputs[0], ranks.size, ranks.rank)
    if option.form:
        return FORMS[option.form](ranks, cut, **{**sample.call.arguments, **arguments})
    return sample.operator(**arguments)


def call_on_shards(sample: Sample, option: Option, ranks: ThreadRank) -> Any:
    """The sample's call on one rank's parts, with nothing compared."""
    tensors = zip(sample.tensors, option.inputs, strict=True)
    given = [take_shard(tensor, place, ranks.size, ranks.rank) for tensor, place in tensors]
    given = [part.clone() for part in given] if sample.written else given
    return _local(sample, option, cut_of(sample, option), ranks, given)


def cut_of(sample: Sample, option: Option) -> Cut:
    """How a form sees the option."""
    shapes = tuple(tuple(tensor.shape) for tensor in sample.tensors)
    made = sample.call.results
    sizes, dtypes = tuple(_sized(kind.shape) for kind in made), tuple(kind.dtype for kind in made)
    return Cut(option.inputs, option.outputs, shapes, sizes, dtypes)


def _parts(tensor: torch.Tensor, place: Placement, size: int) -> list[torch.Tensor]:
    """What ranks hold; summands are any that add up."""
    if not isinstance(place, Partial):
        return [take_shard(tensor, place, size, rank) for rank in range(size)]
    largest = 1 if tensor.is_floating_point() else 9
    others = [(torch.rand_like(tensor.detach().double()) * largest).to(tensor.dtype) for _ in range(size - 1)]
    first = tensor.detach() - sum(others)
    return [part.requires_grad_(tensor.requires_grad) for part in (first, *others)]


def _compare(sample: Sample, option: Option, whole: Run, runs: list[Run]) -> None:
    tolerance = _tolerance(sample)
    for place, expected in enumerate(whole.results):
        found = [run.results[place] for run in runs]
        if "empty" in sample.target:  # holds anything
            expected, found = torch.zeros_like(expected), [torch.zeros_like(part) for part in found]
        _joined(found, option.outputs[place], expected, tolerance, f"result {place}")
    needing = [place for place, tensor in enumerate(sample.tensors) if tensor.requires_grad]
    for nth, place in enumerate(needing):
        law = gradient_handed_back(option, place)
        found = [run.gradients[nth] for run in runs]
        _joined(found, law, whole.gradients[nth], tolerance, f"gradient of argument {place}")
    for place, expected in enumerate(whole.arguments):
        found = [run.arguments[place] for run in runs]
        _joined(found, option.inputs[place], expected, tolerance, f"argument {place} afterwards")


def _tolerance(sample: Sample) -> float:
    """Summands of numbers that are rounded to float32, in or out, add up to what is as exact as those."""
    dtypes = {kind.dtype for kind in (*sample.tensors, *sample.call.results)}
    return 1e-9 if dtypes.isdisjoint({torch.float32, torch.bfloat16}) else 1e-4


def _joined(parts: list[torch.Tensor], place: Placement, expected: torch.Tensor, tolerance: float, what: str) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "msg": lambda text: f"{what} ({place}): {text}", "equal_nan": True}
    torch.testing.assert_close(join_shards(parts, place), expected, **close)
    if isinstance(place, Replicated):
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], **close)


def variants(option: Option) -> Iterator[Option]:
    """The option with its own units, with larger ones, and with more stretches: relative is what an option says."""
    yield option
    yield _scaled(option, 2, 1)
    if option.form not in PLACED:
        yield _scaled(option, 1, 2)


def _scaled(option: Option, units: int, repeats: int) -> Option:
    def change(place: Placement) -> Placement:
        return Shard(place.dim, place.unit * units, place.repeats * repeats) if isinstance(place, Shard) else place

    return replace(option, inputs=tuple(map(change, option.inputs)), outputs=tuple(map(change, option.outputs)))


def _sized(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(size or 0 for size in shape)
