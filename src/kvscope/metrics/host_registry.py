"""Our series in the host's own registry, so that they stand in vLLM's `/metrics` as well, beside its own.

vLLM (0.32, ``vllm/v1/metrics/prometheus.py``) serves ``prometheus_client.REGISTRY`` where one process answers. With
several API servers it sets ``PROMETHEUS_MULTIPROC_DIR`` and serves files of prometheus_client's own instead, into which
no collector can be put; then our series are at the exporter alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import REGISTRY
from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.registry import Collector, CollectorRegistry

from kvscope.logs import say
from kvscope.metrics.catalog import METRICS
from kvscope.metrics.families import Family
from kvscope.metrics.rendering import prometheus_families

__all__ = ["HostRegistration"]

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class HostRegistration(Collector):
    """The series of one run in a registry, from :meth:`begin` to :meth:`end`. None of its methods raises: whoever
    collects the registry serves more than us.
    """

    def __init__(
        self,
        collect: Callable[[], Sequence[Family]],
        *,
        prefix: str,
        interval_s: float,
        is_on: Callable[[], bool],
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collect = collect
        self._prefix = prefix
        self._interval_s = interval_s
        self._is_on = is_on
        self._registry = registry
        self._clock = clock
        self._last: tuple[float, list[PrometheusFamily]] | None = None
        self._has_failed = False
        self.is_registered = False

    def begin(self) -> None:
        """Register, where the registry is served and nobody has taken our names."""
        if os.environ.get(MULTIPROCESS_VARIABLE):
            say(logging.INFO, "kvscope: several processes answer vLLM's /metrics; our series are at the exporter alone")
            return
        if self._prefix.startswith("vllm:"):
            say(logging.WARNING, "kvscope: our series are at the exporter alone: names with %r are vLLM's", "vllm:")
            return
        try:
            self._registry.register(self)
            self.is_registered = True
        except ValueError as error:
            say(logging.INFO, "kvscope: our series are not in vLLM's /metrics, but at the exporter: %s", error)

    def end(self) -> None:
        """Take the series out again. A second call does nothing."""
        if self.is_registered:
            self.is_registered = False
            try:
                self._registry.unregister(self)
            except KeyError:  # somebody has emptied the registry, as tests do
                return

    def describe(self) -> Iterable[PrometheusFamily]:
        """The names that we can come to have; the registry refuses them to a second one."""
        for metric in METRICS.values():
            name = f"{self._prefix}{metric.name}"
            name = name.removesuffix("_total") if metric.kind == "counter" else name
            yield PrometheusFamily(name, metric.help, metric.kind)

    def collect(self) -> Iterable[PrometheusFamily]:
        """What the run's processes said last, collected at most once an interval; nothing while it is switched off."""
        now_s = self._clock()
        if self._last is None or now_s - self._last[0] >= self._interval_s:
            self._last = (now_s, self._collected())
        return self._last[1]

    def _collected(self) -> list[PrometheusFamily]:
        try:
            found = list(prometheus_families(self._collect())) if self._is_on() else []
        except Exception as error:  # noqa: BLE001  an error here would take vLLM's own series away
            if not self._has_failed:
                say(logging.WARNING, "kvscope: our series are missing from vLLM's /metrics: %s", error)
            self._has_failed = True
            return []
        self._has_failed = False
        return found
