"""Where ``kvscope top`` looks: an exporter's address, a run's folder with its metrics and its trace, or a trace alone."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kvscope.errors import KvscopeError
from kvscope.metrics.readout import Readout
from kvscope.metrics.view import View
from kvscope.metrics.viewing import MONITOR_OFF, Viewer

ANSWER_S = 5.0
LARGEST_ANSWER_BYTES = 64 << 20

_MARKS = ("snapshot_age_seconds", "kvscope_info", "kv_cache_usage_percent")
"""Metrics by which the configured prefix is told; the first of them comes with every engine."""


class NothingToShowError(KvscopeError):
    """What was given as a source does not answer, or says nothing that is ours."""


class Source(Protocol):
    def look(self) -> View:
        """The run as it is now. Raises KvscopeError where it cannot be told."""
        ...


class ExporterSource:
    """An exporter of a run, or any other address that gives its series, such as vLLM's own ``/metrics``."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        self._url = url if split.path not in {"", "/"} else f"{url.rstrip('/')}/metrics"
        self._viewer = Viewer(self._url)

    def look(self) -> View:
        at_s = time.time()
        text = self._text()
        if not text.strip():
            return self._viewer.empty(at_s, MONITOR_OFF)
        readout = Readout(_samples(self._url, text), at_s=at_s)
        if not readout:
            raise NothingToShowError(f"{self._url}: no series of kvscope is there")
        return self._viewer.view(readout)

    def _text(self) -> str:
        request = urllib.request.Request(self._url, headers={"Accept": "text/plain;version=0.0.4"})  # noqa: S310  the scheme was looked at
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                data: bytes = answer.read(LARGEST_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                line = error.read(300).decode("utf-8", "replace").strip()
            raise NothingToShowError(f"{self._url}: status {error.code}: {line or error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            said = getattr(reason, "strerror", None) or reason or type(error).__name__
            raise NothingToShowError(f"{self._url}: {said}") from error
        return data.decode("utf-8", "replace")


def _samples(url: str, text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise NothingToShowError(f"{url}: this is no Prometheus text: {error}") from error
    prefix = _prefix({sample.name for sample in found})
    for sample in found:
        if prefix is not None and sample.name.startswith(prefix) and "engine" in sample.labels:
            yield sample.name.removeprefix(prefix), sample.labels, sample.value


def _prefix(names: set[str]) -> str | None:
    """What stands before our names; vLLM's own series never are ours."""
    for mark in _MARKS:
        for name in sorted(names):
            if name.endswith(mark) and not name.startswith("vllm:"):
                return name.removesuffix(mark)
    return None
