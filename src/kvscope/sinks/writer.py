"""The thread behind a stream: takes facts from the queue, makes records of them, hands these to the sinks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvscope.config import OutputConfig
from kvscope.events import codec
from kvscope.events.codec import Identity
from kvscope.events.coverage_schema import CoverageRecord
from kvscope.events.envelope import Envelope
from kvscope.events.finding_schema import ViolationRecord
from kvscope.events.names import RequestNames
from kvscope.events.schema import EnabledRecord
from kvscope.sinks.files import TraceFiles
from kvscope.sinks.kinds import Entry, RecordMaker, records_written
from kvscope.sinks.log import LogSink
from kvscope.sinks.ring import FlightRecorder
from kvscope.sinks.shared import C_CLOSED, C_DROPPED, C_HEARTBEAT_MONO_NS, C_OWN, C_WRITTEN, DROP_CAUSES

PERIOD_S = 0.1
_BUFFER_BYTES = 256 * 1024
# Encoding holds the interpreter lock, and a step that waits for it gets it only after the switch interval (5 ms). So
# the writer gives it up by itself, often.
_SLICE_NS = 500_000
_PAUSE_S = 0.0002
_LOOK_NS = 1_000_000_000  # between two looks whether the file is still where it was made
_KIND, _STEP, _APPROX_BYTES = map(Entry._fields.index, ("kind", "step", "approx_bytes"))
_COMPONENTS = {"frontend": "frontend", "engine": "scheduler", "worker": "worker", "all": "scheduler"}


class Writer:
    """``written``, ``own`` and ``dropped`` count records; ``done_bytes`` is what has left the queue.

    ``written`` is what the system took. When somebody removes the open file or its folder, that is noticed within about
    a second, said once in the log, and a next file is begun. What the removed file held stays counted as written: when
    it was removed is not known, and a file that was only moved away still has its records. ``seq`` goes on behind them,
    so that a reader of what is left states the gap, and of the moved file the missing end. Records that have no file to
    go to are dropped as ``write_error``.
    """

    def __init__(
        self,
        queue: deque[tuple[Any, ...]],
        folder: Path,
        stem: str,
        cells: memoryview,
        *,
        output: OutputConfig,
        identity: Identity,
        names: RequestNames,
    ) -> None:
        self._queue = queue
        self._folder = folder
        self._cells = cells
        self._identity = identity
        self._maker = RecordMaker(identity, names, full=output.records == "full")
        self._weights = records_written(output.records)
        self._files = TraceFiles(folder, stem, rotate_bytes=output.rotate_bytes, retain=output.retain_files)
        self._logs_all = output.log == "all"
        self._log = LogSink(output.log, output.log_tag)
        self._ring = FlightRecorder(steps=output.ring_steps, max_bytes=output.ring_bytes)
        self._enabled: Callable[[], EnabledRecord] | None = None
        self._component = _COMPONENTS[stem.split("-", 1)[0]]

        self._busy = threading.Lock()  # held while draining
        self._progress = threading.Condition()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._enabled_line = b""
        self._seq = 0
        self._last_step = 0
        self._looked_ns = 0
        self._wall_offset_ns = 0  # of the two clocks: the step path reads only the monotonic one
        self._announced: set[str] = set()
        self._done = 0
        self._taken_bytes = 0
        self.done_bytes = 0
        self.written = 0
        self.own = 0
        self.dropped = dict.fromkeys(DROP_CAUSES, 0)
        self.sink_faults = 0

    # Life -------------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._enabled is not None

    def open(self, enabled: Callable[[], EnabledRecord], block_sizes: Mapping[int, int] | None) -> None:
        self._maker.block_sizes = block_sizes
        self._enabled = enabled
        self._thread = threading.Thread(target=self._run, name="kvscope-writer", daemon=True)
        self._thread.start()
        self._wake.set()

    def wake(self) -> None:
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, entered: int, timeout_s: float) -> bool:
        """Wait until ``entered`` entries are dealt with."""
        if not self._is_running():
            return self._done >= entered
        self._wake.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._done >= entered, timeout_s)

    def close(self, timeout_s: float) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        # What is left is what a disk that hangs did not take, or a stream that never was opened: it stays queued, and
        # a reader sees the difference.
        if self._busy.acquire(timeout=timeout_s if self._thread is None else 0):
            try:
                with contextlib.suppress(Exception):  # a log handler is foreign code
                    self._log.tell_suppressed()
                self._files.close()
                self._cells[C_CLOSED] = 1
            finally:
                self._busy.release()

    def hand_over(self, cells: memoryview) -> bool:
        """Count in other cells from now on. False: a disk that hangs still holds the thread, which has yet to count."""
        if not self._is_running():
            self._cells = cells
        return self._cells is cells

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While this is held, no record is under way between the queue and the files."""
        with self._busy:
            yield

    def abandon(self, cells: memoryview) -> None:
        """See ``Stream.abandon``."""
        self._thread = None
        self._enabled = None
        self._stopping = True
        self._cells = cells
        self._busy = threading.Lock()
        self._progress = threading.Condition()
        self._wake = threading.Event()
        self._queue = deque()
        self._files.abandon()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            stopping = self._stopping
            try:
                with self._busy:
                    self._drain(pace=not stopping)
            except Exception as error:  # noqa: BLE001 - a fault of our own must not end the thread: the queue would fill
                self.sink_faults += 1
                self._announce("writer", f"the writer failed: {type(error).__name__}")
            if stopping:
                return

    @property
    def incidents_suppressed(self) -> int:
        return self._ring.suppressed

    # Work -------------------------------------------------------------------------------------------------------------

    def _drain(self, *, pace: bool) -> None:
        now = time.monotonic_ns()
        self._cells[C_HEARTBEAT_MONO_NS] = now
        self._wall_offset_ns = time.time_ns() - now
        self._look_for_file(_LOOK_NS if pace else 0)
        if not self._files.is_open:
            self._start_file()
        taken, slice_start = 0, time.monotonic_ns()
        try:
            # What comes in meanwhile is for the next round, so that a flush does not wait for a step path without rest.
            for _ in range(len(self._queue)):
                entry = self._queue.popleft()
                taken += 1
                self._taken_bytes += entry[_APPROX_BYTES]
                self._take(entry)
                if self._lines_bytes >= _BUFFER_BYTES:
                    self._write_out()
                    self._look_for_file(_LOOK_NS)
                if pace and time.monotonic_ns() - slice_start > _SLICE_NS and not self._wake.is_set():
                    time.sleep(_PAUSE_S)
                    slice_start = time.monotonic_ns()
            self._write_out()
        finally:
            self.done_bytes = self._taken_bytes
            with self._progress:
                self._done += taken
                self._progress.notify_all()

    def _take(self, entry: tuple[Any, ...]) -> None:
        kind, step = entry[_KIND], entry[_STEP]
        weight = self._weights[kind]
        try:
            if weight == 0:
                self._keep_unwritten(Entry._make(entry))
                return
            if self._files.is_full(self._lines_bytes):
                self._look_for_file(0)
                self._write_out()
                self._files.close()
            if not self._files.is_open and not self._lines:
                self._start_file()
            records, lines = self._encoded(entry)
        except Exception as error:  # noqa: BLE001 - a fact taken from a damaged host may have any shape
            self._drop("encode_error", weight, f"a {kind} record: {type(error).__name__}")
            return
        self._seq += len(lines)
        self._lines += lines
        size_bytes = sum(map(len, lines))
        self._lines_bytes += size_bytes
        if step is not None and step > self._last_step:
            self._last_step = step
        self._ring.keep(self._last_step, size_bytes, lambda: lines)
        if self._logs_all or kind == "violation":
            self._hand_on(records, lines)

    def _encoded(self, entry: tuple[Any, ...]) -> tuple[Sequence[Envelope], list[bytes]]:
        records = self._maker.records_of(
            entry, seq=self._seq + 1, last_step=self._last_step, offset=self._wall_offset_ns
        )
        for record in records:
            if isinstance(record, CoverageRecord):
                record.records_written = self._seq
                record.records_dropped = self._all_dropped()
                record.log_suppressed = self._log.suppressed
                record.incidents_suppressed = self._ring.suppressed
        return records, [codec.encode_line(record) for record in records]

    def _keep_unwritten(self, entry: Entry) -> None:
        offset, after = self._wall_offset_ns, self._last_step

        def lines() -> list[bytes]:
            try:
                records = self._maker.records_of(entry, seq=None, last_step=after, offset=offset)
                return [codec.encode_line(record) for record in records]
            except Exception:  # noqa: BLE001 - a fact taken from a damaged host may have any shape
                return []

        if entry.step is not None and entry.step > self._last_step:
            self._last_step = entry.step
        self._ring.keep(self._last_step, entry.approx_bytes, lines)

    def _hand_on(self, records: Sequence[Envelope], lines: list[bytes]) -> None:
        for record, line in zip(records, lines, strict=True):
            self._offer_log(record, line)
            if isinstance(record, ViolationRecord):
                self._write_out()
                self._write_incident(record, line)

    def _offer_log(self, record: Envelope, line: bytes) -> None:
        try:
            self._log.offer(record, line[:-1])
        except Exception as error:  # noqa: BLE001 - a log handler is foreign code
            self.sink_faults += 1
            self._announce("log", f"a record cannot be logged: {type(error).__name__}")

    def _write_incident(self, record: ViolationRecord, line: bytes) -> None:
        try:
            self._ring.write_incident(self._folder, self._enabled_line, record, line)
        except OSError as error:
            self.sink_faults += 1
            self._announce("incident", f"an incident file cannot be written: {error.strerror or type(error).__name__}")

    def _look_for_file(self, period_ns: int) -> None:
        """Let go of a file that was removed, unless the last look was less than ``period_ns`` ago. Encoded lines have
        their numbers and cannot go into a later file: where there are some, they are dropped with the next write.
        """
        now = time.monotonic_ns()
        if now - self._looked_ns < period_ns:
            return
        self._looked_ns = now
        if self._files.close_if_removed():
            self._announce(
                "removed",
                "the trace file was removed or moved away, and what it held is missing in the trace; "
                "writing goes on in a new file",
            )

    def _start_file(self) -> None:
        """Open the next file, and write its kv.enabled. Whatever fails is tried again with the next records."""
        if self._enabled is None:
            return
        try:
            record = self._enabled()
            if not self._files.open():
                self._tell_of_disk()
                return
            record.file_index = self._files.index
            record.files_deleted = self._files.deleted
            codec.stamp(
                record,
                self._identity,
                seq=self._seq + 1,
                component=self._component,
                boundary="trace_file",
                mono_ns=time.monotonic_ns(),
                wall_ns=time.time_ns(),
                after_step=self._last_step,
            )
            line = codec.encode(record) + b"\n"
        except Exception as error:  # noqa: BLE001 - the record is made by a callback that looks at the host
            self._files.discard()
            self._announce("enabled", f"kv.enabled cannot be made ({type(error).__name__}); no trace is written")
            return
        self.own += 1
        self._cells[C_OWN] = self.own
        if self._files.append([line]) == 1:
            self._seq += 1
            self._enabled_line = line
            self._count_written(1)
            self._offer_log(record, line)
        else:
            self._files.discard()
            self._drop("write_error", 1)
            self._tell_of_disk()

    def _write_out(self) -> None:
        lines, self._lines, self._lines_bytes = self._lines, [], 0
        if not lines:
            return
        written = self._files.append(lines) if self._files.is_open else 0
        self._count_written(written)
        if written < len(lines):
            # The numbers of records that did not get in are given again: a file never has a gap.
            self._seq -= len(lines) - written
            self._drop("write_error", len(lines) - written)
            self._tell_of_disk()

    def _count_written(self, count: int) -> None:
        self.written += count
        self._cells[C_WRITTEN] = self.written

    def _drop(self, cause: str, weight: int, told: str | None = None) -> None:
        self.dropped[cause] += weight
        self._cells[C_DROPPED + DROP_CAUSES.index(cause)] += weight
        if told is not None:
            self._announce(cause, f"{told}; such records are dropped and counted")

    def _tell_of_disk(self) -> None:
        if self._files.error is not None:
            text = self._files.error.strerror or type(self._files.error).__name__
            self._announce("write_error", f"the trace cannot be written ({text}); records are dropped and counted")

    def _announce(self, cause: str, text: str) -> None:
        if cause not in self._announced:
            self._announced.add(cause)
            with contextlib.suppress(Exception):  # a log handler is foreign code
                self._log.announce(text)

    def _all_dropped(self) -> dict[str, int]:
        """By every cause, those of the step path included: the shared cells have both."""
        cells = {cause: self._cells[C_DROPPED + index] for index, cause in enumerate(DROP_CAUSES)}
        return {cause: count for cause, count in cells.items() if count}
