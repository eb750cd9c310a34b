"""One small model through every stage of EPL, printed: graph, TaskGraphs, plan, schedule, instructions, functions.

    python examples/walkthrough.py

Nothing is trained and no other process is needed: all of this happens before the first step. docs/walkthrough.md
explains what is printed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import epl
from epl.batch import flatten
from epl.capture.capture import capture
from epl.cluster import Cluster
from epl.ir.text import to_text
from epl.loss import loss_step
from epl.planner.make import make_plan
from epl.planner.table import plan_table
from epl.planner.taskgraphs import build_taskgraphs
from epl.program.lower import lower_stage, lower_step
from epl.schedule import draw, dry_run, generate


class Net(nn.Module):
    """Two layers in two TaskGraphs; the second one reads the batch as well, and the loss is nobody's in particular."""

    def __init__(self) -> None:
        super().__init__()
        with epl.replicate(device_count=1, name="stage_0"):
            self.encoder = nn.Linear(4, 8)
        with epl.replicate(device_count=1, name="stage_1"):
            self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.encoder(x))
        return nn.functional.mse_loss(self.head(hidden) * weight, y)


def show(title: str, text: str) -> None:
    """Print a part under its title."""
    print(f"== {title}\n{text.rstrip()}\n")


def main() -> None:
    """Print every stage."""
    torch.manual_seed(0)
    model = Net()
    micro_batch = {"x": torch.randn(3, 4), "weight": torch.rand(3, 1), "y": torch.randn(3, 2)}

    captured = capture(model, loss_step(None), flatten(micro_batch))
    show("captured graph", _without_folder(to_text(captured.graph)))
    graph = build_taskgraphs(captured.graph)
    show("operators by TaskGraph", "\n".join(f"{op.task}: {op.name} ({op.target})" for op in graph.ops))
    show("edges", "\n".join(f"{edge.name}: {edge.source} -> {edge.target}" for edge in graph.edges))

    plan = make_plan(graph, Cluster.from_spec("1x4"), epl.Config({"pipeline.num_micro_batch": 4}))
    show("plan for one worker of four devices", plan_table(plan))

    schedule = generate(plan.schedule, plan.num_stages, plan.num_micro_batches)
    show("schedule", "\n".join(f"stage {stage}: {' '.join(map(str, row))}" for stage, row in enumerate(schedule)))
    show("dry run", draw(dry_run(schedule)))

    for rank in (0, 1):
        stage = lower_stage(graph, plan, rank)
        program = lower_step(plan, rank, schedule, [stage.program] * plan.num_micro_batches)
        show(f"function of rank {rank}", _without_folder(stage.code.source))
        show(f"instructions of rank {rank}", str(program))


def _without_folder(text: str) -> str:
    """Without the folder of this file, which is another one on every machine."""
    return text.replace(f"{__file__.rsplit('/', 1)[0]}/", "")


if __name__ == "__main__":
    main()
