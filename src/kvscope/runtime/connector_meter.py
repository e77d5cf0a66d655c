"""Counts what is handed from prefill to decode through one scheduler's connector, whatever class it has.

On D a request that waits for its KV is received, on P a finished request whose blocks the connector keeps is sent. What
is planned and what the workers' connectors report is read where the scheduler is told it. A load inside of a step is
reported by nobody, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from ..facts.connector import ConnectorPlan
from ..metrics.store import Slab

MOST_TRANSFERS = 4096
"""So many that are under way are kept of each direction; with more of them nobody knows how many there are."""
OFFLOADS = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""Their loads and stores stay in this engine: what they bring was computed here."""
LOAD_FAILED, ABORTED, HOST_SHUTDOWN = "load_failed", "aborted", "host_shutdown"
"""Ends of a transfer that anybody can see from outside of a connector, other than done."""


class TransferHost(Protocol):
    """What is asked of the scheduler about requests. Implemented by the boundary."""

    def computed_tokens(self, request_id: str) -> int: ...

    def outcome(self, request_id: str) -> str | None: ...

    def is_waiting(self, request_id: str) -> bool: ...


class PlanObserver(Protocol):
    """Whoever else is told what is planned with the connector."""

    def on_connector_plan(self, plan: ConnectorPlan) -> None: ...

    def on_native_error(self, boundary: str, error_type: str) -> None: ...


class ConnectorMeter:
    """``slab`` is that of the scheduler's thread, which also publishes it. ``is_lost``: a plan may have been missed."""

    def __init__(
        self,
        slab: Slab,
        host: TransferHost,
        *,
        inner: PlanObserver | None,
        is_lost: Callable[[], bool],
        tell_error: Callable[[str, str], None],
    ) -> None:
        self._host = host
        self._inner = inner
        self._is_lost = is_lost
        self._tell_error = tell_error
        self._slab = slab
        self._queued: dict[str, None] = {}
        self._receives: dict[str, tuple[int, int]] = {}  # tokens, when it was planned
        self._sends: dict[str, tuple[int, int]] = {}
        self._waits: dict[str, int] = {}
        self._is_partial = False
        self._tokens = {way: slab.counter("pd_transfer_tokens_total", direction=way) for way in ("sent", "received")}
        self._failures = {
            cause: slab.counter("pd_transfer_failures_total", cause=cause)
            for cause in (LOAD_FAILED, ABORTED, HOST_SHUTDOWN)
        }
        self._latency = slab.histogram("pd_transfer_latency_seconds")
        self._wait = slab.histogram("pd_wait_seconds")
        self._depth = slab.gauge("pd_transfer_queue_depth")
        self._in_flight = slab.gauge("pd_transfer_in_flight")

    def on_arrival(self, request_id: str) -> None:
        """A request has come that says that its KV is elsewhere."""
        self._queued[request_id] = None

    def on_connector_plan(self, plan: ConnectorPlan) -> None:
        now = monotonic_ns()
        for receive in plan.receives:
            if receive.waits:
                self._receives[receive.request_id] = (receive.external_tokens, now)
                self._waits[receive.request_id] = now
        for request_id in plan.sends:
            self._sends[request_id] = (self._host.computed_tokens(request_id), now)
        for kept in (self._receives, self._sends, self._waits):
            while len(kept) > MOST_TRANSFERS:
                self._is_partial = True
                kept.pop(next(iter(kept)))
        if self._inner is not None:
            self._inner.on_connector_plan(plan)

    def on_transfers(self, received: list[str], sent: list[str]) -> None:
        """These were reported as finished, however that went; it is about to take effect."""
        now = monotonic_ns()
        for request_id in received:
            planned = self._receives.pop(request_id, None)
            outcome = self._host.outcome(request_id)
            if outcome is not None:
                self._waits.pop(request_id, None)
            if planned is None:
                continue
            if outcome is not None:
                self._failures[outcome].add()
            else:
                self._done("received", *planned, now)
        for request_id in sent:
            planned = self._sends.pop(request_id, None)
            if planned is not None:
                self._done("sent", *planned, now)

    def on_taken_up(self, request_id: str) -> None:
        """A request waits for its KV no longer: it may be scheduled with the step that is being made."""
        since = self._waits.pop(request_id, None)
        if since is not None:
            self._wait.observe((monotonic_ns() - since) / 1e9)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        if self._inner is not None:
            self._inner.on_native_error(boundary, error_type)
        else:
            self._tell_error(boundary, error_type)

    def on_end(self) -> None:
        """The engine ends, and with it what is under way. A second call finds nothing any more."""
        if not self._is_lost():
            self._failures[HOST_SHUTDOWN].add(len(self._receives) + len(self._sends))
        for kept in (self._queued, self._receives, self._sends, self._waits):
            kept.clear()

    def say(self) -> None:
        """Bring what is under way into the slab."""
        if self._queued:
            waiting = self._host.is_waiting
            self._queued = {name: None for name in self._queued if name not in self._receives and waiting(name)}
        self._depth.set(len(self._queued))
        if self._is_partial or self._is_lost():
            self._in_flight.clear()
        else:
            self._in_flight.set(len(self._receives) + len(self._sends))

    def _done(self, direction: str, tokens: int, planned_ns: int, now_ns: int) -> None:
        self._tokens[direction].add(tokens)
        self._latency.observe((now_ns - planned_ns) / 1e9)
