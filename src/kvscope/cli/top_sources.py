"""Where ``kvscope top`` looks: an exporter's address, a run's folder with its metrics and its trace, or a trace."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kvscope.analysis.following import RunFollower
from kvscope.errors import KvscopeError, UnreadableTraceError
from kvscope.metrics.collecting import collect_run, metrics_folder
from kvscope.metrics.readout import Readout, prefix_in
from kvscope.metrics.view import View
from kvscope.metrics.viewing import MONITOR_OFF, Viewer, readout_of

ANSWER_S = 5.0
LARGEST_ANSWER_BYTES = 64 << 20

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Exporters listen on the loopback, where no proxy leads to."""


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
        request = urllib.request.Request(self._url, headers={"Accept": "text/plain;version=0.0.4"})
        try:
            with _opener.open(request, timeout=ANSWER_S) as answer:
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


class RunSource:
    """A run on disk. Numbers are the metrics of its processes and, where there are none, what its trace says; requests
    are named by the trace alone. ``progress`` is told how much of the trace has been read in a look.
    """

    def __init__(self, path: Path, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self._folder = metrics_folder(path) if path.is_dir() else None
        self._follower: RunFollower | None = None
        self._why_no_trace = ""
        try:
            self._follower = RunFollower(path)
        except UnreadableTraceError as error:
            if self._folder is None:
                raise
            self._why_no_trace = error.message
        if self._folder is None and self._follower is not None and self._follower.path.is_dir():
            self._folder = self._follower.path
        self.path = self._folder if self._follower is None else self._follower.path
        self._viewer = Viewer(str(self.path), self.path.name if self.path is not None else None)

    def look(self) -> View:
        families = collect_run(self._folder) if self._folder is not None else []
        followed = self._follower.look(self._progress) if self._follower is not None else None
        now_s = time.time()
        if followed is None:
            why = {"requests": f"there is no trace beside the metrics: {self._why_no_trace}"}
            return self._viewer.view(readout_of(families, at_s=now_s), no_data=why)
        readout = readout_of(families, at_s=now_s) if families else Readout(followed.samples, at_s=followed.at_s)
        return self._viewer.view(
            readout,
            requests=followed.requests,
            holds=None if families else followed.holds,
            coverage_share=followed.coverage_share,
            no_data={why: said for why, said in followed.no_data.items() if why == "requests" or not families},
        )


def _samples(url: str, text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise NothingToShowError(f"{url}: this is no Prometheus text: {error}") from error
    prefix = prefix_in(sample.name for sample in found)
    for sample in found:
        if prefix is not None and sample.name.startswith(prefix) and "engine" in sample.labels:
            yield sample.name.removeprefix(prefix), sample.labels, sample.value
