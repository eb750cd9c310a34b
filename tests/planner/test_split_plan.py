"""Plans of ``split`` for transformers of real widths, on no device at all: what they send, say, obey and refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM
from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.cost.devices import device_model
from epl.errors import PlanError, StrategyError
from epl.ir.graph import Graph
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.plan import Plan
from epl.planner.split import Decided, choose_split
from epl.planner.split_items import SplitGroup
from epl.planner.table import plan_table
from epl.planner.taskgraphs import build_taskgraphs
from epl.sharding.placements import Replicated, Shard, local_shape, parse_placement

BATCH = (8, 512)  # samples, tokens
GPU = "A100-80GB"


def _bert() -> nn.Module:
    # 6 layers: with fewer, the square matrix before the head is more than a hundredth of all weights, and has to be cut;
    # Megatron's plan keeps it whole.
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 6}
    return BertForMaskedLM(BertConfig(**sizes))


def _llama(width: int = 1024, inner: int = 4096, num_key_value_heads: int = 16) -> nn.Module:
    heads = {"num_attention_heads": 16, "num_key_value_heads": num_key_value_heads, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(hidden_size=width, intermediate_size=inner, use_cache=False, **heads))


def _t5() -> nn.Module:
    sizes = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "bert": _bert,
    "llama": _llama,
    "t5": _t5,
    "grouped": lambda: _llama(num_key_value_heads=2),
    "large": lambda: _llama(width=8192, inner=28672),
}


@cache
def graph_of(name: str) -> Graph:
    """A model in one split TaskGraph; captured once for all tests."""
    with torch.device("meta"):
        model = epl.split(2, name="all")(MAKERS[name]())
        batch = {"input_ids": torch.zeros(BATCH, dtype=torch.long), "labels": torch.zeros(BATCH, dtype=torch.long)}
    return build_taskgraphs(capture(model, loss_step(None), flatten(batch)).graph)


def plan_of(graph: Graph, num_devices: int, kind: str = GPU, placements: Mapping[str, str] | None = None) -> Plan:
    """The plan for the same annotations with another number of devices, and placements that are asked for."""
    spec = replace(graph.tasks[0], device_count=num_devices, placements=tuple((placements or {}).items()))
    return make_plan(replace(graph, tasks=(spec,)), Cluster((num_devices,), device_kind=kind), epl.Config())


@cache
def plan_named(name: str, num_devices: int) -> Plan:
    return plan_of(graph_of(name), num_devices)


def placements_of(plan: Plan) -> dict[str, str]:
    return {entry.path: entry.placement for entry in plan.parameters}


# ------------------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_plan_sends_no_more_than_one_by_hand(name: str, num_devices: int) -> None:
    (split,) = plan_named(name, num_devices).splits
    assert 0 < split.sent_bytes <= split.megatron_bytes


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_the_yardstick_is_what_megatron_sends(num_devices: int) -> None:
    """Llama of 2 layers: 4 all-reduces a layer, one for the embedding and one for the head, each of the activations."""
    (split,) = plan_named("llama", num_devices).splits
    activations = 8 * 512 * 1024 * 4
    assert split.megatron_bytes == (2 * 4 + 2) * 2 * activations * (num_devices - 1) / num_devices


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_matrices_of_every_layer_are_cut(name: str) -> None:
    plan = plan_named(name, 4)
    small = (
        1024 * 1024 if name == "bert" else 0
    )  # the matrix before BERT's head, and those of positions and token types
    matrices = [entry for entry in plan.parameters if len(entry.shape) == 2 and "relative" not in entry.path]
    whole = [entry for entry in matrices if entry.placement == "R"]
    assert all(entry.shape[0] * entry.shape[1] <= small and "layer" not in entry.path for entry in whole), whole


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_blocks_are_cut_as_megatron_cuts_them(num_devices: int) -> None:
    found = placements_of(plan_named("llama", num_devices))
    for layer in range(2):
        path = f"model.layers.{layer}"
        assert {found[f"{path}.self_attn.{name}_proj.weight"] for name in "qkv"} == {"S(0, unit=64)"}
        assert found[f"{path}.self_attn.o_proj.weight"] == "S(1, unit=64)"
        assert {found[f"{path}.mlp.{name}_proj.weight"] for name in ("gate", "up")} == {"S(0)"}
        assert found[f"{path}.mlp.down_proj.weight"] == "S(1)"


def test_query_heads_are_cut_four_ways_beside_two_key_heads() -> None:
    """Each rank takes 2 of the 8 query heads that go with each key head, which it has whole."""
    found = placements_of(plan_named("grouped", 4))
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn"
        query = parse_placement(found[f"{path}.q_proj.weight"])
        assert isinstance(query, Shard)
        assert query.unit % 64 == 0
        assert [local_shape((1024, 1024), query, 4, rank) for rank in range(4)] == [(256, 1024)] * 4
        assert found[f"{path}.o_proj.weight"].startswith("S(1")


def test_groups_of_heads_stay_together_where_there_are_enough() -> None:
    """2 key heads on 2 ranks: 8 query heads of 64 go with each."""
    found = placements_of(plan_named("grouped", 2))
    query = parse_placement(found["model.layers.0.self_attn.q_proj.weight"])
    assert isinstance(query, Shard)
    assert (query.sizes(1024, 2), query.unit % 512) == ((512, 512), 0)
    assert found["model.layers.0.self_attn.k_proj.weight"] == "S(0, unit=64)"


# ------------------------------------------------------------------------------------------------- what a plan says


def test_a_plan_with_splits_survives_json() -> None:
    plan = plan_named("llama", 4)
    assert plan.splits
    assert Plan.from_json(plan.to_json()) == plan


def test_the_table_names_the_split_and_its_bytes_beside_those_by_hand() -> None:
    table = plan_table(plan_named("llama", 4))
    assert "split(4)" in table
    assert "split of stage 0 over 4 devices (mesh: 1 x 4): for each micro-batch a rank sends " in table
    assert "(as Megatron cuts by hand: 240.0 MiB), estimated time " in table
    assert "2 x model.layers.*.mlp.gate_proj linear: R, S(0) -> S(2)" in table
    assert "each rank sends 24.0 MiB" in table


def test_the_lines_of_what_travels_add_up_to_the_bytes() -> None:
    """Else a reader would look for what is missing, or the sum would count what is not there."""
    (split,) = plan_named("llama", 4).splits
    total = 0.0
    for line in split.communication:
        count, sent = int(line.split(" x ")[0]), line.rpartition("each rank sends ")[2]
        size, unit = sent.split()
        total += count * float(size.replace(",", "")) * {"MiB": 2**20, "B": 1}[unit]
    assert total == pytest.approx(split.sent_bytes, rel=0.01)


def test_weights_on_each_rank_are_counted_by_their_parts() -> None:
    graph = graph_of("llama")
    plan = plan_of(graph, 4)
    whole = sum(leaf.type.size_bytes for leaf in graph.parameters) / 2**20
    assert {entry.placement for entry in plan.parameters if len(entry.shape) == 1} == {"R"}
    (row,) = (line for line in plan_table(plan).splitlines() if line.startswith("  0 all"))
    held = float(row.split(" MiB")[0].split()[-1])
    assert held == pytest.approx(whole / 4, rel=0.01)


# ------------------------------------------------------------------------------------------------ what a plan obeys


class Tied(nn.Module):
    """A feed-forward net and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, 5000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(F.gelu(self.first(self.embedding(x))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


@cache
def tied_graph() -> Graph:
    with torch.device("meta"):
        model: Any = epl.split(2, name="all")(Tied())
        batch = torch.zeros(16, 32, dtype=torch.long)
    return build_taskgraphs(capture(model, loss_step(lambda module, x: module(x)), flatten(batch)).graph)


@pytest.mark.parametrize("text", ["R", "S(0)", "S(1)"])
@pytest.mark.parametrize("name", ["first.weight", "second.weight", "embedding.weight", "head.weight"])
def test_a_placement_that_is_asked_for_is_obeyed(name: str, text: str) -> None:
    """A tied weight by either of its names."""
    path = "embedding.weight" if name == "head.weight" else name
    plan = plan_of(tied_graph(), 2, placements={name: text})
    assert placements_of(plan)[path] == text
    others = {"first.weight", "second.weight", "embedding.weight"} - {path}
    assert all(placements_of(plan)[other].startswith("S") for other in others)
    if text != "R":  # which may be quicker, and is not chosen unless asked for
        assert plan.splits[0].time_s >= plan_of(tied_graph(), 2).splits[0].time_s * (1 - 1e-3)


def test_the_rest_is_chosen_around_what_is_asked_for() -> None:
    """The matrix after one that is cut by its results is cut by its arguments, and the other way round."""
    first = plan_of(tied_graph(), 2, placements={"first.weight": "S(0)"})
    assert placements_of(first)["second.weight"] == "S(1)"
    second = plan_of(tied_graph(), 2, placements={"second.weight": "S(1)"})
    assert placements_of(second)["first.weight"] == "S(0)"


def test_a_star_stands_for_any_text_and_cuts_keep_heads_together() -> None:
    plan = plan_of(graph_of("llama"), 2, placements={"*.q_proj.weight": "S(0)", "*.embed_tokens.weight": "R"})
    found = placements_of(plan)
    assert found["model.layers.0.self_attn.q_proj.weight"] == "S(0, unit=64)"
    assert found["model.layers.1.self_attn.q_proj.weight"] == "S(0, unit=64)"
    assert found["model.embed_tokens.weight"] == "R"


def test_a_name_that_fits_nothing_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"placements names 'third\.\*', which fits none of its weights: .*weight"):
        plan_of(tied_graph(), 2, placements={"third.*": "S(0)"})


def test_a_cut_that_is_not_possible_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        StrategyError, match=r"first\.bias of shape \[1024\] cannot be placed as S\(1\) .* are R, S\(0\)"
    ):
        plan_of(tied_graph(), 2, placements={"first.bias": "S(1)"})


def test_more_devices_than_rows_is_refused_with_what_is_left() -> None:
    with pytest.raises(StrategyError, match=r"cannot be placed as S\(1\) on 257 devices.*possible are R, S\(0\)$"):
        plan_of(tied_graph(), 257, placements={"second.bias": "R", "embedding.weight": "S(1)"})


@pytest.mark.parametrize("text", ["P", "S", "S(0, unit=2)", "s(0)", "0"])
def test_what_is_no_placement_of_a_weight_is_refused_where_it_is_written(text: str) -> None:
    with pytest.raises(StrategyError, match="is not a placement of a weight; write 'R'"):
        epl.split(2, placements={"first.weight": text})


def test_weights_stay_where_a_plan_has_them_for_another_graph() -> None:
    """What was decided once holds for each sequence length and for evaluation, even where it is not the best."""
    graph = tied_graph()
    pins = {"p_model_first_weight": Shard(1), "p_model_second_weight": Replicated()}
    choice = choose_split(graph, frozenset({0}), SplitGroup(2, device_model(GPU)), Decided(pins))
    assert {name: choice.stored[name] for name in pins} == pins


# ---------------------------------------------------------------------------------------------- what a plan refuses


def test_a_model_too_large_for_its_devices_is_refused_in_numbers() -> None:
    """Nothing was allocated: weights and batch are on the meta device."""
    graph = graph_of("large")
    size_gib = sum(leaf.type.size_bytes for leaf in graph.parameters) / 2 / 2**30
    with pytest.raises(PlanError) as caught:
        plan_of(graph, 2, "T4")
    message = str(caught.value)
    assert message.startswith(
        f"a split over 2 devices does not fit: each rank would hold {size_gib:.2f} GiB of weights, "
    )
    assert f"{size_gib:.2f} GiB of gradients and {2 * size_gib:.2f} GiB of optimizer states" in message
    assert "a T4 has 16.00 GiB" in message
    assert f"{4 * size_gib - 16:.2f} GiB are missing. Split over more devices." in message


def test_the_same_model_on_more_devices_fits() -> None:
    assert plan_of(graph_of("large"), 4, "T4").splits
    assert plan_of(graph_of("large"), 2, GPU).splits
