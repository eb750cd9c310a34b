"""Computing activations again changes no number, whatever the plan; what is drawn at random is drawn again.

A mistake shows as a gradient that differs: another mask, a statistic counted twice, a collective that one rank repeats.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import epl
from epl.errors import ConfigError, PlanError, RunError, StrategyError
from tests.marks import slow
from tests.parity import make_optimizer
from tests.ranks import launch
from tests.runtime.training import Job, build, check_parity, share_of
from tests.zoo import CASES

AUTO = {"gradient_checkpoint.type": "auto", "gradient_checkpoint.extra_compute": 1.0}


def quick(*names: str) -> list[Any]:
    """These models, and all others for ``make test-all``."""
    return [*names, *slow(*(name for name in CASES if name not in (*names, "bart")))]


@pytest.mark.parametrize("name", quick())
def test_accumulation_with_recompute_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=1, micro_batches=3, size=7, config=AUTO))


@pytest.mark.parametrize("name", quick("resnet"))
def test_data_parallelism_with_recompute_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, config=AUTO))


@pytest.mark.parametrize("name", slow("t5", "bert", "gpt2", "unet", "tied", "resnet", "llama"))
def test_a_pipeline_inside_data_parallelism_with_recompute_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, micro_batches=2, config=AUTO))


@pytest.mark.parametrize("name", slow("bert", "gpt2", "llama", "t5", "mixtral", "vit", "resnet", "unet"))
def test_split_with_recompute_equals_one_process(name: str) -> None:
    check_parity(Job(name, world=2, split=2, config=AUTO))


@pytest.mark.parametrize("name", slow("bert", "gpt2", "t5"))
def test_split_and_pipeline_with_recompute_equal_one_process(name: str) -> None:
    check_parity(Job(name, world=4, num_stages=2, split=2, micro_batches=2, config=AUTO))


def step_with_dropout(rank: int, job: Job) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one step with dropout, and how many segments the plan speaks of."""
    settings = {"pipeline.num_micro_batch": job.micro_batches, "run.print_plan": False, **job.config}
    epl.init(epl.Config(settings))
    torch.manual_seed(5)
    model = build(job)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    engine = epl.parallelize(model, make_optimizer(model), loss_fn=CASES[job.case].loss_fn)
    batch = job.batches()[0]
    engine.prepare(share_of(batch, 0, job.num_replicas))
    engine.forward_backward(share_of(batch, engine.plan.place_of(rank)[1], job.num_replicas))
    notes = [note for note in engine.plan.notes if "again in backward" in note]
    found = engine.gradients()
    return {name: value for name, value in found.items() if value is not None}, len(notes)


@pytest.mark.parametrize(
    "job",
    [
        Job("bert", world=2, split=2, micro_batches=2),
        *slow(
            Job("t5", world=2, split=2, micro_batches=2),
            Job("bert", world=2, num_stages=2, micro_batches=2),
            Job("gpt2", world=2, micro_batches=2),
        ),
    ],
    ids=lambda job: f"{job.case}-{job.num_stages}-{job.split}",
)
def test_masks_of_dropout_are_drawn_again(job: Job) -> None:
    plain = launch(job.world, step_with_dropout, job)
    again = launch(job.world, step_with_dropout, replace(job, config=AUTO))
    for (gradients, none), (same, some) in zip(plain, again, strict=True):
        assert none == 0
        assert some == job.num_stages
        assert gradients.keys() == same.keys()
        assert all(torch.equal(gradients[name], same[name]) for name in gradients)


# -- settings -----------------------------------------------------------------------------------------------------


def prepare(case: str, **settings: Any) -> epl.Plan:
    epl.init(
        epl.Config({"run.print_plan": False, **{key.replace("__", "."): value for key, value in settings.items()}})
    )
    model = CASES[case].build(torch.float64)
    engine = epl.parallelize(model, make_optimizer(model), loss_fn=CASES[case].loss_fn)
    return engine.prepare(CASES[case].batch(8, dtype=torch.float64))


def test_a_budget_that_cannot_be_kept_is_refused_with_the_least_that_can() -> None:
    with pytest.raises(
        PlanError, match=r"(?s)memory_budget is 97\.7 KiB.*a rank of stage 0 '.*' needs at least"
    ) as found:
        prepare("bert", gradient_checkpoint__type="auto", gradient_checkpoint__memory_budget="100KB")
    least = re.search(r"at least ([\d.]+) MiB", str(found.value))
    assert least is not None
    enough = f"{float(least[1]) + 0.1:.1f}MiB"
    prepare("bert", gradient_checkpoint__type="auto", gradient_checkpoint__memory_budget=enough)


def measured_peak(rank: int, job: Job, config: dict[str, Any]) -> int:
    """The largest peak of any rank, measured in a training step, after one that makes the optimizer's states."""
    settings = {"pipeline.num_micro_batch": job.micro_batches, "run.print_plan": False, **config}
    epl.init(epl.Config(settings))
    model = build(job)
    engine = epl.parallelize(model, torch.optim.AdamW(model.parameters()), loss_fn=CASES[job.case].loss_fn)
    batch = job.batches()[0]
    engine.prepare(share_of(batch, 0, job.num_replicas))
    share = share_of(batch, engine.plan.place_of(rank)[1], job.num_replicas)
    engine.train_step(share)
    report = engine.memory_report(share)
    engine.close()
    return max(each.measured.peak_bytes for each in report.ranks if each.measured is not None)


def peaks_under_budgets(rank: int, job: Job) -> tuple[int, int, list[tuple[int, int]]]:
    """The peak with everything kept, with as little as can be, and (budget, peak) for budgets between the two."""
    plain, least = measured_peak(rank, job, {}), measured_peak(rank, job, AUTO)
    found: list[tuple[int, int]] = []
    for share in (0.1, 0.5, 0.9):
        budget = int(least * 1.05 + share * (plain - least * 1.05))
        config = {"gradient_checkpoint.type": "auto", "gradient_checkpoint.memory_budget": str(budget)}
        found.append((budget, measured_peak(rank, job, config)))
    return plain, least, found


@pytest.mark.parametrize(
    "job",
    [
        Job("mlp", world=1, size=64),
        *slow(
            Job("bert", world=1, size=64),
            Job("gpt2", world=2, num_stages=2, micro_batches=4, size=64),
            Job("t5", world=2, size=64),
            Job("bert", world=2, split=2, size=64),
        ),
    ],
    ids=lambda job: f"{job.case}-{job.world}-{job.num_stages}-{job.split}",
)
def test_a_budget_is_kept_as_measured(job: Job) -> None:
    plain, least, found = launch(job.world, peaks_under_budgets, job)[0]
    assert least < 0.9 * plain
    assert all(peak <= budget for budget, peak in found)


def test_collection_without_anything_marked_is_refused() -> None:
    with pytest.raises(StrategyError, match="nothing in the model is marked"):
        prepare("bert", gradient_checkpoint__type="collection")


def test_settings_that_only_auto_reads_are_refused_without_it() -> None:
    with pytest.raises(ConfigError, match=r"memory_budget: for .*type='auto'.* the type is ''"):
        prepare("bert", gradient_checkpoint__memory_budget="1GiB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"end_taskgraph": 1}, "end_taskgraph is 1, and the last TaskGraph is 0"),
        ({"memory_budget": "0 GiB"}, "memory_budget is '0 GiB', no memory at all"),
        ({"memory_budget": "much"}, "memory_budget: got 'much' .*, expected a str as in: With auto"),
        ({"memory_budget": "1GiB", "extra_compute": 0.1}, "memory_budget and extra_compute are both set"),
    ],
)
def test_limits_that_say_nothing_or_two_things_are_refused(settings: dict[str, Any], message: str) -> None:
    given = {f"gradient_checkpoint__{key}": value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        prepare("mlp", gradient_checkpoint__type="auto", **given)


def test_a_kernel_that_fills_what_it_keeps_is_not_cut_short() -> None:
    """torch's early stop of a recomputation ends before ``rrelu`` has drawn the noise that backward needs."""

    def gradient(config: dict[str, Any]) -> torch.Tensor:
        epl.init(epl.Config({"run.print_plan": False, **config}))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.RReLU(), torch.nn.Linear(64, 1))
        engine = epl.parallelize(model, loss_fn=lambda m, x: m(x).exp().mean())
        engine.forward_backward(torch.ones(16, 8))
        found = engine.gradients()["0.weight"]
        assert found is not None
        return found

    assert torch.equal(gradient(AUTO), gradient({}))


@pytest.mark.parametrize("budget", ["3 mib", "3145.8KB", "3M", 3 * 2**20])
def test_a_budget_may_be_written_as_people_do(budget: str | int) -> None:
    plan = prepare("bert", gradient_checkpoint__type="auto", gradient_checkpoint__memory_budget=budget)
    assert plan.memory_budget == pytest.approx(3 * 2**20, rel=0.05)


def test_the_plan_says_what_is_computed_again_and_what_a_budget_comes_to() -> None:
    notes = prepare("bert", gradient_checkpoint__type="auto", gradient_checkpoint__memory_budget="1GiB").notes
    assert any(re.search("stage 0 computes 0 segments again in backward", note) for note in notes)
    assert any(
        re.search(r"stage 0: a rank's memory is predicted as .* MiB of a budget of 1\.0 GiB", note) for note in notes
    )


def test_the_plan_counts_what_the_model_marks() -> None:
    epl.init(epl.Config({"run.print_plan": False}))
    model = CASES["bert"].build(torch.float64)
    for layer in model.get_submodule("bert.encoder.layer"):  # type: ignore[union-attr]
        epl.checkpoint(layer)
    plan = epl.parallelize(model).prepare(CASES["bert"].batch(8, dtype=torch.float64))
    assert "stage 0: 4 segments that the model marks are computed again in backward" in plan.notes


def test_check_gradients_without_anything_to_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="check_gradients is set, and nothing is computed again"):
        prepare("mlp", gradient_checkpoint__check_gradients=True)


# -- gradient_checkpoint.check_gradients --------------------------------------------------------------------------


class Fickle(torch.autograd.Function):
    """Gives another gradient at every call, as code that counts its calls may."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Fickle.calls += 1
        ctx.save_for_backward(x * Fickle.calls)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


class FickleNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.is_fickle = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, self.a(x), use_reentrant=False)  # type: ignore[return-value]

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = Fickle.apply(x) if self.is_fickle else x.tanh()  # type: ignore[assignment]
        return self.b(x).pow(2).mean()


@pytest.mark.parametrize("is_fickle", [False, True])
def test_check_gradients_finds_code_that_computes_something_else_the_second_time(is_fickle: bool) -> None:
    epl.init(epl.Config({"run.print_plan": False, "gradient_checkpoint.check_gradients": True}))
    model = FickleNet()
    model.is_fickle = is_fickle
    engine = epl.parallelize(model, make_optimizer(model))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if is_fickle:
        Fickle.calls = 0
        with pytest.raises(RunError, match=r"(?s)computing again in backward changes gradients:.*a\.weight: off by"):
            engine.forward_backward(torch.ones(3, 4))
    else:
        engine.forward_backward(torch.ones(3, 4))
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_check_gradients_over_two_stages_with_dropout() -> None:
    job = Job(
        "bert", world=2, num_stages=2, micro_batches=2, config={**AUTO, "gradient_checkpoint.check_gradients": True}
    )
    plain = launch(2, step_with_dropout, replace(job, config={}))
    checked = launch(2, step_with_dropout, job)
    for (gradients, _), (same, _) in zip(plain, checked, strict=True):
        assert all(torch.equal(gradients[name], same[name]) for name in gradients)
