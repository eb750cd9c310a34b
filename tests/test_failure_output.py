"""What the terminal shows of a rank that failed, once: rank 0's output is there already, that of others is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import started

SCRIPT = """
import os, sys, time
if os.environ["RANK"] == sys.argv[1]:
    raise ValueError("a mistake of rank " + sys.argv[1])
time.sleep(60)
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_the_failed_rank_is_on_the_terminal_once(tmp_path: Path, failing: int) -> None:
    Path(tmp_path, "train.py").write_text(SCRIPT)
    with started(tmp_path, "-m", "epl.cli", "launch", "--nproc", "2", "train.py", str(failing)) as job:
        ended = job.end()
    assert ended.code == 1
    assert f"[epl] rank {failing} failed with exit code 1" in ended.err
    assert ended.err.count(f"ValueError: a mistake of rank {failing}") == 1
    [log] = tmp_path.glob(f"epl_logs/*/rank_{failing}.log")
    assert f"ValueError: a mistake of rank {failing}" in log.read_text()
    said = "its output is above, and in its log" if failing == 0 else "the end of its log"
    assert f"[epl] {said}, {log}" in ended.err
