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
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from epl.errors import ConfigError, bulleted
from epl.keys import Key, Section, Setting, UnknownKey, nearest, unknown
from epl.lines import warn
from epl.units import SIZE_PATTERN

__all__ = ["Config", "Key", "Section", "Setting"]


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
        pattern=SIZE_PATTERN,
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
    level = Key(
        "",
        "What replicas share out: v0 optimizer states, v1 gradients too, v2 weights too.",
        choices=("", "v0", "v1", "v2"),
    )


class _Offload(Section):
    NAME = "offload"
    level = Key(
        "",
        "What lives outside of device memory: v0 weights and optimizer states in host memory, optimizer its states "
        "only, disk both in files.",
        choices=("", "v0", "optimizer", "disk"),
    )
    path = Key("", "Folder for the files of level disk; empty: the system's folder for temporary files.")
    size_limit = Key(
        "", "The most that the files of a rank may take, as 200GiB; empty: what is free there.", pattern=SIZE_PATTERN
    )
    parameters = Key("", "Regular expression: only weights whose path it is found in are offloaded; empty: all.")


class _Amp(Section):
    NAME = "amp"
    level = Key("", "O1: suitable operators run in half precision.", choices=("", "O1"))
    dtype = Key("bf16", "Half precision: bf16, or fp16, whose losses are scaled.", choices=("bf16", "fp16"))
    debug_log = Key(False, "Log what runs in which precision.")
    loss_scale: Key[str | float] = Key(
        "dynamic", "With fp16: multiplier of the loss, fixed or adapted.", at_least=1, choices=("dynamic",)
    )


class _Cluster(Section):
    NAME = "cluster"
    device_place_prefer_intra_node = Key(True, "Place the parts of a replica on the devices of one worker first.")
    run_visible_devices = Key("", "The local devices to use, such as 0,1; empty: all", pattern=r"(\d+(,\d+)*)?")
    colocate_split_and_replicate = Key(False, "All TaskGraphs share the same devices.")


class _Optimizer(Section):
    NAME = "optimizer"
    num_apply_group = Key(1, "Groups of weights that are stepped one after another.", at_least=1)


class _Run(Section):
    NAME = "run"
    log_dir = Key("", "Folder for the plan; empty: none. `epl launch` sets it to the folder of its logs.")
    check_batches = Key(True, "Check that the ranks of one replica are given the same batch.")
    memory_limit = Key(
        "",
        "The most memory that a rank may use, as 6GiB: a plan predicted to need more is refused.",
        pattern=SIZE_PATTERN,
    )
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
    raise ConfigError(unknown(str(name), _KEYS))


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
            raise ConfigError(message + nearest(variable, keys, cutoff=0.0))
        # Another program may own it, or the section may be misspelt: not an error, and not silence.
        warn(f"{message}{nearest(variable, keys, cutoff=0.75)}; it is not used")

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
        raise UnknownKey(unknown(name, _KEYS))

    def __getattr__(self, name: str) -> object:  # called only for what does not exist
        raise UnknownKey(unknown(name, _KEYS))

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Config) else NotImplemented

    def __str__(self) -> str:
        rows = [("key", "value", "origin"), *((key, repr(value), origin) for key, value, origin in self.items())]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}" for key, value, origin in rows)

    def __repr__(self) -> str:
        return f"Config({ {key: value for key, value, origin in self.items() if origin != 'default'} })"
