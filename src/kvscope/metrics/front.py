"""The first page of a metrics file: who writes it, and whether the file is one that this version can read."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec

from ..errors import UnreadableMetricsError
from .layout import DIGEST, ENDED_AT, FILE_BYTES, FRONT, LAYOUT, MAGIC, PAGE

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a file, as it says itself. Readers of other layouts must be able to read this: fields are only added.

    ``has_lock``: the writer holds an exclusive ``flock`` on the file as long as it lives. ``boot_id`` says during which
    uptime of which host the monotonic clock was read; it is empty where nobody can tell.
    """

    kvscope: str
    digest: str
    process: str
    rank: int
    pid: int
    engine: str
    prefix: str
    start_wall_ns: int
    start_mono_ns: int
    boot_id: str
    has_lock: bool


def boot_id() -> str:
    """Names this uptime of this host (Linux, ``proc(5)``); empty where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def front_page(about: About) -> bytes:
    """What the first page begins with.

    Raises:
        ValueError: it does not fit; names and prefixes are far shorter.
    """
    said = msgspec.msgpack.encode(about)
    if FRONT.size + len(said) > ENDED_AT:
        raise ValueError(f"{len(said)} bytes about a process do not fit into a page")
    return FRONT.pack(MAGIC, LAYOUT, len(said), zlib.crc32(said)) + said


def read_front(path: Path, data: bytes) -> About:
    """Who wrote this file.

    Raises:
        UnreadableMetricsError: it is foreign, torn, or of another version.
    """
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise UnreadableMetricsError(str(path), "foreign", "no metrics file")
    if len(data) < PAGE:
        raise UnreadableMetricsError(str(path), "torn", f"it ends after {len(data)} bytes, within its first page")
    _, layout, length, checksum = FRONT.unpack_from(data)
    said = data[FRONT.size : FRONT.size + length]
    if zlib.crc32(said) != checksum:
        raise UnreadableMetricsError(str(path), "torn", "its first page is damaged")
    try:
        about = msgspec.msgpack.decode(said, type=About)
    except msgspec.DecodeError as error:
        text = f"its layout is {layout}, and what it says about itself is not known here ({error})"
        raise UnreadableMetricsError(str(path), "other_version", text) from error
    if layout != LAYOUT or about.digest != DIGEST:
        text = (
            f"written by kvscope {about.kvscope} with other metrics or another layout (layout {layout}, {about.digest})"
        )
        raise UnreadableMetricsError(str(path), "other_version", f"{text}; this one reads layout {LAYOUT}, {DIGEST}")
    if len(data) < FILE_BYTES:
        raise UnreadableMetricsError(str(path), "torn", f"it has {len(data)} of {FILE_BYTES} bytes")
    return about
