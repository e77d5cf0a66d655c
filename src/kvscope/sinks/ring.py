"""The flight recorder: the last steps in memory, written beside a violation."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from kvscope.events.finding_schema import ViolationRecord
from kvscope.sinks.limits import MinuteLimit

INCIDENTS_A_MINUTE = 8
MOST_INCIDENTS = 64
"""Files of one process, and beyond them the first of each reason: each may be as large as ``ring_bytes``."""
_REMEMBERED = 4096

_Kept = tuple[int, int, Callable[[], Iterable[bytes]]]
"""Step, size in bytes, lines. A plain tuple: one is made of every fact, and naming its parts would double the cost."""


class FlightRecorder:
    """Fed by the writer thread. ``suppressed`` counts incidents not written: a repetition, too many a minute, or too
    many in all.
    """

    def __init__(self, *, steps: int, max_bytes: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._steps = steps
        self._max_bytes = max_bytes
        self._limit = MinuteLimit(INCIDENTS_A_MINUTE, clock)
        self._kept: deque[_Kept] = deque()
        self._size_bytes = 0
        self._told: dict[tuple[str, object], None] = {}
        self._written = 0
        self._next_index = 0
        self.suppressed = 0

    def keep(self, step: int, size_bytes: int, lines: Callable[[], Iterable[bytes]]) -> None:
        """Keep records of one step. ``lines`` makes them when needed: a trace of findings encodes no others."""
        self._kept.append((step, size_bytes, lines))
        self._size_bytes += size_bytes
        while self._kept and (self._size_bytes > self._max_bytes or self._kept[0][0] <= step - self._steps):
            _, size_let_go, _ = self._kept.popleft()
            self._size_bytes -= size_let_go

    def write_incident(
        self, folder: Path, enabled: bytes, violation: ViolationRecord, violation_line: bytes
    ) -> Path | None:
        """Write ``incident-<n>.jsonl``: kv.enabled, what is kept, the violation. None: one of this reason and request
        was written already, or there are too many.

        Raises:
            OSError: the file cannot be written.
        """
        request = violation.request_id
        told = (violation.reason, request if isinstance(request, str) else None)
        is_full = self._written >= MOST_INCIDENTS and not self._limit.is_first(violation.reason)
        if told in self._told or is_full or not self._limit.allows(violation.reason):
            self.suppressed += 1
            return None
        lines = [line for _, _, kept in self._kept for line in kept() if line != violation_line]
        path, descriptor = self._create(folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"".join([enabled, *lines, violation_line]))
        # Only now: where the disk was full, the next finding of this kind tries again.
        self._told[told] = None
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        self._limit.take(violation.reason)
        self._written += 1
        return path

    def _create(self, folder: Path) -> tuple[Path, int]:
        """The first free number: all processes of the run write into one folder."""
        while True:
            path = folder / f"incident-{self._next_index}.jsonl"
            self._next_index += 1
            try:
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                continue
