"""One stream a process and run: facts go in on the step path, records come out in a thread of their own.

The step path (:meth:`Stream.put`) appends a tuple to a bounded queue. It never encodes, never waits for the disk, and
the only lock that it takes is held by other producers for as long as they do the same.

What is put is either written, dropped and counted by cause, or still queued: the numbers add up at any time
(:meth:`Stream.balance`). The first of them lives in the shared file, so that it survives the process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from kvscope.config import OutputConfig
from kvscope.events.codec import Identity
from kvscope.events.names import PLAIN, RequestNames
from kvscope.events.schema import EnabledRecord
from kvscope.sinks.kinds import Violation, records_written
from kvscope.sinks.mailbox import Mailbox
from kvscope.sinks.shared import C_DROPPED, C_PRODUCED, DROP_CAUSES, SharedFile, private_cells
from kvscope.sinks.writer import Writer

URGENT_TIMEOUT_S = 1.0


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """``produced == written + sum(dropped.values()) + queued``, in records."""

    produced: int
    written: int
    dropped: dict[str, int]
    queued: int


class Stream:
    """See the module. ``shared_reason`` says why there is no shared file, where there is none; ``recorder_missed``
    counts facts that were to go to the flight recorder alone (``records = "findings"``) and found the queue full.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        process: str,
        rank: int,
        *,
        output: OutputConfig,
        identity: Identity,
        names: RequestNames = PLAIN,
    ) -> None:
        self.folder = directory / run_id
        self.process = process
        self.rank = rank
        self.pid = os.getpid()
        self.stem = f"{process}-{rank}-{self.pid}"
        self.shared: SharedFile | None = None
        self.shared_reason: str | None = None
        self.mailbox: Mailbox | None = None
        cells = private_cells()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.stem}.shared"
            self.shared = SharedFile(path, process=process, rank=rank, dp_rank=identity.ranks.dp, pid=self.pid)
            self.mailbox = Mailbox(self.shared, names)
            cells = self.shared.cells
        except OSError as error:
            self.shared_reason = f"no shared file: {error.strerror or type(error).__name__}"

        self._cells = cells
        self._weights = records_written(output.records)
        self._queue: deque[tuple[Any, ...]] = deque()
        self._queue_records = output.queue_records
        self._queue_bytes = output.queue_bytes
        self._accepting = True
        # With less than this waiting a fact goes into the queue, and nobody is woken. Nothing does once it is closed.
        self._calm_records, self._calm_bytes = output.queue_records >> 1, output.queue_bytes >> 1
        self._lock = threading.Lock()  # producers only
        self._finalizer: multiprocessing.util.Finalize | None = None
        self._entered = 0
        self._entered_bytes = 0
        self._produced = 0
        self.recorder_missed = 0
        self._dropped_here = dict.fromkeys(DROP_CAUSES, 0)
        self._writer = Writer(self._queue, self.folder, self.stem, cells, output=output, identity=identity, names=names)

        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(reference))

    # The step path ----------------------------------------------------------------------------------------------------

    def put(
        self,
        kind: str,
        fact: Any,
        *,
        component: str,
        boundary: str,
        step: int | None = None,
        after_step: int | None = None,
        trace_id: str | None = None,
        approx_bytes: int = 512,
    ) -> None:
        """Hand a fact over. It must not change afterwards.

        ``kind`` is one of ``sinks.kinds.RECORDS_OF_KIND``; ``approx_bytes`` is what the fact occupies in memory.
        """
        # In the order of `kinds.Entry`.
        entry = (kind, fact, component, boundary, step, after_step, trace_id, approx_bytes, monotonic_ns())
        with self._lock:
            self._cells[C_PRODUCED] = self._produced = self._produced + self._weights[kind]
            queue, entered_bytes = self._queue, self._entered_bytes + approx_bytes
            if len(queue) < self._calm_records and entered_bytes - self._writer.done_bytes <= self._calm_bytes:
                self._entered += 1
                self._entered_bytes = entered_bytes
                queue.append(entry)
            else:
                self._squeeze_in(entry, self._weights[kind], approx_bytes)

    def _squeeze_in(self, entry: tuple[Any, ...], weight: int, approx_bytes: int) -> None:
        """The stream has been closed, or much is waiting: the fact is dropped or the writer woken. Under the lock."""
        waiting_bytes = self._entered_bytes - self._writer.done_bytes + approx_bytes
        if not self._accepting:
            self._drop("closed", weight)
        elif len(self._queue) >= self._queue_records:
            self._drop("queue_records", weight)
        elif waiting_bytes > self._queue_bytes:
            self._drop("queue_bytes", weight)
        else:
            self._entered += 1
            self._entered_bytes += approx_bytes
            self._queue.append(entry)
            self._writer.wake()

    def _drop(self, cause: str, weight: int) -> None:
        if weight == 0:
            self.recorder_missed += 1
        self._dropped_here[cause] += weight
        self._cells[C_DROPPED + DROP_CAUSES.index(cause)] = self._dropped_here[cause]
        self._writer.wake()

    def violation(
        self,
        violation: Violation,
        *,
        component: str,
        boundary: str,
        urgent: bool = False,
        timeout_s: float = URGENT_TIMEOUT_S,
    ) -> bool:
        """Hand a finding over. ``urgent``: the process may die next, so wait until record, log line and incident file
        are out. False: they were not within the timeout.
        """
        finding = violation.finding
        self.put(
            "violation",
            violation,
            component=component,
            boundary=boundary,
            step=finding.step,
            trace_id=finding.trace_id,
            approx_bytes=512 if violation.history is None else 4096,
        )
        return self.flush(timeout_s) if urgent else True

    # Opening, flushing, closing ---------------------------------------------------------------------------------------

    def open(self, enabled: Callable[[], EnabledRecord], *, block_sizes: Mapping[int, int] | None = None) -> None:
        """Start writing. ``enabled`` makes the first record of every file, from now on in the writer's thread;
        ``block_sizes`` (group to tokens) are for the target blocks of ``records = "full"``. A second call does nothing.
        """
        with self._lock:
            if not self._accepting or self._writer.is_open:
                return
            self._writer.open(enabled, block_sizes)
        atexit.register(self.close)
        # A forked child of multiprocessing ends without atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    def flush(self, timeout_s: float = URGENT_TIMEOUT_S) -> bool:
        """Wait until everything put so far is written or counted as dropped. False: not within the timeout."""
        return self._writer.flush(self._entered, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and stop. What is put from now on is counted as dropped. A second call does nothing."""
        with self._lock:
            if not self._accepting:
                return
            self._accepting, self._calm_records = False, -1
        self._writer.close(timeout_s)
        atexit.unregister(self.close)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._release_shared_file()

    def _release_shared_file(self) -> None:
        """Give its mapping and descriptor back: a process may start many engines. Readers open the file by its path.

        What is put later is counted in this process alone. The views are dropped and not released: a thread that is
        just storing into one may finish.
        """
        with self._lock:
            cells = private_cells()
            cells[:] = self._cells
            if not self._writer.hand_over(cells):
                return
            self._cells = cells
        if self.mailbox is not None:
            self.mailbox.abandon()
        if self.shared is not None:
            self.shared_reason = "the stream has ended"
        self.mailbox = self.shared = None

    @property
    def dropped(self) -> dict[str, int]:
        """Records dropped so far, by every cause that there is; it waits for nobody."""
        cells = self._cells
        return {cause: cells[C_DROPPED + index] for index, cause in enumerate(DROP_CAUSES)}

    # Numbers ----------------------------------------------------------------------------------------------------------

    def balance(self) -> Balance:
        """A consistent set of numbers; it waits for the writer, so it is not for the step path."""
        with self._writer.paused(), self._lock:
            dropped = {
                cause: self._dropped_here[cause] + self._writer.dropped[cause]
                for cause in DROP_CAUSES
                if self._dropped_here[cause] + self._writer.dropped[cause]
            }
            return Balance(
                produced=self._produced + self._writer.own,
                written=self._writer.written,
                dropped=dropped,
                queued=sum(self._weights[entry[0]] for entry in self._queue),
            )

    @property
    def sink_faults(self) -> int:
        """Log lines and incident files that failed."""
        return self._writer.sink_faults

    @property
    def incidents_suppressed(self) -> int:
        """Incident files not written: a repetition, or too many a minute."""
        return self._writer.incidents_suppressed

    def abandon(self) -> None:
        """In a forked child: this stream is the parent's, and nothing of it may be touched from here."""
        self._accepting, self._calm_records = False, -1
        self._lock = threading.Lock()
        self._cells = private_cells()
        self._queue = deque()
        self.shared = None
        self.shared_reason = "this process was forked from the stream's owner"
        if self.mailbox is not None:
            self.mailbox.abandon()
        self.mailbox = None
        self._writer.abandon(self._cells)


class QuietStream(Stream):
    """Where no part that records steps is on: takes what is written in every mode, and passes all else over."""

    def __init__(self, *arguments: Any, output: OutputConfig, **named: Any) -> None:
        super().__init__(*arguments, output=replace(output, records="findings"), **named)

    def put(self, kind: str, fact: Any, **named: Any) -> None:
        if self._weights[kind]:
            super().put(kind, fact, **named)


def _let_go(reference: weakref.ref[Stream]) -> None:
    stream = reference()
    if stream is not None:
        with contextlib.suppress(Exception):  # an exception here would be printed into the child's stderr and no more
            stream.abandon()
