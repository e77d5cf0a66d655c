"""`additional_config` and two environment variables -> one frozen Config. Nothing else here reads the environment.

The dataclasses below are the table of settings: each field states its default, what it accepts and what it means, once.
Validation, the text of every error and the documentation (`describe`) are read from there.

Variables: `KVSCOPE_DISABLE=1` switches everything off and skips validation; `KVSCOPE_DIR` overrides `kv_output.dir`.
None of them can switch anything on.

How the output folder travels. The front end resolves it once, with `resolve_output_dir`, and every other process has to
arrive at the same folder even from another working directory. A folder from the configuration travels in
`additional_config` itself (`travel_dict`), as a plain absolute string, since that dict must stay JSON-serialisable:
vLLM hashes `json.dumps(additional_config)` into its compile-cache key (`VllmConfig.compute_hash`). Another folder is
therefore another key, and compiles again. That is why `KVSCOPE_DIR` exists: a folder from there is not written into
`additional_config`; it travels in the environment (`travel_environment`) and leaves the key alone. (vLLM hands a
variable on to Ray workers only if `VLLM_RAY_EXTRA_ENV_VARS_TO_COPY` names it.)
"""

# ruff: noqa: RUF009 - `_setting` makes a dataclass field, which is what a call in a field's place is for

from __future__ import annotations

import difflib
import json
import keyword
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from kvscope.errors import ConfigurationError, quoted

CONFIG_KEYS = ("kv_trace", "kv_guard_config", "kv_monitor", "kv_transfer", "kv_output")
DISABLE_VARIABLE = "KVSCOPE_DISABLE"
DIR_VARIABLE = "KVSCOPE_DIR"
ENVIRONMENT_VARIABLES: Mapping[str, str] = {
    DISABLE_VARIABLE: "1 switches everything off and skips the validation of the configuration",
    DIR_VARIABLE: "overrides kv_output.dir without changing vLLM's compile-cache key",
}

Action = Literal["log", "raise", "isolate"]
Unsupported = Literal["skip", "refuse"]
EvidenceLabel = Literal["real-online", "replay", "simulation"]
Records = Literal["full", "compact", "findings"]
LogLevel = Literal["off", "findings", "all"]
RequestIds = Literal["plain", "hashed", "omitted"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
T = TypeVar("T")


# What a setting accepts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """A set of values: `allowed` completes the sentence "<value> is not …"."""

    type_name: str
    allowed: str
    accepts: Callable[[object], bool]
    convert: Callable[[Any], object] = lambda value: value
    items: _Kind | None = None

    def checked(self, value: object, path: str) -> object:
        """The value as Config holds it.

        Raises:
            ConfigurationError: naming `path`, or the list item in it, and what is allowed.
        """
        if not self.accepts(value):
            raise ConfigurationError(path, f"{quoted(value)} is not {self.allowed}")
        if self.items is not None:
            items = cast("list[object]", value)
            return tuple(self.items.checked(item, f"{path}[{index}]") for index, item in enumerate(items))
        return self.convert(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _choice(literal: object) -> _Kind:
    choices: tuple[str, ...] = get_args(literal)
    return _Kind("string", f"one of {_listed(choices)}", lambda value: isinstance(value, str) and value in choices)


def _range(type_name: str, noun: str, types: tuple[type, ...], low: float, high: float) -> _Kind:
    def accepts(value: object) -> bool:
        # bool is an int in Python, and `"port": true` is a mistake. NaN compares false, so it is in no range.
        return isinstance(value, types) and not isinstance(value, bool) and low <= cast("float", value) <= high

    return _Kind(type_name, f"{noun} from {low} to {high}", accepts, types[-1])


def _integer(low: int, high: int) -> _Kind:
    return _range("integer", "an integer", (int,), low, high)


def _text(pattern: str, allowed: str) -> _Kind:
    matches = re.compile(pattern, re.ASCII).fullmatch
    return _Kind("string", allowed, lambda value: isinstance(value, str) and matches(value) is not None)


def _is_module_name(value: object) -> bool:
    if not isinstance(value, str) or len(value) > 255:
        return False
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in value.split("."))


def _list_of(item: _Kind, noun: str, most: int) -> _Kind:
    allowed = f"a list of at most {most} {noun}"
    return _Kind("list", allowed, lambda value: isinstance(value, list) and len(value) <= most, items=item)


def _or_null(kind: _Kind) -> _Kind:
    allowed = f"{kind.allowed} or null"
    return _Kind(f"{kind.type_name} or null", allowed, lambda value: value is None or kind.accepts(value))


_BOOLEAN = _Kind("boolean", "true or false", lambda value: isinstance(value, bool))
# Surrogates stand for bytes that are no UTF-8: such a path could not be written into a record.
_PATH = _text(
    r"(?=.*\S)[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,4096}",
    "a path of 1 to 4096 characters, no control characters among them",
)
_MODULE = _Kind("string", "a dotted module name such as 'package.module'", _is_module_name)
_DURATION = _range("number", "a number of seconds", (int, float), 0.001, 86_400)
_HOST = _text(r"[!-~]{1,255}", "a host name or address of 1 to 255 visible ASCII characters")
_URL_PATH = _text(r"/[\w.~!$&'()*+,;=:@%/-]{0,254}", "a path that starts with '/', of at most 255 URL characters")
_PREFIX = _text(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}", "1 to 64 letters, digits, '_' and ':', the first of them no digit")
_TAG = _text(r"[!-~]{1,64}", "1 to 64 visible ASCII characters, no spaces")


def _setting(default: T, kind: _Kind, meaning: str) -> T:
    """A row of the table of settings. (It claims to return the value so that a field keeps its type.)"""
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


# The settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckingPart:
    enabled: bool = _setting(False, _BOOLEAN, "switches the part on")
    action: Action = _setting(
        "log", _choice(Action), "a finding is recorded, or stops the engine, or ends only the requests that it names"
    )
    unsupported: Unsupported = _setting(
        "skip", _choice(Unsupported), "a check that cannot judge a group is skipped and counted, or start-up fails"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(_CheckingPart):
    """`kv_trace`: what the scheduler declares, and whether attention is handed the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig(_CheckingPart):
    """`kv_guard_config`: whether blocks are used by their owner, in order, and after they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """`kv_monitor`: metrics and their exporter."""

    enabled: bool = _setting(False, _BOOLEAN, "switches the part on")
    host: str = _setting("127.0.0.1", _HOST, "address that the exporter listens on")
    port: int = _setting(9460, _integer(1, 65535), "port of the exporter; the data-parallel rank is added")
    metrics_path: str = _setting("/metrics", _URL_PATH, "path that the exporter answers on")
    scrape_interval: float = _setting(1.0, _DURATION, "the metrics are rendered at most once in this time")
    prefix: str = _setting("vllm_ascend_", _PREFIX, "start of every metric's name")
    window: float = _setting(60.0, _DURATION, "time over which the hit ratio is taken")
    log: bool = _setting(False, _BOOLEAN, "writes one JSON line of aggregates per scrape_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """`kv_transfer`: offload, P/D transfers and recoveries. (vLLM's own kv-transfer-config sets up the connector.)"""

    enabled: bool = _setting(False, _BOOLEAN, "switches the part on")
    descriptor_dir: str | None = _setting(
        None, _or_null(_PATH), "folder for copy descriptors; none are written without it (needs evidence_label)"
    )
    evidence_label: EvidenceLabel | None = _setting(
        None, _or_null(_choice(EvidenceLabel)), "what the descriptors are evidence of (needs descriptor_dir)"
    )
    max_pending: int = _setting(4096, _integer(1, 1 << 20), "transfers under way that are kept")
    max_admissions: int = _setting(4096, _integer(1, 1 << 20), "admissions that are kept")
    max_regions: int = _setting(4096, _integer(1, 1 << 20), "memory regions that are kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """`kv_output`: where records go, and how much is kept."""

    dir: str = _setting("kvscope-out", _PATH, "output folder; a relative one starts where the front end was started")
    records: Records = _setting(
        "compact", _choice(Records), "every field, or what suffices to replay every check, or only findings"
    )
    log: LogLevel = _setting("findings", _choice(LogLevel), "which records also go to vLLM's log, one line each")
    log_tag: str = _setting("KV_GUARD", _TAG, "word at the start of those lines")
    queue_records: int = _setting(65536, _integer(1, 1 << 24), "records that may wait for the writer")
    queue_bytes: int = _setting(64 * _MIB, _integer(_KIB, 64 * _GIB), "bytes that may wait for the writer")
    ring_bytes: int = _setting(64 * _MIB, _integer(_KIB, 64 * _GIB), "bytes of the flight recorder")
    extensions: tuple[str, ...] = _setting(
        (), _list_of(_MODULE, "module names", 64), "modules to import in every process; not done by this version"
    )
    rotate_bytes: int = _setting(256 * _MIB, _integer(_KIB, 1024 * _GIB), "size at which a file is closed")
    retain_files: int = _setting(8, _integer(1, 100_000), "files that a process keeps; older ones are deleted")
    ring_steps: int = _setting(64, _integer(1, 65536), "steps that the flight recorder keeps")
    request_ids: RequestIds = _setting("plain", _choice(RequestIds), "how request ids stand in records")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What this engine's kvscope does. The sections are validated: build it with `parse`, not by hand."""

    trace: TraceConfig = TraceConfig()
    guard: GuardConfig = GuardConfig()
    monitor: MonitorConfig = MonitorConfig()
    transfer: TransferConfig = TransferConfig()
    output: OutputConfig = OutputConfig()
    # Where the settings came from is no part of what they are: two configurations that do the same are equal.
    disabled_by_environment: bool = field(default=False, compare=False)
    dir_from_environment: bool = field(default=False, compare=False)

    @property
    def any_enabled(self) -> bool:
        return self.observes_plan or self.monitor.enabled or self.transfer.enabled

    @property
    def observes_plan(self) -> bool:
        """Whether declaration and plan are built: guard needs both, even with trace off."""
        return self.trace.enabled or self.guard.enabled

    def action_for(self, part: str) -> Action:
        """What a finding does whose rule belongs to `part`: `kv_trace`, `kv_guard_config` or `kv_transfer`."""
        actions: dict[str, Action] = {"kv_trace": self.trace.action, "kv_guard_config": self.guard.action}
        return actions[part] if part != "kv_transfer" else "log"

    def to_public_dict(self) -> dict[str, dict[str, Any]]:
        """The effective configuration in the shape of `additional_config`: `parse` makes an equal Config of it."""
        return {key: _as_json(getattr(self, name)) for key, (name, _) in _SECTIONS.items()}

    def resolve_output_dir(self, base: Path) -> Config:
        """A copy whose folders (`kv_output.dir`, `kv_transfer.descriptor_dir`) are absolute, relative ones from `base`.

        An absolute folder stays as it is, so a second call changes nothing. Nothing is created, no link is followed.

        Raises:
            ConfigurationError: if only `base` makes a folder one that the other processes would refuse to read.
        """
        output = replace(self.output, dir=_absolute(self.output.dir, base, "kv_output.dir"))
        transfer = self.transfer
        if transfer.descriptor_dir is not None:
            path = "kv_transfer.descriptor_dir"
            transfer = replace(transfer, descriptor_dir=_absolute(transfer.descriptor_dir, base, path))
        return replace(self, transfer=transfer, output=output)


_SECTIONS: Mapping[str, tuple[str, type[Any]]] = {
    "kv_trace": ("trace", TraceConfig),
    "kv_guard_config": ("guard", GuardConfig),
    "kv_monitor": ("monitor", MonitorConfig),
    "kv_transfer": ("transfer", TransferConfig),
    "kv_output": ("output", OutputConfig),
}


# Reading --------------------------------------------------------------------------------------------------------------


def parse(additional_config: object, environ: Mapping[str, str] | None = None) -> Config:
    """The Config that `additional_config` and the environment ask for.

    None means all defaults; so does an object that is no dict, because vLLM lets platforms pass their own class there.
    A top-level key that is not in CONFIG_KEYS belongs to somebody else and is left alone.

    Raises:
        ConfigurationError: for the first setting that is wrong, in the order of CONFIG_KEYS.
    """
    environ = os.environ if environ is None else environ
    if environ.get(DISABLE_VARIABLE, "").strip() == "1":
        return Config(disabled_by_environment=True)
    given = additional_config if isinstance(additional_config, dict) else {}
    wanted = [(key, *_SECTIONS[key]) for key in CONFIG_KEYS if key in given]
    sections: dict[str, Any] = {
        name: _section(cls, given[key], f"additional_config.{key}") for key, name, cls in wanted
    }
    config = Config(**sections)
    _require_both_or_neither(config.transfer)
    return _with_environment_dir(config, environ)


def _settings(section: type[Any]) -> dict[str, Field[Any]]:
    return {setting.name: setting for setting in fields(section)}


def _kind(setting: Field[Any]) -> _Kind:
    return cast("_Kind", setting.metadata["kind"])


def _section(section: type[T], given: object, path: str) -> T:
    settings = _settings(section)
    if not isinstance(given, dict):
        raise ConfigurationError(path, f"{quoted(given)} is not an object with the fields {_listed(settings)}")
    for name in given:
        if name not in settings:
            raise _unknown_field(name, settings, path)
    return section(**{name: _kind(settings[name]).checked(value, f"{path}.{name}") for name, value in given.items()})


def _unknown_field(name: object, settings: Mapping[str, object], path: str) -> ConfigurationError:
    allowed = f"the allowed ones are {_listed(settings)}"
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or len(name) > 64:
        return ConfigurationError(f"{path}[{quoted(name)}]", f"unknown field; {allowed}")
    close = difflib.get_close_matches(name.lower(), settings, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigurationError(f"{path}.{name}", f"unknown field; {hint}{allowed}")


def _require_both_or_neither(transfer: TransferConfig) -> None:
    for missing, given in (("evidence_label", "descriptor_dir"), ("descriptor_dir", "evidence_label")):
        if getattr(transfer, missing) is None and getattr(transfer, given) is not None:
            allowed = _kind(_settings(TransferConfig)[missing]).allowed.removesuffix(" or null")
            message = f"missing, but {given} is given: set both or neither, this one to {allowed}"
            raise ConfigurationError(f"additional_config.kv_transfer.{missing}", message)


def _with_environment_dir(config: Config, environ: Mapping[str, str]) -> Config:
    if not (given := environ.get(DIR_VARIABLE)):
        return config
    folder = cast("str", _PATH.checked(given, DIR_VARIABLE))
    return replace(config, output=replace(config.output, dir=folder), dir_from_environment=True)


# Passing on and describing --------------------------------------------------------------------------------------------


def travel_dict(config: Config, additional_config: object) -> object:
    """What the front end puts in place of `additional_config`, for a `config` whose folders are resolved.

    It is a copy in which only the folders are replaced, but for one that came from the environment (see the top of
    this module). With every part off it is the object itself.
    """
    if not config.any_enabled or not isinstance(additional_config, dict):
        return additional_config
    folders: dict[str, dict[str, str]] = {}
    if not config.dir_from_environment:
        folders["kv_output"] = {"dir": config.output.dir}
    if config.transfer.descriptor_dir is not None:
        folders["kv_transfer"] = {"descriptor_dir": config.transfer.descriptor_dir}
    return {**additional_config, **{key: {**additional_config.get(key, {}), **new} for key, new in folders.items()}}


def travel_environment(config: Config) -> dict[str, str]:
    """What the front end puts into the environment of the processes that it starts, for the same `config`."""
    return {DIR_VARIABLE: config.output.dir} if config.any_enabled and config.dir_from_environment else {}


class Setting(NamedTuple):
    """One row of the documentation: everything is text, `default` is JSON."""

    path: str
    type: str
    default: str
    allowed: str
    meaning: str


def describe() -> list[Setting]:
    """Every setting, in the order of CONFIG_KEYS and of the fields in them."""
    return [
        Setting(
            path=f"additional_config.{key}.{name}",
            type=_kind(setting).type_name,
            default=json.dumps(setting.default),
            allowed=_kind(setting).allowed,
            meaning=setting.metadata["meaning"],
        )
        for key, (_, section) in _SECTIONS.items()
        for name, setting in _settings(section).items()
    ]


def _as_json(section: Any) -> dict[str, Any]:
    values = {name: getattr(section, name) for name in _settings(type(section))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _absolute(folder: str, base: Path, path: str) -> str:
    try:
        expanded = Path(folder).expanduser()
    except RuntimeError:  # there is no home folder, and "~" is a name like any other
        expanded = Path(folder)
    return cast("str", _PATH.checked(str((base / expanded).absolute()), f"additional_config.{path}"))
