"""Trials: an operator run on shards of random numbers, and what they make compared with what the whole makes.

Arguments are cut in all combinations, also in units and in stretches where one's size is a multiple of another's, and for
each the placements of the results are read off: cut where the parts put together are the whole, summands where their sum
is. Gradients are compared by the law of :mod:`epl.sharding.options`. What holds for 2, for 3, and for a number of
ranks that does not divide, on several draws, is an option.

Source: the combinations are those of easydist (Alibaba, 2023: ShardCombine), with the gradients compared as well.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product, zip_longest
from typing import NamedTuple

import torch

from epl.ir.graph import Argument
from epl.ir.types import TensorType
from epl.sharding.options import PARTIAL, WHOLE, Option, gradient_expected, gradient_handed_back
from epl.sharding.placements import Partial, Placement, Replicated, Shard, join_shards, local_shape, take_shard
from epl.sharding.stand_ins import StandIn, operator_of

__all__ = ["fingerprint", "holding", "options_by_trial"]

_MAX_TRIALS = 2000
_MAX_TENSORS = 4  # arguments that are cut in all combinations; more are cut alike
_NUM_RANKS = (2, 3)
_TOLERANCE = 1e-9  # relative, of float64
_SEED = 20


class _Run(NamedTuple):
    """What comes of one call: results, and gradients of the arguments that may have one."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


class _Draw(NamedTuple):
    """Random arguments, random gradients of the results, and what the whole call makes of them."""

    tensors: list[torch.Tensor]
    takes_grad: list[bool]
    upstream: list[torch.Tensor]
    whole: _Run


def options_by_trial(stand_in: StandIn) -> tuple[Option, ...] | None:
    """The options that hold for a stand-in; None if it does not run."""
    with _undisturbed():
        draws = _draws(stand_in)
        if not draws:
            return None
        proposals = (
            option
            for inputs in _combinations(stand_in, draws[0])[:_MAX_TRIALS]
            for option in _proposals(stand_in, draws[0], inputs)
        )
        return tuple(option for option in dict.fromkeys(proposals) if _is_option(stand_in, draws, option))


def holding(stand_in: StandIn, options: Sequence[Option]) -> tuple[Option, ...]:
    """Those options that hold for a stand-in of the real sizes, where an operator may work in blocks, say."""
    with _undisturbed():
        draws = _draws(stand_in, _WAYS[:2])
        return tuple(option for option in options if _is_option(stand_in, draws, option)) if draws else ()


def fingerprint(stand_in: StandIn) -> str:
    """A number for what a stand-in gives, and its gradients, to six digits: after a change of code it is another one."""
    smallest = min((size for kind in stand_in.kinds for size in kind.sizes if size > 1), default=2)
    generator = torch.Generator().manual_seed(_SEED)
    with _undisturbed():
        tries = (_draw(stand_in, generator, way) for way in _WAYS[0].easier(smallest))
        draw = next((draw for draw in tries if draw is not None), None)
    if draw is None:
        return ""
    tensors = [*draw.whole.results, *(gradient for gradient in draw.whole.gradients if gradient is not None)]
    digits = " ".join(f"{value:.5e}" for tensor in tensors for value in tensor.flatten().tolist())
    return hashlib.sha256(digits.encode()).hexdigest()[:16]


def _is_option(stand_in: StandIn, draws: Sequence[_Draw], option: Option) -> bool:
    """True if it holds for every draw, on 2 and 3 ranks, and where one rank has a unit more than another."""
    count = _num_units(draws[0].tensors, option.inputs)
    # parts of m and of m + 1: not both are whole blocks, of whatever size, that the operator would keep together
    uneven = next(size for size in range(2, count + 2) if count % size) if count else 2
    sizes = dict.fromkeys((*_NUM_RANKS, uneven))
    return all(_holds(stand_in, draw, option, size) for size in sizes for draw in draws)


def _num_units(tensors: Sequence[torch.Tensor], inputs: Sequence[Placement]) -> int:
    """In how many units the arguments are cut; 0 if none is."""
    placed = zip(tensors, inputs, strict=True)
    counts = (place.num_units(tensor.shape[place.dim]) for tensor, place in placed if isinstance(place, Shard))
    return next(counts, 0) or 0


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on, the random numbers of the program as they were, and no warnings of calls that nobody wrote."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def _draws(stand_in: StandIn, ways: Sequence[_Way] = ()) -> list[_Draw]:
    """Draws on which the call runs, gives the same when it is run again, and gives numbers; none if one is missing.

    Draws of other magnitudes, and of signs alone, may be missing: they are for thresholds and targets. Where truth values
    or whole numbers are mixed, by ``any`` or ``max``, parts often agree by chance: there are more draws.
    """
    smallest = min((size for kind in stand_in.kinds for size in kind.sizes if size > 1), default=2)
    is_real = all(kind.is_differentiable for kind in stand_in.kinds)
    ways = ways or (_WAYS if is_real else _WAYS_WITH_INTEGERS)
    generator = torch.Generator().manual_seed(_SEED)
    draws = []
    for way in ways:
        tries = (_draw(stand_in, generator, each) for each in way.easier(smallest))
        draws.append(next((draw for draw in tries if draw is not None), None))
    more = (_draw(stand_in, generator, way) for way in _MORE_WAYS)
    found = [draw for draw in (*draws, *more) if draw is not None]
    return found if None not in draws and _tell_something(found) else []


def _tell_something(draws: Sequence[_Draw]) -> bool:
    """Not all results are zeros, nor all gradients of an argument: where they are, every cut seems to hold."""
    results = any(bool(result.any()) for draw in draws for result in draw.whole.results)
    gradients = zip(*(draw.whole.gradients for draw in draws), strict=True)
    return results and all(any(gradient is None or bool(gradient.any()) for gradient in of_one) for of_one in gradients)


class _Way(NamedTuple):
    """How numbers are drawn.

    Args:
        centre: Real numbers are around it; None: between 0 and 1.
        high: Whole numbers are below it.
        share: How many truth values are true, and how many whole numbers may be other than 0.
        scale: What real numbers are multiplied by.
        is_sign: Real numbers are 1 and -1.
    """

    centre: float | None
    high: int
    share: float
    scale: float = 1.0
    is_sign: bool = False

    def easier(self, smallest: int) -> Iterator[_Way]:
        """This way, and others that more operators allow; no whole number is larger than all sizes."""
        for centre in dict.fromkeys((self.centre, None, 5.0)):
            yield from (_Way(centre, high, self.share) for high in dict.fromkeys((min(self.high, smallest), 2)))


_ANY = 1 << 30
_WAYS = (_Way(None, _ANY, 0.5), _Way(0.0, 2, 0.5), _Way(-1.5, 2, 0.5), _Way(1.5, 2, 0.5))
_MORE_WAYS = (_Way(0.0, 2, 0.5, 1e-3), _Way(0.0, 2, 0.5, 1e3), _Way(0.0, 2, 0.5, is_sign=True))
_WAYS_WITH_INTEGERS = (*_WAYS, *(_Way(0.0, high, share) for high in (2, _ANY) for share in (0.1, 0.2, 0.5, 0.8, 0.9)))


def _draw(stand_in: StandIn, generator: torch.Generator, way: _Way) -> _Draw | None:
    tensors = [_random(kind, generator, way) for kind in stand_in.kinds]
    given = [tensor.clone() for tensor in tensors]
    try:
        results = stand_in.run(given)
        upstream = [torch.rand(each.shape, generator=generator, dtype=torch.float64) + 0.1 for each in results]
        takes_grad = _takes_grad(stand_in, tensors)
        whole, again = (_run(stand_in, tensors, takes_grad, upstream) for _ in range(2))
    except Exception:  # whatever an operator raises of arguments that it is not made for
        return None
    is_sound = (
        _fits(stand_in, results)
        and all(map(torch.equal, given, tensors))
        and not _shares_unsaid(stand_in, given, results)
        and _same(results, whole.results)
        and _same(again.results, whole.results)
        and not any(result.numel() == 0 or result.isnan().any() for result in whole.results)  # these say nothing
        and all(gradient is None or bool(gradient.isfinite().all()) for gradient in whole.gradients)
    )
    return _Draw(tensors, takes_grad, upstream, whole) if is_sound else None


def _random(kind: TensorType, generator: torch.Generator, way: _Way) -> torch.Tensor:
    shape = kind.sizes
    if not kind.is_differentiable:
        is_set = torch.rand(shape, generator=generator) < way.share
        number = 1 if kind.dtype == torch.bool else torch.randint(way.high, shape, generator=generator)
        return (is_set * number).to(kind.dtype)
    if way.is_sign:
        return (torch.randint(2, shape, generator=generator) * 2 - 1).to(kind.dtype)
    if way.centre is not None:
        return (torch.randn(shape, generator=generator, dtype=kind.dtype) + way.centre) * way.scale
    return torch.rand(shape, generator=generator, dtype=kind.dtype) * 0.9 + 0.05


def _fits(stand_in: StandIn, results: list[torch.Tensor]) -> bool:
    """The results are of the shapes that a call of this class has."""
    return len(results) == len(stand_in.results) and all(
        isinstance(result, torch.Tensor)
        and result.dim() == len(shape)
        and all(size in (None, own) for size, own in zip(shape, result.shape, strict=True))
        for result, shape in zip(results, stand_in.results, strict=True)
    )


def _shares_unsaid(stand_in: StandIn, given: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """True if a result lies in an argument's memory though the schema does not say so."""
    if any(each.alias_info is not None for each in operator_of(stand_in.target)._schema.returns):
        return False
    memory = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}
    return any(result.untyped_storage().data_ptr() in memory for result in results)


def _takes_grad(stand_in: StandIn, tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which arguments have a gradient. Where autograd refuses it, forward, no program has one either."""

    def takes(place: int) -> bool:
        given = [tensor.clone().requires_grad_(nth == place) for nth, tensor in enumerate(tensors)]
        with suppress(RuntimeError):
            return bool(stand_in.run(given))
        return False

    return [stand_in.grad and kind.is_differentiable and takes(place) for place, kind in enumerate(stand_in.kinds)]


def _run(
    stand_in: StandIn,
    tensors: Sequence[torch.Tensor],
    takes_grad: Sequence[bool],
    upstream: Sequence[torch.Tensor],
    changed: Mapping[str, Argument] | None = None,
) -> _Run:
    """The call, forward and backward."""
    leaves = [
        tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(takes)
        for tensor, takes in zip(tensors, takes_grad, strict=True)
    ]
    results = stand_in.run(leaves, changed)
    ends = [(result, up.to(result.dtype)) for result, up in zip(results, upstream, strict=True) if result.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    made: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if ends and wanted:
        made = torch.autograd.grad([end for end, _ in ends], wanted, [up for _, up in ends], allow_unused=True)
    left = iter(made)
    gradients = [_filled(next(left), leaf) if leaf.requires_grad else None for leaf in leaves]
    return _Run([result.detach() for result in results], gradients)


def _filled(gradient: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _combinations(stand_in: StandIn, draw: _Draw) -> list[tuple[Placement, ...]]:
    """What the arguments may be used as, simple combinations first; all that is cut has the same number of units."""
    shapes = [kind.sizes for kind in stand_in.kinds]
    sums: list[list[Placement]] = [[PARTIAL] * kind.is_differentiable for kind in stand_in.kinds]
    found: dict[tuple[Placement, ...], None] = {tuple(PARTIAL if add else WHOLE for add in sums): None}
    counts = {size for shape in (*shapes, *(each.shape for each in draw.whole.results)) for size in shape}
    for count in sorted(count for count in counts if count >= max(_NUM_RANKS)):
        cuts = [list(_cuts(shape, count)) for shape in shapes]
        if len(cuts) <= _MAX_TENSORS:
            found.update(dict.fromkeys(product(*([WHOLE, *cut, *add] for cut, add in zip(cuts, sums, strict=True)))))
        else:
            found.update(dict.fromkeys(zip_longest(*cuts, fillvalue=WHOLE)))
            found[tuple(cut[-1] if cut else WHOLE for cut in cuts)] = None
    if len(sums) <= _MAX_TENSORS:
        found.update(dict.fromkeys(product(*([WHOLE, *add] for add in sums))))
    return sorted((each for each in found if any(place != WHOLE for place in each)), key=_effort)


def _cuts(shape: Sequence[int], count: int) -> Iterator[Shard]:
    """The ways to cut a shape in this many units: element by element, in longer ones, or in each of several stretches."""
    for dim, size in enumerate(shape):
        if size == count:
            yield Shard(dim)
        elif size > count and size % count == 0:
            yield from (Shard(dim, unit=size // count), Shard(dim, repeats=size // count))


def _is_plain(place: Placement) -> bool:
    return isinstance(place, Shard) and place == Shard(place.dim)


def _effort(inputs: tuple[Placement, ...]) -> tuple[int, int, int]:
    num_cut = sum(isinstance(place, Shard) for place in inputs)
    num_sums = sum(isinstance(place, Partial) for place in inputs)
    return num_cut - sum(map(_is_plain, inputs)), (num_sums if num_cut else 0), num_cut + num_sums


def _proposals(stand_in: StandIn, draw: _Draw, inputs: tuple[Placement, ...]) -> Iterator[Option]:
    """Options with results that fit, forward on two ranks."""
    count = _num_units(draw.tensors, inputs)
    parts = [_parts(tensor, place, 2) for tensor, place in zip(draw.tensors, inputs, strict=True)]
    for sizes, asked in _asked(stand_in, draw, count):
        changed = [_with_sizes(sizes, asked, draw, 2, rank) for rank in range(2)]
        try:
            with torch.no_grad():
                made = [stand_in.run([part[rank].contiguous() for part in parts], changed[rank]) for rank in range(2)]
        except Exception:
            continue  # not a way to call it
        if {len(results) for results in made} != {len(draw.whole.results)}:
            continue
        by_result = zip(*made, draw.whole.results, strict=True)
        for outputs in product(*(_fitting(list(results), whole, count) for *results, whole in by_result)):
            is_cut = not count or any(map(_is_plain, (*inputs, *outputs)))  # or else a larger unit of a finer cut
            if is_cut and any(place != WHOLE for place in outputs) and asked in (None, *outputs):
                yield Option(inputs, outputs, sizes=sizes)


def _asked(stand_in: StandIn, draw: _Draw, count: int) -> Iterator[tuple[str, Shard | None]]:
    """The call as it is; then with the shape of a part, where an argument holds the shape of the only result."""
    yield "", None
    shape = tuple(draw.whole.results[0].shape)
    for name, argument in stand_in.arguments:
        if shape and count and argument == shape and len(stand_in.results) == 1:
            yield from ((name, place) for place in _cuts(shape, count))


def _with_sizes(name: str, place: Placement | None, draw: _Draw, num_ranks: int, rank: int) -> dict[str, Argument]:
    return {name: local_shape(draw.whole.results[0].shape, place, num_ranks, rank)} if name and place else {}


def _fitting(parts: list[torch.Tensor], whole: torch.Tensor, count: int) -> list[Placement]:
    """As what a result may come out, given what the ranks made of it; parts rather than sums rather than the whole."""
    cuts = _cuts(whole.shape, count) if count else ()
    fitting: list[Placement] = [place for place in cuts if _joins(parts, place, whole)]
    others: list[Placement] = [PARTIAL, WHOLE]
    return fitting or [place for place in others if _joins(parts, place, whole)][:1]


def _holds(stand_in: StandIn, draw: _Draw, option: Option, num_ranks: int) -> bool:
    """True if the ranks together make the results and the gradients of the whole call."""
    parts = [_parts(tensor, place, num_ranks) for tensor, place in zip(draw.tensors, option.inputs, strict=True)]
    runs = []
    for rank in range(num_ranks):
        laws = zip(draw.upstream, map(gradient_expected, option.outputs), strict=True)
        upstream = [take_shard(gradient, law, num_ranks, rank) for gradient, law in laws]
        changed = _with_sizes(option.sizes, option.outputs[0], draw, num_ranks, rank)
        try:
            runs.append(_run(stand_in, [part[rank] for part in parts], draw.takes_grad, upstream, changed))
        except Exception:
            return False
    return all(
        _joins([run.results[nth] for run in runs], option.outputs[nth], whole)
        for nth, whole in enumerate(draw.whole.results)
    ) and all(
        _joins([_given(run.gradients[nth]) for run in runs], gradient_handed_back(option, nth), whole)
        for nth, whole in enumerate(draw.whole.gradients)
        if whole is not None
    )


def _given(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, "ranks have gradients where the whole call has them"
    return gradient


def _parts(tensor: torch.Tensor, place: Placement, num_ranks: int) -> list[torch.Tensor]:
    """What the ranks hold of an argument; summands are any that add up."""
    if not isinstance(place, Partial):
        return [take_shard(tensor, place, num_ranks, rank) for rank in range(num_ranks)]
    generator = torch.Generator().manual_seed(_SEED + 2)
    others = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(num_ranks - 1)]
    return [tensor - torch.stack(others).sum(0), *others]


def _joins(parts: list[torch.Tensor], place: Placement, whole: torch.Tensor) -> bool:
    """True if the parts are of the shapes that they should have, and together the whole."""
    shapes = [local_shape(whole.shape, place, len(parts), rank) for rank in range(len(parts))]
    if any(part.dtype != whole.dtype or tuple(part.shape) != shape for part, shape in zip(parts, shapes, strict=True)):
        return False
    if isinstance(place, Replicated):
        return all(_same([part], [whole]) for part in parts)
    # summands of truth values, or of infinities, do not say what their sum is
    if isinstance(place, Partial) and (whole.dtype.itemsize == 1 or not whole.isfinite().all()):
        return False
    return _same([join_shards(parts, place)], [whole])


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(_is_close(one, other) for one, other in zip(found, expected, strict=True))


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(found, expected)
    # relative to the largest: differences of equal numbers are zeros only nearly
    scale = expected.detach().abs().nan_to_num(0.0, 0.0).max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * max(scale, 1e-3))
