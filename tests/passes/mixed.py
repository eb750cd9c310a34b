"""A model captured, made mixed, and run as generated code in one process, every value with its type checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from epl.batch import flatten
from epl.capture.capture import Captured, capture
from epl.ir.graph import Graph, Op
from epl.ir.text import parse, to_text
from epl.ir.types import ListType, TensorType, Type
from epl.ir.verify import verify
from epl.loss import Step, loss_step
from epl.passes.precision import mixed_precision
from epl.stage.codegen import generate_code

__all__ = ["WIDTH", "Mixed", "Net", "mixed", "numbers"]

WIDTH = 8


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, the same at each call."""
    return torch.randn(shape or (4, WIDTH), generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Two linear layers and a norm; forward is a function of the net and the batch."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("memory", torch.zeros(4, WIDTH))
        self.steps = (forward,)

    def forward(self, *batch: Any) -> Any:
        return self.steps[0](self, *batch)


class Mixed:
    """A mixed graph and what it was made of."""

    def __init__(
        self, model: nn.Module, batch: Any, step: Step | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.model, self.flat = model, flatten(batch)
        plain = capture(model, step or loss_step(None), self.flat)
        self.plain = plain.graph
        self.graph: Graph = verify(mixed_precision(plain.graph, dtype))
        assert parse(to_text(self.graph)) == self.graph
        self.captured: Captured = replace(plain, graph=self.graph)

    def ops(self, target: str) -> list[Op]:
        """The operators with this in their target."""
        return [op for op in self.graph.ops if target in op.target]

    def casts(self) -> list[Op]:
        """The operators that are new."""
        return [op for op in self.graph.ops if op.name not in self.plain.op_by_name]

    def dtypes(self, op: Op) -> list[torch.dtype]:
        """The element types of the tensors that an operator takes."""
        kinds = [self.graph.type_of(name) for name in op.reads]
        return [kind.dtype for kind in kinds if isinstance(kind, TensorType)]

    def run(self) -> dict[str, Any]:
        """Every value of one step; each is of the type that the graph declares."""
        names = tuple(op.name for op in self.graph.ops)
        code = generate_code("mixed", self.graph.ops, tuple(self.graph.leaves), names)
        leaves = [self._leaf(name) for name in self.graph.leaves]
        with torch.random.fork_rng(devices=[]):
            results = code.compile(self.captured.functions)(*leaves, torch.manual_seed)
        for op, result in zip(self.graph.ops, results, strict=True):
            _check(op, op.type, result)
        return dict(zip(names, results, strict=True))

    def outputs(self) -> dict[str, Any]:
        """What one step gives, by role."""
        values = self.run()
        return {output.role: values[output.value.name] for output in self.graph.outputs}  # type: ignore[union-attr]

    def step(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the gradients of one step."""
        self.model.zero_grad()
        loss = self.outputs()["loss"]
        loss.backward()
        return loss.detach(), gradients(self.model)

    def _leaf(self, name: str) -> Tensor:
        leaf: Any = self.graph.leaves[name]
        if leaf in self.graph.inputs:
            return self.flat.tensors[self.flat.paths.index(leaf.path)]
        if not hasattr(leaf, "path"):
            return self.captured.constants[name]
        holder, _, last = leaf.path.rpartition(".")
        return getattr(self.model.get_submodule(holder), last)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward pass has left."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def _check(op: Op, kind: Type, result: Any) -> None:
    if isinstance(kind, ListType):
        for item, each in zip(kind.items, result, strict=True):
            _check(op, item, each)
    elif isinstance(kind, TensorType):
        assert result.dtype == kind.dtype, f"{op.name} = {op.target} is declared {kind} and is {result.dtype}"
        assert all(size in (None, real) for size, real in zip(kind.shape, result.shape, strict=True))


def mixed(
    forward: Callable[..., Any], *batch: Any, dtype: torch.dtype = torch.bfloat16, step: Step | None = None
) -> Mixed:
    """A `Net` with this forward, captured and made mixed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(forward)
    return Mixed(model, batch or (numbers(),), step, dtype)
