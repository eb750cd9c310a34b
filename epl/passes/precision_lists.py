"""Operators by their numerics: which gain by low precision, which need float32, and which take what comes.

The classes are those of torch.autocast (torch/csrc ``autocast_mode.h``: ``lower_precision_fp``, ``fp32``) and of the
automatic mixed precision of TensorFlow, that EPL used. Where EPL's differ, the reason stands beside the table. A name is
that of an operator without its overload; one without a dot is ATen's.
"""

from __future__ import annotations

from epl.ir.graph import Op

__all__ = [
    "is_allowed",
    "is_denied",
    "is_fixed",
    "is_retyping",
    "is_whole_view",
    "keeps_dtype",
    "may_overflow_by_numbers",
    "mixes",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(name if "." in name else f"aten.{name}" for name in text.split())


# Matrix products and convolutions: their units are several times as fast in low precision, and add up in float32. Weights
# go with their input: biases, prelu's slope, all of a recurrent net (cuDNN's take one type).
ALLOWED = _names(
    """linear matmul mm bmm mv addmm addmv addr addbmm baddbmm chain_matmul linalg_multi_dot linalg_matmul einsum tensordot
    inner conv1d conv2d conv3d conv_tbc convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention prelu lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _grouped_mm transformers.grouped_mm_fallback"""
)

# What leaves the range of float16 or loses too many digits: exponentials and logarithms, powers, sums of many numbers,
# normalisations, distances, losses. Kernels that low precision does not have (fft, linalg), and random numbers, which
# would otherwise be others (a uniform number in bfloat16 is 0 or 1 too often for a logarithm).
DENIED = _names(
    """exp exp2 expm1 log log10 log1p log2 logaddexp logaddexp2 logsumexp logcumsumexp log_sigmoid softplus logit xlogy
    lgamma digamma polygamma mvlgamma erfinv acos asin acosh atanh cosh sinh tan pow float_power reciprocal rsqrt
    softmax log_softmax _softmax _log_softmax _safe_softmax special_softmax special_log_softmax special_logsumexp
    sum nansum sum_to_size mean nanmean prod cumsum cumprod var var_mean std std_mean trace logdet slogdet
    norm frobenius_norm nuclear_norm norm_except_dim _weight_norm renorm dist cdist pdist pairwise_distance
    cosine_similarity layer_norm native_layer_norm group_norm native_group_norm rms_norm instance_norm
    cross_entropy_loss nll_loss nll_loss2d nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss multilabel_margin_loss
    margin_ranking_loss triplet_margin_loss hinge_embedding_loss cosine_embedding_loss poisson_nll_loss
    gaussian_nll_loss ctc_loss quantile nanquantile histc stft istft complex polar inverse pinverse cholesky
    cholesky_solve matrix_exp svd qr det rand_like randn_like bernoulli multinomial normal poisson"""
)
_DENIED_FAMILIES = ("aten.fft_", "aten.linalg_")

# These have to run on what they were captured on: their result's bytes or shape would change, or they leave the graph.
FIXED = _names("view_as_complex view_as_real item _local_scalar_dense _assert_scalar")
_FIXED_OVERLOADS = ("aten.view.dtype",)

# Operators that take inputs of several types, beside those that torch tags as pointwise. batch_norm keeps its statistics
# and weights in float32 and its large input in low precision, as autocast does and cuDNN wants: in float32 the input would
# be kept for backward a second time, and a ResNet would need more memory with mixed precision than without.
MIXING = _names("cat concat concatenate stack hstack vstack dstack broadcast_tensors meshgrid copy_ fill_ batch_norm")
_MATCHING = _names(
    "lerp lerp_ heaviside heaviside_ gcd gcd_ lcm lcm_"
)  # tagged as pointwise, and refuse it (torch 2.13)

# The result has the type of the first argument, and a size that fake tensors cannot know.
KEEPING = _names("index masked_select repeat_interleave")

# The result is its argument itself only if that has the type already.
_RETYPING = ("aten.to.", "aten.type_as.")

# Views of all of their argument.
_WHOLE_VIEWS = _names(
    "t transpose permute movedim view view_as reshape flatten unflatten unsqueeze squeeze alias contiguous numpy_T mT"
)

# Beside the pointwise ones, those that write a number into a tensor.
_FILLING = _names("fill fill_ full_like new_full masked_fill masked_fill_ constant_pad_nd pad")


def _packet(op: Op) -> str:
    return op.target.rpartition(".")[0]


def is_allowed(op: Op) -> bool:
    """True if low precision is what this operator gains by."""
    return _packet(op) in ALLOWED


def is_denied(op: Op) -> bool:
    """True if this operator needs float32."""
    return _packet(op) in DENIED or (op.target.startswith(_DENIED_FAMILIES) and not is_allowed(op))


def is_fixed(op: Op) -> bool:
    """True if this operator has to get what it was captured with: the user's own code, or under the user's own autocast."""
    return bool(op.autocast) or op.target.startswith(("function.", *_FIXED_OVERLOADS)) or _packet(op) in FIXED


def is_retyping(op: Op) -> bool:
    """True if this operator makes another type of its argument, and shares its memory if there is nothing to do."""
    return op.target.startswith(_RETYPING)


def is_whole_view(op: Op) -> bool:
    """True if this operator shows all of its one argument in another shape."""
    return _packet(op) in _WHOLE_VIEWS and len(op.reads) == 1 and op.views == op.reads


def keeps_dtype(op: Op) -> bool:
    """True if the result has the type of the first argument."""
    return _packet(op) in KEEPING or (len(op.views) == 1 and not is_retyping(op))


def mixes(op: Op, *, is_pointwise: bool) -> bool:
    """True if this operator takes inputs of several types."""
    return bool(op.views and not op.writes) or _packet(op) in MIXING or (is_pointwise and _packet(op) not in _MATCHING)


def may_overflow_by_numbers(op: Op, *, is_pointwise: bool) -> bool:
    """True if this operator's whole numbers are values, not sizes or places."""
    return is_pointwise or _packet(op) in _FILLING
