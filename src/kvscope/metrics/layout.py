"""What stands where in a metrics file. One file a process, ``PROCESS-RANK-PID.metrics``, beside its trace.

::

    page 0      magic, layout, length and checksum of what follows; who writes this file (About, msgpack)
                last 8 bytes of the page: 1 after an orderly end
    slab 0..n   two buffers each: number, clocks, length, checksum; then one 8-byte float a series, see PLACES
    custom      two buffers of the same kind; then the values of registered collectors (msgpack)

Heads are little-endian, cells are the host's. Page 0 is written before the file has its name, and never
again but for the end.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator

import msgspec

from .catalog import METRICS
from .metric import Metric

MAGIC = b"KVSCOPEM"
LAYOUT = 1
PAGE = 4096
FRONT = struct.Struct("<8sIII")  # magic, layout, length of About, checksum of About
ENDED_AT = PAGE - 8
HEAD = struct.Struct("<QqqII")  # number from 1, monotonic and wall clock in ns, length of the payload, checksum
MOST_SLABS = 6
"""Threads of one process that count: the scheduler's or the worker's, the one that takes results, the writer's, the
exporter's, and room for two more."""
CUSTOM_BYTES = 16 * 1024
_ALIGN = 64
SUFFIX = ".metrics"


class Place(msgspec.Struct, frozen=True):
    """Where a series stands among the cells of a slab. A histogram has a cell a bucket, then one for the sum."""

    start: int
    width: int


def _width(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


def _places() -> Iterator[tuple[tuple[str, tuple[str, ...]], Place]]:
    start = 0
    for metric in METRICS.values():
        if metric.feeder == "reader":
            continue
        for key in metric.combinations():
            yield (metric.name, key), Place(start, _width(metric))
            start += _width(metric)


PLACES: dict[tuple[str, tuple[str, ...]], Place] = dict(_places())
"""``(metric, label values) -> place``, of every series that can exist."""
CELLS = sum(place.width for place in PLACES.values())
DIGEST = hashlib.blake2b(
    repr([sys.byteorder, *((key, place.start, place.width) for key, place in PLACES.items())]).encode()
    + repr([metric.buckets for metric in METRICS.values()]).encode(),
    digest_size=8,
).hexdigest()
"""Two versions whose files mean the same have the same digest."""


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


SLAB_BYTES = _padded(HEAD.size + 8 * CELLS)
"""Of one buffer; a slab has two."""
CUSTOM_START = PAGE + MOST_SLABS * 2 * SLAB_BYTES
FILE_BYTES = CUSTOM_START + 2 * CUSTOM_BYTES


def slab_start(number: int) -> int:
    """Where a slab begins."""
    return PAGE + number * 2 * SLAB_BYTES
