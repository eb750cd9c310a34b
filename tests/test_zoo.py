"""The zoo's models are what they claim: quick, repeatable, and cut where they say. Else parity tests prove nothing."""

import time

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.parity import Reference, assert_close, loss_of, reference_steps
from tests.ranks import launch
from tests.zoo import CASES, Batch, Case, annotate

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@EVERY_CASE
def test_every_case_trains_every_parameter_within_a_second(case: Case, dtype: torch.dtype):
    start_s = time.thread_time()
    model = case.build(dtype)
    loss = loss_of(case, model, case.batch(4, dtype=dtype))
    loss.backward()
    assert time.thread_time() - start_s < 1.0
    assert loss.dtype is dtype
    assert loss.shape == ()
    assert loss.isfinite()
    assert not [name for name, parameter in model.named_parameters() if not parameter.grad.any()]


@EVERY_CASE
def test_training_on_one_batch_lowers_its_loss(case: Case):
    losses = reference_steps(case, torch.float32, [case.batch(8)], steps=5).losses
    assert losses[-1] < 0.98 * losses[0]


@EVERY_CASE
def test_a_seed_fixes_weights_and_batches_and_leaves_the_global_generator_alone(case: Case):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, first_batch = case.build().state_dict(), case.batch(4)
    torch.manual_seed(2)
    again = case.build().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert str(first_batch) == str(case.batch(4))
    assert str(first_batch) != str(case.batch(4, seed=1))
    torch.manual_seed(1)
    case.build()
    assert torch.equal(torch.random.get_rng_state(), before)


@EVERY_CASE
def test_both_dtypes_see_the_same_weights_and_batches(case: Case):
    """So that a test may be tried in float32 and made sharp in float64."""
    narrow = loss_of(case, case.build(), case.batch(4))
    wide = loss_of(case, case.build(torch.float64), case.batch(4, dtype=torch.float64))
    assert_close(narrow.double(), wide, torch.float32)


@EVERY_CASE
def test_dropout_acts_or_is_refused(case: Case):
    if not case.has_dropout:
        with pytest.raises(ValueError, match=f"{case.name} has no dropout to set to 0.5"):
            case.build(dropout=0.5)
        return
    plain, dropped = case.build(), case.build(dropout=0.5)
    batch = case.batch(4)
    assert not torch.equal(loss_of(case, plain, batch), loss_of(case, dropped, batch))
    assert torch.equal(loss_of(case, plain.eval(), batch), loss_of(case, dropped.eval(), batch))


@EVERY_CASE
def test_samples_weigh_the_same_so_parts_add_up_to_the_whole(case: Case):
    """Seven samples in four parts: what a pipeline with micro-batches of unequal sizes has to reproduce."""
    dtype = torch.float64
    batches = [case.batch(7, seed, dtype=dtype) for seed in range(3)]
    whole = reference_steps(case, dtype, batches, steps=3)
    parts = reference_steps(case, dtype, batches, steps=3, num_parts=4)
    if case.independent_samples:
        assert_close(parts._asdict(), whole._asdict(), case.accuracy(dtype))
    else:
        with pytest.raises(AssertionError, match="tensors differ"):
            assert_close(parts._asdict(), whole._asdict(), case.accuracy(dtype))


@EVERY_CASE
def test_cuts_name_modules_that_hold_parameters_and_name_each_once(case: Case):
    model = case.build()
    assert sorted(case.stages) == [2, 3, 4]
    for num_stages, cut in case.stages.items():
        assert len(cut) == num_stages
        for paths in cut:
            assert any(list(model.get_submodule(path).parameters()) for path in paths)
        owners = [id(module) for paths in cut for path in paths for module in model.get_submodule(path).modules()]
        assert len(owners) == len(set(owners))


@EVERY_CASE
def test_every_parameter_is_in_some_stage(case: Case):
    model = case.build()
    for cut in case.stages.values():
        covered = {id(p) for paths in cut for path in paths for p in model.get_submodule(path).parameters()}
        assert not [name for name, parameter in model.named_parameters() if id(parameter) not in covered]


class _Strategies:
    """Stands in for ``epl``: notes which strategy was called on what."""

    def __init__(self) -> None:
        self.made: list[tuple[int, str, list[nn.Module]]] = []

    def replicate(self, device_count: int, name: str):
        modules: list[nn.Module] = []
        self.made.append((device_count, name, modules))
        return modules.append


def test_annotate_uses_one_strategy_for_each_stage(monkeypatch):
    strategies = _Strategies()
    monkeypatch.setattr(zoo, "epl", strategies)
    model = annotate(CASES["mlp"].build(), CASES["mlp"].stages[2], device_counts=[1, 2])
    assert [(count, name) for count, name, _ in strategies.made] == [(1, "stage_0"), (2, "stage_1")]
    assert strategies.made[0][2] == [model.blocks[0], model.blocks[1]]
    assert strategies.made[1][2] == [model.blocks[2], model.blocks[3], model.head]


def test_lengths_change_at_will():
    for name, shape in (("bert", (2, 11)), ("unet", (2, 3, 16, 16))):
        case = CASES[name]
        batch = case.batch(2, length=shape[-1])
        assert isinstance(batch, dict)
        assert next(value for value in batch.values() if isinstance(value, Tensor)).shape == shape
        assert loss_of(case, case.build(), batch).isfinite()


def _train(_: int, name: str, batches: list[Batch]) -> Reference:
    return reference_steps(CASES[name], torch.float32, batches, steps=1)


@pytest.mark.parametrize("name", ["bert", "mixtral", "resnet"])
def test_a_rank_computes_what_this_process_computes(name):
    batches = [CASES[name].batch(4)]
    here = _train(0, name, batches)
    for there in launch(2, _train, name, batches):
        assert_close(there._asdict(), here._asdict(), torch.float32)
