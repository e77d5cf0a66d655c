"""Where a run is exported: the lock that lets one process of a host export it, and the file that says where.

In the run's folder, with the host's name in both, because a folder may be on a file system that several hosts share::

    exporter-<host>.lock   held (flock) by the process that exports; the system lets go of it when that process dies
    exporter-<host>.json   the Place of the exporter; removed at an orderly end, left over after a kill
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from pathlib import Path

import msgspec

__all__ = ["ExportLock", "Place", "is_exported", "places_in"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """`url` is the page, `metrics_url` what Prometheus scrapes. `wanted_port` is the one that was asked for."""

    run_id: str
    url: str
    metrics_url: str
    host_name: str
    wanted_port: int
    port: int
    pid: int
    start_wall_ns: int

    def write(self, folder: Path) -> None:
        """Put it into the run's folder, whole or not at all. Raises OSError."""
        path = _path(folder, self.host_name, "json")
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_bytes(msgspec.json.encode(self) + b"\n")
        unfinished.replace(path)

    def remove(self, folder: Path) -> None:
        """Take it away again, unless another process has put its own there."""
        path = _path(folder, self.host_name, "json")
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if msgspec.json.decode(path.read_bytes(), type=Place).pid == self.pid:
                path.unlink()


def places_in(folder: Path) -> list[Place]:
    """What the files of a run's folder say. An exporter that was killed leaves its file: whether one answers is for
    the caller to try. A file that is damaged is passed over.
    """
    places = []
    for path in sorted(folder.glob("exporter-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            places.append(msgspec.json.decode(path.read_bytes(), type=Place))
    return places


class ExportLock:
    """The right to export a run on this host."""

    def __init__(self, folder: Path, host_name: str | None = None) -> None:
        self.path = _path(folder, host_name or socket.gethostname(), "lock")
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        return self._descriptor >= 0

    def try_to_take(self) -> bool:
        """Whether this process has it now. Never waits.

        Raises:
            OSError: the file cannot be made, or its file system knows no locks.
        """
        if self.is_held:
            return True
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let go of it."""
        if self.is_held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: close the copy that it was born with. The parent keeps the lock, and its death lets go."""
        if self.is_held:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def is_exported(folder: Path) -> bool:
    """Whether a process of this host holds the lock of the run in this folder. Raises OSError."""
    lock = ExportLock(folder)
    try:
        descriptor = os.open(lock.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _path(folder: Path, host_name: str, suffix: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9.-]", "_", host_name)[:100] or "host"
    return folder / f"exporter-{safe}.{suffix}"
