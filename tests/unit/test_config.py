from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.config import (
    CONFIG_KEYS,
    ENVIRONMENT_VARIABLES,
    Config,
    GuardConfig,
    MonitorConfig,
    OutputConfig,
    Setting,
    TraceConfig,
    TransferConfig,
    describe,
    misspelled_keys,
    parse,
    travel_dict,
    travel_environment,
)
from kvscope.errors import ConfigurationError, quoted

DEFAULTS: dict[str, dict[str, Any]] = {
    "kv_trace": {"enabled": False, "action": "log", "unsupported": "skip"},
    "kv_guard_config": {"enabled": False, "action": "log", "unsupported": "skip"},
    "kv_monitor": {
        "enabled": False,
        "host": "127.0.0.1",
        "port": 9460,
        "metrics_path": "/metrics",
        "scrape_interval": 1,
        "prefix": "vllm_ascend_",
        "window": 60,
        "log": False,
    },
    "kv_transfer": {
        "enabled": False,
        "descriptor_dir": None,
        "evidence_label": None,
        "max_pending": 4096,
        "max_admissions": 4096,
        "max_regions": 4096,
    },
    "kv_output": {
        "dir": "kvscope-out",
        "records": "compact",
        "log": "findings",
        "log_tag": "KV_GUARD",
        "queue_records": 65536,
        "queue_bytes": 67108864,
        "ring_bytes": 67108864,
        "extensions": [],
        "rotate_bytes": 268435456,
        "retain_files": 8,
        "ring_steps": 64,
        "request_ids": "plain",
    },
}

EXAMPLE: dict[str, Any] = {
    "kv_trace": {"enabled": True, "action": "log"},
    "kv_guard_config": {"enabled": True, "action": "raise"},
    "kv_monitor": {"enabled": True},
    "kv_transfer": {"enabled": True},
    "kv_output": {"dir": "kvscope-out"},
}

ON = {"kv_trace": {"enabled": True}}


def brief(value: object) -> str:
    return ascii(quoted(value))[1:-1][:40]


def settings_described() -> list[Setting]:
    return [row for key in describe() for row in key.settings]


def read(additional_config: object, **environ: str) -> Config:
    return parse(additional_config, environ)


def error_of(additional_config: object, **environ: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        parse(additional_config, environ)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert text == f"{caught.value.path}: {caught.value.message}"
    return caught.value


# Defaults and what counts as a configuration --------------------------------------------------------------------------


def test_the_keys_are_the_contracts() -> None:
    assert CONFIG_KEYS == ("kv_trace", "kv_guard_config", "kv_monitor", "kv_transfer", "kv_output")


@pytest.mark.parametrize("nothing", [None, {}, {key: {} for key in CONFIG_KEYS}], ids=["none", "empty", "empty parts"])
def test_everything_is_off_until_asked_for(nothing: object) -> None:
    config = read(nothing)
    assert config == Config()
    assert not config.any_enabled
    assert not config.observes_plan
    assert not config.disabled_by_environment
    assert config.to_public_dict() == DEFAULTS


@pytest.mark.parametrize("path", [f"{key}.{name}" for key, names in DEFAULTS.items() for name in names])
def test_every_default_is_the_contracts(path: str) -> None:
    key, name = path.split(".")
    rows = {row.path: row for row in settings_described()}
    assert json.loads(rows[f"additional_config.{path}"].default) == DEFAULTS[key][name]


@pytest.mark.parametrize("foreign", [object(), "kv_trace", 7, [{"kv_trace": {"enabled": True}}], True])
def test_an_object_of_the_host_switches_nothing_on(foreign: object) -> None:
    assert read(foreign) == Config()


def test_the_example_of_the_contract_is_read() -> None:
    config = read(EXAMPLE)
    assert config.trace == TraceConfig(enabled=True)
    assert config.guard == GuardConfig(enabled=True, action="raise")
    assert config.monitor == MonitorConfig(enabled=True)
    assert config.transfer == TransferConfig(enabled=True)
    assert config.output == OutputConfig()


@pytest.mark.parametrize(
    "foreign",
    [
        {"kv_tracer": 3},
        {"kv_guard": {"enabled": "yes"}},
        {"ascend_scheduler_config": {"enabled": True}},
        {"KV_TRACE": None, "": 1, "kv_trace.enabled": True},
        {1: 2, None: 3},
    ],
    ids=brief,
)
def test_keys_of_others_are_left_alone(foreign: dict[Any, Any]) -> None:
    assert read(foreign) == Config()
    assert read({**foreign, **ON}).trace.enabled


def test_what_was_given_is_not_changed() -> None:
    given_config = copy.deepcopy(EXAMPLE)
    read(given_config, KVSCOPE_DIR="/elsewhere")
    assert given_config == EXAMPLE


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("kv_gaurd_config", "kv_guard_config"),
        ("kv_guard", "kv_guard_config"),
        ("kv_guard_conf", "kv_guard_config"),
        ("kvGuardConfig", "kv_guard_config"),
        ("KV_TRACE", "kv_trace"),
        ("kv-trace", "kv_trace"),
        ("kv_trace_config", "kv_trace"),
        ("kv_tarce", "kv_trace"),
        ("k_trace", "kv_trace"),
        ("kv_monitors", "kv_monitor"),
        ("kv-monitor", "kv_monitor"),
        ("kv_tranfser", "kv_transfer"),
        ("kv_ouput", "kv_output"),
    ],
)
def test_a_misspelled_key_is_recognised(key: str, ours: str) -> None:
    assert misspelled_keys({**ON, key: {"enabled": True}, "others": 1}) == {f"additional_config.{key}": ours}
    assert read({key: {"enabled": True}}) == Config()


@pytest.mark.parametrize(
    "key",
    [
        *CONFIG_KEYS,
        *("kv_transfer_config", "kv-transfer-config", "kv_transfer_params", "kv_events_config", "kv_cache_dtype"),
        *("kv_connector", "kv_role", "kv_offloading_size", "kv_cache", "kv_load_config", "gdn_prefill_backend"),
        *("ascend_scheduler_config", "ascend_compilation_config", "torchair_graph_config", "weight_prefetch_config"),
        *("xlite_graph_config", "profiling_chunk_config", "eplb_config", "dump_config_path", "enable_kv_nz", "refresh"),
        *("trace", "monitor", "transfer", "output", "guard", "guard_config", "config", "kv", "", "x" * 10**6),
        *(1, None, ("kv_trace",), b"kv_trace"),
    ],
    ids=brief,
)
def test_keys_that_are_right_or_plausibly_of_others_are_not_taken_for_misspelled(key: object) -> None:
    assert misspelled_keys({key: {"enabled": True}}) == {}


def test_a_misspelled_key_with_strange_characters_is_quoted() -> None:
    assert misspelled_keys({"kv\ntrace\x1b": {}}) == {r"additional_config['kv\ntrace\x1b']": "kv_trace"}


@pytest.mark.parametrize("foreign", [None, object(), "kv_tracer", 7, [{"kv_tracer": {}}]], ids=brief)
def test_an_object_of_the_host_has_no_misspelled_keys(foreign: object) -> None:
    assert misspelled_keys(foreign) == {}


# Good values ----------------------------------------------------------------------------------------------------------

LONGEST_PATH = "x" * 4096

GOOD = [
    ("kv_trace.enabled", True),
    ("kv_trace.action", "raise"),
    ("kv_guard_config.action", "isolate"),
    ("kv_guard_config.unsupported", "refuse"),
    ("kv_monitor.host", "0.0.0.0"),
    ("kv_monitor.host", "::1"),
    ("kv_monitor.host", "metrics.example"),
    ("kv_monitor.port", 1),
    ("kv_monitor.port", 65535),
    ("kv_monitor.metrics_path", "/"),
    ("kv_monitor.metrics_path", "/a/b-c_d.e~%20"),
    ("kv_monitor.scrape_interval", 0.25),
    ("kv_monitor.scrape_interval", 86400),
    ("kv_monitor.window", 5),
    ("kv_monitor.prefix", "vllm_ascend_"),
    ("kv_monitor.prefix", "_"),
    ("kv_monitor.prefix", "team:kv1_"),
    ("kv_monitor.log", True),
    ("kv_transfer.descriptor_dir", None),
    ("kv_transfer.evidence_label", None),
    ("kv_transfer.max_pending", 1),
    ("kv_transfer.max_admissions", 2**20),
    ("kv_transfer.max_regions", 5),
    ("kv_output.dir", "/var/log/kvscope"),
    ("kv_output.dir", "输出 folder ü"),
    ("kv_output.dir", LONGEST_PATH),
    ("kv_output.records", "full"),
    ("kv_output.records", "findings"),
    ("kv_output.log", "off"),
    ("kv_output.log", "all"),
    ("kv_output.log_tag", "[KV]"),
    ("kv_output.queue_records", 1),
    ("kv_output.queue_bytes", 1024),
    ("kv_output.ring_bytes", 2**36),
    ("kv_output.rotate_bytes", 2**40),
    ("kv_output.retain_files", 1),
    ("kv_output.ring_steps", 65536),
    ("kv_output.request_ids", "hashed"),
    ("kv_output.request_ids", "omitted"),
    ("kv_output.extensions", ["package", "package.module_1", "größe._x"]),
]


def placed(path: str, value: object) -> dict[str, Any]:
    key, name = path.split(".")
    return {key: {name: value}}


@pytest.mark.parametrize(("path", "value"), GOOD, ids=brief)
def test_a_good_value_is_taken_and_comes_back(path: str, value: object) -> None:
    key, name = path.split(".")
    config = read(placed(path, value))
    public = config.to_public_dict()
    assert public[key][name] == value
    assert public == {**DEFAULTS, key: {**DEFAULTS[key], name: value}}
    assert read(public) == config


@pytest.mark.parametrize("label", ["real-online", "replay", "simulation"])
def test_descriptors_need_a_folder_and_a_label(label: str) -> None:
    config = read({"kv_transfer": {"descriptor_dir": "copies", "evidence_label": label}})
    assert (config.transfer.descriptor_dir, config.transfer.evidence_label) == ("copies", label)
    assert read(config.to_public_dict()) == config


def test_a_whole_number_of_seconds_is_held_as_float() -> None:
    assert isinstance(read(placed("kv_monitor.scrape_interval", 2)).monitor.scrape_interval, float)


# Bad values -----------------------------------------------------------------------------------------------------------

HUGE = 10**6000
NAN, INF = float("nan"), float("inf")
INJECTION = "log\nKV_GUARD reason=none\r\u2028\x85\x1b[2J"

ALLOWED = {
    "enabled": "is not true or false",
    "action": "is not one of 'log', 'raise', 'isolate'",
    "unsupported": "is not one of 'skip', 'refuse'",
    "host": "is not a host name or address of 1 to 255 visible ASCII characters",
    "port": "is not an integer from 1 to 65535",
    "metrics_path": "is not a path that starts with '/', of at most 255 URL characters",
    "scrape_interval": "is not a number of seconds from 0.001 to 86400",
    "window": "is not a number of seconds from 0.001 to 86400",
    "prefix": "is not 1 to 64 letters, digits, '_' and ':', the first of them no digit",
    "descriptor_dir": "is not a path of 1 to 4096 characters, no control characters among them or null",
    "evidence_label": "is not one of 'real-online', 'replay', 'simulation' or null",
    "max_pending": "is not an integer from 1 to 1048576",
    "max_admissions": "is not an integer from 1 to 1048576",
    "max_regions": "is not an integer from 1 to 1048576",
    "dir": "is not a path of 1 to 4096 characters, no control characters among them",
    "records": "is not one of 'full', 'compact', 'findings'",
    "kv_output.log": "is not one of 'off', 'findings', 'all'",
    "kv_monitor.log": "is not true or false",
    "log_tag": "is not 1 to 64 visible ASCII characters, no spaces",
    "queue_records": "is not an integer from 1 to 16777216",
    "queue_bytes": "is not an integer from 1024 to 68719476736",
    "ring_bytes": "is not an integer from 1024 to 68719476736",
    "extensions": "is not a list of at most 64 module names",
    "rotate_bytes": "is not an integer from 1024 to 1099511627776",
    "retain_files": "is not an integer from 1 to 100000",
    "ring_steps": "is not an integer from 1 to 65536",
    "request_ids": "is not one of 'plain', 'hashed', 'omitted'",
}

BAD_BY_TYPE: dict[str, list[object]] = {
    "boolean": [0, 1, "true", "false", "", None, [], {}, 1.0, [True]],
    "integer": [True, False, "9460", 9460.0, None, 0, -1, -HUGE, HUGE, NAN, INF, -INF, [], {"a": 1}],
    "number": [True, "1", None, 0, 0.0, -0.0, -1, 1e-9, 86400.5, HUGE, -HUGE, NAN, INF, -INF, [1], {}, 5e-324],
    "string": [1, True, 1.5, ["log"], {"log": 1}, "", " ", INJECTION, "\n", "a\x00b", "\udc80", "x" * 5000],
    "list": [None, "package", {"package": 1}, 1, True, ["a"] * 65],
}


def bad_values() -> Iterator[tuple[str, object]]:
    for row in settings_described():
        path = row.path.removeprefix("additional_config.")
        for value in BAD_BY_TYPE[row.type.removesuffix(" or null")]:
            yield path, value
        if row.type == "string":
            yield path, None
    for name in ("action", "unsupported", "records", "request_ids"):
        key = "kv_output" if name in DEFAULTS["kv_output"] else "kv_trace"
        yield from ((f"{key}.{name}", value) for value in ("warn", "LOG", " log", "log ", "logs", "пlain"))
    yield from (("kv_monitor.port", value) for value in (65536, 2**63, -9460))
    yield from (("kv_monitor.metrics_path", v) for v in ("metrics", "/a b", "/a?b=1", "/a#b", "/ü", "/" + "a" * 255))
    yield from (("kv_monitor.prefix", v) for v in ("9kv_", "kv-", "kv.", "kv ", "kvü_", "kv_\n", "k" * 65))
    yield from (("kv_monitor.host", v) for v in ("a b", " localhost", "localhost\n", "a\u00a0b", "h" * 256))
    yield from (("kv_output.log_tag", v) for v in ("KV GUARD", "KV\tGUARD", "守卫", "T" * 65))
    yield from (("kv_output.dir", v) for v in ("   ", "out\nkv", "x" * 4097))


@pytest.mark.parametrize(("path", "value"), list(bad_values()), ids=brief)
def test_a_bad_value_is_refused_with_its_path_and_what_is_allowed(path: str, value: object) -> None:
    error = error_of(placed(path, value))
    assert error.path == f"additional_config.{path}"
    assert error.message.endswith(ALLOWED.get(path) or ALLOWED[path.split(".")[1]])
    assert len(error.message) <= 80 + 120


def test_the_example_error_of_the_contract() -> None:
    error = error_of({"kv_guard_config": {"action": "warn"}})
    assert str(error) == ("additional_config.kv_guard_config.action: 'warn' is not one of 'log', 'raise', 'isolate'")


@pytest.mark.parametrize("key", CONFIG_KEYS)
@pytest.mark.parametrize(
    "value",
    [None, True, 1, "on", [], [{"enabled": True}], INJECTION, HUGE],
    ids=brief,
)
def test_a_key_must_hold_an_object(key: str, value: object) -> None:
    error = error_of({key: value})
    assert error.path == f"additional_config.{key}"
    fields = ", ".join(repr(name) for name in DEFAULTS[key])
    assert error.message.endswith(f"is not an object with the fields {fields}")


@pytest.mark.parametrize(
    "item",
    [None, 1, "", ".", "a.", ".a", "a..b", "a b", "a-b", "1a", "a.class", "a/b", "a\n", "ä" * 256, ["a"]],
    ids=brief,
)
def test_every_extension_must_be_a_module_name(item: object) -> None:
    error = error_of(placed("kv_output.extensions", ["fine.module", item]))
    assert error.path == "additional_config.kv_output.extensions[1]"
    assert error.message.endswith("is not a dotted module name such as 'package.module'")


@pytest.mark.parametrize(
    ("key", "name", "hint"),
    [
        ("kv_trace", "acton", "action"),
        ("kv_trace", "Enabled", "enabled"),
        ("kv_guard_config", "ENABLE", "enabled"),
        ("kv_monitor", "scrape_intervall", "scrape_interval"),
        ("kv_transfer", "evidence_labels", "evidence_label"),
        ("kv_output", "ring_step", "ring_steps"),
        ("kv_output", "ring-steps", "ring_steps"),
        ("kv_output", "disabled_by_environment", None),
        ("kv_output", "zzz", None),
    ],
)
def test_an_unknown_field_names_the_allowed_ones_and_a_close_one(key: str, name: str, hint: str | None) -> None:
    error = error_of({key: {name: 1}})
    fields = ", ".join(repr(field) for field in DEFAULTS[key])
    question = f"did you mean {hint!r}? " if hint else ""
    assert str(error) == f"additional_config.{key}.{name}: unknown field; {question}the allowed ones are {fields}"


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a.b", "a\nb", INJECTION, "äction", "x" * 65, 1, None, HUGE, ("a",)],
    ids=brief,
)
def test_a_strange_field_name_is_quoted(name: object) -> None:
    error = error_of({"kv_trace": {name: 1}})
    assert error.path.startswith("additional_config.kv_trace[")
    assert error.path.endswith("]")
    assert error.message == "unknown field; the allowed ones are 'enabled', 'action', 'unsupported'"


def test_descriptors_without_a_label_are_refused() -> None:
    assert str(error_of({"kv_transfer": {"descriptor_dir": "copies"}})) == (
        "additional_config.kv_transfer.evidence_label: missing, but descriptor_dir is given: "
        "set both or neither, this one to one of 'real-online', 'replay', 'simulation'"
    )


@pytest.mark.parametrize("missing", [{}, {"descriptor_dir": None}])
def test_a_label_without_descriptors_is_refused(missing: dict[str, None]) -> None:
    assert str(error_of({"kv_transfer": {"evidence_label": "replay", **missing}})) == (
        "additional_config.kv_transfer.descriptor_dir: missing, but evidence_label is given: "
        "set both or neither, this one to a path of 1 to 4096 characters, no control characters among them"
    )


def test_a_part_that_is_off_is_validated_all_the_same() -> None:
    assert error_of({"kv_trace": {"enabled": False, "action": "warn"}}).path == "additional_config.kv_trace.action"


def test_the_first_error_is_told_in_the_order_of_the_keys() -> None:
    assert error_of({"kv_output": 1, "kv_trace": 2}).path == "additional_config.kv_trace"


# The environment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("additional_config", [None, EXAMPLE, {"kv_trace": 3}, {"kv_output": {"x": 1}}, 7], ids=brief)
def test_disable_wins_over_everything(additional_config: object) -> None:
    config = read(additional_config, KVSCOPE_DISABLE="1", KVSCOPE_DIR="\n")
    assert config == Config()
    assert config.disabled_by_environment
    assert not config.any_enabled


@pytest.mark.parametrize("value", ["", "0", "false", "2", "11"])
def test_only_one_disables(value: str) -> None:
    config = read(ON, KVSCOPE_DISABLE=value)
    assert config.any_enabled
    assert not config.disabled_by_environment


@pytest.mark.parametrize("additional_config", [None, {}, EXAMPLE, {"kv_output": {"dir": "/configured"}}], ids=brief)
def test_dir_overrides_the_configured_folder(additional_config: object) -> None:
    config = read(additional_config, KVSCOPE_DIR="/from/environment")
    assert config.output.dir == "/from/environment"
    assert config.dir_from_environment
    assert config.any_enabled is read(additional_config).any_enabled


def test_an_empty_dir_is_no_override() -> None:
    config = read({"kv_output": {"dir": "here"}}, KVSCOPE_DIR="")
    assert config.output.dir == "here"
    assert not config.dir_from_environment


def test_a_bad_dir_names_the_variable() -> None:
    assert str(error_of(ON, KVSCOPE_DIR="a\nb")) == (
        r"KVSCOPE_DIR: 'a\nb' is not a path of 1 to 4096 characters, no control characters among them"
    )


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSCOPE_DISABLE", raising=False)
    monkeypatch.setenv("KVSCOPE_DIR", "/from/process")
    assert parse(ON).output.dir == "/from/process"
    monkeypatch.setenv("KVSCOPE_DISABLE", "1")
    assert parse(ON).disabled_by_environment
    assert parse(ON, {}).trace.enabled


def test_no_variable_switches_anything_on() -> None:
    assert set(ENVIRONMENT_VARIABLES) == {"KVSCOPE_DISABLE", "KVSCOPE_DIR"}
    switches = {f"KVSCOPE_{name}": "1" for name in ("ENABLE", "TRACE", "GUARD", "MONITOR", "TRANSFER", "KV_TRACE")}
    assert read({}, **switches) == Config()


# Asking the configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "observes_plan"),
    [("kv_trace", True), ("kv_guard_config", True), ("kv_monitor", False), ("kv_transfer", False)],
)
def test_one_part_is_enough_to_be_on(key: str, observes_plan: bool) -> None:
    config = read({key: {"enabled": True}})
    assert config.any_enabled
    assert config.observes_plan is observes_plan


def test_each_part_has_its_action_and_transfer_always_logs() -> None:
    config = read({"kv_trace": {"action": "raise"}, "kv_guard_config": {"action": "isolate"}})
    assert config.action_for("kv_trace") == "raise"
    assert config.action_for("kv_guard_config") == "isolate"
    assert config.action_for("kv_transfer") == "log"


@pytest.mark.parametrize("part", ["kv_monitor", "kv_output", "trace", ""])
def test_a_part_without_rules_has_no_action(part: str) -> None:
    with pytest.raises(KeyError):
        Config().action_for(part)


@pytest.mark.parametrize("section", [Config, TraceConfig, GuardConfig, MonitorConfig, TransferConfig, OutputConfig])
def test_a_configuration_cannot_be_changed(section: type[Any]) -> None:
    instance = section()
    assert not hasattr(instance, "__dict__")
    for field in dataclasses.fields(section):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, field.name, None)
    with pytest.raises(TypeError):
        section(True)


def test_a_configuration_is_hashable_and_travels_by_pickle() -> None:
    config = read({**EXAMPLE, "kv_output": {"extensions": ["a.b"]}}, KVSCOPE_DIR="/x")
    arrived = pickle.loads(pickle.dumps(config))
    assert arrived == config
    assert hash(arrived) == hash(config)
    assert arrived.dir_from_environment


# The folder and how it travels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "absolute"), [("out", "/base/out"), ("a/../b", "/base/a/../b"), (".", "/base"), ("/x/y", "/x/y")]
)
def test_a_folder_is_resolved_from_the_base(folder: str, absolute: str) -> None:
    config = read({"kv_output": {"dir": folder}, "kv_transfer": {"descriptor_dir": folder, "evidence_label": "replay"}})
    resolved = config.resolve_output_dir(Path("/base"))
    assert resolved.output.dir == resolved.transfer.descriptor_dir == absolute
    assert resolved.resolve_output_dir(Path("/other")) == resolved
    assert config.output.dir == folder


@pytest.mark.parametrize("base", ["/a\nb", "/bytes\udcff", "/" + "b" * 4090])
@pytest.mark.parametrize("key", ["kv_output.dir", "kv_transfer.descriptor_dir"])
def test_a_base_that_would_fail_in_another_process_fails_in_the_front_end(base: str, key: str) -> None:
    given_config = {
        "kv_output": {"dir": "relative" if key == "kv_output.dir" else "/absolute"},
        "kv_transfer": {"descriptor_dir": "copies", "evidence_label": "replay"},
    }
    with pytest.raises(ConfigurationError) as caught:
        read(given_config).resolve_output_dir(Path(base))
    assert caught.value.path == f"additional_config.{key}"
    assert str(caught.value).isprintable()


def test_resolving_changes_only_the_folders() -> None:
    config = read(EXAMPLE, KVSCOPE_DIR="out")
    resolved = config.resolve_output_dir(Path("/base"))
    assert resolved == dataclasses.replace(config, output=dataclasses.replace(config.output, dir="/base/out"))
    assert resolved.dir_from_environment


def test_a_relative_base_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config().resolve_output_dir(Path("sub")).output.dir == str(Path.cwd() / "sub" / "kvscope-out")


def test_a_home_folder_is_expanded_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = read({"kv_output": {"dir": "~/out"}})
    assert config.resolve_output_dir(Path("/base")).output.dir == "/home/me/out"
    config = read({"kv_output": {"dir": "~no-such-user-of-kvscope/out"}})
    assert config.resolve_output_dir(Path("/base")).output.dir == "/base/~no-such-user-of-kvscope/out"


def test_another_process_arrives_at_the_same_folder() -> None:
    front_end: dict[str, Any] = {
        "kv_trace": {"enabled": True},
        "kv_transfer": {"descriptor_dir": "copies", "evidence_label": "replay"},
        "other": {"left": ["alone"]},
    }
    before = copy.deepcopy(front_end)
    config = read(front_end).resolve_output_dir(Path("/front"))
    travelling = travel_dict(config, front_end)
    assert front_end == before
    assert travelling == {
        "kv_trace": {"enabled": True},
        "kv_transfer": {"descriptor_dir": "/front/copies", "evidence_label": "replay"},
        "other": {"left": ["alone"]},
        "kv_output": {"dir": "/front/kvscope-out"},
    }
    assert travel_environment(config) == {}
    worker = read(json.loads(json.dumps(travelling))).resolve_output_dir(Path("/worker"))
    assert worker == config
    assert travel_dict(worker, travelling) == travelling


def test_a_folder_from_the_environment_leaves_the_compile_cache_key_alone() -> None:
    config = read(EXAMPLE, KVSCOPE_DIR="run7").resolve_output_dir(Path("/front"))
    assert travel_dict(config, EXAMPLE) == EXAMPLE
    assert travel_environment(config) == {"KVSCOPE_DIR": "/front/run7"}
    assert read(EXAMPLE, **travel_environment(config)).resolve_output_dir(Path("/worker")) == config


@pytest.mark.parametrize("untouched", [None, {}, {"kv_output": {"dir": "x"}}, {"other": 1}, object()], ids=brief)
def test_nothing_travels_while_everything_is_off(untouched: object) -> None:
    config = read(untouched, KVSCOPE_DIR="y").resolve_output_dir(Path("/front"))
    assert travel_dict(config, untouched) is untouched
    assert travel_environment(config) == {}


# The documentation ----------------------------------------------------------------------------------------------------


def test_the_documentation_has_one_row_a_setting() -> None:
    rows = settings_described()
    assert [row.path for row in rows] == [
        f"additional_config.{key}.{name}" for key in DEFAULTS for name in DEFAULTS[key]
    ]
    for row in rows:
        texts = [row.type, row.default, row.allowed, row.meaning, *row.choices, *row.choices.values()]
        assert all(text and text.isprintable() for text in texts)


def test_the_documentation_has_one_section_a_key() -> None:
    assert tuple(key.key for key in describe()) == CONFIG_KEYS
    for key in describe():
        assert key.meaning.isprintable()
        assert key.meaning
        assert "`" not in key.meaning


def test_the_documentation_says_what_the_errors_say() -> None:
    for row in settings_described():
        error = error_of(placed(row.path.removeprefix("additional_config."), {"no": "object"}))
        assert error.message.endswith(f"is not {row.allowed}")


# Anything at all ------------------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELD_NAMES = sorted({name for names in DEFAULTS.values() for name in names})
# Fields with a value that is right for some field: most of these configurations are nearly good.
PLAUSIBLE = st.sampled_from([value for _, value in GOOD]) | JSON_VALUES
SECTIONS = st.dictionaries(st.sampled_from(FIELD_NAMES) | st.text(), PLAUSIBLE, max_size=5) | JSON_VALUES
GOOD_SECTIONS = {
    key: st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from(
                [v for p, v in GOOD if p == f"{key}.{name}" and v != LONGEST_PATH] + [DEFAULTS[key][name]]
            )
            for name in DEFAULTS[key]
        },
    )
    for key in CONFIG_KEYS
}


def reads_or_refuses(additional_config: object) -> None:
    try:
        config = parse(additional_config, {})
    except ConfigurationError as error:
        text = str(error)
        assert text.startswith("additional_config.")
        assert len(text.splitlines()) == 1
        assert len(text) < 600
    else:
        assert isinstance(config, Config)
        assert parse(json.loads(json.dumps(config.to_public_dict())), {}) == config


@given(JSON_VALUES)
def test_any_json_is_read_or_refused(additional_config: object) -> None:
    reads_or_refuses(additional_config)


@settings(max_examples=examples(400))
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS) | st.text(), SECTIONS, max_size=5))
def test_anything_under_our_keys_is_read_or_refused(additional_config: object) -> None:
    reads_or_refuses(additional_config)


@given(st.fixed_dictionaries({}, optional=GOOD_SECTIONS))
def test_good_sections_combine(additional_config: dict[str, Any]) -> None:
    public = read(additional_config).to_public_dict()
    for key, section in additional_config.items():
        assert public[key] == {**DEFAULTS[key], **section}
    assert read(public) == read(additional_config)


@given(st.fixed_dictionaries({}, optional=GOOD_SECTIONS), st.sampled_from(["/a", "b/c"]), st.booleans())
def test_every_process_agrees_with_the_front_end(
    additional_config: dict[str, Any], folder: str, by_variable: bool
) -> None:
    environ = {"KVSCOPE_DIR": folder} if by_variable else {}
    config = parse(additional_config, environ).resolve_output_dir(Path("/front"))
    if not config.any_enabled:
        return
    inherited = {**environ, **travel_environment(config)}
    worker = parse(travel_dict(config, additional_config), inherited).resolve_output_dir(Path("/worker"))
    assert worker == config


def test_reading_leaves_the_process_environment_alone() -> None:
    before = dict(os.environ)
    parse(EXAMPLE)
    assert dict(os.environ) == before
