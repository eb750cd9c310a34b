"""Every model of the zoo, cut in every way the zoo knows, computes stage by stage what it computes whole."""

from __future__ import annotations

import pytest
import torch

from tests.program.local_run import check_parity
from tests.zoo import CASES, annotate

CUTS = [(name, num_stages) for name, case in CASES.items() for num_stages in (1, *case.stages)]


@pytest.mark.parametrize(("name", "num_stages"), CUTS)
def test_stages_compute_what_the_whole_model_computes(name: str, num_stages: int) -> None:
    case = CASES[name]
    model = case.build(torch.float64)
    if num_stages > 1:
        annotate(model, case.stages[num_stages])
    batch = case.batch(3, dtype=torch.float64)
    check_parity(model, batch, case.loss_fn, dtype=case.accuracy(torch.float64), num_stages=num_stages)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_dropout])
def test_dropout_draws_the_same_numbers_whatever_the_cut(name: str) -> None:
    case = CASES[name]
    model = annotate(case.build(torch.float64, dropout=0.3), case.stages[3])
    check_parity(model, case.batch(3, dtype=torch.float64), case.loss_fn, dtype=case.accuracy(torch.float64))
