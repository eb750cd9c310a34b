"""What Megatron's hand-made plan would send for a graph: the yardstick beside a split's own bytes.

Megatron cuts the first matrix of an attention or feed-forward block by its results and the last one by its arguments, so
a block costs an all-reduce of its result forward, and one of the gradient of what enters it backward. Cut rows of an
embedding cost an all-reduce forward, a cut head one backward.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from epl.cost.communication import bytes_sent
from epl.ir.graph import Graph, Op
from epl.ir.types import TensorType

__all__ = ["megatron_bytes"]

_MATRIX = ("linear", "addmm", "matmul")
_PASSES = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "contiguous",
    "dropout",
    "gelu",
    "relu",
    "silu",
    "mul",
    "tanh",
    "pow",
)
_PASSES = (*_PASSES, "alias", "to", "unsqueeze", "clone", "expand", "sigmoid", "getitem")


def megatron_bytes(graph: Graph, tasks: frozenset[int], num_ranks: int) -> float:
    """Bytes that each rank would send for a micro-batch, forward and backward."""
    ops = [op for op in graph.ops if op.task in tasks]
    matrices = [op for op in ops if _is_matrix(graph, op)]
    total = 0.0
    for op in matrices:
        arguments = _block_arguments(graph, op)
        crossing = [op.name, *arguments] if arguments else []
        total += sum(bytes_sent("all_reduce", _size(graph, name), num_ranks) for name in crossing)
    for op in ops:
        if _name(op) == "embedding" and _is_large(graph, op):
            total += bytes_sent("all_reduce", _size(graph, op.name), num_ranks)
    if heads := [op for op in matrices if _is_large(graph, op)]:
        total += bytes_sent("all_reduce", _size(graph, heads[-1].reads[0]), num_ranks)
    return total


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _is_matrix(graph: Graph, op: Op) -> bool:
    return _name(op) in _MATRIX and _weight_of(graph, op) is not None


def _weight_of(graph: Graph, op: Op) -> TensorType | None:
    weights = {leaf.name: leaf.type for leaf in graph.parameters}
    kinds = [weights[name] for name in op.reads if name in weights and len(weights[name].shape) == 2]
    return kinds[0] if kinds else None


def _is_large(graph: Graph, op: Op) -> bool:
    """True for the matrix of a vocabulary: the largest of the model."""
    weight = _weight_of(graph, op)
    largest = max((leaf.type.size_bytes for leaf in graph.parameters if len(leaf.type.shape) == 2), default=0)
    return weight is not None and weight.size_bytes == largest


def _block_arguments(graph: Graph, op: Op) -> set[str]:
    """What enters the block that a matrix closes; nothing if it closes none.

    Backwards from the matrix there are operators of one argument, perhaps attention with anything before it, and then the
    matrices that open the block.
    """
    found: set[str] = set()
    seen: set[str] = {op.name}
    left = [(name, False) for name in op.reads]
    while left:
        name, within = left.pop()
        maker = graph.op_by_name.get(name)
        if maker is None or maker.name in seen:
            continue
        seen.add(maker.name)
        within = within or _name(maker) == "scaled_dot_product_attention"
        if _is_matrix(graph, maker):
            found.add(next(iter(maker.reads[1:] if _name(maker) == "addmm" else maker.reads)))
        elif within or _name(maker) in _PASSES:
            left += [(argument, within) for argument in maker.reads]
    return found


def _size(graph: Graph, name: str) -> int:
    kind = graph.type_of(name)
    return kind.size_bytes if isinstance(kind, TensorType) else 0
