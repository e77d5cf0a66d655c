"""The process' shared file: counters that outlive the process, and the cells that the mailbox (``sinks.mailbox``) uses.

Layout 1, little-endian, all cells 8 bytes: one page of cells (the indices below), then the mailbox' slots. Every cell
has one writer and is stored whole, so that a reader in another process never sees half a number. The file is fully
allocated when it is created: a disk that fills up later cannot fault the process that stores into the mapping.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

import msgspec

from kvscope.events.envelope import PROCESSES

MAGIC = int.from_bytes(b"KVSCOPE1", "little")
LAYOUT = 1
PAGE = 4096
SLOTS = 64
SLOT_BYTES = 4096
FILE_BYTES = PAGE + SLOTS * SLOT_BYTES

# Indices of cells.
C_MAGIC, C_LAYOUT, C_PID, C_PROCESS, C_DP_RANK, C_RANK, C_START_WALL_NS, C_START_MONO_NS = range(8)
C_PRODUCED = 8  # records that the step path handed over, or dropped
C_OWN = 9  # records that the writer made itself: the kv.enabled of every file
C_WRITTEN = 10
C_HEARTBEAT_MONO_NS = 11
C_CLOSED = 12  # 1 after an orderly end
C_DROPPED = 16  # one cell a cause, in the order of DROP_CAUSES
C_POSTED = 32  # mailbox: entries posted so far

DROP_CAUSES = ("queue_records", "queue_bytes", "write_error", "encode_error", "closed")
_NONE = (1 << 64) - 1


def private_cells() -> memoryview:
    """Cells for a process that has no shared file."""
    return memoryview(bytearray(PAGE)).cast("Q")


class SharedFile:
    """The writing end. ``cells`` is a view of 8-byte unsigned cells; ``memory`` maps the whole file."""

    def __init__(self, path: Path, *, process: str, rank: int, dp_rank: int | None, pid: int) -> None:
        """Create the file.

        Raises:
            OSError: the file cannot be had in full (a full disk, no permission, a file system that cannot allocate).
        """
        path.unlink(missing_ok=True)  # a leftover of an earlier process with this pid: its readers keep their mapping
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            self.memory = mmap.mmap(descriptor, FILE_BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.path = path
        self.cells = memoryview(self.memory)[:PAGE].cast("Q")
        self.cells[C_LAYOUT] = LAYOUT
        self.cells[C_PID] = pid
        self.cells[C_PROCESS] = PROCESSES.index(process)
        self.cells[C_DP_RANK] = _NONE if dp_rank is None else dp_rank
        self.cells[C_RANK] = rank
        self.cells[C_START_WALL_NS] = time.time_ns()
        self.cells[C_START_MONO_NS] = time.monotonic_ns()
        self.cells[C_MAGIC] = MAGIC  # last: from here on a reader takes the file for whole


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a shared file says about its process. ``produced`` has the records of the step path and the writer's own."""

    path: Path
    pid: int
    process: str
    dp_rank: int | None
    rank: int
    start_wall_ns: int
    start_mono_ns: int
    produced: int
    written: int
    dropped: dict[str, int]
    heartbeat_mono_ns: int
    closed: bool

    def lost(self, last_seq: int) -> int:
        """Records that were produced, and are neither counted as dropped nor in the trace, whose last one is
        ``last_seq`` (0: there is none). Exact once the process is gone; before, it is what still waits in the queue.
        """
        return self.produced - sum(self.dropped.values()) - last_seq


def read_status(path: Path) -> ProcessStatus:
    """What the file says now.

    Raises:
        ValueError: it is no shared file of this layout, or not yet whole.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        page = file.read(PAGE)
    cells = struct.unpack(f"<{PAGE // 8}Q", page) if len(page) == PAGE else (0, 0)
    if (cells[C_MAGIC], cells[C_LAYOUT]) != (MAGIC, LAYOUT):
        raise ValueError(f"{path.name} is no shared file of layout {LAYOUT}")
    dropped = dict(zip(DROP_CAUSES, cells[C_DROPPED:], strict=False))
    return ProcessStatus(
        path=path,
        pid=cells[C_PID],
        process=PROCESSES[cells[C_PROCESS]],
        dp_rank=None if cells[C_DP_RANK] == _NONE else cells[C_DP_RANK],
        rank=cells[C_RANK],
        start_wall_ns=cells[C_START_WALL_NS],
        start_mono_ns=cells[C_START_MONO_NS],
        produced=cells[C_PRODUCED] + cells[C_OWN],
        written=cells[C_WRITTEN],
        dropped={cause: count for cause, count in dropped.items() if count},
        heartbeat_mono_ns=cells[C_HEARTBEAT_MONO_NS],
        closed=cells[C_CLOSED] == 1,
    )
