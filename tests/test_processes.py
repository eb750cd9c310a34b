"""What the launcher reads of its ranks as processes. How it shows and ends them is tested in test_launcher.py."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from epl.processes import has_failed, tail


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n\n", []),
        (b"one\ntwo\nthree\nfour\n", ["two", "three", "four"]),
        (b"one\n\ntwo", ["one", "", "two"]),
        (b" 10%\r 50%\r100%\nend\r\n", ["100%", "end"]),
        (b"x" * 200_000 + b"\nlast\n", ["x" * ((1 << 16) - 6), "last"]),
        (b"\xff!\n", ["\ufffd!"]),
    ],
)
def test_tail_shows_what_a_terminal_would(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    """Of a progress bar the last state; of endless lines the end; of bytes that are no text something."""
    path = tmp_path / "log"
    path.write_bytes(content)
    assert tail(path, 3) == expected


@pytest.mark.parametrize(
    ("code", "expected"), [("", False), ("raise SystemExit(3)", True), ("import os; os.kill(os.getpid(), 9)", True)]
)
def test_a_failure_is_seen_and_the_exit_code_stays_to_be_asked_for(code: str, expected: bool) -> None:
    """torch asks for it afterwards, and must find it."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()\n" + code], stdin=subprocess.PIPE) as process:
        assert not has_failed(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        deadline_s = time.monotonic() + 10
        while expected and not has_failed(process.pid) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert has_failed(process.pid) == expected
        assert (process.wait() != 0) == expected
    assert not has_failed(process.pid)
