"""Reads the files of a run as one stream of records, in the order in which things followed from each other.

Clocks of two processes are never compared. Records are merged by step: within a step the process that declares comes
before those that carry it out, and within a process the order of writing holds. Memory does not grow with the trace.

A file may end at any byte, hold lines that are no records, or be missing: that is counted in the process's log, for
others to judge by. Only what cannot be a trace at all is an error. Of a file that still grows, what was there when the
run was opened is read, so that reading ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from kvscope.analysis.files import PROCESS_ORDER, ProcessFiles, RunFiles, find
from kvscope.errors import UnreadableTraceError, quoted
from kvscope.events.coverage_schema import CoverageRecord, ErrorRecord
from kvscope.events.envelope import SCHEMA, given
from kvscope.events.schema import EnabledRecord, Record, UnknownRecord, decode_record
from kvscope.facts.topology import Ranks
from kvscope.sinks.shared import ProcessStatus, read_status

LONGEST_LINE_BYTES = 64 << 20
"""A longer line is no record: without a limit a file without line ends would be read into memory as a whole."""

_TAIL_BYTES = 256 << 10

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"PK\x03\x04")
"""How files by gzip, zstd, xz, bzip2 and zip start."""

_LOOK_AHEAD = 64
"""Lines in which a process has to introduce itself with kv.enabled before it is read without an introduction."""


class ProcessLog(msgspec.Struct, kw_only=True):
    """What was read of one process, filled in while reading.

    ``missing`` counts numbers that ``seq`` passes over, ``missing_first`` those before the first record that is there,
    and ``deleted_files`` the older files that the process itself removed. ``truncated``: the last line is a fragment;
    ``closed``: the last record is a kv.coverage. ``ever_dropped`` is known before anything is read.
    """

    files: ProcessFiles
    enabled: EnabledRecord | None = None
    coverage: CoverageRecord | None = None
    status: ProcessStatus | None = None
    records: int = 0
    events: Counter[str] = msgspec.field(default_factory=Counter)
    first_seq: int = 0
    last_seq: int = 0
    missing: int = 0
    missing_first: int = 0
    repeated: int = 0
    garbage: int = 0
    unknown: int = 0
    truncated: bool = False
    closed: bool = False
    ever_dropped: bool = False
    deleted_files: int = 0
    vanished: list[str] = msgspec.field(default_factory=list)
    native_errors: Counter[str] = msgspec.field(default_factory=Counter)
    first_wall_ns: int = 0
    last_wall_ns: int = 0

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def process(self) -> str:
        return self.files.process or (self.enabled.process if self.enabled else "all")

    @property
    def is_worker(self) -> bool:
        return self.process in {"worker", "all"}

    @property
    def dp_rank(self) -> int:
        if self.enabled is None or isinstance(self.enabled.dp_rank, UnsetType):
            return 0
        return self.enabled.dp_rank

    @property
    def context_ranks(self) -> Ranks:
        """Where the process says it stands in context parallelism."""
        if self.enabled is None:
            return Ranks()
        return Ranks(pcp=given(self.enabled.pcp_rank, None), dcp=given(self.enabled.dcp_rank, None))

    @property
    def dropped(self) -> dict[str, int]:
        """Records that were produced and never written, by cause; the shared file knows later ones than kv.coverage."""
        said = self.status.dropped if self.status else self.coverage.records_dropped if self.coverage else {}
        return {cause: count for cause, count in said.items() if count}

    @property
    def lost_at_end(self) -> int:
        """Records that the process produced and neither wrote nor dropped: it was killed before it could."""
        return max(self.status.lost(self.last_seq), 0) if self.status else 0

    @property
    def ended(self) -> bool:
        """Whether the process itself ended its trace. False: it was killed, it still runs, or the end was cut off."""
        return self.status.closed if self.status else self.closed


class Entry(msgspec.Struct, kw_only=True):
    """One record, and the process that wrote it."""

    log: ProcessLog
    record: Record


class Trace:
    """A run on disk. Iterate once over :meth:`records`; the logs are complete afterwards."""

    def __init__(self, files: RunFiles, logs: list[ProcessLog]) -> None:
        self.files = files
        self.logs = logs
        self.bytes_read = 0
        # Workers first: of what they carried out until now, the declarations are then in EngineCore's file.
        paths = [path for process in reversed(files.processes) for path in process.paths]
        self._sizes = {path: path.stat().st_size if path.exists() else 0 for path in paths}
        self.size_bytes = sum(self._sizes.values())

    @classmethod
    def open(cls, path: Path | str) -> Trace:
        """Find the run and read how each of its processes introduces itself.

        Raises:
            UnreadableTraceError: there is no record at all, or they are of a schema that this version does not read.
        """
        files = find(Path(path))
        trace = cls(files, [ProcessLog(files=process) for process in files.processes])
        introduced = [trace._introduce(log) for log in trace.logs]
        if not any(introduced):
            raise UnreadableTraceError(str(path), _why_unreadable(files))
        return trace

    @property
    def run_id(self) -> str:
        return next((log.enabled.run_id for log in self.logs if log.enabled), self.files.directory.name)

    @property
    def started(self) -> str | None:
        """When the first of the processes began, in local time: ISO 8601, to the second. None if nothing says it."""
        shared = [log.status.start_wall_ns for log in self.logs if log.status]
        told = [*shared, *(log.enabled.wall_ns for log in self.logs if log.enabled)]
        try:
            return (
                datetime.fromtimestamp(min(ns for ns in told if ns > 0) / 1e9)
                .astimezone()
                .isoformat(timespec="seconds")
            )
        except (ValueError, OverflowError, OSError):  # no time at all, or one that no calendar has
            return None

    def records(self) -> Iterator[Entry]:
        """All records of all processes, merged."""
        for entry in heapq.merge(*(self._keyed(order, log) for order, log in enumerate(self.logs)), key=lambda e: e[0]):
            yield entry[1]

    def _keyed(self, order: int, log: ProcessLog) -> Iterator[tuple[tuple[int, int, int], Entry]]:
        """The stream of one process with its place in the merge: by the highest step so far, which never decreases."""
        step = 0
        place = PROCESS_ORDER.index(log.process)
        for record in self._stream(log):
            step = max(step, step_of(record))
            yield (step, place, order), Entry(log=log, record=record)

    def _introduce(self, log: ProcessLog) -> bool:
        """Read the first records without counting them. False where there is none."""
        seen = False
        lines = (line for path in log.files.paths for line in _lines(path, ProcessLog(files=log.files)))
        for line in itertools.islice(lines, _LOOK_AHEAD):
            record = _decoded(line)
            if record is None:
                continue
            seen = True
            if record.schema != SCHEMA:
                message = f"has the schema {quoted(record.schema)}; this kvscope reads {SCHEMA!r}"
                raise UnreadableTraceError(str(log.files.paths[0]), message)
            if isinstance(record, EnabledRecord):
                log.enabled = record
                break
        log.status = _status(log.files.shared)
        last = _last_coverage(log.files.paths[-1])
        log.ever_dropped = bool((log.status and log.status.dropped) or (last and any(last.records_dropped.values())))
        return seen

    def _stream(self, log: ProcessLog) -> Iterator[Record]:
        for path in log.files.paths:
            for line in _lines(path, log, self._sizes[path]):
                self.bytes_read += len(line)
                record = _decoded(line)
                if record is None or record.schema != SCHEMA:
                    _count_damage(log, line)
                    continue
                if log.truncated:  # the fragment was not the end after all
                    log.truncated = False
                    log.garbage += 1
                _count(log, record)
                if isinstance(record, UnknownRecord):
                    log.unknown += 1
                    continue
                _note(log, record)
                yield record


def step_of(record: Record) -> int:
    """The step that the record is about, or after which it was written."""
    if record.step is not UNSET:
        return int(record.step)
    return int(record.after_step) if record.after_step is not UNSET else 0


def _why_unreadable(files: RunFiles) -> str:
    starts = []
    for path in (path for process in files.processes for path in process.paths):
        with path.open("rb") as file:
            starts.append(file.read(6))
    if not any(starts):
        return "is empty"
    packed = any(start.startswith(_PACKED) for start in starts)
    return "is compressed; unpack it first" if packed else f"holds no complete {SCHEMA} record"


def _lines(path: Path, log: ProcessLog, size_bytes: int | None = None) -> Iterator[bytes]:
    """The lines that begin within the first ``size_bytes``."""
    try:
        with path.open("rb") as file:
            done = 0
            while (size_bytes is None or done < size_bytes) and (line := file.readline(LONGEST_LINE_BYTES)):
                done += len(line)
                yield line
    except FileNotFoundError:  # the process rotates its files while they are being read
        log.vanished.append(path.name)
    except OSError as error:
        raise UnreadableTraceError(str(path), error.strerror or type(error).__name__) from error


def _status(shared: Path | None) -> ProcessStatus | None:
    """What the shared file says; None where there is none, or none that this version understands."""
    try:
        return read_status(shared) if shared else None
    except (OSError, ValueError, IndexError):
        return None


def _last_coverage(path: Path) -> CoverageRecord | None:
    """The last kv.coverage near the end of a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b'"kv.coverage"' in line and isinstance(record := _decoded(line), CoverageRecord):
            return record
    return None


def _decoded(line: bytes) -> Record | UnknownRecord | None:
    try:
        return decode_record(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _count_damage(log: ProcessLog, line: bytes) -> None:
    if not line.strip():
        return
    log.closed = False
    if line.endswith(b"\n"):
        log.garbage += 1
    else:
        log.truncated = True


def _count(log: ProcessLog, record: Record | UnknownRecord) -> None:
    log.records += 1
    log.events[_event_of(record)] += 1
    log.closed = isinstance(record, CoverageRecord)
    if not log.first_seq:
        log.first_seq = record.seq
        log.missing_first = max(record.seq - 1, 0)
    elif record.seq > log.last_seq + 1:
        log.missing += record.seq - log.last_seq - 1
    elif record.seq <= log.last_seq:
        log.repeated += 1
    log.last_seq = max(log.last_seq, record.seq)


def _note(log: ProcessLog, record: Record) -> None:
    log.last_wall_ns = max(log.last_wall_ns, record.wall_ns)
    log.first_wall_ns = log.first_wall_ns or record.wall_ns
    if isinstance(record, EnabledRecord):
        log.enabled = record
        log.deleted_files = max(log.deleted_files, record.files_deleted)
    elif isinstance(record, CoverageRecord):
        log.coverage = record
    elif isinstance(record, ErrorRecord):
        log.native_errors[f"{record.error_type} in {record.boundary}"] += 1


def _event_of(record: Record | UnknownRecord) -> str:
    if isinstance(record, UnknownRecord):
        return record.event
    return str(type(record).__struct_config__.tag)
