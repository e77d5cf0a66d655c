"""All values of a run at one time, to be asked for by a metric's name without prefix and by labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Readout", "prefix_in"]

_MARKS = ("snapshot_age_seconds", "kvscope_info", "kv_cache_usage_percent")
"""Metrics that tell what stands before their names; every process that is read has the first."""

Labels = frozenset[tuple[str, str]]


class Readout:
    """Values by the name of the sample (for a histogram with `_bucket`, `_sum`, `_count`) and its labels.

    A value that is no number (NaN) is no value. `at_s` is wall time in seconds.
    """

    def __init__(self, samples: Iterable[tuple[str, Mapping[str, str], float]], *, at_s: float) -> None:
        self.at_s = at_s
        self._values: dict[str, dict[Labels, float]] = {}
        for name, labels, value in samples:
            if not math.isnan(value):
                self._values.setdefault(name, {})[frozenset(labels.items())] = value

    def __bool__(self) -> bool:
        return bool(self._values)

    def engines(self) -> list[str]:
        """The values of the label `engine`, numbers first and in their order."""
        found = {dict(labels).get("engine", "") for series in self._values.values() for labels in series}
        return sorted(found - {""}, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))

    def get(self, name: str, **labels: str) -> float | None:
        """The value of the one series with exactly these labels."""
        return self._values.get(name, {}).get(frozenset(labels.items()))

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of all series that have these labels and maybe others; None where there is none."""
        values = [value for _, value in self._series(name, labels)]
        return sum(values) if values else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The sums of all series that have these labels, by the value of another label."""
        sums: dict[str, float] = {}
        for own, value in self._series(name, labels):
            if label in own:
                sums[own[label]] = sums.get(own[label], 0.0) + value
        return sums

    def quantile(self, share: float, name: str, *, since: Readout | None = None, **labels: str) -> float | None:
        """A quantile of a histogram, as PromQL's histogram_quantile has it: linear within a bucket, and the highest
        finite bound where it lies above that. `since` leaves out what had been observed before. None: nothing was.
        """
        counts = self.by("le", f"{name}_bucket", **labels)
        before = since.by("le", f"{name}_bucket", **labels) if since is not None else {}
        buckets = sorted((float(bound), count - before.get(bound, 0.0)) for bound, count in counts.items())
        if not buckets or buckets[-1][1] <= 0:
            return None
        rank = share * buckets[-1][1]
        lower, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= rank:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * ((rank - below) / (count - below) if count > below else 1.0)
            lower, below = bound, count
        return lower

    def _series(self, name: str, wanted: Mapping[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        asked = frozenset(wanted.items())
        for labels, value in self._values.get(name, {}).items():
            if asked <= labels:
                yield dict(labels), value


def prefix_in(names: Iterable[str]) -> str | None:
    """The configured start of our names among these; None where none of them is ours. vLLM's own never are."""
    known = sorted(name for name in names if not name.startswith("vllm:"))
    return next((name.removesuffix(mark) for mark in _MARKS for name in known if name.endswith(mark)), None)
