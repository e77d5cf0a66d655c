"""Families as text: Prometheus 0.0.4, or OpenMetrics for who asks for it. prometheus_client writes both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.exposition import generate_latest as plain_text
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector

__all__ = ["OPENMETRICS", "TEXT", "Format", "negotiated"]


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    content_type: str
    write: Callable[[Collector], bytes]
