"""Pipeline schedules as data: actions, the named generators, and a dry run of all stages on paper.

See :mod:`epl.schedule.actions` for the notation, :mod:`epl.schedule.generators` for the schedules and
:mod:`epl.schedule.dryrun` for what is checked and measured.
"""

from __future__ import annotations

from epl.schedule.actions import Action, Kind, Schedule
from epl.schedule.dryrun import DryRun, TimedAction, chain, draw, dry_run
from epl.schedule.generators import DEFAULT_SCHEDULE, SCHEDULE_NAMES, forward_only, generate, schedule_name

__all__ = [
    "DEFAULT_SCHEDULE",
    "SCHEDULE_NAMES",
    "Action",
    "DryRun",
    "Kind",
    "Schedule",
    "TimedAction",
    "chain",
    "draw",
    "dry_run",
    "forward_only",
    "generate",
    "schedule_name",
]
