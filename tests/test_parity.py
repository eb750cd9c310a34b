"""The yardstick itself: a comparison that passes too much would pass every parallel feature."""

import pytest
import torch

from tests.parity import assert_close, cut_batch, reference_steps
from tests.zoo import CASES

ONES = torch.ones(3, dtype=torch.float64)


def test_agreement_is_relative_to_the_tensors_size():
    assert_close({"w": 1e6 * ONES + 1e-4}, {"w": 1e6 * ONES}, torch.float64)
    assert_close([1.0, 2.0], [1.0, 2.0 + 1e-10], torch.float64)
    with pytest.raises(AssertionError, match=r"1 of 1 tensors differ; the worst is w\n  w: off by 0.01, allowed 0.001"):
        assert_close({"w": 1e6 * ONES + 1e-2}, {"w": 1e6 * ONES}, torch.float64)


def test_the_worst_tensor_comes_first_with_what_it_has_and_should_have():
    expected = {"a": ONES, "layer": {"b": ONES, "c": [ONES, ONES]}}
    actual = {"a": ONES + 1e-3, "layer": {"b": ONES, "c": [ONES, ONES + torch.tensor([0.0, 0.5, 0.0])]}}
    with pytest.raises(
        AssertionError, match=r"2 of 4 tensors differ; the worst is layer.c\[1\]\n.*got 1.5, expected 1\n"
    ):
        assert_close(actual, expected, torch.float64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_never_agrees(value):
    for actual, expected in ((value, 1.0), (1.0, value), (value, value)):
        with pytest.raises(AssertionError, match="the worst is the value"):
            assert_close(actual, expected, torch.float64)


def test_a_gradient_that_is_rounding_noise_is_measured_against_the_largest():
    """A key's bias has a gradient of zero, so 1e-17 here and 3e-18 there are both right, and 1e-5 is not."""
    assert_close({"key.bias": 1e-17 * ONES, "w": ONES}, {"key.bias": 3e-18 * ONES, "w": ONES}, torch.float64)
    with pytest.raises(AssertionError, match=r"the worst is key\.bias"):
        assert_close({"key.bias": 1e-5 * ONES, "w": ONES}, {"key.bias": 0 * ONES, "w": ONES}, torch.float64)


def test_names_shapes_and_dtypes_must_be_those_expected():
    with pytest.raises(AssertionError, match=r"missing \['b'\], unexpected \['c'\]"):
        assert_close({"a": ONES, "c": ONES}, {"a": ONES, "b": ONES}, torch.float64)
    with pytest.raises(AssertionError, match=r"a is \(torch.float64, \(2,\)\), expected \(torch.float64, \(3,\)\)"):
        assert_close({"a": ONES[:2]}, {"a": ONES}, torch.float64)
    with pytest.raises(AssertionError, match=r"a is \(torch.float32"):
        assert_close({"a": ONES.float()}, {"a": ONES}, torch.float64)


def test_counts_are_compared_too():
    with pytest.raises(AssertionError, match="the worst is seen"):
        assert_close({"seen": torch.tensor(5)}, {"seen": torch.tensor(4)}, torch.float32)


def test_parts_are_cut_as_tensor_split_does_and_plain_values_go_to_each():
    batch = {"x": torch.arange(7), "mask": None, "depth": 2}
    parts = cut_batch(batch, 4)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all(part["mask"] is None and part["depth"] == 2 for part in parts)
    assert [part[0].tolist() for part in cut_batch((torch.arange(2), "mean"), 4)] == [[0], [1]]


def test_reference_steps_are_plain_sgd():
    """Checked against one step written out by hand."""
    case = CASES["mlp"]
    batch = case.batch(4, dtype=torch.float64)
    model = case.build(torch.float64)
    loss = case.loss_fn(model, batch)
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    state = {name: value - 0.01 * gradients[name] for name, value in model.state_dict().items()}
    reference = reference_steps(case, torch.float64, [batch], steps=1, optimizer="sgd")
    assert_close(reference, ([loss.item()], [norm.item()], gradients, state), torch.float64)
