"""The table of settings: each field states its default, what it accepts, what it means, and whether this version acts
on it. It is said here and nowhere else: `config` reads configurations by it, and describes it to the documentation.
"""

# ruff: noqa: RUF009 - `setting` makes a dataclass field, which is what a call in a field's place is for

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, cast

from kvscope.errors import ConfigurationError, quoted

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
class Kind:
    """A set of values: `allowed` completes the sentence "<value> is not …", `choices` says what each of a few means."""

    type_name: str
    allowed: str
    accepts: Callable[[object], bool]
    convert: Callable[[Any], object] = lambda value: value
    items: Kind | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

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


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def choice(meanings: Mapping[str, str]) -> Kind:
    """One of these texts. Each is given with its meaning."""
    allowed = f"one of {listed(meanings)}"
    return Kind("string", allowed, lambda value: isinstance(value, str) and value in meanings, choices=meanings)


def _range(type_name: str, noun: str, types: tuple[type, ...], low: float, high: float) -> Kind:
    def accepts(value: object) -> bool:
        # bool is an int in Python, and `"port": true` is a mistake. NaN compares false, so it is in no range.
        return isinstance(value, types) and not isinstance(value, bool) and low <= cast("float", value) <= high

    return Kind(type_name, f"{noun} from {low} to {high}", accepts, types[-1])


def integer(low: int, high: int) -> Kind:
    return _range("integer", "an integer", (int,), low, high)


def text(pattern: str, allowed: str) -> Kind:
    matches = re.compile(pattern, re.ASCII).fullmatch
    return Kind("string", allowed, lambda value: isinstance(value, str) and matches(value) is not None)


def _is_module_name(value: object) -> bool:
    if not isinstance(value, str) or len(value) > 255:
        return False
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in value.split("."))


def list_of(item: Kind, noun: str, most: int) -> Kind:
    allowed = f"a list of at most {most} {noun}"
    return Kind("list", allowed, lambda value: isinstance(value, list) and len(value) <= most, items=item)


def or_null(kind: Kind) -> Kind:
    allowed = f"{kind.allowed} or null"
    type_name = f"{kind.type_name} or null"
    return Kind(type_name, allowed, lambda value: value is None or kind.accepts(value), choices=kind.choices)


BOOLEAN = Kind("boolean", "true or false", lambda value: isinstance(value, bool))
# Surrogates stand for bytes that are no UTF-8: such a path could not be written into a record.
PATH = text(
    r"(?=.*\S)[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,4096}",
    "a path of 1 to 4096 characters, no control characters among them",
)
MODULE = Kind("string", "a dotted module name such as 'package.module'", _is_module_name)
DURATION = _range("number", "a number of seconds", (int, float), 0.001, 86_400)
HOST = text(r"[!-~]{1,255}", "a host name or address of 1 to 255 visible ASCII characters")
URL_PATH = text(r"/[\w.~!$&'()*+,;=:@%/-]{0,254}", "a path that starts with '/', of at most 255 URL characters")
PREFIX = text(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}", "1 to 64 letters, digits, '_' and ':', the first of them no digit")
TAG = text(r"[!-~]{1,64}", "1 to 64 visible ASCII characters, no spaces")


def setting(default: T, kind: Kind, meaning: str, *, acts: bool = True) -> T:
    """A row of the table of settings. (It claims to return the value so that a field keeps its type.)

    With `acts` False it is validated and passed on, and this version does nothing about it.
    """
    return field(default=default, metadata={"kind": kind, "meaning": meaning, "acts": acts})


# Settings with a few values, and what each does -----------------------------------------------------------------------

_ACTION = choice(
    {
        "log": "the finding is recorded, one line goes to vLLM's log (unless `kv_output.log` is `off`), and the engine "
        "goes on; if the access is outside the cache and may crash it, the record is on disk before the launch",
        "raise": "recorded and logged as well; the result of the faulty step is withheld, and the engine stops until "
        "its process is started anew; an access outside the cache is not even launched",
        "isolate": "recorded and logged as well; only the requests that the finding names, and those that have the "
        "damaged block, end with finish reason `error`, without the faulty step's token; their blocks are held back "
        "until the prefix cache is reset. The engine stops as with `raise` where more than 5 % of the pool would be "
        "held back, where a pooling request or a session would have to end, and, with `kv_output.request_ids` = "
        "`omitted`, for what a worker in a process of its own has found. A finding that names no request is only "
        "logged",
    }
)
_UNSUPPORTED = choice(
    {
        "skip": "the check is skipped for that cache group, and its rows are counted as skipped",
        "refuse": "start-up fails and names the group, what it is and the checks that could not run; so it does where "
        "this vLLM lacks a function that a check needs",
    }
)
_EVIDENCE = choice(
    {
        "real-online": "copied by an engine that served requests",
        "replay": "replayed from a recording",
        "simulation": "simulated",
    }
)
_RECORDS = choice(
    {
        "full": "every field, block tables and slots spelled out step by step; every check can be replayed",
        "compact": "what suffices to replay every check",
        "findings": "findings, errors and coverage only, with the last steps before a finding in `incident-<n>.jsonl`; "
        "such a trace cannot be replayed, and `kvscope check` says *inconclusive* (exit code 3)",
    }
)
_LOG = choice(
    {
        "off": "none; what kvscope says about itself, and that `raise` stops the engine, is logged all the same",
        "findings": "findings",
        "all": "every record",
    }
)
_REQUEST_IDS = choice(
    {
        "plain": "as they are; a client can choose them",
        "hashed": "16 hex digits, from a hash whose key is made anew for every run and written nowhere",
        "omitted": "null; requests cannot be told apart, so `kvscope check` says *inconclusive* (exit code 3)",
    }
)


# The settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """`ACTS` is False where this version validates the settings of a part and does nothing about them."""

    ACTS: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckingPart(Section):
    enabled: bool = setting(False, BOOLEAN, "switches the part on")
    action: Action = setting("log", _ACTION, "what a finding of this part does")
    unsupported: Unsupported = setting("skip", _UNSUPPORTED, "what happens where a check cannot judge a cache group")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(CheckingPart):
    """`kv_trace`: what the scheduler declares, and whether attention is handed the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig(CheckingPart):
    """`kv_guard_config`: whether blocks are used by their owner, in order, and after they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(Section):
    """`kv_monitor`: metrics, in a file of each process, and their exporter."""

    enabled: bool = setting(False, BOOLEAN, "switches the part on")
    host: str = setting("127.0.0.1", HOST, "address that the exporter listens on")
    port: int = setting(
        9460,
        integer(1, 65535),
        "port of the exporter, the next free one where it is taken; an EngineCore that exports, as no front end is on "
        "its host, adds its data-parallel rank",
    )
    metrics_path: str = setting("/metrics", URL_PATH, "path that the exporter answers on")
    scrape_interval: float = setting(1.0, DURATION, "the metrics are rendered at most once in this time")
    prefix: str = setting("vllm_ascend_", PREFIX, "start of every metric's name")
    window: float = setting(60.0, DURATION, "time over which the hit ratio is taken")
    log: bool = setting(False, BOOLEAN, "writes one JSON line of aggregates into vLLM's log per scrape_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(Section):
    """`kv_transfer`: offload, P/D transfers and recoveries. (vLLM's own kv-transfer-config sets up the connector.)"""

    ACTS: ClassVar[bool] = False

    enabled: bool = setting(False, BOOLEAN, "switches the part on")
    descriptor_dir: str | None = setting(
        None, or_null(PATH), "folder for copy descriptors; none are written without it (needs evidence_label)"
    )
    evidence_label: EvidenceLabel | None = setting(
        None, or_null(_EVIDENCE), "what the descriptors are evidence of (needs descriptor_dir)"
    )
    max_pending: int = setting(4096, integer(1, 1 << 20), "transfers under way that are kept")
    max_admissions: int = setting(4096, integer(1, 1 << 20), "admissions that are kept")
    max_regions: int = setting(4096, integer(1, 1 << 20), "memory regions that are kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig(Section):
    """`kv_output`: where records go, and how much is kept."""

    dir: str = setting("kvscope-out", PATH, "output folder; a relative one starts where the front end was started")
    records: Records = setting("compact", _RECORDS, "how much of what happened is recorded")
    log: LogLevel = setting("findings", _LOG, "which records also go to vLLM's log, one line each")
    log_tag: str = setting("KV_GUARD", TAG, "word at the start of those lines")
    queue_records: int = setting(
        65536, integer(1, 1 << 24), "records that may wait for the writer; what comes on top is dropped and counted"
    )
    queue_bytes: int = setting(
        64 * _MIB,
        integer(_KIB, 64 * _GIB),
        "bytes that may wait for the writer; what comes on top is dropped and counted",
    )
    ring_bytes: int = setting(64 * _MIB, integer(_KIB, 64 * _GIB), "bytes that the flight recorder keeps in memory")
    extensions: tuple[str, ...] = setting(
        (),
        list_of(MODULE, "module names", 64),
        "modules to import in front end, EngineCore and workers, once any part is on; each registers what it has with "
        "`kvscope.monitor`",
    )
    rotate_bytes: int = setting(
        256 * _MIB, integer(_KIB, 1024 * _GIB), "size at which a file is closed and the next one begun"
    )
    retain_files: int = setting(
        8, integer(1, 100_000), "files that a process keeps; older ones are deleted, and how many is recorded"
    )
    ring_steps: int = setting(
        64,
        integer(1, 65536),
        "steps that the flight recorder keeps, to be written to `incident-<n>.jsonl` with a finding",
    )
    request_ids: RequestIds = setting("plain", _REQUEST_IDS, "how request ids stand in records")
