"""docs/api.md has every public name, and docs/getting-started.md shows what its code prints.

A mistake shows as a page that tells of a name that is gone, or of a plan that no version prints.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import epl
from tests.jobs import ROOT, started

API = (ROOT / "docs" / "api.md").read_text()
START = (ROOT / "docs" / "getting-started.md").read_text()


def test_the_page_of_public_names_lists_all_of_them_and_no_other() -> None:
    listed = re.findall(r"^- `epl\.(\w+)", API, re.MULTILINE)
    assert sorted(listed) == sorted(epl.__all__), "run scripts/update_api"


def test_the_page_of_public_names_is_what_its_script_writes() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "update_api"))["page"]()
    assert page == API, "docs/api.md is out of date: run scripts/update_api"


def test_the_plan_of_getting_started_is_that_of_the_walk_through() -> None:
    """Whose page holds, word for word, what examples/walkthrough.py prints (tests/test_walkthrough.py)."""
    block = START.partition("on four ranks is\n\n")[2].partition("\n\n")[0]
    plan = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    assert plan.startswith("EPL plan for 4 ranks: ")
    assert plan in (ROOT / "docs" / "walkthrough.md").read_text()


@pytest.mark.slow
def test_the_script_of_getting_started_ends_with_one_loss_on_one_and_two_ranks(tmp_path: Path) -> None:
    Path(tmp_path, "train.py").write_text(START.partition("```python\n")[2].partition("```")[0])
    last = []
    for command in (("train.py",), ("-m", "epl.cli", "launch", "--nproc", "2", "train.py")):
        with started(tmp_path, *command) as job:
            ended = job.end()
        assert ended.code == 0, ended
        last.append(float(ended.out.splitlines()[-1]))
    assert abs(last[0] - last[1]) < 1e-5, "float32 losses near 1"
