"""EPL as a contestant of run.py: the same models, batches, optimizer and measurements as the peers.

    python run.py ddp:bert epl:bert --also epl='ours.py --strategy dp {flags}'

Started by torchrun, like the peers.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import measure
import torch
import workloads

import epl

LR = 1e-4
_COLOCATED = {"classes": "head", "experts": "experts"}  # what is split, beside a rest that is replicated


def _options() -> argparse.ArgumentParser:
    parser = measure.options()
    parser.add_argument("--strategy", choices=("dp", "pipeline", "split", "classes", "experts"), default="dp")
    parser.add_argument("--schedule", default="PreferBackward")
    return parser


def _annotate_beside(model: torch.nn.Module, name: str) -> None:
    """Modules of this name are split over all ranks, which replicate the rest."""
    world = int(os.environ["WORLD_SIZE"])
    epl.split(world)(*(module for path, module in model.named_modules() if path.rpartition(".")[2] == name))
    epl.replicate(world, name="rest")(*_without(model, name))


def _without(model: torch.nn.Module, name: str) -> list[torch.nn.Module]:
    """The largest modules that hold none of this name."""
    found: list[torch.nn.Module] = []
    for path, child in model.named_children():
        if path == name:
            continue
        holds = any(path.rpartition(".")[2] == name for path, _ in child.named_modules())
        found += _without(child, name) if holds else [child]
    return found


def _annotate(model: torch.nn.Module, meta: dict[str, Any]) -> None:
    """Two stages, cut where cuts.py cuts them for torch's pipelining."""
    first, second = (epl.replicate(1, name=f"stage_{stage}") for stage in range(2))
    blocks = [model.get_submodule(name) for name in meta["blocks"]]
    for block in blocks[: meta["cut"]]:
        first(block)
    for block in blocks[meta["cut"] :]:
        second(block)


def main() -> None:
    """Train the workload under EPL and print measure's JSON line."""
    args = _options().parse_args()
    micro = args.micro or (4 if args.strategy == "pipeline" else 1)
    settings = {"pipeline.num_micro_batch": micro, "pipeline.strategy": args.schedule, "run.print_plan": False}
    colocate = {"cluster.colocate_split_and_replicate": args.strategy in _COLOCATED}
    epl.init(epl.Config({**settings, **colocate}))
    model, loss_fn, make_batch, meta = workloads.build(args.workload, args.scale)
    batches = measure.make_batches(make_batch, args)
    baseline = measure.Baseline()
    if args.strategy == "pipeline":
        _annotate(model, meta)
    elif args.strategy == "split":
        epl.split(int(os.environ["WORLD_SIZE"]))(model)
    elif args.strategy in _COLOCATED:
        _annotate_beside(model, _COLOCATED[args.strategy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = epl.parallelize(model, optimizer, loss_fn=loss_fn)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return engine.train_step(_share(engine, batch))

    label = f"epl-{args.strategy}"
    measure.train(step, batches, baseline, args, peer=label, params=meta["params"], micro=micro)


def _share(engine: epl.Engine, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This replica's part of the global batch."""
    replica, num_replicas = engine.share_of_data(
        lambda count: {key: value.chunk(count)[0] for key, value in batch.items()}
    )
    return {key: value.chunk(num_replicas)[replica] for key, value in batch.items()}


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
