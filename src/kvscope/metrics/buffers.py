"""Two buffers that a writer fills in turn, so that a reader always finds one that is complete.

Nothing is assumed about the order in which stores become visible to others: a buffer counts only if the checksum over
its number, its clocks and its content is right, and of two that count the higher number is the later one. So a writer
needs neither a lock nor a barrier, and one that dies in the middle of a store leaves the snapshot before it.
"""

from __future__ import annotations

import zlib

import msgspec

from .layout import HEAD

_CHECKED = HEAD.size - 4  # bytes of the head that the checksum covers: all but itself


class Snapshot(msgspec.Struct, frozen=True):
    """One complete publication. ``number`` counts them from 1."""

    number: int
    mono_ns: int
    wall_ns: int
    payload: bytes


class DoubleBuffer:
    """The writing end: one thread. ``size`` is that of one buffer, its head included."""

    __slots__ = ("_head", "_memory", "_number", "_size", "_start")

    def __init__(self, memory: memoryview, start: int, size: int) -> None:
        self._memory: memoryview | None = memory
        self._start = start
        self._size = size
        self._number = 0
        self._head = bytearray(HEAD.size)

    def publish(self, payload: bytes | memoryview, length: int, mono_ns: int, wall_ns: int) -> None:
        """Store ``length`` bytes as the next snapshot.

        Raises:
            ValueError: the payload is longer than a buffer, which stays as it was.
        """
        memory = self._memory
        if memory is None:
            return
        if length > self._size - HEAD.size:
            raise ValueError(f"{length} bytes do not fit into a buffer of {self._size - HEAD.size}")
        number = self._number + 1
        head = self._head
        HEAD.pack_into(head, 0, number, mono_ns, wall_ns, length, 0)
        checksum = zlib.crc32(payload, zlib.crc32(memoryview(head)[:_CHECKED]))
        HEAD.pack_into(head, 0, number, mono_ns, wall_ns, length, checksum)
        start = self._start + (number & 1) * self._size
        content = start + HEAD.size
        memory[content : content + length] = payload
        memory[start:content] = head
        self._number = number

    def forget(self) -> None:
        """From now on nothing is stored."""
        self._memory = None


def latest(data: memoryview, start: int, size: int) -> Snapshot | None:
    """The last complete snapshot, None where none was ever published.

    Raises:
        ValueError: there was one, and neither buffer is whole now.
    """
    found = [_complete(data[at : at + size]) for at in (start, start + size)]
    whole = [snapshot for snapshot in found if snapshot is not None]
    if whole:
        return max(whole, key=lambda snapshot: snapshot.number)
    if data[start : start + 2 * size].tobytes() == bytes(2 * size):
        return None
    raise ValueError("both buffers are torn")


def _complete(buffer: memoryview) -> Snapshot | None:
    number, mono_ns, wall_ns, length, checksum = HEAD.unpack_from(buffer)
    if number == 0 or length > len(buffer) - HEAD.size:
        return None
    payload = bytes(buffer[HEAD.size : HEAD.size + length])
    if zlib.crc32(payload, zlib.crc32(buffer[:_CHECKED])) != checksum:
        return None
    return Snapshot(number, mono_ns, wall_ns, payload)
