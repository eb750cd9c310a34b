"""A training job in which one rank goes wrong at one place: `epl launch --nproc 4 tests/faulty.py PLACE FAULT RANK`.

Two stages by two replicas: stage 0 is ranks 0 and 2, stage 1 is ranks 1 and 3; FAULTY_LAYOUT names another layout. The
fault happens in the third step, or while the model is captured. The file ``fault`` in the working directory says when.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn

import epl

NUM_STEPS = int(os.environ.get("FAULTY_NUM_STEPS", "6"))
LAYOUT = os.environ.get("FAULTY_LAYOUT", "pipeline")
LAYOUTS = {  # the strategies of both parts, and whether they are on the same devices
    "pipeline": lambda: (epl.replicate(1), epl.replicate(1), False),
    "split": lambda: (*(epl.split(3),) * 2, False),
    "beside": lambda: (epl.replicate(3), epl.split(3), True),
    "bridge": lambda: (epl.replicate(2), epl.replicate(1), False),
}
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
STEP = 2  # in which the fault happens


class Fault:
    """What goes wrong, where, and in which rank."""

    def __init__(self, place: str, kind: str, rank: str) -> None:
        self.place, self.kind, self.rank = place, kind, int(rank)
        self.step = -1

    def happens_at(self, place: str) -> None:
        """To be called at every place; where it is the one, this does not return."""
        if place != self.place or self.rank != RANK or self.step not in (-1, STEP):
            return
        if place not in ("capture", "loader") and self.step != STEP:
            return
        _note_fault()
        self._happens()

    def _happens(self) -> None:
        if self.kind in ("raise", "caught"):
            raise ValueError("a planted fault")
        if self.kind == "exit":
            sys.exit(3)
        if self.kind == "loop":
            while True:
                pass
        if self.kind == "sleep":  # as a rank does that waits for another host's data
            time.sleep(300)
        os.kill(os.getpid(), getattr(signal, f"SIG{self.kind.upper()}"))
        time.sleep(60)


FAULT = Fault(*sys.argv[1:4])


@torch.library.custom_op("faulty::pass_on", mutates_args=())
def pass_on(x: torch.Tensor) -> torch.Tensor:
    """The identity, as an operator whose Python code runs at every step."""
    FAULT.happens_at("forward")
    return x.clone()


@pass_on.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
    FAULT.happens_at("backward")
    return gradient


pass_on.register_autograd(_backward)


class Part(nn.Module):
    """One stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FAULT.step == -1:
            FAULT.happens_at("capture")
        return torch.ops.faulty.pass_on(self.linear(x)).tanh()


class Net(nn.Module):
    """Two parts, under the strategies of the layout."""

    def __init__(self) -> None:
        super().__init__()
        first, second, _ = LAYOUTS[LAYOUT]()
        with first:
            self.first = Part()
        with second:
            self.second = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples, the later ones of which are hard to load."""

    def __len__(self) -> int:
        return 8 * NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 8 * STEP and torch.utils.data.get_worker_info() is not None:
            FAULT.happens_at("loader")
        return torch.full((8,), index / len(self))


def _note_fault() -> None:
    """Write down when it goes wrong; whoever sees the file sees it whole."""
    Path("fault.tmp").write_text(str(time.time()))
    Path("fault.tmp").rename("fault")


def main() -> None:
    torch.manual_seed(0)
    colocate = {"cluster.colocate_split_and_replicate": LAYOUT == "beside"}
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "run.print_plan": False, **colocate}))
    model = Net()
    engine = epl.parallelize(model, torch.optim.SGD(model.parameters(), 0.1))
    num_workers = int(FAULT.place == "loader")
    for step, batch in enumerate(epl.data_loader(Samples(), 8, num_workers=num_workers)):
        FAULT.step = step
        if FAULT.place == "between" and FAULT.kind == "leave" and step == STEP and FAULT.rank == RANK:
            _note_fault()
            return
        FAULT.happens_at("between")
        try:
            loss = engine.train_step(batch)
        except ValueError:
            if FAULT.kind != "caught":
                raise
            time.sleep(60)
        else:
            sys.stdout.write(f"step {step} {loss.item()}\n")  # at once: other ranks may write to the same place
    print("done")


if __name__ == "__main__":
    main()
