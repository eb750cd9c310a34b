"""The examples as a user starts them, for a few steps: they end, they learn, and the number of ranks changes nothing.

README's example is one of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TINY_BERT = ["--layers", "2", "--hidden", "32", "--steps", "10", "--learning-rate", "0.01", "--evaluate-every", "5"]
TOLERANCE = 1e-4  # of float32 losses near 6, after ten steps

pytestmark = pytest.mark.timeout(240)  # starts of torch and transformers on up to 5 ranks


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def launch(folder: Path, num_ranks: int, script: str, *arguments: str) -> str:
    """Run an example through the launcher and return what rank 0 printed."""
    path = str(EXAMPLES / script)  # or a path of its own
    run = command(folder, "-m", "epl.cli", "launch", "--nproc", str(num_ranks), path, *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def compare(folder: Path, *curves: Path) -> subprocess.CompletedProcess[str]:
    return command(folder, str(EXAMPLES / "compare_curves.py"), *map(str, curves), "--plot", "curves.png")


WAYS = {"one": (1, "dp", 4), "dp": (2, "dp", 2), "pipeline": (2, "pipeline", 4), "split": (2, "split", 4)}


@pytest.mark.parametrize("others", slow("pipeline", "dp split"))
def test_bert_has_one_curve_whatever_the_strategy(tmp_path: Path, others: str):
    """A wrong gradient shows from the second step on; other dropout or other masks in the first."""
    runs = {name: WAYS[name] for name in ("one", *others.split())}
    for name, (num_ranks, strategy, micro_batches) in runs.items():
        arguments = ("--strategy", strategy, "--micro-batches", str(micro_batches), "--curve", f"{name}.json")
        printed = launch(tmp_path, num_ranks, "pretrain_bert.py", *TINY_BERT, *arguments)
        assert f"{strategy} on {num_ranks} rank" in printed.splitlines()[-1]
        assert len(re.findall(r"step .* loss .* samples/s .* memory .* MiB", printed)) == 10
    curves = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in runs}

    one = curves.pop("one")
    assert one["losses"][-1] < one["losses"][0] - 0.3
    (_, before), *_, (_, after) = one["held_out_losses"]
    assert after < before - 0.3
    for curve in curves.values():
        assert curve["losses"] == pytest.approx(one["losses"], abs=TOLERANCE)
        for (step, loss), (its_step, its_loss) in zip(one["held_out_losses"], curve["held_out_losses"], strict=True):
            assert (its_step, its_loss) == (step, pytest.approx(loss, abs=TOLERANCE))

    same = compare(tmp_path, *(tmp_path / f"{name}.json" for name in runs))
    assert same.returncode == 0, same.stdout + same.stderr
    assert f"The {len(runs)} curves agree" in same.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_curves_that_part_are_told(tmp_path: Path):
    curve = {
        "name": "dp on 2 ranks",
        "model": "a model",
        "data": "a text",
        "samples_per_step": 32,
        "seed": 0,
        "losses": [6.0, 5.0],
        "held_out_losses": [[0, 6.0], [2, 5.0]],
        "samples_per_s": 1.0,
    }
    parted = curve | {"losses": [6.0, 5.5]}
    for name, each in (("a.json", curve), ("b.json", parted)):
        (tmp_path / name).write_text(json.dumps(each))
    run = compare(tmp_path, tmp_path / "a.json", tmp_path / "b.json")
    assert run.returncode == 1
    assert "do NOT agree" in run.stdout
    assert "5.0e-01, in the training loss of step 2" in run.stdout


@pytest.mark.slow
def test_digits_have_one_accuracy_whatever_the_number_of_ranks(tmp_path: Path):
    alone = command(tmp_path, str(EXAMPLES / "digits.py"), "--epochs", "1")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    epochs = re.findall(r"epoch .*", alone.stdout)
    accuracies = [float(percent) for percent in re.findall(r"accuracy (\S+)%", alone.stdout)]
    assert len(epochs) == 1
    assert accuracies[-1] > 60  # 12 epochs bring more than 95

    printed = launch(tmp_path, 2, "digits.py", "--epochs", "1")
    assert re.findall(r"epoch .*", printed) == epochs


def test_readme_example_gives_one_loss_whatever_the_number_of_ranks(tmp_path: Path):
    code = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    script = tmp_path / "train.py"
    script.write_text(code)
    alone = command(tmp_path, str(script))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    loss = float(alone.stdout.splitlines()[-1])
    assert loss < 2.0  # ten classes start at 2.3
    assert float(launch(tmp_path, 2, str(script)).splitlines()[-1]) == pytest.approx(loss, abs=TOLERANCE)


LOSS = re.compile(r"step +(\d+) of \d+: loss (\S+?)(?:,|$)", re.MULTILINE)
BESIDE = {
    "large_classification.py": ("--num-classes", "1001", "--width", "8", "--steps", "6", "--num-samples", "64"),
    "moe_pretrain.py": ("--steps", "8", "--layers", "1", "--hidden", "32"),
    "tensor_parallel.py": ("--steps", "8", "--layers", "2", "--hidden", "32"),
}
RUNS = [  # script, ranks, further arguments
    *slow(
        ("moe_pretrain.py", 2, ()),
        ("moe_pretrain.py", 4, ("--expert-ranks", "2")),
        ("large_classification.py", 2, ()),
        ("tensor_parallel.py", 2, ("--stages", "1")),
        ("tensor_parallel.py", 8, ()),
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_strategies_side_by_side_print_the_losses_of_one_process(tmp_path: Path, run: tuple[str, int, tuple[str, ...]]):
    script, num_ranks, more = run
    arguments = BESIDE[script]
    alone = command(tmp_path, str(EXAMPLES / script), *arguments)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    expected = LOSS.findall(alone.stdout)
    assert len(expected) >= 6
    found = LOSS.findall(launch(tmp_path, num_ranks, script, *arguments, *more))
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=2e-3), "float32, and batch statistics are summed up"


@pytest.mark.slow
def test_a_t5_over_its_limit_is_refused_and_fits_when_it_is_shared_out_and_in_files(tmp_path: Path):
    script, small = str(EXAMPLES / "large_t5.py"), ("--steps", "2", "--layers", "1", "--limit", "30MiB")
    refused = command(tmp_path, "-m", "epl.cli", "launch", "--nproc", "2", script, *small)
    assert refused.returncode != 0
    assert re.search(r"run.memory_limit is 30.0 MiB.*of optimizer", refused.stdout + refused.stderr, re.DOTALL)
    less = ("--zero", "v2", "--offload", "disk", "--recompute", "auto")
    printed = launch(tmp_path, 2, "large_t5.py", *small, *less)
    assert re.search(r"step +2 of 2: loss \d", printed)
    assert "memory of one training step" in printed
