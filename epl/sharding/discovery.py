"""Discovery: the options of an operator without a rule, found by running it on shards of random inputs.

A user's own operator has no rule, and none has to be written: what it allows shows when it is tried. A call gets a small
stand-in (:mod:`epl.sharding.stand_ins`), in float64 on the CPU, which is cut in every way (:mod:`epl.sharding.trials`).
What holds for it has to hold at the real sizes, too.

Why not read the operator's code: a kernel has none that says which dimensions it mixes. Not tried are operators that draw
random numbers, change their arguments, or do not run on a CPU in float64; they run whole, as every operator may.

What is found is kept in files, by the text of the stand-in, in ``~/.cache/epl/discovery`` (or in ``XDG_CACHE_HOME``). A
file also says what the stand-in gave, so that a user's operator whose code has changed is tried anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from epl.ir.graph import refs_in
from epl.ir.types import ListType, TensorType
from epl.sharding.options import Call, Option, is_possible
from epl.sharding.placements import Placement, Shard, parse_placement
from epl.sharding.stand_ins import StandIn, operator_of, shape_class, stand_ins
from epl.sharding.trials import fingerprint, holding, options_by_trial

__all__ = ["discover", "shape_class"]

_LARGEST = 1 << 24  # elements of a call that is tried at its real sizes
_FORMAT = 2  # of a cache file; a higher one makes all older files stale


def discover(call: Call) -> tuple[Option, ...]:
    """The ways to run a call on shards, without the whole one, that hold where they are tried.

    Args:
        call: A call of any operator; its results need not be tensors.

    Returns:
        The options; none for an operator that cannot be tried.
    """
    if not _can_be_tried(call):
        return ()
    folder = _folder()
    for stand_in in stand_ins(call):
        entry = _read(folder, stand_in)
        if entry is None:
            entry = _Entry(options_by_trial(stand_in))
            _write(folder, stand_in, entry)
        if entry.options is not None:
            return _proved(call, folder, [option for option in (_real(call, each) for each in entry.options) if option])
    return ()


def _proved(call: Call, folder: Path, options: list[Option]) -> tuple[Option, ...]:
    """Those that hold at the real sizes, too; none of a call that is too large to try."""
    stand_in = shape_class(call, keep=_LARGEST)
    if sum(prod(kind.sizes) for kind in stand_in.kinds) > _LARGEST or not options:
        return ()
    entry = _read(folder, stand_in)
    if entry is None or entry.options is None:
        entry = _Entry(holding(stand_in, options))
        _write(folder, stand_in, entry)
    return tuple(option for option in options if option in (entry.options or ()))


def _real(call: Call, option: Option) -> Option | None:
    """The option of the stand-in as one of the call, whose units may be longer; None if the call has no such option."""
    kinds = [kind for name in dict.fromkeys(name for name, _ in call.refs) for kind in call.types(name)]
    placed = list(zip((*kinds, *call.results), (*option.inputs, *option.outputs), strict=True))
    cuts = [(kind.sizes[place.dim], place) for kind, place in placed if isinstance(place, Shard)]
    count = next((size for size, place in cuts if place == Shard(place.dim)), 0)
    if any(place.unit > 1 and not 2 <= 2 * count <= size for size, place in cuts):
        return None

    def scaled(kind: TensorType, place: Placement) -> Placement:
        if not isinstance(place, Shard) or place.unit == 1:
            return place
        return replace(place, unit=kind.sizes[place.dim] // count)

    places = tuple(scaled(kind, place) for kind, place in placed)
    found = replace(option, inputs=places[: len(kinds)], outputs=places[len(kinds) :])
    fits = not option.sizes or call[option.sizes] == call.results[0].sizes
    return found if fits and is_possible(call, found) else None


def _can_be_tried(call: Call) -> bool:
    """A deterministic operator from tensors to tensors, all of them of known shapes."""
    if call.op.target.startswith(("python.", "function.")) or call.op.random is not None or not call.refs:
        return False
    if {ref for argument in call.arguments.values() for ref in refs_in(argument)} != {ref for _, ref in call.refs}:
        return False  # a number that is known at run time only
    operator = operator_of(call.op.target)
    schema, items = operator._schema, call.op.type.items if isinstance(call.op.type, ListType) else (call.op.type,)
    if operator.namespace == "aten" and schema.name.startswith("aten::_"):
        return False  # torch's inner operators may read beside their arguments if sizes do not fit
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return call.is_static and len(call.results) == len(items) > 0


class _Entry(NamedTuple):
    """What was found for a stand-in; None: it does not run."""

    options: tuple[Option, ...] | None


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "epl" / "discovery"


def _file(folder: Path, stand_in: StandIn) -> Path:
    return folder / f"{hashlib.sha256(str(stand_in).encode()).hexdigest()[:32]}.json"


def _heading(stand_in: StandIn) -> dict[str, Any]:
    """What a file must say to be of use."""
    gives = "" if stand_in.target.startswith("aten.") else fingerprint(stand_in)  # torch's own change with its version
    return {"format": _FORMAT, "torch": torch.__version__, "call": str(stand_in), "gives": gives}


def _read(folder: Path, stand_in: StandIn) -> _Entry | None:
    """What was found before; None if nothing was, or if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # whatever the file holds
        content = json.loads(_file(folder, stand_in).read_text())
        if content | _heading(stand_in) == content:
            options = content["options"]
            return _Entry(None if options is None else tuple(_parsed(option, stand_in) for option in options))
    return None


def _parsed(option: Mapping[str, Any], stand_in: StandIn) -> Option:
    inputs, outputs = (tuple(map(parse_placement, option[side])) for side in ("inputs", "outputs"))
    ranks = [len(each) for each in (*(kind.shape for kind in stand_in.kinds), *stand_in.results)]
    for place, rank in zip((*inputs, *outputs), ranks, strict=True):
        if isinstance(place, Shard) and place.dim >= rank:
            raise ValueError(f"{place} of {rank} dimensions")
    if len(inputs) != len(stand_in.kinds) or option["sizes"] not in ("", *dict(stand_in.arguments)):
        raise ValueError("options of another call")
    return Option(inputs, outputs, sizes=option["sizes"])


def _write(folder: Path, stand_in: StandIn, entry: _Entry) -> None:
    """Keep what was found; without a folder to write to, it will have to be found again."""
    options = None if entry.options is None else list(map(_written, entry.options))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # by a rename, so that ranks that look for the same see nothing or all of it
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            json.dump(_heading(stand_in) | {"options": options}, file, indent=1)
        os.replace(file.name, _file(folder, stand_in))


def _written(option: Option) -> dict[str, Any]:
    inputs, outputs = (list(map(str, side)) for side in (option.inputs, option.outputs))
    return {"inputs": inputs, "outputs": outputs, "sizes": option.sizes}
