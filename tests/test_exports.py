"""``epl/__init__.py`` is the whole public interface: what stands there is promised, all else may change."""

import __future__

import tomllib
from pathlib import Path
from types import ModuleType

import epl


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff sorts ``__all__`` (RUF022)."""
    if name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name


def _is_own_module(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__.startswith("epl.")


def test_all_lists_exactly_the_public_names_in_order():
    features = {name for name in __future__.all_feature_names if hasattr(epl, name)}
    names = {name for name, value in vars(epl).items() if not name.startswith("_") and not _is_own_module(value)}
    exported = [name for name in epl.__all__ if not name.startswith("__")]
    assert set(exported) - {"nn"} == names - features
    assert _is_own_module(epl.nn)
    assert exported == sorted(exported, key=_order)
    assert len(epl.__all__) == len(set(epl.__all__))
    assert not [name for name in epl.__all__ if not hasattr(epl, name)]


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert epl.__version__ == project["version"]
