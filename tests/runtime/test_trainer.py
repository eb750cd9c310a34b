"""Hugging Face's Trainer, unmodified, with ``engine.model`` in place of the model.

Data parallelism needs nothing more: the Trainer shares the data out over the processes by itself, and accelerate leaves
a model alone that says it is prepared. Under a pipeline each rank's Trainer must believe that it is alone, so that all
ranks of a replica read the same batches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import epl
from tests.parity import assert_close
from tests.ranks import launch
from tests.zoo import CASES, annotate

CASE = CASES["bert"]
STEPS = 4


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of one batch of the zoo, one by one."""

    def __init__(self, size: int) -> None:
        self.batch: Any = CASE.batch(size)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: value[i] for name, value in self.batch.items()}


class Result(NamedTuple):
    losses: list[float]
    eval_loss: float
    state: dict[str, Tensor]


def leave_the_launcher() -> None:
    """What a script does between ``epl.init()`` and ``TrainingArguments`` if ranks must not share the data out."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def run_trainer(model: nn.Module, folder: Path, batch_size: int, **arguments: Any) -> tuple[list[float], float]:
    """Train and evaluate; two batches to an update."""
    from transformers.trainer import Trainer  # costs seconds, and only a rank of these tests needs it
    from transformers.training_args import TrainingArguments

    options = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        adam_epsilon=1e-3,  # with the usual one, Adam makes a full step of a gradient that is mere rounding noise
        label_names=["labels"],  # the Trainer finds them and the columns to keep by the signature of the model's class
        remove_unused_columns=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    trainer = Trainer(model, options, train_dataset=Rows(32), eval_dataset=Rows(16))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


def train_plainly(rank: int, folder: Path, jobs: list[tuple[int, float]]) -> list[Result]:
    leave_the_launcher()
    results = []
    for batch_size, max_grad_norm in jobs:
        model: Any = CASE.build()
        # It takes the Trainer's count of labels and ignores it, so that the Trainer's loss would be twice the mean.
        model.accepts_loss_kwargs = False
        losses, eval_loss = run_trainer(model, folder, batch_size, max_grad_norm=max_grad_norm)
        results.append(Result(losses, eval_loss, {name: value.detach() for name, value in model.state_dict().items()}))
    return results


def train_in_parallel(rank: int, folder: Path, num_stages: int, max_grad_norm: float) -> Result:
    epl.init(epl.Config({"run.print_plan": False, "pipeline.num_micro_batch": 2}))
    model = CASE.build()
    if num_stages > 1:
        annotate(model, CASE.stages[num_stages])
        leave_the_launcher()
    engine = epl.parallelize(model)
    losses, eval_loss = run_trainer(engine.model, folder / str(rank), 4, max_grad_norm=max_grad_norm)
    return Result(losses, eval_loss, engine.state_dict())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Trained by one process on twice the batch with clipping, and on the batch without."""
    [results] = launch(1, train_plainly, tmp_path_factory.mktemp("plain"), [(8, 0.1), (4, 0.0)])
    return results


def test_the_trainer_under_data_parallelism(plain: list[Result], tmp_path: Path) -> None:
    """With its own clipping: all replicas have all gradients, and so the same norm."""
    for result in launch(2, train_in_parallel, tmp_path, 1, 0.1):
        assert len(result.losses) == STEPS
        assert_close(result, plain[0], torch.float32)


def test_the_trainer_under_a_pipeline(plain: list[Result], tmp_path: Path) -> None:
    """Without clipping: the Trainer would clip each stage by the norm of that stage alone."""
    for result in launch(2, train_in_parallel, tmp_path, 2, 0.0):
        assert len(result.losses) == STEPS
        assert_close(result, plain[1], torch.float32)
