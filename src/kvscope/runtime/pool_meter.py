"""Counts what one scheduler's block pool does, and publishes it: all of it in EngineCore's own thread.

What the pool does is counted as it is told. When a step has been made, or its result has taken effect, the numbers are
published, unless that was done a moment ago and another step follows; and whenever requests are ended from outside, as
there may be no other step after it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.topology import Topology
from ..metrics.labels import GROUP
from ..metrics.store import Gauge, Slab
from ..state.block_states import HELD_BECAUSE, CountedLedger
from ..state.blocks import BlockLedger
from ..state.reuse import Reuse
from .connector_meter import OFFLOADS, ConnectorMeter, TransferHost
from .engine import EngineJudge
from .process_monitor import ProcessMonitor
from .run import Run

PUBLISH_EVERY_NS = 100_000_000
FILL_EVERY_NS = 1_000_000_000
"""The fill ratio walks the live requests."""


class MeteredScheduler(TransferHost, Protocol):
    """What is asked of the scheduler when numbers are published. Implemented by the boundary."""

    @property
    def usage(self) -> float: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def is_aborting(self) -> bool: ...

    @property
    def block_size(self) -> int: ...

    @property
    def caches_prefixes(self) -> bool: ...

    def unfilled_slots(self) -> list[int]: ...


class PoolObserver(Protocol):
    """Whoever else is told what the pool does."""

    def on_pool(self, operation: PoolOperation, boundary: str) -> None: ...

    def on_handing_out(self, operation: PoolOperation, boundary: str) -> None: ...

    def on_native_error(self, boundary: str, error_type: str) -> None: ...


class PoolMeter:
    """``ledger`` is that of ``inner`` where there is one, which then takes over each operation; None where the pool is
    not observed. ``is_lost`` says that the ledger is not right any more: blocks by state are absent from then on, and
    what has been counted stands still. vLLM's own usage and the hits go on. ``tell_error`` is told what the host
    raises where there is no ``inner``; ``end`` closes the run.
    """

    def __init__(
        self,
        slab: Slab,
        topology: Topology,
        host: MeteredScheduler,
        ledger: CountedLedger | None,
        *,
        inner: PoolObserver | None = None,
        is_lost: Callable[[], bool],
        tell_error: Callable[[str, str], None],
        end: Callable[[], None],
    ) -> None:
        self.host = host
        self.ledger = ledger
        self.connector: ConnectorMeter | None = None
        self.reuse = Reuse()
        self.slab = slab
        self._inner = inner
        self._is_lost = is_lost
        self._tell_error = tell_error
        self._end = end
        self._has_moved = True
        self._publish_at = self._fill_at = 0
        self._block_size = host.block_size
        self._usage = slab.gauge("kv_cache_usage_percent")
        self._queries, self._hits = [], []
        if host.caches_prefixes:
            self._queries = [slab.counter("prefix_cache_queries_total", unit=unit) for unit in ("token", "block")]
            self._hits = [slab.counter("prefix_cache_hits_total", unit=unit) for unit in ("token", "block")]
        if ledger is not None:
            self._states = [slab.gauge("kv_blocks", state=state) for state in ("free", "cached", "used")]
            self._held = [slab.gauge("kv_blocks", state="held", cause=cause) for cause in HELD_BECAUSE]
            self._null = slab.gauge("kv_blocks", state="null")
            self._deferred = slab.gauge("kv_deferred_free_blocks")
            self._totals = [
                slab.counter(f"kv_{name}_total")
                for name in ("block_alloc", "block_free", "block_evict", "block_touch", "refs_released")
            ]
            self._fill: dict[str, tuple[Gauge, list[int]]] = {}
            self._sizes = [group.block_size for group in topology.groups]
            for index, group in enumerate(topology.groups):
                if group.judged:  # a state or a ring has no place for each token
                    label = GROUP.closed(str(group.group_id))
                    gauge = slab.gauge("kv_token_fill_ratio", group=label)
                    self._fill.setdefault(label, (gauge, []))[1].append(index)

    # What happens -----------------------------------------------------------------------------------------------------

    def on_pool(self, operation: PoolOperation, boundary: str) -> None:
        if self._inner is not None:
            self._inner.on_pool(operation, boundary)
        elif self.ledger is not None and not self._is_lost():
            self.ledger.apply(operation, operation.step)
        self._has_moved = True
        if operation.kind == facts.RECEIVE and operation.request_id is not None and self.connector is not None:
            self.connector.on_taken_up(operation.request_id)
        if self.host.is_aborting or operation.kind == facts.RESET:
            self.publish()

    def on_handing_out(self, operation: PoolOperation, boundary: str) -> None:
        if self._inner is not None:
            self._inner.on_handing_out(operation, boundary)

    def on_admitted(self, prompt_tokens: int, hit_tokens: int) -> None:
        """A request was looked up in the prefix cache and admitted, for the first time."""
        self.reuse = self.reuse.admitted(prompt_tokens, hit_tokens, self._block_size)
        self._has_moved = True

    def on_transfers(self, received: list[str], sent: list[str]) -> None:
        """Transfers were reported as finished, which is about to take effect."""
        self._has_moved = True
        if self.connector is not None:
            self.connector.on_transfers(received, sent)

    def on_step(self) -> None:
        """A step was made, or its result has taken effect."""
        if monotonic_ns() >= self._publish_at or (self._has_moved and not self.host.is_running):
            self.publish()

    def on_native_error(self, boundary: str, error_type: str) -> None:
        if self._inner is not None:
            self._inner.on_native_error(boundary, error_type)
        else:
            self._tell_error(boundary, error_type)

    def on_shutdown(self) -> None:
        self._end()

    def say_last(self) -> None:
        """The run ends."""
        if self.connector is not None:
            self.connector.on_end()
        self.publish()

    # What is said -----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Let readers see the numbers as they are now."""
        now = monotonic_ns()
        self._publish_at, self._has_moved = now + PUBLISH_EVERY_NS, False
        self._usage.set(self.host.usage * 100)
        if self._queries:
            reuse = self.reuse
            self._queries[0].reach(reuse.queried_tokens)
            self._queries[1].reach(reuse.queried_blocks)
            self._hits[0].reach(reuse.hit_tokens)
            self._hits[1].reach(reuse.hit_blocks)
        if self.ledger is not None:
            if self._is_lost():
                self._forget_states()
            else:
                self._say_states(self.ledger, now)
        if self.connector is not None:
            self.connector.say()
        self.slab.publish()

    def _say_states(self, ledger: CountedLedger, now: int) -> None:
        used = ledger.used
        for gauge, count in zip(self._states, (ledger.free, ledger.cached, used), strict=True):
            gauge.set(count)
        for gauge, because in zip(self._held, HELD_BECAUSE, strict=True):
            gauge.set(ledger.held(because))
        self._null.set(ledger.has_null)
        self._deferred.set(ledger.held("deferred"))
        totals = (ledger.allocated, ledger.freed, ledger.evicted, ledger.touched, ledger.released)
        for counter, total in zip(self._totals, totals, strict=True):
            counter.reach(total)
        if now >= self._fill_at or not used:
            self._fill_at = now + FILL_EVERY_NS
            self._say_fill(ledger)

    def _say_fill(self, ledger: CountedLedger) -> None:
        unfilled = self.host.unfilled_slots()
        for gauge, indices in self._fill.values():
            slots = sum(ledger.used_of(index) * self._sizes[index] for index in indices)
            if slots:
                empty = sum(unfilled[index] for index in indices)
                gauge.set(min(max(1 - empty / slots, 0.0), 1.0))
            else:
                gauge.clear()

    def _forget_states(self) -> None:
        for gauge in (
            *self._states,
            *self._held,
            self._null,
            self._deferred,
            *(gauge for gauge, _ in self._fill.values()),
        ):
            gauge.clear()


def meter_of(
    run: Run,
    monitor: ProcessMonitor,
    host: MeteredScheduler,
    connector: str,
    judge: EngineJudge | None,
    *,
    is_observed: bool,
    reads_plans: bool,
) -> PoolMeter:
    """The meter of one scheduler; ``is_observed``: what its block pool does will be told, ``reads_plans``: so will be
    what is planned with its connector.
    """
    topology, faults, before = run.topology, run.allocator_faults, run.allocator_faults[0]
    if topology is None:
        raise ValueError("the scheduler's topology is not known")
    pool = None if judge is None else judge.pool
    ledger: BlockLedger | None = None
    if is_observed:
        blank = CountedLedger(topology.num_blocks, topology.null_block_id, len(topology.groups))
        ledger = blank if pool is None else pool.ledger

    def is_lost() -> bool:
        return faults[0] != before if pool is None else pool.why_lost() is not None

    def tell_error(boundary: str, error_type: str) -> None:
        run.native_error(error_type, component="scheduler", boundary=boundary)

    meter = PoolMeter(
        monitor.store.slab(),
        topology,
        host,
        ledger if isinstance(ledger, CountedLedger) else None,
        inner=None if pool is None else judge,
        is_lost=is_lost,
        tell_error=tell_error,
        end=run.close,
    )
    if reads_plans and connector not in OFFLOADS:
        faults_before = run.connector_faults
        meter.connector = ConnectorMeter(
            meter.slab,
            host,
            inner=judge,
            is_lost=lambda: run.connector_faults != faults_before,
            tell_error=tell_error,
        )
    monitor.observe_scheduler(connector, (lambda: meter.reuse) if host.caches_prefixes else None)
    monitor.before_close.append(meter.say_last)
    return meter
