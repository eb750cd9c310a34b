"""Convolution, pooling and resizing: samples and channels. Places in an image stay together: windows overlap."""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import PARTIAL, Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import linear_in, passed_on, table

__all__ = ["RULES"]


def convolution(call: Call) -> Iterator[Option]:
    """Samples; output channels; input channels, with summands; groups of both."""
    transposed = "transpose" in call.op.target or bool(call["transposed"])
    groups = call["groups"]
    channel = call.rank("input") - call.rank("weight") + 1  # 0 without samples
    if channel == 1:
        yield call.option({"input": Shard(0)}, Shard(0))
    if groups == 1:
        outputs, inputs = (1, 0) if transposed else (0, 1)
        yield call.option({"weight": Shard(outputs), "bias": Shard(0)}, Shard(channel))
        yield call.option({"input": Shard(channel), "weight": Shard(inputs), "bias": PARTIAL}, PARTIAL)
    else:
        yield _groups(call, channel, groups)
    for name in ("input", "weight"):
        yield call.option({name: PARTIAL, "bias": PARTIAL}, PARTIAL)


def _groups(call: Call, channel: int, groups: int) -> Option:
    inputs = Shard(channel, call.shape("input")[channel] // groups)
    weights = Shard(0, call.shape("weight")[0] // groups)
    made = (call.results[0].shape[channel] or 0) // groups
    used = {"input": inputs, "weight": weights, "bias": Shard(0, made)}
    return call.option(used, Shard(channel, made), form=f"groups.{call.op.target}")


def _windows(num_dims: int, *, of: str = "self", linear: bool = False) -> Rule:
    """Samples and channels of what works on the last dimensions."""

    def rule(call: Call) -> Iterator[Option]:
        yield from passed_on(call, {dim: dim for dim in range(call.rank(of) - num_dims)}, of=of)
        if linear:
            yield from linear_in(call, of)

    return rule


def shuffle(call: Call) -> Iterator[Option]:
    """``pixel_shuffle``: the channels that become one channel's places are a unit."""
    channel = call.rank("self") - 3
    yield from passed_on(call, {dim: dim for dim in range(channel)})
    yield call.option({"self": Shard(channel, call["upscale_factor"] ** 2)}, Shard(channel))
    yield from linear_in(call, "self")


def unshuffle(call: Call) -> Iterator[Option]:
    """``pixel_unshuffle``, the reverse."""
    channel = call.rank("self") - 3
    yield from passed_on(call, {dim: dim for dim in range(channel)})
    yield call.option({"self": Shard(channel)}, Shard(channel, call["downscale_factor"] ** 2))
    yield from linear_in(call, "self")


def columns(call: Call) -> Iterator[Option]:
    """``im2col`` and ``col2im``: the places of a window stand beside each other as channels."""
    window = call["kernel_size"][0] * call["kernel_size"][1]
    takes_apart = "im2col" in call.op.target
    if call.rank("self") == (4 if takes_apart else 3):
        yield call.option({"self": Shard(0)}, Shard(0))
        image, rows = Shard(1), Shard(1, window)
        yield call.option({"self": image if takes_apart else rows}, rows if takes_apart else image)
    yield from linear_in(call, "self")


def sampling(call: Call) -> Iterator[Option]:
    """``grid_sampler``: samples, each with its grid, or channels."""
    yield call.option({"input": Shard(0), "grid": Shard(0)}, Shard(0))
    yield call.option({"input": Shard(1)}, Shard(1))
    yield call.option({"input": PARTIAL}, PARTIAL)


RULES: dict[str, Rule] = {
    **table(
        convolution,
        """conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution""",
    ),
    **table(_windows(1), "max_pool1d"),
    **table(_windows(2), "max_pool2d max_pool2d_with_indices adaptive_max_pool2d"),
    **table(_windows(3), "max_pool3d"),
    **table(_windows(1, linear=True), "avg_pool1d adaptive_avg_pool1d"),
    **table(_windows(2, linear=True), "avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d upsample_nearest2d"),
    **table(_windows(2, linear=True), "upsample_bilinear2d"),
    **table(_windows(3, linear=True), "avg_pool3d adaptive_avg_pool3d"),
    **table(_windows(1, of="input", linear=True), "upsample_nearest1d.vec upsample_linear1d.vec"),
    **table(
        _windows(2, of="input", linear=True),
        "upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec",
    ),
    **table(_windows(2, of="input", linear=True), "_upsample_nearest_exact2d.vec"),
    **table(_windows(3, of="input", linear=True), "upsample_nearest3d.vec upsample_trilinear3d.vec"),
    **table(shuffle, "pixel_shuffle"),
    **table(unshuffle, "pixel_unshuffle"),
    **table(columns, "im2col col2im"),
    **table(sampling, "grid_sampler"),
    **table(_windows(3, linear=True), "channel_shuffle"),
}
