"""Modules of torch with a life of their own (parametrisations, recurrent cells, statistics, dropout), cut in two.

A mistake shows as a weight norm that is computed on one stage and trained on another, a statistic that moves twice, or a
dropout mask that hangs on the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import epl
from tests.program.local_run import check_parity
from tests.program.staged import batch_of, staged

X = batch_of()
SEQUENCE = batch_of(4, 5, 6)
TOKENS = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(0))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class _Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.randn(6))})

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.several:
            x = x * parameter
        return x + self.named["x"]


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "weight norm": (lambda: weight_norm(nn.Linear(6, 6)), X),
    "spectral norm": (lambda: spectral_norm(nn.Linear(6, 6)), X),
    "orthogonal": (lambda: orthogonal(nn.Linear(6, 6)), X),
    "parameter containers": (_Parameters, X),
    "lstm": (lambda: nn.LSTM(6, 6, 2, batch_first=True, dropout=0.3), SEQUENCE),
    "gru": (lambda: nn.GRU(6, 3, batch_first=True, bidirectional=True), SEQUENCE),
    "rnn": (lambda: nn.RNN(6, 6, batch_first=True), SEQUENCE),
    "transformer encoder": (_encoder, SEQUENCE),
    "embedding bag": (lambda: nn.EmbeddingBag(10, 6), TOKENS),
    "sparse embedding": (lambda: nn.Embedding(10, 6, sparse=True), TOKENS),
    "embedding with a largest norm": (lambda: nn.Embedding(10, 6, max_norm=1.0), TOKENS),
    "batch norm": (lambda: nn.BatchNorm1d(6), X),
    "instance norm with statistics": (lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True), SEQUENCE),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(5, 5), nn.LayerNorm(6), nn.RMSNorm(6)), SEQUENCE),
    "dropouts": (
        lambda: nn.Sequential(nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.RReLU()),
        SEQUENCE,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_a_stage_of_its_own_computes_what_it_computes_alone(name: str) -> None:
    make, batch = LAYERS[name]
    model = staged(lambda m, x: m.b(_first(m.a(x))).pow(2).mean(), 2, layers=[make()])
    check_parity(model, batch, num_stages=2)


def test_attention_with_masks_and_weights() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        attended, weights = m.a(x, x, x, key_padding_mask=x[..., 0] > 1)
        return m.b(attended).pow(2).mean() + weights.pow(2).mean()

    check_parity(staged(forward, 2, [nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)]), SEQUENCE)


def test_a_transformer_that_looks_whether_its_mask_is_causal() -> None:
    """It branches on the mask's values: the graph holds an assertion that they are the same."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return m.b(m.a(x, mask=mask)).pow(2).mean()

    lowered = check_parity(staged(forward, 2, [_encoder()]), SEQUENCE)
    assert lowered.captured.follows_data


def test_an_encoder_and_a_decoder() -> None:
    model = nn.Transformer(6, 2, 1, 1, 8, dropout=0.1, batch_first=True)
    check_parity(staged(lambda m, x: m.b(m.a(x, x * 2)).pow(2).mean(), 2, [model]), SEQUENCE)


def test_hidden_states_of_recurrent_layers_cross() -> None:
    layers = [nn.LSTM(6, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True)]
    check_parity(staged(lambda m, x: m.b(*m.a(x))[0].pow(2).mean(), 2, layers), SEQUENCE)


def test_a_module_under_two_names_is_one() -> None:
    model = staged(lambda m, x: m.again(m.b(m.a(x))).pow(2).mean(), 2)
    model.again = model.b
    lowered = check_parity(model, X)
    assert [len(stage.program.takes) for stage in lowered.stages] == [0, 1]


def test_a_compiled_submodule_is_captured_as_what_it_is_made_of() -> None:
    model = staged(lambda m, x: m.b(m.a(x)).pow(2).mean(), 2)
    model.a = torch.compile(model.a, backend="eager")
    check_parity(model, X)


def test_every_random_operator_draws_the_same_whatever_the_cut() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        noise = torch.rand(6) + torch.randn_like(x) + torch.randint(0, 3, (6,)) + torch.randperm(6)
        noise = noise + torch.normal(0.0, 1.0, (6,)) + torch.empty(6).uniform_() + torch.poisson(torch.ones(6))
        noise = noise * torch.bernoulli(torch.full((6,), 0.5)) + torch.multinomial(torch.ones(6), 6)
        a = F.gumbel_softmax(m.a(x) + noise, hard=True)
        q = a[:, None]
        with torch.no_grad():
            scale = torch.rand(6)
        return m.b(F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)[:, 0] * scale).pow(2).mean()

    check_parity(staged(forward, 2), X)


# ---------------------------------------------------------------------------------------------------- loss functions


class _Weighted(nn.Module):
    """Class weights as a buffer, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2, 3, 1, 1, 2], dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        return F.cross_entropy(model(batch[0]), batch[1], weight=self.weights) * self.calls


def test_a_loss_function_may_be_a_module_with_buffers() -> None:
    loss_fn = _Weighted()
    check_parity(staged(lambda m, x: m.b(m.a(x)), 2), (X, torch.tensor([0, 1, 2, 3])), loss_fn)
    assert loss_fn.calls == 2, "one for each step, none for the capture"


def test_a_loss_function_may_close_over_tensors() -> None:
    weights = torch.tensor([1.0, 2, 3, 1, 1, 2], dtype=torch.float64)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    lowered = check_parity(staged(lambda m, x: m.b(m.a(x)), 2), (X, torch.tensor([0, 1, 2, 3])), loss_fn)
    (entropy,) = [op for op in lowered.graph.ops if op.target.startswith("aten.cross_entropy")]
    assert entropy.source.startswith(__file__)
    assert entropy.module == ""


# ------------------------------------------------------------------------------------------ grad mode and autocast


def _narrow(forward: Callable[..., Any]) -> nn.Module:
    """In float32, since autocast leaves float64 alone."""
    return staged(forward, 2).float()


def autocast_that_is_turned_off_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = m.a(x)
        with torch.autocast("cpu", enabled=False):
            b = m.b(a.float())
        return m.b(a).float().pow(2).mean() + b.mean()


def autocast_around_no_grad_and_the_other_way_round(m: Any, x: Tensor) -> Tensor:
    """torch 2.13's export loses ``no_grad`` inside ``autocast``."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        a = m.a(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        c = m.a(x)
        with torch.enable_grad():
            d = m.b(x)
    return m.b(a.float()).pow(2).mean() + c.float().mean() + d.float().sum()


def autocast_around_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    """``checkpoint`` annotates what runs in it, and forgets on leaving what was marked inside."""
    with torch.autocast("cpu"):
        h = checkpoint(lambda y: m.a(y).tanh(), x, use_reentrant=False)
        return m.b(h).float().pow(2).mean()


@pytest.mark.parametrize(
    "forward",
    [
        autocast_that_is_turned_off_inside,
        autocast_around_no_grad_and_the_other_way_round,
        autocast_around_a_checkpoint,
    ],
    ids=lambda forward: forward.__name__,
)
def test_autocast_regions_hold_where_they_held(forward: Callable[..., Any]) -> None:
    check_parity(_narrow(forward), X.float(), dtype=torch.float32)


def test_autocast_around_the_step_is_part_of_it() -> None:
    model = _narrow(lambda m, x: m.b(m.a(x)).float().pow(2).mean())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = check_parity(model, X.float(), dtype=torch.float32)
    assert {op.autocast for op in lowered.graph.ops} == {"cpu:bfloat16"}


def test_regions_without_gradients_stay_without() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        with torch.no_grad():
            b = a * 2
            with torch.enable_grad():
                c = m.b(a)
        with torch.inference_mode():
            d = (a * 3).mean().clone()
        torch.set_grad_enabled(False)
        e = m.a(x)
        torch.set_grad_enabled(True)
        return (c * b + e + d.item()).pow(2).mean()

    check_parity(staged(forward, 2), X)


def test_sum_losses_and_metrics_of_real_models_agree() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch)
        return epl.SumLoss(logits.pow(2).sum(), (batch > 0).sum().item()), {"logits": logits, "rows": batch.shape[0]}

    check_parity(staged(lambda m, x: m.b(m.a(x)), 2), X, loss_fn)
