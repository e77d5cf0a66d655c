"""Metrics of somebody else's: who registered what in this process, and what each has said.

Nothing here calls a collector. ``sampling`` does, for each run of the process, in a thread of each collector's own.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from numbers import Real
from queue import SimpleQueue
from typing import Literal, Protocol, get_args

from kvscope.errors import RegistrationError, quoted
from kvscope.fence import SLOW_NS, Fence, require_callable
from kvscope.metrics.catalog import METRICS
from kvscope.metrics.collecting import DEFAULT_PREFIX
from kvscope.metrics.families import CustomValue
from kvscope.metrics.metric import Kind
from kvscope.metrics.readout import Readout

__all__ = ["COLLECTORS", "Collector", "CollectorContext", "CollectorProcess", "Collectors", "Series"]

CollectorProcess = Literal["exporter", "engine", "worker"]

BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)
"""Upper bounds of every registered histogram. Nobody knows its unit, so they are decades."""
MOST_HELP = 200

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,199}", re.ASCII)
_ALLOWED_NAME = "1 to 200 letters, digits, '_' and ':', the first of them no digit"


class CollectorContext:
    """What a collector is given. It can only be read.

    metrics: what was published last, read when it is first asked for; see ``Readout``. In process ``exporter`` it has
        what all processes of the engine have said, else what this process has said itself. It is empty where that
        cannot be read.
    engine: the engine as label ``engine`` has it: its data-parallel rank.
    engine_id: the engine as records have it: the run, and the data-parallel rank.
    wall_ns: nanoseconds since 1970 when this interval's calls began, by this host's clock.
    """

    __slots__ = ("_engine", "_engine_id", "_metrics", "_read", "_wall_ns")

    def __init__(self, *, engine: str, engine_id: str, wall_ns: int, read: Callable[[], Readout]) -> None:
        self._engine = engine
        self._engine_id = engine_id
        self._wall_ns = wall_ns
        self._read = read
        self._metrics: Readout | None = None

    @property
    def engine(self) -> str:
        return self._engine

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def wall_ns(self) -> int:
        return self._wall_ns

    @property
    def metrics(self) -> Readout:
        found = self._metrics
        if found is None:  # two collectors may ask at once: then both read, and find the same
            found = self._metrics = self._read()
        return found


class Function(Protocol):
    """What can be registered."""

    def __call__(self, ctx: CollectorContext, /) -> float: ...


class Collector:
    """One registration. ``name`` is that of the family: of a counter with ``_total``."""

    __slots__ = ("_ended", "_jobs", "_thread", "calls", "fence", "function", "help", "kind", "name", "process")

    def __init__(
        self, function: Function, *, name: str, kind: Kind, process: CollectorProcess, slow_ns: int = SLOW_NS
    ) -> None:
        self.function = function
        self.name = name if kind != "counter" or name.endswith("_total") else f"{name}_total"
        self.kind = kind
        self.process = process
        self.fence = Fence("collector", function, slow_ns)
        self.calls = 0
        said = " ".join((getattr(function, "__doc__", None) or "").partition("\n\n")[0].split())
        self.help = (said or f"What {self.fence.name} says.")[:MOST_HELP]
        self._ended = False
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Whether it is still called: not after ``close``, not after removal, and not in a forked child."""
        return not self._ended and not self.fence.is_down

    def close(self) -> None:
        """Call it no more, and let its series end. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._jobs.put(None)

    def abandon(self) -> None:
        """In a forked child: neither the thread nor a lock that the queue may have been left with is used again."""
        self._ended = True

    def offer(self, job: Callable[[], object]) -> bool:
        """Have its own thread do this; False where no thread can be had."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"kvscope-{self.fence.name}"[:64], daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many, or the interpreter is going down
                return False
            self._thread = thread
        self._jobs.put(job)
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and self.active:
            job()


class Series:
    """What one collector has said about one engine in one run. ``said`` is None where it says nothing."""

    __slots__ = ("_collector", "_counts", "_total", "said")

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._counts = [0] * (len(BUCKETS) + 1)
        self._total = 0.0
        self.said: CustomValue | None = None

    def take(self, value: object) -> None:
        """What the collector has returned. A gauge that is no number (NaN) has no value now.

        Raises:
            TypeError: it is no number at all.
            ValueError: a counter, or a sample for a histogram, that is not finite; or a counter that went down.
        """
        if not isinstance(value, Real):
            raise TypeError(f"{self._collector.name}: {type(value).__name__} is no number")
        number, kind = float(value), self._collector.kind
        if kind == "gauge":
            self._say(number)
            return
        if not math.isfinite(number):
            raise ValueError(f"{self._collector.name}: {number} is not finite")
        if kind == "counter":
            if number < self._total:
                raise ValueError(f"{self._collector.name}: {number} is less than the total before, {self._total}")
            self._total = number
            self._say(number)
            return
        self._total += number
        self._counts[bisect_left(BUCKETS, number)] += 1
        running, buckets = 0.0, []
        for bound, count in zip((*BUCKETS, math.inf), self._counts, strict=True):
            running += count
            buckets.append((bound, running))
        self._say(self._total, tuple(buckets))

    def miss(self) -> None:
        """The collector has failed: totals stand still, and there is no number of the moment."""
        if self._collector.kind == "gauge":
            self.said = None

    def _say(self, value: float, buckets: tuple[tuple[float, float], ...] = ()) -> None:
        of = self._collector
        self.said = None if math.isnan(value) else CustomValue(of.name, of.kind, of.help, value, buckets)


class Attendant(Protocol):
    """Who wants to know that there is a collector to be called."""

    def begin(self) -> None: ...


class Collectors:
    """All registrations of a process. ``COLLECTORS`` is the one that serves."""

    def __init__(self) -> None:
        self._known: tuple[Collector, ...] = ()  # replaced as a whole, so that reading takes no lock
        self._lock = threading.Lock()
        self._prefixes: tuple[str, ...] = ()
        self._attendants: weakref.WeakSet[Attendant] = weakref.WeakSet()
        self._before = (0, 0)  # calls and faults of those that are known no more

    def expect(self, prefix: str) -> None:
        """A run of this process has this ``kv_monitor.prefix``. Until one is known it is the default."""
        if prefix not in self._prefixes:
            self._prefixes = (*self._prefixes, prefix)

    def require(self, name: str, kind: str, process: str) -> None:
        """Refuse what may not be registered now.

        Raises:
            RegistrationError: one of them cannot be used; the text says why, in one line.
        """
        if not _is_name(name):
            raise RegistrationError(f"name: {quoted(name)} is not {_ALLOWED_NAME}")
        _require_one_of("metric_type", kind, get_args(Kind))
        _require_one_of("process", process, get_args(CollectorProcess))
        prefixes = self._prefixes or (DEFAULT_PREFIX,)
        if name in prefixes:
            raise RegistrationError(f"name: {name!r} has nothing behind kv_monitor.prefix")
        if not any(map(name.startswith, prefixes)):
            allowed = " or ".join(map(repr, prefixes))
            raise RegistrationError(f"name: {name!r} does not begin with {allowed}, as kv_monitor.prefix has it")
        wanted = _claimed(name, kind)
        for prefix in prefixes:
            for metric in METRICS.values():
                if wanted & _claimed(f"{prefix}{metric.name}", metric.kind):
                    raise RegistrationError(f"name: {name!r} is kvscope's own {metric.kind} {prefix}{metric.name}")
        for other in self._known:
            if other.active and wanted & _claimed(other.name, other.kind):
                raise RegistrationError(f"name: {name!r} is registered already, by {other.fence.name}")

    def register(
        self, function: Function, *, name: str, kind: Kind, process: CollectorProcess, slow_ns: int = SLOW_NS
    ) -> Collector:
        """Have ``function`` called once an interval from now on, in every run of this process that has such a process.

        Raises:
            RegistrationError: see ``require``.
            TypeError: it cannot be called, or calling it would only make a coroutine.
        """
        require_callable("collector", function)
        collector = Collector(function, name=name, kind=kind, process=process, slow_ns=slow_ns)
        with self._lock:
            self.require(name, kind, process)
            self._sort_out(collector)
            attendants = list(self._attendants)
        for attendant in attendants:
            attendant.begin()
        return collector

    def attend(self, attendant: Attendant) -> None:
        """Tell it, now and whenever one is registered, that there may be a collector for it."""
        with self._lock:
            self._attendants.add(attendant)
        attendant.begin()

    def of(self, processes: Iterable[CollectorProcess]) -> list[Collector]:
        """Those that are to be called in such processes."""
        if any(not collector.active for collector in self._known):
            with self._lock:
                self._sort_out()
        return [collector for collector in self._known if collector.process in processes]

    def numbers(self) -> tuple[int, int, int] | None:
        """``(calls, faults, 0)``: the time is that of threads of their own. None where nothing was called."""
        calls = self._before[0] + sum(collector.calls for collector in self._known)
        faults = self._before[1] + sum(collector.fence.faults for collector in self._known)
        return (calls, faults, 0) if calls else None

    def forget(self) -> None:
        """In a forked child: registrations are the parent's, whose threads and locks did not come along."""
        for collector in self._known:
            collector.abandon()
        self._known = ()
        self._lock = threading.Lock()
        self._attendants = weakref.WeakSet()
        self._before = (0, 0)

    def _sort_out(self, *more: Collector) -> None:
        """Remove who has ended, add ``more``. The lock is held."""
        known = self._known
        self._known = (*(collector for collector in known if collector.active), *more)
        for collector in known:
            if collector not in self._known:
                self._before = (self._before[0] + collector.calls, self._before[1] + collector.fence.faults)
                if collector.fence.is_down:
                    collector.fence.say_removed()
                collector.close()


def _is_name(given: object) -> bool:
    return isinstance(given, str) and _NAME.fullmatch(given) is not None


def _require_one_of(what: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise RegistrationError(f"{what}: {quoted(given)} is not one of {', '.join(map(repr, allowed))}")


def _claimed(name: str, kind: str) -> set[str]:
    """The names of samples that a metric of this kind has, as registries of Prometheus clients see it."""
    base = name.removesuffix("_total") if kind == "counter" else name
    suffixes = {
        "gauge": ("",),
        "counter": ("", "_total", "_created"),
        "histogram": ("", "_bucket", "_sum", "_count", "_created"),
    }
    return {f"{base}{suffix}" for suffix in suffixes[kind]}


COLLECTORS = Collectors()
"""Module state, because extensions register before there is a run."""

os.register_at_fork(after_in_child=COLLECTORS.forget)
