"""`additional_config` and two environment variables -> one frozen Config. Nothing else here reads the environment.

What the settings are, what they accept and what they mean stands in the table of `settings`, once. Validation, the text
of every error and the documentation (`describe`) are read from there.

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

# ruff: noqa: RUF009 - the sections are frozen, so that one default may be shared by all

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from kvscope.errors import ConfigurationError, quoted
from kvscope.settings import (
    PATH,
    Action,
    EvidenceLabel,
    GuardConfig,
    Kind,
    LogLevel,
    MonitorConfig,
    OutputConfig,
    Records,
    RequestIds,
    Section,
    TraceConfig,
    TransferConfig,
    Unsupported,
    listed,
)

__all__ = [
    "CONFIG_KEYS",
    "DIR_VARIABLE",
    "DISABLE_VARIABLE",
    "ENVIRONMENT_VARIABLES",
    "Action",
    "Config",
    "EvidenceLabel",
    "GuardConfig",
    "Key",
    "LogLevel",
    "MonitorConfig",
    "OutputConfig",
    "Records",
    "RequestIds",
    "Setting",
    "TraceConfig",
    "TransferConfig",
    "Unsupported",
    "describe",
    "misspelled_keys",
    "parse",
    "travel_dict",
    "travel_environment",
]

CONFIG_KEYS = ("kv_trace", "kv_guard_config", "kv_monitor", "kv_transfer", "kv_output")
DISABLE_VARIABLE = "KVSCOPE_DISABLE"
DIR_VARIABLE = "KVSCOPE_DIR"
ENVIRONMENT_VARIABLES: Mapping[str, str] = {
    DISABLE_VARIABLE: "`1` switches everything off, and even skips the validation of the configuration",
    DIR_VARIABLE: "overrides `kv_output.dir` without changing vLLM's compile-cache key",
}

T = TypeVar("T")


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

    @property
    def only_counts(self) -> bool:
        """Whether nothing is recorded of steps and nothing judged: KV Monitor is on, and neither trace nor guard."""
        return self.monitor.enabled and not self.observes_plan

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


_SECTIONS: Mapping[str, tuple[str, type[Section]]] = {
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
    return {row.name: row for row in fields(section)}


def _kind(row: Field[Any]) -> Kind:
    return cast("Kind", row.metadata["kind"])


def _section(section: type[T], given: object, path: str) -> T:
    settings = _settings(section)
    if not isinstance(given, dict):
        raise ConfigurationError(path, f"{quoted(given)} is not an object with the fields {listed(settings)}")
    for name in given:
        if name not in settings:
            raise _unknown_field(name, settings, path)
    return section(**{name: _kind(settings[name]).checked(value, f"{path}.{name}") for name, value in given.items()})


def _unknown_field(name: object, settings: Mapping[str, object], path: str) -> ConfigurationError:
    allowed = f"the allowed ones are {listed(settings)}"
    close = difflib.get_close_matches(name.lower(), settings, n=1) if isinstance(name, str) and _is_plain(name) else []
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigurationError(_path_to(name, path), f"unknown field; {hint}{allowed}")


def _is_plain(name: str) -> bool:
    return name.isascii() and name.replace("-", "_").isidentifier() and len(name) <= 64


def _path_to(name: object, path: str) -> str:
    return f"{path}.{name}" if isinstance(name, str) and _is_plain(name) else f"{path}[{quoted(name)}]"


def _require_both_or_neither(transfer: TransferConfig) -> None:
    for missing, given in (("evidence_label", "descriptor_dir"), ("descriptor_dir", "evidence_label")):
        if getattr(transfer, missing) is None and getattr(transfer, given) is not None:
            allowed = _kind(_settings(TransferConfig)[missing]).allowed.removesuffix(" or null")
            message = f"missing, but {given} is given: set both or neither, this one to {allowed}"
            raise ConfigurationError(f"additional_config.kv_transfer.{missing}", message)


def _with_environment_dir(config: Config, environ: Mapping[str, str]) -> Config:
    if not (given := environ.get(DIR_VARIABLE)):
        return config
    folder = cast("str", PATH.checked(given, DIR_VARIABLE))
    return replace(config, output=replace(config.output, dir=folder), dir_from_environment=True)


# Keys that look like ours ---------------------------------------------------------------------------------------------

_NOT_OURS = frozenset({"kvtransferconfig"})
"""Looks like a key of ours and is vLLM's own name for something else. As `_squeezed` has it."""

_LONGEST_KEY = 64
_CLOSE = 0.85
"""Likeness from which a key counts as misspelled: one or two letters of `kv_trace` are wrong."""


def misspelled_keys(additional_config: object) -> dict[str, str]:
    """Top-level keys that look like one of ours and are not: the full path of each, and the key that it looks like.

    Such a key may be somebody else's all the same, so it is nothing to stop for. `trace` or `guard_config`, ours
    without its first word, is a likely name for something else and does not count.
    """
    given = additional_config if isinstance(additional_config, dict) else {}
    meant = {key: _looks_like(key) for key in given if isinstance(key, str) and key not in CONFIG_KEYS}
    return {_path_to(key, "additional_config"): ours for key, ours in meant.items() if ours is not None}


def _looks_like(key: str) -> str | None:
    squeezed = _squeezed(key)
    if len(key) > _LONGEST_KEY or squeezed in _NOT_OURS:
        return None
    likeness, ours = max((_likeness(squeezed, _squeezed(ours)), ours) for ours in CONFIG_KEYS)
    return ours if likeness >= _CLOSE and squeezed not in _squeezed(ours).removeprefix("kv") else None


def _squeezed(key: str) -> str:
    """The key without what people write differently: case, dashes, dots."""
    return re.sub(r"[^a-z0-9]", "", key.lower())


def _likeness(one: str, other: str) -> float:
    """With `config` at the end or without: one key of ours has it, and the others do not."""
    pairs = ((one, other), (one.removesuffix("config"), other.removesuffix("config")))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


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
    """One row of the documentation. `default` is JSON; `choices` are the values and their meanings, where these are
    few; `acts` is False where this version only validates.
    """

    path: str
    type: str
    default: str
    allowed: str
    meaning: str
    choices: Mapping[str, str]
    acts: bool


class Key(NamedTuple):
    """One key of `additional_config` in the documentation."""

    key: str
    meaning: str
    settings: list[Setting]
    acts: bool


def describe() -> list[Key]:
    """Every setting, in the order of CONFIG_KEYS and of the fields in them."""
    return [
        Key(
            key=key,
            meaning=(section.__doc__ or "").removeprefix(f"`{key}`: "),
            settings=[_described(f"additional_config.{key}", row, section) for row in fields(section)],
            acts=section.ACTS,
        )
        for key, (_, section) in _SECTIONS.items()
    ]


def _described(path: str, row: Field[Any], section: type[Section]) -> Setting:
    kind = _kind(row)
    return Setting(
        path=f"{path}.{row.name}",
        type=kind.type_name,
        default=json.dumps(row.default),
        allowed=kind.allowed,
        meaning=row.metadata["meaning"],
        choices=kind.choices,
        acts=section.ACTS and row.metadata["acts"],
    )


def _as_json(section: Any) -> dict[str, Any]:
    values = {name: getattr(section, name) for name in _settings(type(section))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _absolute(folder: str, base: Path, path: str) -> str:
    try:
        expanded = Path(folder).expanduser()
    except RuntimeError:  # there is no home folder, and "~" is a name like any other
        expanded = Path(folder)
    return cast("str", PATH.checked(str((base / expanded).absolute()), f"additional_config.{path}"))
