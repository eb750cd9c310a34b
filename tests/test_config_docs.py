"""docs/reference/config.md says the same as the table of keys in epl/config.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epl.config import Config

_PAGE = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
_ROW = re.compile(r"^\| `(\w+\.\w+)` \| ([^|]+) \| `([^`]*)` \| `(\w+)` \| (yes|no) \| (.+) \|$", re.MULTILINE)


def _rows() -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in _ROW.findall(_PAGE.read_text(encoding="utf-8"))}


def test_page_lists_exactly_the_keys_that_exist_in_the_same_order():
    assert [row[0] for row in _ROW.findall(_PAGE.read_text(encoding="utf-8"))] == list(Config.keys())


@pytest.mark.parametrize("name", Config.keys())
def test_page_tells_type_default_variable_and_availability_of(name: str):
    key = Config.spec(name)
    default = f'"{key.default}"' if isinstance(key.default, str) else repr(key.default)
    available = "yes" if key.available else "no"
    assert _rows()[name][:4] == (key.type_name, default, key.variable, available)


@pytest.mark.parametrize("name", [key.name for key in map(Config.spec, Config.keys()) if key.choices])
def test_page_names_every_choice_of(name: str):
    row = _rows()[name]
    text = f"{row[1]} {row[4]}"
    missing = [
        choice for choice in Config.spec(name).choices if f"`{choice}`" not in text and f'"{choice}"' not in text
    ]
    assert missing in ([], [""])  # the empty choice is written "Empty"
    assert "" not in missing or "Empty:" in text
