"""Forms in short types, and what they move between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epl.sharding.forms import FORMS, Cut
from epl.sharding.options import Option
from epl.sharding.placements import Shard
from epl.sharding.rules import options_of
from tests.sharding.checks import call_on_shards, cut_of
from tests.sharding.samples import Sample, case, const, whole
from tests.sharding.threads import ThreadRank, run_ranks

TOKENS, CLASSES = 600, 1001
LOGITS = (const(TOKENS, CLASSES) * 8).bfloat16()
SHORT = (
    case("cross_entropy_loss", LOGITS, whole(CLASSES, TOKENS)),
    case("cross_entropy_loss", LOGITS, whole(CLASSES, TOKENS), const(CLASSES).bfloat16(), 1, -100, 0.1),
    case("nll_loss", LOGITS.float().log_softmax(-1).bfloat16(), whole(CLASSES, TOKENS)),
    case("softmax.int", LOGITS, -1),
    case("log_softmax.int", LOGITS, 1),
    case("logsumexp", LOGITS, [1]),
    case("batch_norm", LOGITS, None, None, None, None, True, 0.1, 1e-5, False),
)


def _of_form(sample: Sample) -> list[Option]:
    return [option for option in options_of(sample.call) if option.form]


@pytest.mark.parametrize("sample", SHORT, ids=str)
def test_forms_keep_short_types_and_count_in_longer_ones(sample: Sample):
    """bfloat16 knows no odd number above 256, so a count or a sum of exponentials in it would be off by far more."""
    longer = [tensor.float() if tensor.is_floating_point() else tensor for tensor in sample.tensors]
    expected = sample.operator(**sample.arguments(longer))  # bfloat16's own result has an error of its own
    for option in _of_form(sample):
        parts = run_ranks(2, lambda ranks, option=option: call_on_shards(sample, option, ranks))
        assert {part.dtype for part in parts} == {torch.bfloat16}
        assert sum(part.numel() for part in parts) >= expected.numel()
        if expected.dim() == 0:
            total = parts[0].float() if str(option.outputs[0]) == "R" else sum(part.float() for part in parts)
            torch.testing.assert_close(total, expected.float(), rtol=1e-2, atol=1e-2)


def test_a_form_gives_the_type_that_autocast_gives():
    sample = SHORT[0]
    (option,) = (option for option in _of_form(sample) if option.form == "cross_entropy_classes")
    cut = replace(cut_of(sample, option), output_dtypes=(torch.float32,))
    arguments = {**sample.call.arguments, **sample.given}

    def work(ranks: ThreadRank) -> torch.Tensor:
        start, stop = option.inputs[0].span(CLASSES, ranks.size, ranks.rank)  # type: ignore[union-attr]
        return FORMS[option.form](ranks, cut, **{**arguments, "self": LOGITS[:, start:stop]})

    expected = torch.nn.functional.cross_entropy(LOGITS.float(), sample.tensors[1])
    for loss in run_ranks(2, work):
        torch.testing.assert_close(loss, expected)


def test_cross_entropy_over_cut_classes_moves_no_logits(monkeypatch: pytest.MonkeyPatch):
    """What it moves is a few numbers for each token."""
    sample = SHORT[0]
    (option,) = (option for option in _of_form(sample) if option.form == "cross_entropy_classes")
    moved: list[int] = []
    exchange = ThreadRank._exchange

    def counted(ranks: ThreadRank, item: torch.Tensor) -> list[torch.Tensor]:
        moved.append(item.numel())
        return exchange(ranks, item)

    monkeypatch.setattr(ThreadRank, "_exchange", counted)
    run_ranks(2, lambda ranks: call_on_shards(sample, option, ranks))
    assert sum(moved) / 2 <= 3 * TOKENS


def test_a_cut_without_types_gives_those_of_its_arguments():
    cut = Cut((), (), (), ())
    assert cut.typed(torch.ones(2), torch.ones(2).half()).dtype == torch.half


@pytest.mark.parametrize("name", ["topk", "max.dim"])
def test_what_was_chosen_may_be_changed_in_place(name: str):
    """Mixtral divides the weights of the chosen experts by their sum in place."""
    count = 3 if name == "topk" else 1
    sample = case(name, const(4, 10), count, 1) if name == "topk" else case(name, const(4, 10), 1)
    (option,) = (each for each in _of_form(sample) if isinstance(each.inputs[0], Shard) and each.inputs[0].dim == 1)

    def run(ranks: ThreadRank) -> torch.Tensor:
        own = const(4, 10).tensor_split(2, 1)[ranks.rank].clone().requires_grad_()
        cut = cut_of(sample, option)
        arguments = {"k": 3, "largest": True, "sorted": True} if name == "topk" else {}
        values, _ = FORMS[option.form](ranks, cut, self=own * 1, dim=1, **arguments)
        values.div_(2)
        values.sum().backward()
        assert own.grad is not None
        return own.grad

    gradient = torch.cat(run_ranks(2, run), 1)
    assert gradient.sum().item() == pytest.approx(4 * count / 2)
