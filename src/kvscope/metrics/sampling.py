"""Calls registered collectors for one run of this process, once an interval, and keeps what they say.

A thread of ours begins each interval; each collector answers in a thread of its own. One that has not come back from
the interval before is not called again meanwhile. There is no thread as long as there is no collector.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

from kvscope.logs import say
from kvscope.metrics.collectors import Collector, CollectorContext, CollectorProcess, Collectors, Series
from kvscope.metrics.families import CustomValue

__all__ = ["Collected", "Sampler"]

MAX_FAULTS = 16
LONGEST_ANSWER_S = 1.0
"""So long, or an interval if that is shorter, what has been said is held back for those who are still at it."""

Collected = Mapping[str, Sequence[CustomValue]]
"""What collectors have said last, by engine."""


class Sampler:
    """``contexts`` makes what collectors are given, one for each engine; ``publish`` is told after each interval, in
    the thread of the sampler, what all have said.
    """

    def __init__(
        self,
        processes: Iterable[CollectorProcess],
        *,
        prefix: str,
        interval_s: float,
        contexts: Callable[[], Sequence[CollectorContext]],
        publish: Callable[[Collected], None],
        collectors: Collectors,
    ) -> None:
        self._processes = frozenset(processes)
        self._prefix = prefix
        self._interval_s = interval_s
        self._contexts = contexts
        self._publish = publish
        self._collectors = collectors
        self._series: dict[tuple[Collector, str], Series] = {}
        self._busy: set[Collector] = set()
        self._refused: set[Collector] = set()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin as soon as there is a collector for this process. Never waits."""
        self._collectors.attend(self)

    def begin(self) -> None:
        """Begin, if there is a collector to be called."""
        with self._lock:
            if self._thread is not None or self._ending.is_set() or not self._collectors.of(self._processes):
                return
            thread = threading.Thread(target=self._work, name="kvscope-collectors", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                say(logging.WARNING, "kvscope: registered collectors are not called: %s", error)
                return
            self._thread = thread

    def stop(self, timeout_s: float = LONGEST_ANSWER_S) -> None:
        """Begin no further interval. A second call does nothing."""
        self._ending.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def sample(self) -> None:
        """One interval: everybody is called, and what has been said is published."""
        collectors = [each for each in self._collectors.of(self._processes) if self._has_prefix(each)]
        self._series = {key: series for key, series in self._series.items() if key[0] in collectors}
        contexts = self._contexts() if collectors else ()
        done: SimpleQueue[None] = SimpleQueue()
        called = 0
        for collector in collectors:
            if collector not in self._busy:
                self._busy.add(collector)
                if collector.offer(partial(self._ask, collector, contexts, done)):
                    called += 1
                else:
                    self._busy.discard(collector)
        self._wait(done, called)
        self._publish(self._said(collectors, {context.engine for context in contexts}))

    def _ask(self, collector: Collector, contexts: Sequence[CollectorContext], done: SimpleQueue[None]) -> None:
        """In the collector's own thread."""
        try:
            for context in contexts:
                if not collector.active:
                    break
                series = self._series.setdefault((collector, context.engine), Series(collector))
                collector.calls += 1
                if not collector.fence.passes(partial(_answer, collector, context, series)):
                    series.miss()
        finally:
            self._busy.discard(collector)
            done.put(None)

    def _wait(self, done: SimpleQueue[None], called: int) -> None:
        ends = monotonic() + min(self._interval_s, LONGEST_ANSWER_S)
        with contextlib.suppress(Empty):  # then somebody is still at it
            for _ in range(called):
                done.get(timeout=max(0.0, ends - monotonic()))

    def _said(self, collectors: Sequence[Collector], engines: Iterable[str]) -> Collected:
        found: dict[str, list[CustomValue]] = {engine: [] for engine in sorted(engines)}
        for collector in collectors:
            for engine, values in found.items():
                series = self._series.get((collector, engine))
                if series is not None and series.said is not None and collector.active:
                    values.append(series.said)
        return found

    def _has_prefix(self, collector: Collector) -> bool:
        """Several runs of one process may have different ones."""
        if collector.name.startswith(self._prefix):
            return True
        if collector not in self._refused:
            self._refused.add(collector)
            text = "kvscope: collector %s is not called for this run, whose kv_monitor.prefix is %r"
            say(logging.WARNING, text, collector.name, self._prefix)
        return False

    def _work(self) -> None:
        faults = 0
        while faults < MAX_FAULTS:
            try:
                self.sample()
            except Exception as error:  # noqa: BLE001 - files of a run can be gone; what fails is done again
                faults += 1
                if faults in {1, MAX_FAULTS}:
                    more = "it is not tried again" if faults == MAX_FAULTS else "it is tried again"
                    text = "kvscope: what registered collectors say cannot be published (%s); %s"
                    say(logging.WARNING, text, type(error).__name__, more)
            if self._ending.wait(self._interval_s):
                return


def _answer(collector: Collector, context: CollectorContext, series: Series) -> None:
    series.take(collector.function(context))
