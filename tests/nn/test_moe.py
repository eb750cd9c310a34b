"""The layer of experts as plain PyTorch: against a loop over tokens, and what it says of wrong numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from epl.errors import StrategyError
from epl.nn import MoE
from tests.parity import assert_close

HIDDEN = 6


def layer_of(**options: object) -> MoE:
    torch.manual_seed(0)
    return MoE(HIDDEN, 10, **{"num_experts": 4, **options}).double()  # type: ignore[arg-type]


def tokens_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_expert(layer: MoE, expert: int, token: Tensor) -> Tensor:
    experts = layer.experts
    inner = nn.functional.gelu(token @ experts.weight_in[expert] + experts.bias_in[expert, 0])
    return inner @ experts.weight_out[expert] + experts.bias_out[expert, 0]


def by_loop(layer: MoE, sample: Tensor) -> tuple[Tensor, int]:
    """What the layer is to give for one sample [tokens, hidden], token by token; and the choices that found no room."""
    room, each = layer.capacity(len(sample)), layer.experts_per_prototype
    logits = (sample @ layer.gate.weight.t()).unflatten(-1, (layer.num_prototypes, each))
    probabilities = torch.softmax(logits, -1)
    ranked = probabilities.argsort(-1, descending=True)
    output, used, dropped = torch.zeros_like(sample), [0] * layer.num_experts, 0
    for choice, place, prototype in product(range(layer.top_k), range(len(sample)), range(layer.num_prototypes)):
        best = ranked[place, prototype]
        weight = probabilities[place, prototype, best[choice]]
        if layer.top_k > 1:
            weight = weight / probabilities[place, prototype, best[: layer.top_k]].sum()
        expert = prototype * each + int(best[choice])
        used[expert] += 1
        if used[expert] <= room:
            output[place] = output[place] + weight * one_expert(layer, expert, sample[place])
        else:
            dropped += 1
    return output, dropped


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 2, "capacity_factor": 0.5},
        {"top_k": 3, "capacity_factor": 8.0},
        {"top_k": 1, "num_prototypes": 2},
        {"num_experts": 6, "top_k": 1, "num_prototypes": 3, "capacity_factor": 0.6},
    ],
    ids=str,
)
def test_the_layer_gives_what_a_loop_over_tokens_gives(options: dict[str, object]) -> None:
    layer, x = layer_of(**options), tokens_of(3, 7)
    output, _, dropped = layer(x)
    expected = [by_loop(layer, sample) for sample in x]
    assert_close(output, torch.stack([result for result, _ in expected]), torch.float64)
    assert dropped.tolist() == [count for _, count in expected]
    mine = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    theirs = torch.autograd.grad(torch.stack([r for r, _ in expected]).square().sum(), list(layer.parameters()))
    assert_close(list(mine), list(theirs), torch.float64)


def test_with_little_room_tokens_are_dropped_and_come_out_as_zero() -> None:
    layer = layer_of(top_k=1, capacity_factor=0.25)  # room for one token an expert
    output, _, dropped = layer(tokens_of(2, 12))
    assert (dropped >= 12 - 4).all()
    assert ((output == 0).all(-1).sum(1) == dropped).all()


def test_samples_do_not_compete_for_room() -> None:
    layer, x = layer_of(capacity_factor=0.5), tokens_of(4, 5)
    together, alone = layer(x).output, [layer(sample.unsqueeze(0)).output for sample in x]
    assert_close(together, torch.cat(alone), torch.float64)


def test_dimensions_between_batch_and_features_are_tokens() -> None:
    layer, x = layer_of(), tokens_of(2, 3, 4)
    assert_close(layer(x).output, layer(x.flatten(1, 2)).output.view_as(x), torch.float64)


def test_the_balancing_loss_is_least_when_experts_are_used_alike_and_teaches_the_gate() -> None:
    layer, x = layer_of(top_k=1, balance_weight=1.0), tokens_of(2, 16)
    loss = layer(x).loss
    assert loss.item() > 0.9
    (gradient,) = torch.autograd.grad(loss, [layer.gate.weight])
    assert gradient.abs().max() > 1e-4
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[1] = 100.0  # tokens whose features add up to a positive number all go to expert 1
    assert layer(tokens_of(1, 16).abs()).loss.item() == pytest.approx(4.0)
    with torch.no_grad():
        layer.gate.weight.zero_()  # all alike: the probabilities are, though the first choice is not
    assert layer(x).loss.item() == pytest.approx(1.0)


def test_wrong_numbers_are_listed() -> None:
    with pytest.raises(StrategyError, match=r"num_experts=5 has to be a multiple of num_prototypes=2"):
        layer_of(num_experts=5, num_prototypes=2)
    with pytest.raises(StrategyError, match=r"top_k=5 has to be 1 to 4.*\n.*capacity_factor=0"):
        layer_of(top_k=5, capacity_factor=0)
    with pytest.raises(StrategyError, match=r"each token to one expert: top_k=1"):
        layer_of(num_prototypes=2, top_k=2)
    with pytest.raises(StrategyError, match=r"takes \[batch, tokens, hidden\], and was given \[4, 6\]"):
        layer_of()(tokens_of(4))
