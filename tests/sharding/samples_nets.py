"""Calls of what networks are made of: attention, normalisation, convolution, losses, random and new tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.sharding.samples import Sample, case, const, real, truth, whole

NONE, MEAN, SUM = 0, 1, 2


def samples() -> Iterator[Sample]:
    yield from _attention()
    yield from _norms()
    yield from _convolutions()
    yield from _windows()
    yield from _recurrent()
    yield from _element_losses()
    yield from _class_losses()
    yield from _new()
    yield from _random()


def _attention() -> Iterator[Sample]:
    name = "scaled_dot_product_attention"
    query, key, value = real(2, 6, 5, 4), real(2, 6, 7, 4), real(2, 6, 7, 4)
    for dropout in (0.0, 0.3):
        yield case(name, query, key, value, None, dropout)
        yield case(name, query, query, query, None, dropout, True)
        yield case(name, query, key, value, truth(2, 1, 5, 7), dropout, scale=0.7)
        yield case(name, query, key, value, real(6, 5, 7), dropout)
        yield case(name, query, real(2, 3, 7, 4), real(2, 3, 7, 4), None, dropout, enable_gqa=True)
        yield case(name, query, real(2, 3, 7, 4), real(2, 3, 7, 4), const(2, 6, 1, 7), dropout, enable_gqa=True)
        yield case(name, query, real(2, 1, 7, 4), real(2, 1, 7, 4), None, dropout, enable_gqa=True)
        yield case(name, real(5, 6, 4), real(5, 7, 4), real(5, 7, 4), const(6, 7), dropout)


def _norms() -> Iterator[Sample]:
    yield case("layer_norm", real(5, 3, 4), [4], real(4), real(4))
    yield case("layer_norm", real(5, 3, 4), [3, 4])
    yield case("rms_norm", real(5, 3, 4), [4], real(4), 1e-6)
    yield case("rms_norm", real(5, 4), [4])
    for training in (True, False):
        yield case("batch_norm", real(5, 4, 3), real(4), real(4), const(4), const(4), training, 0.1, 1e-5, False)
        yield case("batch_norm", real(5, 7), None, None, const(7), const(7), training, 0.3, 1e-5, False)
    yield case("batch_norm", real(5, 3, 2, 4), real(3), real(3), None, None, True, 0.1, 1e-5, False)
    yield case("group_norm", real(5, 12, 3), 4, real(12), real(12))
    yield case("group_norm", real(5, 6, 3, 2), 3)
    yield case("instance_norm", real(5, 4, 3), real(4), real(4), None, None, True, 0.1, 1e-5, False)
    yield case("instance_norm", real(5, 4, 3), real(4), real(4), const(4), const(4), True, 0.1, 1e-5, False)
    yield case("instance_norm", real(5, 4, 3), None, None, const(4), const(4), False, 0.1, 1e-5, False)
    for dim in (0, 1, 2):
        yield case(
            "_weight_norm", real(5, 4, 6), real(*(size if i == dim else 1 for i, size in enumerate((5, 4, 6)))), dim
        )
    yield case("_weight_norm", real(5, 7), real(), -1)
    yield case("_weight_norm", real(5, 7), real(1, 7), -1)
    for name in ("softmax", "log_softmax"):
        yield case(f"{name}.int", real(5, 7), -1)
        yield case(f"{name}.int", real(5, 4, 7), 1, torch.float64)
        yield case(f"_{name}", real(5, 7), 1, False)


def _convolutions() -> Iterator[Sample]:
    yield case("conv1d", real(5, 4, 9), real(6, 4, 3), real(6), [2], [1])
    yield case("conv1d.padding", real(5, 4, 9), real(6, 4, 3), real(6), [1], "same")
    yield case("conv2d", real(5, 4, 6, 5), real(7, 4, 3, 3), real(7))
    yield case("conv2d", real(5, 6, 6, 5), real(12, 2, 3, 3), real(12), groups=3)
    yield case("conv2d", real(5, 6, 6, 5), real(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 6)
    yield case("conv2d", real(4, 6, 5), real(7, 4, 3, 3), real(7))
    yield case("conv2d.padding", real(5, 4, 6, 5), real(7, 4, 3, 3), None)
    yield case("conv3d", real(3, 4, 4, 3, 5), real(5, 4, 2, 2, 2), real(5))
    yield case("conv3d.padding", real(3, 4, 4, 3, 5), real(5, 4, 2, 2, 2), real(5))
    yield case("conv_transpose1d", real(5, 4, 7), real(4, 6, 3), real(6), [2])
    yield case("conv_transpose2d.input", real(5, 6, 4, 3), real(6, 2, 3, 3), real(6), groups=3)
    yield case("conv_transpose2d.input", real(5, 4, 4, 3), real(4, 3, 3, 3), real(3))
    yield case("conv_transpose3d.input", real(3, 4, 2, 3, 2), real(4, 5, 2, 2, 2))
    yield from _grouped_convolutions()
    more = [1, 1], [0, 0], [1, 1]
    yield case("convolution", real(5, 4, 6, 5), real(7, 4, 3, 3), real(7), *more, False, [0, 0], 1)
    yield case("convolution", real(5, 4, 6, 5), real(4, 7, 3, 3), real(7), *more, True, [0, 0], 1)


def _grouped_convolutions() -> Iterator[Sample]:
    for ending in ("", ".padding"):
        yield case(f"conv1d{ending}", real(5, 6, 9), real(12, 2, 3), real(12), groups=3)
        yield case(f"conv2d{ending}", real(5, 6, 6, 5), real(3, 2, 3, 3), None, groups=3)
        yield case(f"conv3d{ending}", real(3, 6, 4, 3, 5), real(6, 2, 2, 2, 2), real(6), groups=3)
    yield case("conv_transpose1d", real(5, 6, 7), real(6, 4, 3), real(12), groups=3)
    yield case("conv_transpose3d.input", real(3, 6, 2, 3, 2), real(6, 1, 2, 2, 2), groups=3)
    more = [1, 1], [0, 0], [1, 1]
    yield case("convolution", real(5, 6, 6, 5), real(6, 2, 3, 3), real(6), *more, False, [0, 0], 3)


def _windows() -> Iterator[Sample]:
    for name in ("max_pool", "avg_pool"):
        yield case(f"{name}1d", real(5, 4, 9), [3], [2], [1])
        yield case(f"{name}2d", real(5, 4, 6, 6), [2, 2])
        yield case(f"{name}3d", real(3, 4, 4, 4, 4), [2, 2, 2])
    yield case("max_pool2d", real(4, 6, 6), [3, 3], [2, 2], [1, 1])
    yield case("max_pool2d_with_indices", real(5, 4, 6, 6), [2, 2])
    yield case("adaptive_max_pool2d", real(5, 4, 6, 6), [2, 3])
    yield case("adaptive_avg_pool1d", real(5, 4, 7), [3])
    yield case("adaptive_avg_pool2d", real(5, 4, 6, 7), [2, 3])
    yield case("_adaptive_avg_pool2d", real(5, 4, 6, 7), [1, 1])
    yield case("adaptive_avg_pool3d", real(3, 4, 4, 4, 4), [2, 2, 1])
    yield case("upsample_nearest2d", real(5, 4, 3, 3), [6, 6])
    yield case("upsample_bilinear2d", real(5, 4, 3, 3), [6, 5], True)
    yield case("upsample_nearest1d.vec", real(5, 4, 3), [6], None)
    yield case("upsample_linear1d.vec", real(5, 4, 3), [7], False, None)
    yield case("upsample_nearest2d.vec", real(5, 4, 3, 3), None, [2.0, 2.0])
    yield case("upsample_bilinear2d.vec", real(5, 4, 3, 3), None, False, [2.0, 2.0])
    yield case("upsample_bicubic2d.vec", real(5, 4, 3, 3), [6, 6], False, None)
    yield case("upsample_nearest3d.vec", real(3, 4, 2, 2, 2), [4, 4, 4], None)
    yield case("upsample_trilinear3d.vec", real(3, 4, 2, 2, 2), [4, 4, 4], False, None)
    yield case("_upsample_nearest_exact2d.vec", real(5, 4, 3, 3), None, [2.0, 2.0])
    yield case("pixel_unshuffle", real(5, 3, 4, 6), 2)
    yield case("channel_shuffle", real(5, 6, 3, 2), 2)
    yield case("im2col", real(5, 3, 4, 6), [2, 2], [1, 1], [0, 0], [2, 2])
    yield case("col2im", real(5, 12, 6), [4, 6], [2, 2], [1, 1], [0, 0], [2, 2])
    yield case("grid_sampler", real(5, 3, 4, 6), real(5, 3, 2, 2), 0, 0, False)
    yield case("pixel_shuffle", real(5, 12, 3, 2), 2)


def _recurrent() -> Iterator[Sample]:
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        weights = [real(gates * 3, 4), real(gates * 3, 3), real(gates * 3), real(gates * 3)]
        for batch_first in (True, False):
            state = real(1, 5 if batch_first else 6, 3)
            hidden = [state, real(*state.shape)] if name == "lstm" else state
            more = True, 1, 0.0, True, False, batch_first
            yield case(f"{name}.input", real(5, 6, 4), hidden, weights, *more)
            state = real(4, 5 if batch_first else 6, 3)
            hidden = [state, real(*state.shape)] if name == "lstm" else state
            wide = [real(gates * 3, 6), *weights[1:]]  # of the second layer, which has both directions' results
            more = True, 2, 0.5, False, True, batch_first
            yield case(f"{name}.input", real(5, 6, 4), hidden, [*weights, *weights, *wide, *wide], *more)


def _element_losses() -> Iterator[Sample]:
    names = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
    for reduction in (NONE, MEAN, SUM):
        for name in names:
            target = const(5, 7) if name == "binary_cross_entropy" else real(5, 7)
            arguments = (None, reduction) if name == "binary_cross_entropy" else (reduction,)
            yield case(name, real(5, 7), target.detach(), *arguments)
        yield case("margin_ranking_loss", real(5, 7), real(5, 7), const(5, 7), 0.1, reduction)
        yield case("hinge_embedding_loss", real(5, 7), const(5, 7).round() * 2 - 1, 1.0, reduction)
        yield case("poisson_nll_loss", real(5, 7), const(5, 7), True, True, 1e-8, reduction)
        yield case("kl_div", real(5, 7), const(5, 7), reduction, log_target=True)
        name = "binary_cross_entropy_with_logits"
        yield case(name, real(5, 7), const(5, 7), const(7), const(7), reduction)
        yield case(name, real(5, 7), const(5, 7), None, None, reduction)


def _class_losses() -> Iterator[Sample]:
    target = torch.tensor([3, -100, 0, 6, 2])
    image = whole(5, 4, 3, 2)
    name = "cross_entropy_loss"
    for reduction in (NONE, MEAN, SUM):
        for smoothing in (0.0, 0.1):
            yield case(name, real(5, 7), target, None, reduction, -100, smoothing)
            yield case(name, real(5, 7), target, const(7), reduction, -100, smoothing)
            yield case(name, real(4, 5, 3, 2), image, const(5), reduction, 2, smoothing)
            yield case(name, real(5, 7), const(5, 7), const(7), reduction, -100, smoothing)
        yield case("nll_loss", real(5, 7), target, const(7), reduction)
        yield case("nll_loss_nd", real(4, 5, 3, 2), image, None, reduction, 2)
    yield case(name, (real(5, 101) * 1000).detach().requires_grad_(), target)
    yield case(name, real(7), torch.tensor(3))


def _new() -> Iterator[Sample]:
    for name in ("zeros", "ones", "empty.memory_format"):
        yield case(name, [5, 7], dtype=torch.float64)
    yield case("full", [5, 7], 0.5)
    for name in ("zeros_like", "ones_like", "empty_like"):
        yield case(name, real(5, 7))
    yield case("full_like", real(5, 7), 0.5)
    for name in ("new_zeros", "new_ones", "new_empty"):
        yield case(name, real(5, 3), [7, 5])
    yield case("new_full", real(5, 3), [7, 5], 0.5)


def _random() -> Iterator[Sample]:
    for train in (True, False):
        yield case("dropout", real(5, 7), 0.3, train)
        yield case("dropout_", real(5, 7), 0.3, train)
        yield case("native_dropout", real(5, 7), 0.3, train)
        yield case("feature_dropout", real(5, 7, 3), 0.3, train)
    yield case("dropout", real(5, 101).t().detach().requires_grad_(), 0.3, True)
    for name in ("rand", "randn"):
        yield case(name, [5, 7], dtype=torch.float64)
        yield case(f"{name}_like", real(5, 7))
    yield case("randint", 9, [5, 7])
    yield case("randint.low", 3, 9, [5, 7], dtype=torch.int32)
    yield case("randint_like", const(5, 7), 9)
    yield case("bernoulli", const(5, 7))
    yield case("bernoulli.p", const(5, 7), 0.3)
    yield case("bernoulli_.float", real(5, 7), 0.3)
    for name in ("uniform_", "normal_", "exponential_"):
        yield case(name, real(5, 7))
