"""Families as a run's processes make them, and a client that reads what an exporter answers."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvscope.metrics.catalog import METRICS
from kvscope.metrics.families import Family, Histogram, ProcessValues, Value, families

PREFIX = "vllm_ascend_"


def histogram(name: str, *counts: float, total: float = 1.0) -> Histogram:
    """Observations in the first buckets; there are none in the others."""
    missing = len(METRICS[name].buckets) + 1 - len(counts)
    return Histogram((*counts, *(0.0 for _ in range(missing))), total)


def process(engine: str = "0", kind: str = "all", **metrics: Mapping[tuple[str, ...], Value]) -> ProcessValues:
    return ProcessValues(
        run_id="run",
        process=kind,
        rank=0,
        pid=1,
        engine=engine,
        start_wall_ns=1,
        snapshot_wall_ns=2,
        age_seconds=0.25,
        is_alive=True,
        has_ended=False,
        values=metrics,
    )


def collected(*processes: ProcessValues) -> list[Family]:
    return families(processes, prefix=PREFIX)


class Got(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def get(port: int, path: str = "/metrics", accept: str = "") -> Got:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        return Got(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def until(true: Callable[[], bool]) -> bool:
    """Whether it becomes true within five seconds."""
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()
