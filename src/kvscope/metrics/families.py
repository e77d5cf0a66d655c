"""The read model: what processes have counted, as metric families with names, labels and one value a series.

Who draws, renders or prints metrics starts here and needs to know nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from .catalog import METRICS
from .labels import ENGINE
from .metric import Kind, Metric

ENGINE_PROCESSES = ("engine", "all")


class Histogram(msgspec.Struct, frozen=True):
    """``counts`` holds how many observations fell into each bucket, the last one being that without an upper bound;
    ``total`` is their sum, in the metric's unit.
    """

    counts: tuple[float, ...]
    total: float


Value = float | Histogram
Values = Mapping[str, Mapping[tuple[str, ...], Value]]
"""``{name without prefix: {label values in the order of the metric's labels: value}}``. What is not there was not
observed; it is not zero."""


class CustomValue(msgspec.Struct, frozen=True, array_like=True):
    """What a registered collector said last. ``name`` is complete. Of a histogram ``value`` is the sum of all
    observations, and ``buckets`` are ``(upper bound, how many were at most that)``, the last bound being infinity.
    """

    name: str
    kind: Kind
    help: str
    value: float
    buckets: tuple[tuple[float, float], ...] = ()


class ProcessValues(msgspec.Struct, frozen=True, kw_only=True):
    """What one process said last.

    ``process`` is ``frontend``, ``engine``, ``worker`` or ``all``; ``rank`` stands in the file's name; ``engine`` is
    the value of that label. ``is_alive`` is None where it cannot be told. ``has_ended`` says that it ended in an
    orderly way. ``snapshot_wall_ns`` is when it said it, ``age_seconds`` how long ago that was. ``prefix`` is what the
    run's configuration has. ``num_torn_slabs`` counts threads whose numbers cannot be read.
    """

    run_id: str
    process: str
    rank: int
    pid: int
    engine: str
    start_wall_ns: int
    snapshot_wall_ns: int
    age_seconds: float
    is_alive: bool | None
    has_ended: bool
    values: Values
    prefix: str = ""
    custom: tuple[CustomValue, ...] = ()
    num_torn_slabs: int = 0


class Sample(msgspec.Struct, frozen=True):
    """One series. Of a histogram ``value`` is the sum of all observations, and ``buckets`` are ``(upper bound, how many
    observations were at most that)``, in order, the last bound being infinity.
    """

    labels: Mapping[str, str]
    value: float
    buckets: tuple[tuple[float, float], ...] = ()

    @property
    def count(self) -> float:
        """How many observations a histogram has."""
        return self.buckets[-1][1] if self.buckets else 0.0


class Family(msgspec.Struct, frozen=True):
    """All series of one metric. ``name`` has the prefix, and of a counter the ``_total``; ``help`` is one line."""

    name: str
    kind: Kind
    help: str
    unit: str
    samples: tuple[Sample, ...]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one run. ``replaced`` are those that came before others of ``processes`` in the same place."""

    run_id: str
    start_wall_ns: int
    processes: tuple[ProcessValues, ...]
    replaced: tuple[ProcessValues, ...] = ()

    @property
    def is_over(self) -> bool:
        """No process of it is alive, as far as can be told."""
        return all(process.has_ended or process.is_alive is False for process in self.processes)


def runs(processes: Iterable[ProcessValues]) -> list[Run]:
    """Processes by run, the newest run first. Values of two runs are never added: each starts from zero.

    Within one run, which can have been started twice under one name, a process counts no longer once another has
    started in its place, or once it is dead and its engine has started anew.
    """
    by_run: dict[str, list[ProcessValues]] = {}
    for process in processes:
        by_run.setdefault(process.run_id, []).append(process)
    found = [_run(run_id, members) for run_id, members in by_run.items()]
    return sorted(found, key=lambda run: run.start_wall_ns, reverse=True)


def _run(run_id: str, members: list[ProcessValues]) -> Run:
    newest: dict[tuple[str, str, int], ProcessValues] = {}
    engine_start: dict[str, int] = {}
    for member in sorted(members, key=lambda process: process.start_wall_ns):
        newest[member.engine, member.process, member.rank] = member
        if member.process in ENGINE_PROCESSES:
            engine_start[member.engine] = member.start_wall_ns
    current = tuple(
        process
        for process in newest.values()
        if process.is_alive is not False or process.snapshot_wall_ns >= engine_start.get(process.engine, 0)
    )
    replaced = tuple(member for member in members if member not in current)
    start = max(process.start_wall_ns for process in current)
    return Run(run_id=run_id, start_wall_ns=start, processes=current, replaced=replaced)


def families(
    processes: Sequence[ProcessValues],
    *,
    prefix: str,
    collected: Mapping[str, Sequence[CustomValue]] = MappingProxyType({}),
) -> list[Family]:
    """The metrics of one run's processes (``Run.processes``), in the order of the catalog, then those of registered
    collectors; those without any series are left out. ``prefix`` is that of ``kv_monitor.prefix``, ``collected`` what
    collectors have said in the process that reads, by engine.
    """
    found = []
    for metric in METRICS.values():
        samples = tuple(_samples(metric, processes))
        if samples:
            name = f"{prefix}{metric.name}"
            found.append(Family(name, metric.kind, metric.help, metric.unit, samples))
    said = [(process.engine, value) for process in processes for value in process.custom]
    return found + _custom_families([*said, *((engine, each) for engine, of in collected.items() for each in of)])


def _custom_families(said: Iterable[tuple[str, CustomValue]]) -> list[Family]:
    """Of an engine's processes counters and histograms are added; of gauges the largest counts."""
    merged: dict[str, dict[str, CustomValue]] = {}
    for engine, value in said:
        of_name = merged.setdefault(value.name, {})
        before = of_name.get(engine)
        of_name[engine] = value if before is None else _added(before, value)
    return [
        Family(name, next(iter(values.values())).kind, next(iter(values.values())).help, "", _custom_samples(values))
        for name, values in sorted(merged.items())
    ]


def _custom_samples(values: Mapping[str, CustomValue]) -> tuple[Sample, ...]:
    return tuple(
        Sample({ENGINE: engine}, value.value, value.buckets)
        for engine, value in sorted(values.items(), key=lambda item: _order(item[0]))
    )


def _added(one: CustomValue, other: CustomValue) -> CustomValue:
    if one.kind != other.kind or len(one.buckets) != len(other.buckets):
        return other  # registered in two ways under one name: what was said last
    value = max(one.value, other.value) if one.kind == "gauge" else one.value + other.value
    buckets = tuple((bound, a + b) for (bound, a), (_, b) in zip(one.buckets, other.buckets, strict=True))
    return msgspec.structs.replace(one, value=value, buckets=buckets)


def _samples(metric: Metric, processes: Sequence[ProcessValues]) -> Iterator[Sample]:
    merged: dict[tuple[str, tuple[str, ...]], Value] = {}
    for process in processes:
        for key, value in _values(metric, process).items():
            series = (process.engine, key)
            merged[series] = combined(metric, merged[series], value) if series in merged else value
    for (engine, key), value in sorted(merged.items(), key=lambda item: _order(item[0][0])):
        labels = {ENGINE: engine} | {name: of for name, of in zip(metric.label_names, key, strict=True) if of}
        if isinstance(value, Histogram):
            yield Sample(labels, value.total, _cumulative(metric, value))
        else:
            yield Sample(labels, value)


def _values(metric: Metric, process: ProcessValues) -> Mapping[tuple[str, ...], Value]:
    if metric.name == "snapshot_age_seconds":
        return {(): process.age_seconds}
    return process.values.get(metric.name, {})


def combined(metric: Metric, one: Value, other: Value) -> Value:
    """The value of two processes, or of two threads, of one engine.

    Raises:
        TypeError: one is a histogram and the other is not.
    """
    if isinstance(one, Histogram) and isinstance(other, Histogram):
        counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
        return Histogram(counts, one.total + other.total)
    if isinstance(one, Histogram) or isinstance(other, Histogram):
        raise TypeError(f"{metric.name} is a histogram in one process and none in another")
    return one + other if metric.combine == "sum" else max(one, other)


def _cumulative(metric: Metric, histogram: Histogram) -> tuple[tuple[float, float], ...]:
    bounds = (*metric.buckets, math.inf)
    running, buckets = 0.0, []
    for bound, count in zip(bounds, histogram.counts, strict=True):
        running += count
        buckets.append((bound, running))
    return tuple(buckets)


def _order(engine: str) -> tuple[int, str]:
    """Engines in the order of their ranks; what is no engine comes last."""
    return (int(engine), "") if engine.isdecimal() else (1 << 30, engine)
