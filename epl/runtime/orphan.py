"""A rank whose launcher was killed has nobody left who would end it: it ends itself.

The launcher ends its ranks in every other case. Killed by SIGKILL (a job scheduler, a lack of memory) it cannot, and
its ranks would go on without logs, or wait for ever, and hold devices and ports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

from epl.errors import RunError
from epl.runtime.watch import Watch

__all__ = ["LAUNCHER_PID", "end_with_launcher"]

LAUNCHER_PID = "EASY_PARALLEL_LAUNCHER_PID"  # what the launcher tells its ranks; not EPL_..., which are settings
_PERIOD_S = 1.0


def end_with_launcher(environ: Mapping[str, str], watch: Watch) -> None:
    """Start a thread that ends this process, and what it has started, once the launcher is gone.

    Args:
        environ: Has the launcher's process id, if it is EPL's.
        watch: Through which the other ranks are told.
    """
    launcher = environ.get(LAUNCHER_PID, "")
    if launcher.isdecimal():
        threading.Thread(
            target=_wait, args=(int(launcher), os.getppid(), watch), name="epl launcher", daemon=True
        ).start()


def _wait(launcher: int, parent: int, watch: Watch) -> None:
    while _is_there(launcher, parent):
        time.sleep(_PERIOD_S)
    with contextlib.suppress(OSError):  # the launcher was the one to read it
        print(f"epl: rank ends, as its launcher, process {launcher}, has ended", file=sys.stderr, flush=True)
    watch.report_failure(RunError(f"its launcher, process {launcher}, was killed"))
    if os.getpgrp() == os.getpid():  # the launcher gives each rank a group of its own
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _is_there(launcher: int, parent: int) -> bool:
    if parent == launcher:  # then the system gives this process another parent; the launcher may stay as a zombie
        return os.getppid() == launcher
    try:  # a process that a rank has started
        os.kill(launcher, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
