"""The run's folder: the plan, the settings and, on demand, graphs and programs, as files that can be read later."""

from __future__ import annotations

from pathlib import Path

from epl.config import Config
from epl.planner.plan import Plan
from epl.planner.table import plan_table

__all__ = ["settings_lines", "write_plan"]


def write_plan(folder: str, plan: Plan, config: Config) -> None:
    """Write ``plan.json``, ``plan.txt`` and ``config.txt`` into the folder; nothing if the folder is ""."""
    if not folder:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "plan.json").write_text(plan.to_json())
    (path / "plan.txt").write_text(plan_table(plan) + "\n")
    (path / "config.txt").write_text(str(config) + "\n")


def settings_lines(config: Config) -> list[str]:
    """One line for each setting that ranks must have in common: all but the folder, which is of each machine's own."""
    return [f"{key} = {value!r}" for key, value in config.to_dict().items() if key != "run.log_dir"]
