"""docs/walkthrough.md shows what examples/walkthrough.py prints, word for word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_walk_through_page_shows_what_the_example_prints() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "walkthrough.py")], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    page = (ROOT / "docs" / "walkthrough.md").read_text()
    blocks = [block.partition("\n") for block in run.stdout.split("== ")[1:]]
    missing = [title for title, _, text in blocks if text.strip() not in page]
    assert not missing, f"the page is out of date in: {missing}; copy the example's output"
    assert len(blocks) == 10
