"""The reading end: metrics files -> what each process said last. It never maps a file: reading one that somebody is
just cutting short would end the reader with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from array import array
from collections.abc import Iterable
from math import isnan
from pathlib import Path

import msgspec

from ..errors import UnreadableMetricsError
from .buffers import Snapshot, latest
from .catalog import METRICS
from .families import CustomValue, Histogram, ProcessValues, Value, combined
from .front import About, boot_id, read_front
from .layout import CELLS, CUSTOM_BYTES, CUSTOM_START, ENDED_AT, FILE_BYTES, MOST_SLABS, PLACES, SLAB_BYTES, SUFFIX
from .layout import slab_start as slab_starts_at

_ATTEMPTS = 4
"""A writer publishes in microseconds, and both buffers are torn only while it does so twice: looking again is enough,
unless it died in its very first store."""

_custom_decoder = msgspec.msgpack.Decoder(tuple[CustomValue, ...])


class Reading(msgspec.Struct, kw_only=True):
    """What was found: the processes, and the files that say nothing, each with the reason."""

    processes: list[ProcessValues]
    unreadable: list[UnreadableMetricsError]


def read_run(folder: Path) -> Reading:
    """All processes of one run, from its folder. A file that vanishes meanwhile is no file."""
    return _read(sorted(folder.glob(f"*{SUFFIX}")))


def read_runs(directory: Path) -> Reading:
    """All processes of all runs in an output folder."""
    return _read(sorted(directory.glob(f"*/*{SUFFIX}")))


def _read(paths: Iterable[Path]) -> Reading:
    reading = Reading(processes=[], unreadable=[])
    for path in paths:
        if path.name.startswith("."):  # one that is just being made
            continue
        try:
            reading.processes.append(read_process(path))
        except UnreadableMetricsError as error:
            reading.unreadable.append(error)
        except FileNotFoundError:
            continue
        except OSError as error:
            text = error.strerror or type(error).__name__
            reading.unreadable.append(UnreadableMetricsError(str(path), "torn", f"it cannot be read: {text}"))
    return reading


def read_process(path: Path) -> ProcessValues:
    """What the process said last.

    Raises:
        UnreadableMetricsError: the file is foreign, torn, or of another version.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for attempt in range(_ATTEMPTS):
            # Asked first: of a writer that is dead by now, what is read is what it said last.
            is_locked = _is_locked(descriptor)
            data = os.pread(descriptor, FILE_BYTES, 0)
            about = read_front(path, data)
            slabs, num_torn = _slabs(data)
            if num_torn == 0 or attempt == _ATTEMPTS - 1:
                return _values(path, about, data, slabs, num_torn, is_locked)
            time.sleep(0.0005)
    finally:
        os.close(descriptor)
    raise AssertionError("the last attempt returns")


def _is_locked(descriptor: int) -> bool | None:
    """None where the file system does not say, such as a mount without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _slabs(data: bytes) -> tuple[list[Snapshot], int]:
    """The last snapshot of every slab that was ever published, and how many slabs have none that is whole."""
    view = memoryview(data)
    snapshots, num_torn = [], 0
    for number in range(MOST_SLABS):
        try:
            snapshot = latest(view, slab_starts_at(number), SLAB_BYTES)
        except ValueError:
            num_torn += 1
            continue
        if snapshot is not None and len(snapshot.payload) == 8 * CELLS:
            snapshots.append(snapshot)
    return snapshots, num_torn


def _values(
    path: Path, about: About, data: bytes, slabs: list[Snapshot], num_torn: int, is_locked: bool | None
) -> ProcessValues:
    values: dict[str, dict[tuple[str, ...], Value]] = {}
    for slab in slabs:
        _add(values, slab)
    mono_ns = max((slab.mono_ns for slab in slabs), default=about.start_mono_ns)
    wall_ns = max((slab.wall_ns for slab in slabs), default=about.start_wall_ns)
    is_same_clock = about.boot_id != "" and about.boot_id == boot_id()
    age_ns = time.monotonic_ns() - mono_ns if is_same_clock else time.time_ns() - wall_ns
    return ProcessValues(
        run_id=path.parent.name,
        process=about.process,
        rank=about.rank,
        pid=about.pid,
        engine=about.engine,
        start_wall_ns=about.start_wall_ns,
        snapshot_wall_ns=wall_ns,
        age_seconds=max(0, age_ns) / 1e9,
        is_alive=is_locked if about.has_lock else None,
        has_ended=data[ENDED_AT] == 1,
        values=values,
        prefix=about.prefix,
        custom=_custom(data),
        num_torn_slabs=num_torn,
    )


def _add(values: dict[str, dict[tuple[str, ...], Value]], slab: Snapshot) -> None:
    cells = array("d")
    cells.frombytes(slab.payload)
    for (name, key), place in PLACES.items():
        start = place.start
        first = cells[start]
        if isnan(first):  # nobody observes it here
            continue
        end = start + place.width - 1
        value: Value = Histogram(tuple(cells[start:end]), cells[end]) if place.width > 1 else first
        of_metric = values.setdefault(name, {})
        of_metric[key] = combined(METRICS[name], of_metric[key], value) if key in of_metric else value


def _custom(data: bytes) -> tuple[CustomValue, ...]:
    try:
        snapshot = latest(memoryview(data), CUSTOM_START, CUSTOM_BYTES)
        return () if snapshot is None else _custom_decoder.decode(snapshot.payload)
    except (ValueError, msgspec.DecodeError):  # torn, or of a kind that this version does not know
        return ()
