"""The metrics of one process: its file, and a thread that hands over what is counted anyway.

Hooks, coverage and the stream count for kv.coverage whether anybody publishes it or not; a thread of its own reads
these numbers now and then, so that nothing of it happens in a step. Who counts for metrics alone has a slab to itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

from ..checks.catalog import RULES
from ..checks.rule import Part
from ..config import Config
from ..logs import say
from ..metrics.labels import FRONTEND, HOOK, SKIP_CAUSE
from ..metrics.reclaim import reclaim
from ..metrics.store import MetricsStore, Slab
from ..state.coverage import Coverage
from ..state.reuse import HitRatio, Reuse
from ..state.tails import STATES as TAIL_STATES
from .checks_counted import checks_run, checks_stalled
from .collectors_called import sampler_of_process

LONGEST_INTERVAL_S, SHORTEST_INTERVAL_S = 1.0, 0.05
MAX_FAULTS = 16


class Monitored(Protocol):
    """What is read of a run in one process."""

    run_id: str
    config: Config
    parts: frozenset[Part]
    coverage: Coverage

    @property
    def process(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def engine(self) -> int: ...

    def hooks_spent(self) -> dict[str, tuple[int, int, int]]: ...

    def records_dropped(self) -> dict[str, int]: ...


class ProcessMonitor:
    """``store.reason`` says why nobody can read the metrics, where nobody can. ``before_close`` are those who have
    something to publish before the last snapshot.
    """

    def __init__(self, run: Monitored) -> None:
        monitor = run.config.monitor
        self._run = run
        self._directory = Path(run.config.output.dir)
        self._is_frontend = run.process == "frontend"
        self.store = MetricsStore(
            self._directory / run.run_id,
            process=run.process,
            rank=run.rank,
            engine=FRONTEND if self._is_frontend else str(run.engine),
            prefix=monitor.prefix,
        )
        if self.store.reason is not None:
            say(logging.WARNING, "kvscope: no metrics of this process: %s", self.store.reason)
        self.before_close: list[Callable[[], None]] = []
        self._slab = self.store.slab()
        self._numbers = _CountedAnyway(self._slab, run, judges=not self._is_frontend)
        self._reuse: Callable[[], Reuse] | None = None
        self._ratio = HitRatio(monitor.window)
        self._interval = min(max(monitor.window / 10, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)
        self._faults = 0
        self._ending = threading.Event()
        self._publishing = threading.Lock()  # a slab has one writer at a time
        self._thread = threading.Thread(target=self._work, name="kvscope-metrics", daemon=True)
        self._thread.start()
        self._sampler = sampler_of_process(run, self.store)
        self._sampler.start()

    def observe_scheduler(self, connector: str, reuse: Callable[[], Reuse] | None) -> None:
        """This process has a scheduler with a connector of this class (``none``: without); ``reuse`` says what has been
        found in its prefix cache, None where nothing is looked for.
        """
        self._slab.gauge("kvscope_info", connector=connector).set(1)
        self._reuse = reuse

    def publish(self) -> None:
        """Hand over what has been counted until now."""
        with self._publishing:
            self._numbers.read()
            if self._reuse is not None:
                by_token, by_block = self._ratio.take(monotonic(), self._reuse())
                for unit, ratio in (("token", by_token), ("block", by_block)):
                    gauge = self._slab.gauge("prefix_cache_hit_ratio", unit=unit)
                    gauge.clear() if ratio is None else gauge.set(ratio)
            self._slab.publish()

    def publish_urgently(self) -> None:
        """The same before this process may end, from whichever thread has found why. Never raises."""
        self._fenced(self.publish)

    def close(self) -> None:
        """Publish for the last time, and end. What was published stays readable. A second call does nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._sampler.stop()
        self._thread.join(LONGEST_INTERVAL_S)
        for say_last in self.before_close:
            say_last()
        if not self._thread.is_alive():  # else it is its slab still
            self.publish()
        self.store.close()

    def _work(self) -> None:
        self._fenced(self._begin)
        while self._faults < MAX_FAULTS and not self._ending.wait(self._interval):
            self._fenced(self.publish)

    def _begin(self) -> None:
        if not self._is_frontend:
            reclaim(self._directory)
        self.publish()

    def _fenced(self, action: Callable[[], None]) -> None:
        """Other threads go on adding to what is read; what fails is done again with the next round."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a thread of ours; what it cannot do is no reason to end
            self._faults += 1
            if self._faults in {1, MAX_FAULTS}:
                more = "it is not tried again" if self._faults == MAX_FAULTS else "it is tried again"
                say(logging.WARNING, "kvscope: metrics cannot be published (%s); %s", type(error).__name__, more)


class _CountedAnyway:
    """What hooks, coverage and stream have counted, brought into a slab."""

    def __init__(self, slab: Slab, run: Monitored, *, judges: bool) -> None:
        self._slab = slab
        self._run = run
        self._judges = judges
        self._plans = judges and run.process != "engine" and run.config.observes_plan
        self._violations = dict.fromkeys((r.reason for r in RULES.values() if r.part in run.parts), (0, 0))
        if judges:
            for reason in self._violations:
                slab.counter("guard_violations_total", reason=reason)

    def read(self) -> None:
        slab, run = self._slab, self._run
        for cause, count in run.records_dropped().items():
            slab.counter("records_dropped_total", cause=cause).reach(count)
        self._read_hooks()
        if self._judges:
            self._read_findings()
            self._read_checks()
        if self._plans:
            slab.counter("guard_rows_audited_total").reach(run.coverage.rows)
            for state in TAIL_STATES:
                slab.gauge("tail_entries", state=state).set(run.coverage.tail_entries[state])

    def _read_hooks(self) -> None:
        faults: dict[str, int] = {}
        spent_ns: dict[str, int] = {}
        for name, (_, of_name, time_ns) in self._run.hooks_spent().items():
            series = _series_of(name)
            faults[series] = faults.get(series, 0) + of_name
            spent_ns[series] = spent_ns.get(series, 0) + time_ns
        for series, count in faults.items():
            self._slab.counter("hook_faults_total", hook=series).reach(count)
        for series, time_ns in spent_ns.items():
            if time_ns:  # some hooks only note a word, and are not timed
                self._slab.counter("hook_seconds_total", hook=series).reach(time_ns / 1e9)

    def _read_findings(self) -> None:
        """The tallies are by group, and may begin anew."""
        now: dict[str, int] = {}
        for (reason, _), tally in list(self._run.coverage.findings.items()):
            now[reason] = now.get(reason, 0) + tally.count
        for reason, (earlier, last) in self._violations.items():
            count = now.get(reason, 0)
            base = earlier + last if count < last else earlier
            self._violations[reason] = (base, count)
            self._slab.counter("guard_violations_total", reason=reason).reach(base + count)

    def _read_checks(self) -> None:
        slab, run = self._slab, self._run
        checked, stalled = checks_run(run.coverage, run.parts), checks_stalled(run.coverage, run.parts)
        for check, count in checked.items():
            slab.counter("guard_checks_total", check=check).reach(count)
            slab.gauge("guard_checks_stalled", check=check).set(check in stalled)
        for check in stalled.keys() - checked.keys():
            slab.gauge("guard_checks_stalled", check=check).set(1)
        skipped: dict[tuple[str, str], int] = {}
        for (check, cause), count in list(run.coverage.skipped.items()):
            series = (check, SKIP_CAUSE.closed(cause))  # several causes may be one series
            skipped[series] = skipped.get(series, 0) + count
        for (check, cause), count in skipped.items():
            slab.counter("guard_checks_skipped_total", check=check, cause=cause).reach(count)


def _series_of(hook: str) -> str:
    """The value of label ``hook``: that of a connector's class is of the interface."""
    name = hook
    while name and name not in HOOK.values:
        name = name.rpartition(".")[0]
    return HOOK.closed(name or hook)
