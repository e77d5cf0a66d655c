"""Findings on their way from a worker whose results vLLM does not return to the EngineCore of the same host.

A ring of slots in the shared file, one writing process and any number of reading ones. An entry is stored before the
count of posted entries; its checksum tells a reader that the two became visible in another order, or that the writer
has lapped it.
"""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from pathlib import Path

import msgspec
import numpy as np

from kvscope.checks.finding import Finding
from kvscope.events.names import PLAIN, RequestNames
from kvscope.sinks.shared import C_POSTED, FILE_BYTES, PAGE, SLOT_BYTES, SLOTS, SharedFile, private_cells, read_status

_HEAD = struct.Struct("<QII")  # number of the entry from 1, length of the payload, checksum over number and payload
_PAYLOAD_BYTES = SLOT_BYTES - _HEAD.size
ID_CHARACTERS = 224  # of up to 4 bytes: three ids, the reasons and the numbers fit
_REASONS = 16
_PATIENCE = 64  # polls after which an entry that stays damaged is given up: its writer died while storing it


def _from_numpy(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a finding cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_numpy)
_decoder = msgspec.msgpack.Decoder(Finding)


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(8, "little")))


class Mailbox:
    """The writing end, in the process that owns the shared file.

    An entry holds what stops an engine and names the access; texts beside it are in the record. Request ids stand in it
    as ``names`` writes them: the file is kept beside the trace.
    """

    def __init__(self, shared: SharedFile, names: RequestNames = PLAIN) -> None:
        self._memory: mmap.mmap | bytearray = shared.memory
        self._cells = shared.cells
        self._lock = threading.Lock()
        self._posted = 0
        self._names = names

    def post(self, finding: Finding) -> None:
        """Store the finding; the oldest one is overwritten when nobody reads."""
        payload = _encoder.encode(
            msgspec.structs.replace(
                finding,
                trace_id=finding.trace_id[:ID_CHARACTERS],
                request_id=self._named(finding.request_id),
                other_request_id=self._named(finding.other_request_id),
                expected=None if isinstance(finding.expected, str) else finding.expected,
                actual=None if isinstance(finding.actual, str) else finding.actual,
                also=finding.also[:_REASONS],
            )
        )
        with self._lock:
            number = self._posted + 1
            start = PAGE + number % SLOTS * SLOT_BYTES
            head = _HEAD.pack(number, len(payload), _checksum(number, payload))
            self._memory[start : start + _HEAD.size + len(payload)] = head + payload
            self._posted = number
            self._cells[C_POSTED] = number

    def _named(self, request_id: str | None) -> str | None:
        """A client chooses its ids, and as long as it likes: an entry must fit its slot all the same."""
        name = None if request_id is None else self._names(request_id)
        return None if name is None else name[:ID_CHARACTERS]

    def abandon(self) -> None:
        """In a forked child: the shared file is the parent's; what is posted from here goes nowhere."""
        self._memory = bytearray(FILE_BYTES)
        self._cells = private_cells()
        self._lock = threading.Lock()


class MailboxReader:
    """A reading end, in another process. It starts with the oldest entry that is still there.

    ``lost`` counts entries that were overwritten before they were read, or that stayed damaged.
    """

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            ValueError: it is no shared file of this layout.
            OSError: it cannot be read.
        """
        read_status(path)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES, access=mmap.ACCESS_READ)
        self._cells = memoryview(self._memory)[:PAGE].cast("Q")
        self._seen = 0
        self._damaged_polls = 0
        self.path = path
        self.lost = 0

    def poll(self) -> list[Finding]:
        """What was posted since the last call. Without news it costs one 8-byte load."""
        posted = self._cells[C_POSTED]
        if posted == self._seen:
            return []
        return self._read(posted)

    def close(self) -> None:
        self._cells.release()
        self._memory.close()

    def _read(self, posted: int) -> list[Finding]:
        findings: list[Finding] = []
        if posted - self._seen > SLOTS:
            self.lost += posted - SLOTS - self._seen
            self._seen = posted - SLOTS
        while self._seen < posted:
            number = self._seen + 1
            start = PAGE + number % SLOTS * SLOT_BYTES
            stored, length, checksum = _HEAD.unpack_from(self._memory, start)
            payload = self._memory[start + _HEAD.size : start + _HEAD.size + min(length, _PAYLOAD_BYTES)]
            if stored == number and checksum == _checksum(number, payload):
                try:
                    findings.append(_decoder.decode(payload))
                except msgspec.DecodeError:  # whole, but not a Finding as this version knows it
                    self.lost += 1
            elif stored > number or self._damaged_polls >= _PATIENCE:
                self.lost += 1
            else:  # not yet visible in full, or just being overwritten: look again next time
                self._damaged_polls += 1
                return findings
            self._damaged_polls = 0
            self._seen = number
        return findings


def find_mailboxes(run_directory: Path, dp_rank: int | None) -> list[Path]:
    """The shared files of this run's workers of one data-parallel rank on this host, in the order of their names."""
    found: list[Path] = []
    for path in sorted(run_directory.glob("worker-*.shared")):
        try:
            status = read_status(path)
        except (OSError, ValueError):  # not whole yet, or of another version: the caller looks again later
            continue
        if status.dp_rank == dp_rank:
            found.append(path)
    return found
