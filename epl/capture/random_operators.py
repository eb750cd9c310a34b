"""How many random numbers an operator draws: composite operators say so in their arguments, others by torch's own tag."""

from __future__ import annotations

import torch
import torch.fx as fx

from epl.ir.graph import Argument, Op

__all__ = ["argument_at", "num_draws"]

_RANDOM_TAG = torch.Tag.nondeterministic_seeded
# composite random operators: (name, position and keyword of the probability, position of the training flag or None)
_DROPOUT = {
    "aten.dropout": (1, 2),
    "aten.feature_dropout": (1, 2),
    "aten.alpha_dropout": (1, 2),
    "aten.feature_alpha_dropout": (1, 2),
    "aten.dropout_": (1, 2),
    "aten.rrelu": (None, 3),
}


def num_draws(op: Op, node: fx.Node) -> int:
    """Random numbers are drawn this many times in one run of the operator."""
    name = op.target.rsplit(".", 1)[0]
    if name in _DROPOUT:
        rate, training = _DROPOUT[name]
        drawing = bool(argument_at(op, training, "train")) and (rate is None or bool(argument_at(op, rate, "p")))
        return int(drawing)
    if name == "aten.scaled_dot_product_attention":
        return int(bool(argument_at(op, 4, "dropout_p")))
    if name in ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"):
        layers, rate, training = _recurrent(op)
        return layers - 1 if training and rate else 0
    tags = getattr(node.target, "tags", ())
    return int(_RANDOM_TAG in tags)


def _recurrent(op: Op) -> tuple[int, float, bool]:
    """(num_layers, dropout, train), which follow ``has_biases`` in every form of the recurrent operators."""
    flags = next(place for place, arg in enumerate(op.args) if isinstance(arg, bool))
    layers, rate, training = op.args[flags + 1 : flags + 4]
    return int(layers), float(rate), bool(training)  # type: ignore[arg-type]


def argument_at(op: Op, place: int, keyword: str) -> Argument:
    """An argument by its position or its keyword."""
    return op.args[place] if place < len(op.args) else dict(op.kwargs).get(keyword)
