"""A layer of experts: each token goes through a few of many feed-forward networks.

Tokens are routed within *groups*, and a group is what belongs to one sample: how many tokens an expert takes, and which
ones are dropped, does not depend on how the batch is cut. So the numbers are the same under any plan. With the batch cut
over the ranks that replicate the rest (``replicate(n)``) and the experts cut over the same ranks (``split(n)``), what goes
to the experts and what comes back are one all-to-all each.

Sources: GShard (Lepikhin et al. 2020: groups, capacity, top-2), Switch Transformer (Fedus et al. 2021: top-1, balancing
loss), M6-T (Yang et al. 2021: expert prototyping, k prototypes with top-1 each).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epl.errors import StrategyError, bulleted

__all__ = ["Experts", "MoE", "MoEOutput"]


class MoEOutput(NamedTuple):
    """What the layer gives.

    Args:
        output: As the input, [batch, ..., hidden]; zero for a token that no expert had room for.
        loss: The balancing loss, a number, already weighted: add it to the model's loss.
        dropped: Of each sample, how many of its tokens' choices found no room: int64 [batch].
    """

    output: Tensor
    loss: Tensor
    dropped: Tensor


class _Route(NamedTuple):
    """Of each choice of each token: the slot it is put in ([batch, tokens, choices]), its weight, and if it found room."""

    slots: Tensor
    weights: Tensor
    kept: Tensor
    loss: Tensor


class Experts(nn.Module):
    """Feed-forward networks side by side, each on tokens of its own.

    Under ``epl.split(n)`` the experts are shared out: each device keeps some of them whole.

    Args:
        num_experts: Networks.
        hidden_size: Features of a token.
        intermediate_size: Features between the two layers.
        activation: Between the two layers.
    """

    split_dims: ClassVar[Mapping[str, int]] = {"weight_in": 0, "bias_in": 0, "weight_out": 0, "bias_out": 0}

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.weight_in = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.bias_in = nn.Parameter(torch.empty(num_experts, 1, intermediate_size))
        self.weight_out = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.bias_out = nn.Parameter(torch.empty(num_experts, 1, hidden_size))
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` does it, for each expert."""
        for weight, bias in ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out)):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, experts, room, hidden] to the same."""
        inner = self.activation(torch.einsum("gech,ehf->gecf", x, self.weight_in) + self.bias_in)
        return torch.einsum("gecf,efh->gech", inner, self.weight_out) + self.bias_out


class MoE(nn.Module):
    """A gate and its experts, in the place of a feed-forward block.

    Args:
        hidden_size: Features of a token.
        intermediate_size: Features inside an expert.
        num_experts: Experts in all.
        top_k: Experts that a token goes to. The weights of two or more are made to add up to 1; that of one is its
            probability, so that the gate learns.
        capacity_factor: Room of an expert for each sample: ``capacity_factor * top_k * tokens / experts`` tokens, rounded
            up. What finds no room is dropped: the layer gives zero for it, and the residual connection around it keeps it.
        num_prototypes: Groups of experts. Each has a gate of its own that sends every token to one of its experts
            (``top_k`` is 1), and what they give is added up: expert prototyping, as in M6-T.
        balance_weight: Weight of the balancing loss.
        activation: Inside an expert.

    Raises:
        StrategyError: the numbers do not go together; lists what is wrong.

    Example:
        >>> layer = MoE(16, 32, num_experts=4)
        >>> output, loss, dropped = layer(torch.randn(2, 8, 16))
        >>> output.shape, loss.shape, dropped.shape
        (torch.Size([2, 8, 16]), torch.Size([]), torch.Size([2]))
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float = 1.25,
        num_prototypes: int = 1,
        balance_weight: float = 0.01,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        _check(num_experts, top_k, capacity_factor, num_prototypes)
        self.num_experts, self.top_k, self.num_prototypes = num_experts, top_k, num_prototypes
        self.capacity_factor, self.balance_weight = capacity_factor, balance_weight
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, activation)

    @property
    def experts_per_prototype(self) -> int:
        return self.num_experts // self.num_prototypes

    def capacity(self, num_tokens: int) -> int:
        """Room of each expert for a sample of so many tokens."""
        wanted = self.capacity_factor * self.top_k * num_tokens / self.experts_per_prototype
        return max(1, math.ceil(wanted - 1e-9))

    def forward(self, x: Tensor) -> MoEOutput:
        """Route tokens, run the experts, and put together what they give.

        Args:
            x: [batch, ..., hidden]; all dimensions between are the tokens of a sample.

        Raises:
            StrategyError: the input has less than three dimensions.
        """
        if x.dim() < 3:
            raise StrategyError(
                f"MoE takes [batch, tokens, hidden], and was given {list(x.shape)}: it routes within each sample, so do "
                "not flatten the batch. With one token a sample give x.unsqueeze(1)."
            )
        tokens = x.flatten(1, -2)
        capacity = self.capacity(tokens.shape[1])
        route = self._route(tokens, capacity)
        output = self._collect(self.experts(self._dispatch(tokens, route, capacity)), route)
        dropped = (~route.kept).flatten(1).sum(1)
        return MoEOutput(output.reshape(x.shape), self.balance_weight * route.loss, dropped)

    def _route(self, tokens: Tensor, capacity: int) -> _Route:
        """Where each token goes. First choices of all tokens find room before any second choice."""
        logits = self.gate(tokens)
        logits = logits.unflatten(-1, (self.num_prototypes, self.experts_per_prototype))
        probabilities = torch.softmax(logits.float() if logits.dtype.itemsize < 4 else logits, dim=-1)
        experts = torch.arange(self.experts_per_prototype, device=tokens.device)
        prototypes = torch.arange(self.num_prototypes, device=tokens.device)
        left, taken = probabilities, torch.zeros_like(probabilities[:, :1], dtype=torch.int64)
        slots, weights, kept, loss = [], [], [], probabilities.new_zeros(())
        for choice in range(self.top_k):
            best = left.argmax(-1)
            chosen = best.unsqueeze(-1) == experts  # [batch, tokens, prototypes, experts of a prototype]
            place = ((chosen.cumsum(1) - 1 + taken) * chosen).sum(-1)
            taken = taken + chosen.sum(1, keepdim=True)
            left = left.masked_fill(chosen, -1.0)
            slots.append((prototypes * self.experts_per_prototype + best) * capacity + place)
            weights.append((probabilities * chosen).sum(-1))
            kept.append(place < capacity)
            if choice == 0:
                loss = _balance(probabilities, chosen)
        weight, room = torch.cat(weights, -1), torch.cat(kept, -1)
        if self.top_k > 1:
            weight = weight / weight.sum(-1, keepdim=True)
        return _Route(torch.cat(slots, -1), (weight * room).to(tokens.dtype), room, loss)

    def _dispatch(self, tokens: Tensor, route: _Route, capacity: int) -> Tensor:
        """[batch, experts, room, hidden]: every token in its slots; what found no room goes to one that is cut off."""
        size, length, hidden = tokens.shape
        choices = route.slots.shape[-1]
        num_slots = self.num_experts * capacity
        slots = torch.where(route.kept, route.slots, num_slots).flatten(1)
        copies = tokens.unsqueeze(2).expand(size, length, choices, hidden).flatten(1, 2)
        room = tokens.new_zeros(size, num_slots + 1, hidden)
        room = room.scatter(1, slots.unsqueeze(-1).expand(size, length * choices, hidden), copies)
        return room[:, :num_slots].unflatten(1, (self.num_experts, capacity))

    def _collect(self, results: Tensor, route: _Route) -> Tensor:
        """[batch, tokens, hidden]: of each token what its experts give, by their weights."""
        size, length, choices = route.slots.shape
        found = results.flatten(1, 2)
        hidden = found.shape[-1]
        slots = route.slots.clamp(max=found.shape[1] - 1).flatten(1)  # what found no room has the weight 0
        found = found.gather(1, slots.unsqueeze(-1).expand(size, length * choices, hidden))
        return (found.unflatten(1, (length, choices)) * route.weights.unsqueeze(-1)).sum(2)


def _balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Of each sample and prototype: experts times the sum of (share of first choices * mean probability); 1 at best."""
    shares = chosen.to(probabilities.dtype).mean(1)
    return (shares * probabilities.mean(1)).sum(-1).mean() * probabilities.shape[-1]


def _check(num_experts: int, top_k: int, capacity_factor: float, num_prototypes: int) -> None:
    faults: list[str] = []
    if num_experts < 1 or num_prototypes < 1 or num_experts % num_prototypes:
        faults.append(
            f"num_experts={num_experts} has to be a multiple of num_prototypes={num_prototypes}, both at least 1"
        )
    elif not 1 <= top_k <= num_experts // num_prototypes:
        faults.append(
            f"top_k={top_k} has to be 1 to {num_experts // num_prototypes}, the experts that a token chooses from"
        )
    if num_prototypes > 1 and top_k != 1:
        faults.append(f"with num_prototypes={num_prototypes} a prototype sends each token to one expert: top_k=1")
    if not capacity_factor > 0:
        faults.append(f"capacity_factor={capacity_factor} has to be above 0")
    if faults:
        raise StrategyError(bulleted("MoE cannot be built:", faults))
