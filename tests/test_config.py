"""Config takes what it can honour, from three places in order, and refuses the rest with the cure."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings

import pytest

from epl.config import Config
from epl.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    for variable in [name for name in os.environ if name.startswith("EPL_")]:
        monkeypatch.delenv(variable)


_UNAVAILABLE = {
    "auto.auto_parallel": True,
    "io.slicing": True,
    "io.unbalanced_io_slicing": True,
    "io.drop_last_files": True,
    "communication.fp16": True,
    "communication.fp16_scale": 64,
    "pipeline.num_stages": 2,
}

_DEFAULTS = {
    "auto.auto_parallel": False,
    "io.slicing": False,
    "io.unbalanced_io_slicing": False,
    "io.drop_last_files": False,
    "communication.sparse_as_dense": False,
    "communication.max_splits": 5,
    "communication.num_communicators": 2,
    "communication.fp16": False,
    "communication.fp16_scale": 128,
    "communication.clip_after_allreduce": False,
    "communication.gradients_reduce_method": "mean",
    "communication.timeout": 600.0,
    "pipeline.num_stages": -1,
    "pipeline.num_micro_batch": 1,
    "pipeline.strategy": "PreferBackward",
    "gradient_checkpoint.type": "",
    "gradient_checkpoint.end_taskgraph": -1,
    "gradient_checkpoint.check_gradients": False,
    "gradient_checkpoint.memory_budget": "",
    "gradient_checkpoint.extra_compute": 0.34,
    "loss.chunked": "auto",
    "loss.chunk_rows": 0,
    "zero.level": "",
    "offload.level": "",
    "offload.path": "",
    "offload.size_limit": "",
    "offload.parameters": "",
    "amp.level": "",
    "amp.dtype": "bf16",
    "amp.debug_log": False,
    "amp.loss_scale": "dynamic",
    "cluster.device_place_prefer_intra_node": True,
    "cluster.run_visible_devices": "",
    "cluster.colocate_split_and_replicate": False,
    "optimizer.num_apply_group": 1,
    "run.log_dir": "",
    "run.check_batches": True,
    "run.memory_limit": "",
    "run.print_plan": True,
    "run.trace": "",
    "run.trace_steps": 3,
    "debug.verify": False,
    "debug.verify_only": False,
}


def test_defaults_are_those_of_the_original_epl_and_of_the_keys_added():
    assert Config().to_dict() == _DEFAULTS


def test_every_default_may_be_given_explicitly():
    config = Config(_DEFAULTS)
    assert config == Config()
    assert {origin for _, _, origin in config.items()} == {"dict"}


def test_later_sources_win_and_each_value_tells_its_origin(monkeypatch: pytest.MonkeyPatch):
    for name in ("max_splits", "num_communicators", "timeout"):
        monkeypatch.setenv(f"EPL_COMMUNICATION_{name.upper()}", "7")
    config = Config({"communication.num_communicators": 8, "communication.timeout": 8.0})
    config.communication.timeout = 9
    found = {key: (value, origin) for key, value, origin in config.items()}
    assert found["communication.sparse_as_dense"] == (False, "default")
    assert found["communication.max_splits"] == (7, "environment EPL_COMMUNICATION_MAX_SPLITS")
    assert found["communication.num_communicators"] == (8, "dict")
    assert found["communication.timeout"] == (9.0, "attribute")


def test_values_can_be_read_by_attribute_and_by_name():
    config = Config({"pipeline.num_micro_batch": 4})
    assert config.pipeline.num_micro_batch == config.get("pipeline.num_micro_batch") == 4
    with pytest.raises(ConfigError, match=r"pipeline\.num_microbatch is not .* nearest is pipeline\.num_micro_batch"):
        config.get("pipeline.num_microbatch")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("pipeline.num_micro_batch", True, r"got True \(bool\), expected an int of at least 1"),
        ("pipeline.num_micro_batch", 0, r"got 0 \(int\), expected an int of at least 1"),
        ("pipeline.num_micro_batch", -3, "expected an int of at least 1"),
        ("pipeline.num_micro_batch", 2.0, r"got 2\.0 \(float\), expected an int"),
        ("pipeline.num_micro_batch", "4", r"got '4' \(str\), expected an int"),
        ("pipeline.num_stages", 0, "expected an int of at least 1 or -1"),
        ("pipeline.strategy", "GPipe", "'PreferForward' or 'PreferBackward' or 'PreferBackwardOptimizer'"),
        ("pipeline.strategy", None, "'PreferForward' or"),
        ("gradient_checkpoint.end_taskgraph", -2, "at least 0 or -1"),
        ("communication.gradients_reduce_method", "max", "'mean' or 'sum'"),
        ("communication.max_splits", 0, "at least 1"),
        ("communication.timeout", True, "expected a finite float"),
        ("communication.timeout", 0, r"at least 0\.001"),
        ("communication.timeout", float("nan"), "finite"),
        ("communication.timeout", float("inf"), "finite"),
        ("communication.timeout", 10**400, "finite"),
        ("communication.sparse_as_dense", 1, r"got 1 \(int\), expected True or False"),
        ("run.log_dir", 3, "expected a str"),
        ("cluster.run_visible_devices", "0 1", "such as 0,1"),
        ("cluster.run_visible_devices", "0,", "such as 0,1"),
        ("amp.loss_scale", 0.5, "'dynamic' or a finite float of at least 1"),
        ("amp.loss_scale", "static", "'dynamic' or a finite float"),
        ("amp.loss_scale", True, "'dynamic' or a finite float"),
    ],
)
def test_wrong_values_are_refused_in_the_dict_and_by_attribute(name: str, value: object, expected: str):
    section, attribute = name.split(".")
    with pytest.raises(ConfigError, match=f"{name}: .*{expected}"):
        Config({name: value})
    config = Config()
    with pytest.raises(ConfigError, match=f"{name}: .*{expected}"):
        setattr(getattr(config, section), attribute, value)
    assert config == Config()  # a refused assignment leaves no trace


def test_an_int_passes_as_a_float():
    timeout = Config({"communication.timeout": 30}).communication.timeout
    assert (timeout, type(timeout)) == (30.0, float)


@pytest.mark.parametrize("name", ["PreferForward", "PreferBackward", "PreferBackwardOptimizer"])
def test_choices_are_taken_in_any_case_and_kept_in_one_spelling(name: str):
    assert Config({"pipeline.strategy": name.upper()}).pipeline.strategy == name
    config = Config()
    config.pipeline.strategy = name.lower()
    assert config.pipeline.strategy == name


def test_reduce_method_is_taken_in_any_case():
    assert Config({"communication.gradients_reduce_method": "SUM"}).communication.gradients_reduce_method == "sum"


def test_paths_keep_their_case(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPL_RUN_LOG_DIR", "/Data/Runs")
    assert Config().run.log_dir == "/Data/Runs"
    assert Config({"run.log_dir": "Logs/A"}).run.log_dir == "Logs/A"


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "On"])
def test_environment_takes_these_words_as_true(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("EPL_DEBUG_VERIFY", text)
    assert Config().debug.verify is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "OFF"])
def test_environment_takes_these_words_as_false(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("EPL_RUN_PRINT_PLAN", text)
    assert Config().run.print_plan is False


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("EPL_DEBUG_VERIFY", "maybe", "expected true/false/1/0/yes/no/on/off"),
        ("EPL_DEBUG_VERIFY", "", "expected true/false"),
        ("EPL_PIPELINE_NUM_MICRO_BATCH", "four", "expected an int of at least 1"),
        ("EPL_PIPELINE_NUM_MICRO_BATCH", "0", "expected an int of at least 1"),
        ("EPL_PIPELINE_NUM_MICRO_BATCH", "true", "expected an int"),
        ("EPL_COMMUNICATION_TIMEOUT", "nan", "expected a finite float"),
        ("EPL_PIPELINE_STRATEGY", "1F1B", "'PreferForward' or"),
        ("EPL_AMP_LOSS_SCALE", "0.5", "'dynamic' or a finite float of at least 1"),
    ],
)
def test_wrong_variables_are_refused_by_name_and_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: str
):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"{variable}='{text}', .*{expected}"):
        Config()


def test_a_dict_does_not_excuse_a_wrong_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPL_PIPELINE_NUM_MICRO_BATCH", "four")
    with pytest.raises(ConfigError, match="EPL_PIPELINE_NUM_MICRO_BATCH"):
        Config({"pipeline.num_micro_batch": 4})


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("EPL_PIPELINE_NUM_MICROBATCH", "EPL_PIPELINE_NUM_MICRO_BATCH"),
        ("EPL_GRADIENT_CHECKPOINT_TYP", "EPL_GRADIENT_CHECKPOINT_TYPE"),
        ("EPL_ZERO_", "EPL_ZERO_LEVEL"),
        ("EPL_Pipeline_Strategy", "EPL_PIPELINE_STRATEGY"),
    ],
)
def test_unknown_variables_of_a_known_section_are_errors(monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str):
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ConfigError, match=f"{variable} is not a setting of EPL; the nearest is {nearest}"):
        Config()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("EPL_WHATEVER", "it is not used"),
        ("EPL_PIPELIN_NUM_MICRO_BATCH", "the nearest is EPL_PIPELINE_NUM_MICRO_BATCH; it is not used"),
    ],
)
def test_variables_of_no_section_give_a_warning_at_the_line_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
):
    monkeypatch.setenv(variable, "1")
    with pytest.warns(UserWarning, match=f"{variable} is not a setting of EPL; {hint}") as caught:
        assert Config() == Config({})
    assert caught[0].filename == __file__


def test_variables_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPLUS_PIPELINE_X", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config().to_dict() == _DEFAULTS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pipeline.num_microbatch", "the nearest is pipeline.num_micro_batch"),
        ("Pipeline.Strategy", "the nearest is pipeline.strategy"),
        ("pipelin.num_micro_batch", "the nearest is pipeline.num_micro_batch"),
        ("loss_scale", "the nearest is amp.loss_scale"),
        ("pipline", "the nearest is pipeline"),
        ("zzzz", "the sections are auto, io, communication, pipeline"),
        ("pipeline", "pipeline is a section; set its keys, pipeline.num_stages, pipeline.num_micro_batch"),
        (5, "5 is not a setting of EPL"),
    ],
)
def test_unknown_keys_in_the_dict_are_errors_with_the_nearest_key(name: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        Config({name: 1})


def test_unknown_attributes_cannot_be_assigned():
    config = Config()
    with pytest.raises(ConfigError, match=r"the nearest is pipeline\.num_micro_batch"):
        config.pipeline.num_microbatch = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="the nearest is pipeline"):
        config.pipline.num_micro_batch = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="pipeline is a section; set its keys"):
        config.pipeline = {"num_micro_batch": 4}  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(config, "pipline")


def test_all_problems_come_in_one_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPL_DEBUG_VERIFY", "maybe")
    with pytest.raises(ConfigError) as caught:
        Config({"pipeline.num_micro_batch": 0, "pipeline.stratgy": "x", "auto.auto_parallel": True})
    text = str(caught.value)
    assert text.count("\n  - ") == 4
    for part in (
        "EPL_DEBUG_VERIFY='maybe'",
        "pipeline.num_micro_batch: got 0",
        "pipeline.stratgy is",
        "auto.auto_parallel: not",
    ):
        assert part in text


def test_something_that_is_no_dict_is_refused():
    with pytest.raises(ConfigError, match="Config takes a dict"):
        Config("pipeline.num_micro_batch=4")  # pyright: ignore[reportArgumentType]


def test_these_keys_are_not_available_yet():
    assert {key.name for key in map(Config.spec, Config.keys()) if not key.available} == set(_UNAVAILABLE)


@pytest.mark.parametrize(("name", "value"), _UNAVAILABLE.items())
def test_a_feature_that_is_missing_is_refused_however_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
):
    section, attribute = name.split(".")
    with pytest.raises(ConfigError, match=f"{name}: not yet available .*leave it at its default"):
        Config({name: value})
    config = Config()
    with pytest.raises(ConfigError, match=f"{name}: not yet available"):
        setattr(getattr(config, section), attribute, value)
    monkeypatch.setenv(Config.spec(name).variable, str(value))
    with pytest.raises(ConfigError, match=f"{name}: not yet available .*{Config.spec(name).variable}="):
        Config()


@pytest.mark.parametrize("duplicate", [Config.copy, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_equal_and_keep_their_origins(duplicate):
    config = Config({"pipeline.num_micro_batch": 4})
    other = duplicate(config)
    assert other == config
    assert list(other.items()) == list(config.items())


@pytest.mark.parametrize("duplicate", [Config.copy, copy.copy, copy.deepcopy])
def test_a_copy_is_independent_and_still_checks(duplicate):
    config = Config({"pipeline.num_micro_batch": 4})
    other = duplicate(config)
    other.pipeline.num_micro_batch = 8
    assert (config.pipeline.num_micro_batch, other.get("pipeline.num_micro_batch")) == (4, 8)
    assert config != other
    with pytest.raises(ConfigError, match="at least 1"):
        other.pipeline.num_micro_batch = 0


def test_two_configs_share_nothing():
    first = Config()
    first.pipeline.num_micro_batch = 4
    assert Config().pipeline.num_micro_batch == 1


def test_equality_is_of_values_not_of_origins():
    assert Config({"pipeline.num_micro_batch": 1}) == Config()
    assert Config({"pipeline.num_micro_batch": 2}) != Config()
    assert Config() != "config"


def test_the_dict_form_is_stable_json_and_gives_the_same_config_back():
    config = Config({"run.log_dir": "x", "communication.timeout": 5})
    text = json.dumps(config.to_dict())
    assert text == json.dumps(config.copy().to_dict())
    assert Config(json.loads(text)) == config


def test_printing_shows_every_key_with_value_and_origin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPL_PIPELINE_STRATEGY", "preferforward")
    lines = [line.split() for line in str(Config({"pipeline.num_micro_batch": 4})).splitlines()]
    assert lines[0] == ["key", "value", "origin"]
    assert [line[0] for line in lines[1:]] == list(Config.keys())
    assert ["pipeline.num_micro_batch", "4", "dict"] in lines
    assert ["pipeline.strategy", "'PreferForward'", "environment", "EPL_PIPELINE_STRATEGY"] in lines
    assert ["zero.level", "''", "default"] in lines


def test_repr_is_the_code_that_makes_the_config():
    config = Config({"pipeline.num_micro_batch": 4})
    assert repr(config) == "Config({'pipeline.num_micro_batch': 4})"
    assert eval(repr(config)) == config
