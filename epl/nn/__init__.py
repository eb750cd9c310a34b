"""Layers that train well under EPL, written as plain PyTorch: without EPL they compute the same."""

from epl.nn.moe import Experts, MoE, MoEOutput

__all__ = ["Experts", "MoE", "MoEOutput"]
