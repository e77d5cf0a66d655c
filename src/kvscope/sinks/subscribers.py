"""Findings on their way to whoever subscribed in this process: foreign code, kept off the step path.

Each subscriber has a bounded queue and a thread of its own, so that one that raises, is slow or never returns holds up
neither inference nor the other subscribers, nor the end of the process (the threads are daemons). The step path puts an
event into a queue and goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns, time_ns

from kvscope.checks.finding import Finding
from kvscope.checks.rule import Rule, Severity
from kvscope.events.names import PLAIN, RequestNames
from kvscope.fence import SLOW_NS, Fence, require_callable

QUEUED_EVENTS = 1024
"""Events that may wait for one subscriber; what comes on top is dropped and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardViolationEvent:
    """One finding. The same facts stand in its kv.violation record; None means that something does not apply.

    reason: what is wrong, a name from ``kvscope rules``, e.g. ``write_after_release``.
    check: the family that the reason belongs to, ``C1`` to ``C6``, ``L``, ``A`` or ``T``.
    severity: ``info``, ``warning``, ``error`` or ``fatal``.
    block_id: physical KV block, in ``0 .. num_blocks - 1``.
    generation: how often that block had been handed out when it was used, from 1.
    request_ids: the request whose access it is, then the other one that it concerns, where there are such. Engine
        request ids, written as ``kv_output.request_ids`` says; empty where that is ``omitted``.
    group: KV-cache group.
    step: number of the ``Scheduler.schedule()`` result, from 1; 0 before the first one.
    wall_ns: nanoseconds since 1970 when the finding was reported, by this host's clock.
    """

    reason: str
    check: str
    severity: Severity
    block_id: int | None
    generation: int | None
    request_ids: tuple[str, ...]
    group: int | None
    step: int
    wall_ns: int


Callback = Callable[[GuardViolationEvent], object]


class Subscription:
    """What ``subscribe_guard_events`` returns: the subscriber's numbers, and the way to end it."""

    __slots__ = ("_callback", "_ended", "_queue", "_thread", "delivered", "dropped", "fence")

    def __init__(self, callback: Callback, slow_ns: int = SLOW_NS) -> None:
        self.delivered = 0
        self.dropped = 0
        self.fence = Fence("subscriber", callback, slow_ns)
        self._callback = callback
        self._ended = False
        self._queue: SimpleQueue[GuardViolationEvent | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Module and qualified name of the callback."""
        return self.fence.name

    @property
    def active(self) -> bool:
        """Whether events still come: not after ``close``, not after removal, and not in a forked child."""
        return not self._ended and not self.fence.is_down

    @property
    def faults(self) -> int:
        """How often the callback raised, and how often 5 seconds passed in one call of it."""
        return self.fence.faults

    def close(self) -> None:
        """Let no further event come; one that is being delivered is not interrupted. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._queue.put(None)

    def _abandon(self) -> None:
        """In a forked child: neither the thread nor a lock that the queue may have been left with is used again."""
        self._ended = True

    def _offer(self, event: GuardViolationEvent) -> None:
        if self._queue.qsize() >= QUEUED_EVENTS:
            self.dropped += 1
            return
        if self._thread is None:
            thread = threading.Thread(target=self._deliver, name=f"kvscope-{self.name}"[:64], daemon=True)
            thread.start()
            self._thread = thread
        self._queue.put(event)

    def _deliver(self) -> None:
        while (event := self._queue.get()) is not None and self.active:
            if self.fence.passes(partial(self._callback, event)):
                self.delivered += 1


class Subscribers:
    """All subscribers of a process. ``SUBSCRIBERS`` is the one that serves."""

    def __init__(self) -> None:
        self._known: tuple[Subscription, ...] = ()  # replaced as a whole, so that publishing takes no lock
        self._lock = threading.Lock()
        self._published = 0
        self._faults_before = 0  # of those that are known no more
        self._time_ns = 0

    def subscribe(self, callback: Callback, *, slow_ns: int = SLOW_NS) -> Subscription:
        """Call ``callback`` with every finding from now on.

        Raises:
            TypeError: it cannot be called, or calling it would only make a coroutine.
        """
        require_callable("subscriber", callback)
        subscription = Subscription(callback, slow_ns)
        self._sort_out(subscription)
        return subscription

    def publish(self, finding: Finding, rule: Rule, names: RequestNames = PLAIN) -> None:
        """Queue a finding for every subscriber. Never waits, and raises nothing of theirs."""
        if not self._known:
            return
        began_ns = perf_counter_ns()
        event = _event(finding, rule, names)
        self._published += 1
        some_ended = False
        for subscription in self._known:
            if not subscription.active:
                some_ended = True
                continue
            try:
                subscription._offer(event)
            except RuntimeError:  # no thread can be started: there are too many, or the interpreter is going down
                subscription.dropped += 1
        if some_ended:
            self._sort_out()
        self._time_ns += perf_counter_ns() - began_ns

    def numbers(self) -> tuple[int, int, int] | None:
        """``(findings published, faults of all subscribers, time spent publishing in ns)``; None if there was nothing
        to publish, or nobody to publish it to.
        """
        if not self._published:
            return None
        faults = self._faults_before + sum(subscription.faults for subscription in self._known)
        return self._published, faults, self._time_ns

    def forget(self) -> None:
        """In a forked child: registrations are the parent's, whose threads and locks did not come along."""
        for subscription in self._known:
            subscription._abandon()
        self._known = ()
        self._lock = threading.Lock()
        self._published = self._faults_before = self._time_ns = 0

    def _sort_out(self, *more: Subscription) -> None:
        """Remove who has ended, add ``more``."""
        removed = []
        with self._lock:
            known = self._known
            self._known = (*(subscription for subscription in known if subscription.active), *more)
            for subscription in known:
                if subscription not in self._known:
                    self._faults_before += subscription.faults
                    removed += [subscription] if subscription.fence.is_down else []
        for subscription in removed:
            subscription.close()
            subscription.fence.say_removed()


def _event(finding: Finding, rule: Rule, names: RequestNames) -> GuardViolationEvent:
    given = [request_id for request_id in (finding.request_id, finding.other_request_id) if request_id is not None]
    written = [name for name in map(names, given) if name is not None]
    return GuardViolationEvent(
        reason=finding.reason,
        check=rule.check,
        severity=rule.severity,
        block_id=_plain(finding.block_id),
        generation=_plain(finding.generation),
        request_ids=tuple(written),
        group=_plain(finding.group_id),
        step=int(finding.step),
        wall_ns=time_ns(),
    )


def _plain(number: int | None) -> int | None:
    """A rule may have taken a number out of an array, and an event is for anybody's JSON."""
    return None if number is None else int(number)


SUBSCRIBERS = Subscribers()
"""Module state, because extensions subscribe before there is a run, and whoever finds something does not know them."""

os.register_at_fork(after_in_child=SUBSCRIBERS.forget)
