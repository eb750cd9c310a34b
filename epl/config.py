"""Config: every setting of EPL, its type, its default and where its present value came from.

A setting has a key, ``section.attribute``. Its value is the last one given by: the default, the environment
(``EPL_SECTION_ATTRIBUTE``), the dict handed to :class:`Config`, assignment to the attribute. All of them pass the
same checks. What cannot be honoured is an error: an unknown key, a wrong type, and a key whose feature this version
does not have yet. The keys are those of the original EPL, and a few more; unlike there, a typo is never ignored.

The classes that derive from :class:`Section` are the table of keys, and the only place that says what a key may be.
A feature that becomes available removes its ``available=False`` there, and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast, overload

from epl.errors import ConfigError, bulleted
from epl.lines import warn

__all__ = ["Config", "Key", "Section", "Setting"]

T = TypeVar("T")

_BOOLS: Mapping[str, bool] = MappingProxyType(
    {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}
)


class _UnknownKey(ConfigError, AttributeError):
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
        return " or ".join(words) + (f" that matches {self.pattern} ({self.doc})" if self.pattern else "")

    def convert(self, value: object) -> T:
        """The value to store for one written in Python; a ConfigError if it is wrong or not available yet."""
        return self._checked(value, f"{value!r} ({type(value).__name__})", self.allowed)

    def parse(self, text: str) -> T:
        """The value to store for one written in the environment; a ConfigError as for :meth:`convert`."""
        allowed = "/".join(_BOOLS) if self._kind is bool else self.allowed
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
            return _BOOLS.get(text.strip().lower(), text)
        with contextlib.suppress(ValueError):
            return self._kind(text)
        return text

    def _accept(self, value: Any) -> Any:
        """The value as it is stored; KeyError or ValueError if it is not allowed."""
        kind = self._kind
        if isinstance(value, str) and self.choices:
            spelling = {choice.lower(): choice for choice in self.choices}
            return spelling[value.lower()]
        # bool is a subclass of int, but True micro-batches are a mistake.
        is_bool = isinstance(value, bool)
        if is_bool != (kind is bool) or not isinstance(value, (kind, int) if kind is float else kind):
            raise ValueError
        if kind is float and not math.isfinite(cast(float, value)):
            raise ValueError
        if self.pattern and not re.fullmatch(self.pattern, value):
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
        _find(f"{self.NAME}.{attribute}").__set__(self, value)


class _Auto(Section):
    NAME = "auto"
    auto_parallel = Key(False, "EPL chooses the strategy; the model must then have no scopes.", available=False)


class _Io(Section):
    NAME = "io"
    slicing = Key(False, "Share out the input files over the replicas.", available=False)
    unbalanced_io_slicing = Key(False, "Keep the files that do not divide, in unequal shares.", available=False)
    drop_last_files = Key(False, "Drop the files that do not divide.", available=False)


class _Communication(Section):
    NAME = "communication"
    sparse_as_dense = Key(False, "Turn sparse gradients into dense ones before they are reduced.")
    max_splits = Key(5, "The most buckets that the gradients are fused into for their all-reduce.", at_least=1)
    num_communicators = Key(2, "Communicators that take turns with the buckets of gradients.", at_least=1)
    fp16 = Key(False, "Send gradients and all-to-all payloads as float16.", available=False)
    fp16_scale = Key(128, "Multiplier before the cast to float16, taken out after.", at_least=1, available=False)
    clip_after_allreduce = Key(False, "Either value: clipping sees the reduced gradients, as in one process.")
    gradients_reduce_method = Key("mean", "Mean or sum over micro-batches and replicas.", choices=("mean", "sum"))
    timeout = Key(600.0, "Seconds that one rank waits for another before the run fails.", at_least=0.001)


class _Pipeline(Section):
    NAME = "pipeline"
    num_stages = Key(-1, "Stages to cut an unannotated model into; -1: none.", at_least=1, available=False)
    num_micro_batch = Key(1, "Micro-batches that the batch of a replica is cut into.", at_least=1)
    strategy = Key(
        "PreferBackward",
        "The schedule of the pipeline.",
        choices=("PreferForward", "PreferBackward", "PreferBackwardOptimizer"),
    )


class _GradientCheckpoint(Section):
    NAME = "gradient_checkpoint"
    type = Key("", "Which activations are computed again.", choices=("", "collection", "auto"))
    end_taskgraph = Key(-1, "With auto: the last TaskGraph to recompute; -1: all.", at_least=0)
    check_gradients = Key(False, "Compare the first step's gradients with those of a run without recomputing.")
    memory_budget = Key(
        "",
        "With auto: the most memory that a rank may use, as 6GiB; empty: as little as extra_compute allows.",
        pattern=r"|\d+(\.\d+)?\s*([KMGT]?i?B)?",
    )
    extra_compute = Key(
        0.34, "With auto: the most that may be computed again, as a share of a step's work.", at_least=0
    )


class _Loss(Section):
    NAME = "loss"
    chunked = Key("auto", "Logits and their loss are computed in chunks of rows.", choices=("auto", "on", "off"))
    chunk_rows = Key(0, "Rows of a chunk; 0: EPL chooses.", at_least=1)


class _Zero(Section):
    NAME = "zero"
    level = Key("", "What replicas share out.", choices=("", "v0", "v1", "v2"), available=False)


class _Offload(Section):
    NAME = "offload"
    level = Key("", "What lives in host memory.", choices=("", "v0"), available=False)


class _Amp(Section):
    NAME = "amp"
    level = Key("", "O1: suitable operators run in half precision.", choices=("", "O1"), available=False)
    debug_log = Key(False, "Log what runs in which precision.", available=False)
    loss_scale: Key[str | float] = Key(
        "dynamic", "Multiplier of the loss, fixed or adapted.", at_least=1, choices=("dynamic",), available=False
    )


class _Cluster(Section):
    NAME = "cluster"
    device_place_prefer_intra_node = Key(True, "Place the parts of a replica on the devices of one worker first.")
    run_visible_devices = Key("", "The local devices to use, such as 0,1; empty: all", pattern=r"(\d+(,\d+)*)?")
    colocate_split_and_replicate = Key(False, "All TaskGraphs share the same devices.")


class _Optimizer(Section):
    NAME = "optimizer"
    num_apply_group = Key(1, "Groups of weights that are stepped one after another.", at_least=1, available=False)


class _Run(Section):
    NAME = "run"
    log_dir = Key("", "Folder for the plan; empty: none. `epl launch` sets it to the folder of its logs.")
    check_batches = Key(True, "Check that the ranks of one replica are given the same batch.")
    print_plan = Key(True, "Rank 0 prints the plan at the start.")
    trace = Key("", "File for a timeline of training steps, after the first one; empty: none.")
    trace_steps = Key(3, "Training steps that the timeline covers.", at_least=1)


class _Debug(Section):
    NAME = "debug"
    verify = Key(False, "Compare the first step with that of one process.")
    verify_only = Key(False, "Compare one step on a small part of the first batch, print the table and end the script.")


_SECTIONS: tuple[type[Section], ...] = (
    *(_Auto, _Io, _Communication, _Pipeline, _GradientCheckpoint, _Loss, _Zero),
    *(_Offload, _Amp, _Cluster, _Optimizer, _Run, _Debug),
)
_KEYS: Mapping[str, Key[Any]] = MappingProxyType(
    {key.name: key for section in _SECTIONS for key in vars(section).values() if isinstance(key, Key)}
)


def _find(name: object) -> Key[Any]:
    if name in _KEYS:
        return _KEYS[cast(str, name)]
    raise ConfigError(_unknown(str(name)))


def _unknown(name: str) -> str:
    sections = [section.NAME for section in _SECTIONS]
    if name in sections:
        return f"{name} is a section; set its keys, {', '.join(key for key in _KEYS if key.startswith(f'{name}.'))}"
    nearest = _nearest(name, [*_KEYS, *(sections if "." not in name else ())], cutoff=0.4)
    return f"{name} is not a setting of EPL" + (nearest or f"; the sections are {', '.join(sections)}")


def _nearest(name: str, candidates: Iterable[str], *, cutoff: float) -> str:
    folded = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return f"; the nearest is {folded[close[0]]}" if close else ""


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


class Config:
    """The settings of one run: ``config.section.attribute``.

    Args:
        param_dict: Values by key, such as ``{"pipeline.num_micro_batch": 4}``. They win over the environment.

    Raises:
        ConfigError: A key is unknown, a value is wrong or a feature is not available yet; all findings in one message.

    Example:
        >>> config = Config({"pipeline.num_micro_batch": 4})
        >>> config.pipeline.strategy = "preferforward"
        >>> config
        Config({'pipeline.num_micro_batch': 4, 'pipeline.strategy': 'PreferForward'})
    """

    auto: _Auto
    io: _Io
    communication: _Communication
    pipeline: _Pipeline
    gradient_checkpoint: _GradientCheckpoint
    loss: _Loss
    zero: _Zero
    offload: _Offload
    amp: _Amp
    cluster: _Cluster
    optimizer: _Optimizer
    run: _Run
    debug: _Debug
    _settings: dict[str, Setting]

    def __init__(self, param_dict: Mapping[str, Any] | None = None) -> None:
        self.__dict__["_settings"] = {name: Setting(name, key.default, "default") for name, key in _KEYS.items()}
        self.__dict__.update({section.NAME: section(self._settings) for section in _SECTIONS})
        if not isinstance(param_dict, Mapping | None):
            raise ConfigError(f"Config takes a dict with keys such as 'pipeline.strategy', got {param_dict!r}")
        problems: list[str] = []
        for variable in sorted(name for name in os.environ if name.startswith("EPL_")):
            with _collected(problems):
                self._read_variable(variable, os.environ[variable])
        for name, value in (param_dict or {}).items():
            with _collected(problems):
                key = _find(name)
                self._settings[key.name] = Setting(key.name, key.convert(value), "dict")
        if problems:
            raise ConfigError(bulleted("these settings cannot be used:", problems))

    def _read_variable(self, variable: str, text: str) -> None:
        keys = {key.variable: key for key in _KEYS.values()}
        if variable in keys:
            key = keys[variable]
            self._settings[key.name] = Setting(key.name, key.parse(text), f"environment {variable}")
            return
        message = f"{variable} is not a setting of EPL"
        if any(variable.lower().startswith(f"epl_{section.NAME}_") for section in _SECTIONS):
            raise ConfigError(message + _nearest(variable, keys, cutoff=0.0))
        # Another program may own it, or the section may be misspelt: not an error, and not silence.
        warn(f"{message}{_nearest(variable, keys, cutoff=0.75)}; it is not used")

    @staticmethod
    def keys() -> tuple[str, ...]:
        """The names of all keys, such as "pipeline.strategy", in the order of the table."""
        return tuple(_KEYS)

    @staticmethod
    def spec(name: str) -> Key[Any]:
        """What is known about a key: default, type_name, variable, doc, available; a ConfigError if there is none."""
        return _find(name)

    def get(self, name: str) -> Any:
        """The value of a key written as "section.attribute"; a ConfigError if there is none."""
        return self._settings[_find(name).name].value

    def items(self) -> Iterator[Setting]:
        """Every key with its value and its origin, in the order of the table."""
        return iter(self._settings.values())

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, ready for JSON, always in the same order."""
        return {key: value for key, value, _ in self.items()}

    def copy(self) -> Config:
        """An independent config with the same values and origins; the environment is not read again."""
        return copy.deepcopy(self)

    __copy__ = copy  # a shallow copy would share its values with the original

    def __setattr__(self, name: str, value: object) -> None:
        raise _UnknownKey(_unknown(name))

    def __getattr__(self, name: str) -> object:  # called only for what does not exist
        raise _UnknownKey(_unknown(name))

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Config) else NotImplemented

    def __str__(self) -> str:
        rows = [("key", "value", "origin"), *((key, repr(value), origin) for key, value, origin in self.items())]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}" for key, value, origin in rows)

    def __repr__(self) -> str:
        return f"Config({ {key: value for key, value, origin in self.items() if origin != 'default'} })"
