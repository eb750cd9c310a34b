"""A module marked with epl.checkpoint computes the same, keeps less, and stays the module that it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.errors import StrategyError
from epl.loss import loss_step

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.down(nn.functional.dropout(self.up(x).relu(), 0.3, self.training)) * scale


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1)).double()


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None], int]:
    """The loss, the gradients, and how many bytes autograd has kept."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    model.zero_grad()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).pow(2).mean()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()], sum(kept.values())


def test_the_same_numbers_with_less_kept() -> None:
    plain, marked, x = net(), net(), torch.randn(16, WIDTH, dtype=torch.float64)
    for block in marked[:2]:  # type: ignore[index]
        assert epl.checkpoint(block) is block
    loss, gradients, kept = run(plain, x)
    again, gradients_again, kept_again = run(marked, x)
    assert torch.equal(loss, again)
    assert all(torch.equal(one, other) for one, other in zip(gradients, gradients_again, strict=True))  # type: ignore[arg-type]
    assert kept_again < kept / 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_marked_too_and_is_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    block = epl.checkpoint(Block())
    other = copied(block)
    assert isinstance(other, Block)
    assert type(other).__name__ == "Block"
    with pytest.raises(StrategyError, match=r"marked with epl\.checkpoint already"):
        epl.checkpoint(other)
    assert other.state_dict().keys() == block.state_dict().keys()
    nn.init.zeros_(other.up.weight)
    assert block.up.weight.any()


def test_a_capture_has_a_segment_for_each_call() -> None:
    model = net()
    epl.checkpoint(model[0])  # type: ignore[index]
    graph = capture(
        model, loss_step(lambda m, x: m(x).mean()), flatten(torch.ones(4, WIDTH, dtype=torch.float64))
    ).graph
    marked = {op.module for op in graph.ops if op.segment is not None}
    assert marked
    assert all(module.split(".")[0] == "0" for module in marked)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"takes an nn\.Module, got a Tensor"):
        epl.checkpoint(torch.ones(2))  # type: ignore[type-var]
