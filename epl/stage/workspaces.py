"""What a kernel takes for itself while it runs: found by running it once.

Fake tensors show an operator's results and nothing of its insides. For most operators that is all there is; a convolution
of oneDNN copies its arguments into blocked layouts and its result out of one, which can be three times the result, and
which copies it makes hangs on the processor, the shape and the version [measured: Xeon, AVX-512, torch 2.13, 2026-11: a
1x1 convolution makes none, a 3x3 one copies argument, weight and result, with channels padded to 16]. So the call is made
once with zeros, under the profiler. From some samples on memory is linear in them: a few stand for many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.profiler import record_function

from epl.capture.allocations import Allocation, Span, memory_profile, read_profile
from epl.capture.ledger import Call, Like

__all__ = ["HUNGRY", "find_workspaces"]

# operator -> its arguments whose first dimension counts samples
_SAMPLES = {
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
    "aten.mse_loss.default": (0, 1),
    "aten.upsample_nearest2d.default": (0,),
    "aten.upsample_bilinear2d.default": (0,),
}
HUNGRY = frozenset({*_SAMPLES, "aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"})
_FEW = (4, 8)  # with fewer samples other kernels run, and what they take that does not grow counts [measured as above]
_PREFIX = "epl trial "


def find_workspaces(calls: Iterable[Call]) -> dict[Call, int]:
    """The most bytes that each call has at once beyond its arguments: its results and its workspace.

    Calls on other devices than this process's CPU are not tried: 0 bytes.
    """
    found = dict.fromkeys(calls, 0)
    trials: dict[Call, tuple[tuple[int, Call], ...]] = {call: _trials(call) for call in found if _is_here(call)}
    peaks = _peaks(list(dict.fromkeys(trial for few in trials.values() for _, trial in few)))
    for call, few in trials.items():
        found[call] = _extrapolated(_num_samples(call), {size: peaks[trial] for size, trial in few})
    return found


def _is_here(call: Call) -> bool:
    return all(value.device.type == "cpu" for value in call.args if isinstance(value, Like))


def _num_samples(call: Call) -> int:
    places = _SAMPLES.get(str(call.operator))
    return call.args[places[0]].shape[0] if places else 0


def _trials(call: Call) -> tuple[tuple[int, Call], ...]:
    """(number of samples, the call with so many)."""
    size = _num_samples(call)
    if size <= max(_FEW):
        return ((size, call),)
    places = _SAMPLES[str(call.operator)]
    return tuple(
        (few, call._replace(args=tuple(_cut(a, few) if i in places else a for i, a in enumerate(call.args))))
        for few in _FEW
    )


def _cut(like: Like, num_samples: int) -> Like:
    return like._replace(shape=(num_samples, *like.shape[1:]))


def _extrapolated(size: int, peaks: Mapping[int, int]) -> int:
    if len(peaks) == 1:
        return next(iter(peaks.values()))
    (few, first), (more, second) = sorted(peaks.items())
    return first + (second - first) * (size - few) // (more - few)


def _peaks(calls: list[Call]) -> dict[Call, int]:
    """The most memory at once of each call."""
    if not calls:
        return {}
    with memory_profile() as profiled, torch.no_grad():
        for number, call in enumerate(calls):
            args = [_made(value) for value in call.args]
            kwargs = {key: _made(value) for key, value in call.kwargs}
            with record_function(f"{_PREFIX}{number}"):
                call.operator(*args, **kwargs)
    allocations, spans = read_profile(profiled, _PREFIX)
    return {calls[int(span.name)]: _peak(allocations, span) for span in spans}


def _peak(allocations: list[Allocation], span: Span) -> int:
    live = peak = 0
    for allocation in allocations:
        if span.start_ns <= allocation.time_ns <= span.end_ns:
            live += allocation.size_bytes
            peak = max(peak, live)
    return peak


def _made(value: Any) -> Any:
    if isinstance(value, Like):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype).zero_()
    return list(value) if isinstance(value, tuple) else value
