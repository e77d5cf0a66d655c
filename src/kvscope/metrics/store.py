"""The writing end: where a process counts, and the file that its numbers are published in.

A thread that counts has a slab to itself. It counts in private memory, with plain stores; now and then, when its
numbers belong together, it publishes all of them as one snapshot into the mapped file. Nothing of it waits for a lock,
for the disk or for a reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path

import msgspec

from kvscope import __version__

from .buffers import DoubleBuffer
from .catalog import METRICS
from .families import CustomValue
from .front import About, boot_id, front_page
from .layout import (
    CELLS,
    CUSTOM_BYTES,
    CUSTOM_START,
    DIGEST,
    ENDED_AT,
    FILE_BYTES,
    MOST_SLABS,
    PLACES,
    SLAB_BYTES,
    SUFFIX,
    slab_start,
)

FORKED = "this process was forked from the one whose metrics these are"
CLOSED = "the metrics of this process have ended"


class Counter:
    """A number that only grows. ``cells[index]`` is the number itself, for whoever wants to save the call."""

    __slots__ = ("cells", "index")

    def __init__(self, cells: array[float], index: int) -> None:
        self.cells = cells
        self.index = index

    def add(self, amount: float = 1) -> None:
        self.cells[self.index] += amount

    def reach(self, total: float) -> None:
        """The total as somebody else has counted it: for what is counted anyway and only handed over to be published.
        It must never be less than before.
        """
        self.cells[self.index] = total


class Gauge:
    """A number of the moment. ``clear`` says that there is none: the series is then absent, which is not zero."""

    __slots__ = ("cells", "index")

    def __init__(self, cells: array[float], index: int) -> None:
        self.cells = cells
        self.index = index

    def set(self, value: float) -> None:
        self.cells[self.index] = value

    def clear(self) -> None:
        self.cells[self.index] = nan


class HistogramCells:
    """The buckets of one series."""

    __slots__ = ("_bounds", "_cells", "_start", "_total")

    def __init__(self, cells: array[float], start: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._start = start
        self._total = start + len(bounds) + 1
        self._bounds = bounds

    def observe(self, value: float) -> None:
        """Count one observation, in the metric's unit."""
        self._cells[self._start + bisect_left(self._bounds, value)] += 1
        self._cells[self._total] += value


class Slab:
    """Where one thread counts. Whatever is not asked for here is not observed, and its series do not exist."""

    __slots__ = ("_buffer", "_bytes", "cells")

    def __init__(self, buffer: DoubleBuffer | None) -> None:
        self.cells = array("d", [nan]) * CELLS
        self._bytes = memoryview(self.cells).cast("B")
        self._buffer = buffer

    def counter(self, name: str, **labels: str) -> Counter:
        """A series of a counter. It begins at zero, and asking again goes on with it.

        Raises:
            KeyError: there is no such counter, or no series of it with these labels.
        """
        return Counter(self.cells, self._begin("counter", name, labels, 1))

    def gauge(self, name: str, **labels: str) -> Gauge:
        """A series of a gauge. It is absent until it is set.

        Raises:
            KeyError: there is no such gauge, or no series of it with these labels.
        """
        return Gauge(self.cells, self._place("gauge", name, labels))

    def histogram(self, name: str, **labels: str) -> HistogramCells:
        """A series of a histogram, without any observation at first.

        Raises:
            KeyError: there is no such histogram, or no series of it with these labels.
        """
        bounds = METRICS[name].buckets
        return HistogramCells(self.cells, self._begin("histogram", name, labels, len(bounds) + 2), bounds)

    def publish(self) -> None:
        """Let readers see all numbers as they are now. For the thread whose slab it is, when they belong together."""
        buffer = self._buffer
        if buffer is not None:
            buffer.publish(self._bytes, len(self._bytes), time.monotonic_ns(), time.time_ns())

    def detach(self) -> None:
        """From now on what is counted here goes nowhere."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.forget()

    def _place(self, kind: str, name: str, labels: dict[str, str]) -> int:
        metric = METRICS[name]
        if metric.kind != kind:
            raise KeyError(f"{name} is a {metric.kind}, not a {kind}")
        place = PLACES.get((name, metric.key(labels)))
        if place is None:
            raise KeyError(f"{name} is made by whoever reads the file")
        return place.start

    def _begin(self, kind: str, name: str, labels: dict[str, str], width: int) -> int:
        start = self._place(kind, name, labels)
        for index in range(start, start + width):
            if isnan(self.cells[index]):
                self.cells[index] = 0.0
        return start


class MetricsStore:
    """The metrics of this process. ``reason`` says why nobody can read them, where nobody can: counting goes on, so
    that whoever counts needs to ask nothing, and nothing is published.
    """

    def __init__(
        self, folder: Path, *, process: str, rank: int, engine: str, prefix: str, pid: int | None = None
    ) -> None:
        """Make the file, ``PROCESS-RANK-PID.metrics`` in the run's folder. Where it cannot be had in full (a full disk,
        no permission, a file system that cannot allocate) ``reason`` says so.
        """
        pid = os.getpid() if pid is None else pid
        self.path = folder / f"{process}-{rank}-{pid}{SUFFIX}"
        self.reason: str | None = None
        self._slabs: list[Slab] = []
        self._custom: DoubleBuffer | None = None
        self._lock = threading.Lock()  # among those that ask for a slab
        self._memory: memoryview | None = None
        self._mapping: mmap.mmap | None = None
        self._descriptor = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._make(process, rank, engine, prefix, pid)
        except OSError as error:
            self.reason = f"no metrics file: {error.strerror or type(error).__name__}"
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(reference))

    def slab(self) -> Slab:
        """A slab for the calling thread, or for one that is going to be its only writer.

        Raises:
            RuntimeError: this process has no slab left; there are ``MOST_SLABS``.
        """
        with self._lock:
            memory = self._memory
            if memory is None:
                return Slab(None)
            if len(self._slabs) == MOST_SLABS:
                raise RuntimeError(f"this process has no more than {MOST_SLABS} slabs")
            slab = Slab(DoubleBuffer(memory, slab_start(len(self._slabs)), SLAB_BYTES))
            self._slabs.append(slab)
            return slab

    def publish_custom(self, values: Sequence[CustomValue]) -> None:
        """Publish what registered collectors have said, in place of what they said before. One thread calls it.

        Raises:
            ValueError: they are too many, or too long; what was published before stays.
        """
        if self._custom is not None:
            payload = msgspec.msgpack.encode(values)
            self._custom.publish(payload, len(payload), time.monotonic_ns(), time.time_ns())

    def close(self) -> None:
        """End in an orderly way: what was published stays readable. A second call does nothing.

        The mapping is dropped and not closed: a thread that is just publishing may finish.
        """
        with self._lock:
            memory = self._memory
            if memory is None:
                return
            memory[ENDED_AT : ENDED_AT + 8] = (1).to_bytes(8, "little")
            self._detach(CLOSED)
            self._mapping = None
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def abandon(self) -> None:
        """In a forked child: the file is the parent's. Its lock is shared with the parent, and must neither be released
        from here nor outlive the parent in an open descriptor of the child.
        """
        self._lock = threading.Lock()
        memory, mapping = self._memory, self._mapping
        if memory is None or mapping is None:
            return
        self._detach(FORKED)
        self._mapping = None
        with contextlib.suppress(BufferError):  # a thread of the parent was publishing, and its frame lives on here
            memory.release()
            mapping.close()
        os.close(self._descriptor)
        self._descriptor = -1

    def _detach(self, reason: str) -> None:
        self.reason = reason
        self._memory = self._custom = None
        for slab in self._slabs:
            slab.detach()
        self._slabs = []

    def _make(self, process: str, rank: int, engine: str, prefix: str, pid: int) -> None:
        """Make the file under another name, and give it its own when it is whole."""
        unfinished = self.path.with_name(f".{self.path.name}.new")
        unfinished.unlink(missing_ok=True)  # an earlier process with this pid left it
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            about = About(
                kvscope=__version__,
                digest=DIGEST,
                process=process,
                rank=rank,
                pid=pid,
                engine=engine,
                prefix=prefix,
                start_wall_ns=time.time_ns(),
                start_mono_ns=time.monotonic_ns(),
                boot_id=boot_id(),
                has_lock=_locked(descriptor),
            )
            mapping = mmap.mmap(descriptor, FILE_BYTES)
            front = front_page(about)
            mapping[: len(front)] = front
            unfinished.replace(self.path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._mapping, self._descriptor = mapping, descriptor
        self._memory = memoryview(mapping)
        self._custom = DoubleBuffer(self._memory, CUSTOM_START, CUSTOM_BYTES)


def _locked(descriptor: int) -> bool:
    """Lock the file for as long as this process lives. Not every file system can."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _let_go(reference: weakref.ref[MetricsStore]) -> None:
    store = reference()
    if store is not None:
        with contextlib.suppress(Exception):  # an exception here would be printed into the child's stderr and no more
            store.abandon()
