"""Every model of the zoo, cut in every way the zoo knows, computes stage by stage what it computes whole."""

from __future__ import annotations

import pytest
import torch

from epl.batch import flatten
from epl.capture.capture import Captured
from epl.capture.convert import convert
from epl.capture.export import export
from epl.loss import loss_step
from tests.marks import slow
from tests.program.local_run import check_lowered, check_parity, lower_captured
from tests.zoo import CASES, annotate

SLOW = ("mixtral", "llama", "gpt2", "bart", "resnet", "unet")  # as pipelines they are trained in tests/runtime


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SLOW), *slow(*SLOW)])
def test_stages_compute_what_the_whole_model_computes(name: str) -> None:
    """Annotations have no say in an export, so one serves all cuts: it is what takes the time."""
    case = CASES[name]
    model, batch = case.build(torch.float64), case.batch(3, dtype=torch.float64)
    flat = flatten(batch)
    exported = export(model, loss_step(case.loss_fn), flat.structure, flat.tensors)
    for num_stages in (1, *case.stages):
        if num_stages > 1:
            annotate(model, case.stages[num_stages])
        converted = convert(exported, model, flat.paths)
        captured = Captured(converted.graph, converted.functions, converted.constants)
        lowered = lower_captured(model, captured)
        assert lowered.plan.num_stages == num_stages
        check_lowered(lowered, batch, case.loss_fn, dtype=case.accuracy(torch.float64), num_steps=1)


LARGE = ("llama", "gpt2", "bart")


@pytest.mark.parametrize("name", ["bert", "t5", "unet", "tied"])
def test_dropout_draws_the_same_numbers_whatever_the_cut(name: str) -> None:
    case = CASES[name]
    model = annotate(case.build(torch.float64, dropout=0.3), case.stages[3])
    check_parity(model, case.batch(3, dtype=torch.float64), case.loss_fn, dtype=case.accuracy(torch.float64))
