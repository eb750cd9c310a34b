"""One setting: what it may be, and how a value for it is checked. :mod:`epl.config` has the table of all of them."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast, overload

from epl.errors import ConfigError

__all__ = ["BOOLS", "Key", "Section", "Setting", "UnknownKey", "nearest", "unknown"]

T = TypeVar("T")

BOOLS: Mapping[str, bool] = MappingProxyType(
    {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}
)


class UnknownKey(ConfigError, AttributeError):
    """Also an AttributeError, because ``hasattr``, ``copy`` and ``pickle`` ask objects for attributes they lack."""


class Setting(NamedTuple):
    """One resolved setting; ``origin`` is "default", "environment EPL_X_Y", "dict" or "attribute"."""

    key: str
    value: object
    origin: str


@dataclass(eq=False)
class Key(Generic[T]):
    """One setting: a descriptor that stands in a section and checks whatever is assigned to it.

    Args:
        default: The value when none is given; its type is the type of the setting.
        doc: What the setting does, in one line.
        at_least: The smallest number allowed. The default is allowed even if it is smaller.
        choices: The strings allowed, as they are stored; the user may write them in any case.
        pattern: A regular expression that the string must match as a whole.
        available: Whether this version of EPL acts on the setting. If not, only the default may be set.
    """

    default: T
    doc: str
    _: KW_ONLY
    at_least: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    available: bool = True
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type[Section], attribute: str) -> None:
        self.name = f"{owner.NAME}.{attribute}"

    @overload
    def __get__(self, instance: None, owner: type[Section]) -> Key[T]: ...
    @overload
    def __get__(self, instance: Section, owner: type[Section]) -> T: ...
    def __get__(self, instance: Section | None, owner: type[Section]) -> Key[T] | T:
        return self if instance is None else cast(T, instance.settings[self.name].value)

    def __set__(self, instance: Section, value: T) -> None:
        instance.settings[self.name] = Setting(self.name, self.convert(value), "attribute")

    @property
    def variable(self) -> str:
        """The environment variable that sets this key."""
        return f"EPL_{self.name.replace('.', '_').upper()}"

    @property
    def type_name(self) -> str:
        """The type as the documentation writes it."""
        own, kind = type(self.default), self._kind
        return own.__name__ if own is kind else f"{own.__name__} or {kind.__name__}"

    @property
    def allowed(self) -> str:
        """What may be assigned, in words."""
        words = [repr(choice) for choice in self.choices]
        if self._kind is not str or not words:
            kind = {bool: "True or False", int: "an int", float: "a finite float", str: "a str"}[self._kind]
            words.append(kind if self.at_least is None else f"{kind} of at least {self.at_least:g}")
        if isinstance(self.default, int | float) and not self._in_range(self.default):
            words.append(repr(self.default))
        return " or ".join(words) + (f" as in: {self.doc}" if self.pattern else "")

    def convert(self, value: object) -> T:
        """The value to store for one written in Python; a ConfigError if it is wrong or not available yet."""
        return self._checked(value, f"{value!r} ({type(value).__name__})", self.allowed)

    def parse(self, text: str) -> T:
        """The value to store for one written in the environment; a ConfigError as for :meth:`convert`."""
        allowed = "/".join(BOOLS) if self._kind is bool else self.allowed
        return self._checked(self._read(text), f"{self.variable}={text!r}", allowed)

    def _checked(self, value: object, given: str, allowed: str) -> T:
        try:
            accepted = self._accept(value)
        except (KeyError, ValueError, OverflowError):
            raise ConfigError(f"{self.name}: got {given}, expected {allowed}") from None
        if not self.available and accepted != self.default:
            message = f"{self.name}: not yet available in this version of EPL (got {given})"
            raise ConfigError(f"{message}; leave it at its default, {self.default!r}")
        return accepted

    @property
    def _kind(self) -> type:
        """The type of the default, but float for a word that stands in for a number ("dynamic")."""
        return float if isinstance(self.default, str) and self.at_least is not None else type(self.default)

    def _read(self, text: str) -> object:
        """The Python value of a text, or the text itself where it is not of the key's type."""
        if self._kind is bool:
            return BOOLS.get(text.strip().lower(), text)
        with contextlib.suppress(ValueError):
            return self._kind(text)
        return text

    def _accept(self, value: Any) -> Any:
        """The value as it is stored; KeyError or ValueError if it is not allowed."""
        kind = self._kind
        if self.pattern and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # a number of bytes, or of a device
        if isinstance(value, str) and self.choices:
            spelling = {choice.lower(): choice for choice in self.choices}
            return spelling[value.lower()]
        # bool is a subclass of int, but True micro-batches are a mistake.
        is_bool = isinstance(value, bool)
        if is_bool != (kind is bool) or not isinstance(value, (kind, int) if kind is float else kind):
            raise ValueError
        if kind is float and not math.isfinite(cast(float, value)):
            raise ValueError
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            raise ValueError
        if value != self.default and not self._in_range(value):
            raise ValueError
        return kind(value)

    def _in_range(self, value: Any) -> bool:
        return self.at_least is None or value >= self.at_least


class Section:
    """Base of the groups of settings. Its attributes are the keys; assigning to one checks the value."""

    NAME: ClassVar[str]
    settings: dict[str, Setting]

    def __init__(self, settings: dict[str, Setting]) -> None:
        self.__dict__["settings"] = settings  # of all sections: the config's own dict

    def __setattr__(self, attribute: str, value: object) -> None:
        key = vars(type(self)).get(attribute)
        if not isinstance(key, Key):
            raise UnknownKey(unknown(f"{self.NAME}.{attribute}", list(self.settings)))
        key.__set__(self, value)


def unknown(name: str, keys: Iterable[str]) -> str:
    """What to say of a name that is none of the keys: the nearest, or the sections."""
    keys = list(keys)
    sections = list(dict.fromkeys(key.split(".")[0] for key in keys))
    if name in sections:
        return f"{name} is a section; set its keys, {', '.join(key for key in keys if key.startswith(f'{name}.'))}"
    close = nearest(name, [*keys, *(sections if "." not in name else ())], cutoff=0.4)
    return f"{name} is not a setting of EPL" + (close or f"; the sections are {', '.join(sections)}")


def nearest(name: str, candidates: Iterable[str], *, cutoff: float) -> str:
    """``; the nearest is X``, or nothing."""
    folded = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return f"; the nearest is {folded[close[0]]}" if close else ""
