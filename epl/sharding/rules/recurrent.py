"""Recurrent networks: samples. Their states need all features at every step."""

from __future__ import annotations

from collections.abc import Iterator

from epl.sharding.options import Call, Option, Rule
from epl.sharding.placements import Shard
from epl.sharding.rules.common import table

__all__ = ["RULES"]


def recurrent(call: Call) -> Iterator[Option]:
    """A batch, where nothing is dropped between the layers."""
    if call.rank("input") != 3 or (call["train"] and call["dropout"] and call["num_layers"] > 1):
        return
    batch = 0 if call["batch_first"] else 1
    states = [Shard(1)] * (len(call.results) - 1)
    yield call.option({"input": Shard(batch), "hx": Shard(1)}, [Shard(batch), *states])


RULES: dict[str, Rule] = table(recurrent, "lstm.input gru.input rnn_tanh.input rnn_relu.input")
# No rule: the ``data`` overloads, whose rows are sequences of several lengths packed into one.
