"""What things cost: bytes and seconds of collectives and operators, from formulas that fit on a line."""

from __future__ import annotations

import pytest

from epl.cost.communication import bytes_sent, collective_s
from epl.cost.devices import CPU, DeviceModel, LinkModel, device_model
from epl.cost.operators import Work, operator_s, work_of

LINK = LinkModel(latency_s=1.0, bandwidth_bytes_per_s=100.0)
DEVICE = DeviceModel("test", flops_per_s=1000.0, memory_bytes_per_s=10.0, memory_bytes=0, operator_s=0.5, link=LINK)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expected"),
    [
        ("all_reduce", 2, 800.0),  # what all_gather and reduce_scatter send, together
        ("all_reduce", 4, 1200.0),
        ("all_gather", 2, 400.0),
        ("all_gather", 4, 600.0),
        ("reduce_scatter", 2, 400.0),
        ("reduce_scatter", 4, 600.0),
        ("all_to_all", 2, 200.0),  # of its half, a half
        ("all_to_all", 4, 150.0),  # of its quarter, three quarters
    ],
)
def test_bytes_that_each_rank_sends_of_800(kind: str, num_ranks: int, expected: float) -> None:
    assert bytes_sent(kind, 800, num_ranks) == expected


@pytest.mark.parametrize("kind", ["nothing", "slice", "zero"])
def test_what_stays_within_a_rank_sends_nothing(kind: str) -> None:
    assert bytes_sent(kind, 800, 4) == 0
    assert collective_s(kind, 800, 4, LINK) == 0


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_one_rank_and_no_bytes_cost_nothing(kind: str) -> None:
    assert collective_s(kind, 800, 1, LINK) == 0
    assert collective_s(kind, 0, 4, LINK) == 0


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expected"),
    [
        ("all_reduce", 2, 2 + 8.0),  # steps of a second, then the bytes
        ("all_reduce", 4, 6 + 12.0),
        ("all_gather", 2, 1 + 4.0),
        ("all_gather", 4, 3 + 6.0),
        ("reduce_scatter", 4, 3 + 6.0),
        ("all_to_all", 2, 1 + 2.0),
        ("all_to_all", 4, 1 + 1.5),
    ],
)
def test_seconds_are_steps_and_bytes(kind: str, num_ranks: int, expected: float) -> None:
    assert collective_s(kind, 800, num_ranks, LINK) == pytest.approx(expected)


def _linear(batch: int) -> Work:
    return work_of("aten.linear.default", {"input": [(batch, 3)], "weight": [(5, 3)]}, [(batch, 5)], 4)


@pytest.mark.parametrize(
    ("target", "inputs", "output", "flops"),
    [
        ("aten.linear.default", {"input": [(2, 7, 3)], "weight": [(5, 3)]}, (2, 7, 5), 2 * 2 * 7 * 5 * 3),
        ("aten.addmm.default", {"self": [(5,)], "mat1": [(7, 3)], "mat2": [(3, 5)]}, (7, 5), 2 * 7 * 5 * 3),
        ("aten.matmul.default", {"self": [(2, 7, 3)], "other": [(2, 3, 5)]}, (2, 7, 5), 2 * 2 * 7 * 5 * 3),
        ("aten.bmm.default", {"self": [(2, 7, 3)], "mat2": [(2, 3, 5)]}, (2, 7, 5), 2 * 2 * 7 * 5 * 3),
        ("aten.conv2d.default", {"input": [(2, 3, 9, 9)], "weight": [(8, 3, 2, 2)]}, (2, 8, 8, 8), 2 * 1024 * 12),
        (
            "aten.scaled_dot_product_attention.default",
            {"query": [(2, 4, 9, 8)], "key": [(2, 4, 6, 8)], "value": [(2, 4, 6, 8)]},
            (2, 4, 9, 8),
            2 * 2 * (2 * 4 * 9 * 6 * 8),  # queries with keys, and what comes of it with values
        ),
        (
            "aten.gru.input",
            {"input": [(2, 7, 3)], "hx": [(1, 2, 5)], "params": [(15, 3), (15, 5), (15,), (15,)]},
            (2, 7, 5),
            2 * 2 * 7 * 15 * (3 + 5),
        ),
        ("aten.gelu.default", {"self": [(2, 3)]}, (2, 3), 6),
    ],
)
def test_operations_of_an_operator(
    target: str, inputs: dict[str, list[tuple[int, ...]]], output: tuple[int, ...], flops: float
) -> None:
    assert work_of(target, inputs, [output], 4).flops == flops


def test_bytes_are_those_of_all_that_is_read_and_made() -> None:
    assert _linear(2).size_bytes == 4 * (2 * 3 + 5 * 3 + 2 * 5)
    assert work_of("aten.add_.Tensor", {"self": [(6,)], "other": [(6,)]}, [(6,)], 2).size_bytes == 2 * 18


@pytest.mark.parametrize(
    "name", ["view.default", "transpose.int", "unsqueeze.default", "slice.Tensor", "chunk.default"]
)
def test_views_are_free(name: str) -> None:
    work = work_of(f"aten.{name}", {"self": [(1000, 1000)]}, [(1000, 1000)], 4)
    assert operator_s(work, DEVICE, backward=True) == 0


def test_time_is_that_of_the_scarcer_of_two_and_never_below_the_floor() -> None:
    assert operator_s(Work(5000.0, 10.0), DEVICE, backward=False) == 5.0
    assert operator_s(Work(100.0, 20.0), DEVICE, backward=False) == 2.0
    assert operator_s(Work(1.0, 1.0), DEVICE, backward=False) == 0.5


def test_backward_takes_twice_as_long_as_forward() -> None:
    work = Work(5000.0, 10.0)
    assert operator_s(work, DEVICE, backward=True) == 3 * operator_s(work, DEVICE, backward=False)


def test_larger_operators_take_longer() -> None:
    times = [operator_s(_linear(batch), DEVICE, backward=False) for batch in (10, 100, 1000)]
    assert times == sorted(set(times))


@pytest.mark.parametrize("kind", ["", "cpu"])
def test_a_device_that_is_not_said_is_a_core(kind: str) -> None:
    assert device_model(kind) is CPU
    assert CPU.memory_bytes == 0  # not limited


@pytest.mark.parametrize(
    ("kind", "name", "gib"),
    [("T4", "T4", 16), ("V100-32GB", "V100-32GB", 32), ("a100-80gb", "A100-80GB", 80), ("H100", "H100-80GB", 80)],
)
def test_a_known_device_is_found_by_the_beginning_of_its_name(kind: str, name: str, gib: int) -> None:
    model = device_model(kind)
    assert (model.name, model.memory_bytes) == (name, gib * 2**30)


def test_an_unknown_device_is_taken_for_an_a100() -> None:
    assert device_model("X-9000") == device_model("A100-80GB")


def test_better_devices_are_faster_and_links_slower_than_memory() -> None:
    names = ("T4", "V100-32GB", "A100-80GB", "H100-80GB")
    models = [device_model(name) for name in names]
    rates = [model.flops_per_s for model in models]
    assert rates == sorted(rates)
    for model in (CPU, *models):
        assert model.link.bandwidth_bytes_per_s < model.memory_bytes_per_s < model.flops_per_s
