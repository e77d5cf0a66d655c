"""Families as text: Prometheus 0.0.4, or OpenMetrics 1.0.0 for who asks for it. prometheus_client writes both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.exposition import generate_latest as plain_text
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_TYPE
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvscope.metrics.families import Family

__all__ = ["OPENMETRICS", "TEXT", "Format", "negotiated", "prometheus_families"]


class _Collected(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[PrometheusFamily]:
        return prometheus_families(self._families)


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    content_type: str
    write: Callable[[Collector], bytes]

    def render(self, families: Sequence[Family]) -> bytes:
        return self.write(_Collected(families))


TEXT = Format("text", "text/plain; version=0.0.4; charset=utf-8", plain_text)
OPENMETRICS = Format("openmetrics", OPENMETRICS_TYPE, openmetrics_text)


def prometheus_families(families: Sequence[Family]) -> Iterator[PrometheusFamily]:
    """The same families as prometheus_client has them, for any registry of it.

    Between two of them other threads of the process may go on: writing all is a few milliseconds of Python, for which a
    thread that runs an engine would have to wait otherwise.
    """
    for family in families:
        time.sleep(0)
        # Its counters are named without `_total`, and a unit is only said where the name ends with it.
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        unit = family.unit if name.endswith(f"_{family.unit}") else ""
        made = PrometheusFamily(name, family.help, family.kind, unit)
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.kind == "histogram":
                for bound, count in sample.buckets:
                    made.add_sample(f"{name}_bucket", {**labels, "le": _bound(bound)}, count)
                made.add_sample(f"{name}_count", labels, sample.count)
                made.add_sample(f"{name}_sum", labels, sample.value)
            else:
                made.add_sample(family.name, labels, sample.value)
        yield made


def _bound(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped


def negotiated(accept: str) -> Format:
    """What an `Accept` header asks for; text where it asks for both alike, or for nothing that is written here."""
    wanted = {TEXT.name: 0.0, OPENMETRICS.name: 0.0}
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        said = dict(piece.partition("=")[::2] for piece in parameters)
        weight = _weight(said.get("q", "1"))
        if kind == "application/openmetrics-text" and said.get("version", "1.0.0") == "1.0.0":
            wanted[OPENMETRICS.name] = max(wanted[OPENMETRICS.name], weight)
        elif kind in {"text/plain", "text/*", "*/*"}:
            wanted[TEXT.name] = max(wanted[TEXT.name], weight)
    return OPENMETRICS if wanted[OPENMETRICS.name] > wanted[TEXT.name] else TEXT


def _weight(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 1.0)
    except ValueError:
        return 0.0
