"""A real scheduler of vLLM that is counted, beside a count of every block and every request of its own books."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from typing import Any

from kvscope.boundary.connector import PlanReader
from kvscope.boundary.ledger import Ledger
from kvscope.boundary.metering import MeteredHost, metering_seams, observe_scheduler
from kvscope.boundary.topology import read_topology
from kvscope.facts.allocator import PoolOperation
from kvscope.metrics.layout import PLACES
from kvscope.metrics.store import Slab
from kvscope.runtime.connector_meter import ConnectorMeter
from kvscope.runtime.pool_meter import PoolMeter
from kvscope.state.block_states import CountedLedger
from kvscope.testing.metering import blocks_by_state, referenced_blocks
from unit.boundary.schedulers import Connector, Host

STATES = ("free", "cached", "used")
HELD = ("deferred", "connector", "isolated", "other")


class Counted(PoolMeter):
    """``published`` counts how often."""

    published = 0

    def publish(self) -> None:
        self.published += 1
        super().publish()


class Meter:
    """The meter of a host that others observe as well. Its ``slab`` goes nowhere."""

    def __init__(self, host: Host) -> None:
        scheduler = host.scheduler
        topology = read_topology(scheduler.kv_cache_config)
        self.host = host
        self.lost = False
        self.errors: list[tuple[str, str]] = []
        self.follower = host.follower
        self.slab = Slab(None)
        self.ledger = CountedLedger(topology.num_blocks, topology.null_block_id, len(topology.groups))
        self.meter = Counted(
            self.slab,
            topology,
            MeteredHost(scheduler),
            self.ledger,
            is_lost=lambda: self.lost,
            tell_error=lambda *told: self.errors.append(told),
            end=lambda: None,
        )
        host.reader.observer = self
        observe_scheduler(self.meter, scheduler)

    def connect(self, kind: type[Connector]) -> Connector:
        """Give the scheduler a connector of this class, of which everything that is planned is told."""
        scheduler = self.host.scheduler
        scheduler.connector = connector = kind()
        self.meter.connector = ConnectorMeter(
            self.slab,
            self.meter.host,
            inner=None,
            is_lost=lambda: self.lost,
            tell_error=lambda *told: self.errors.append(told),
        )
        PlanReader(self.meter.connector, scheduler)
        return connector

    def publish(self) -> None:
        self.meter.publish()

    def on_pool(self, operation: PoolOperation, boundary: str) -> None:
        self.follower.on_pool(operation, boundary)
        self.meter.on_pool(operation, boundary)

    def on_handing_out(self, operation: PoolOperation, boundary: str) -> None:
        self.follower.on_handing_out(operation, boundary)
        self.meter.on_handing_out(operation, boundary)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self.follower.on_native_error(boundary, error_type)
        self.meter.on_native_error(boundary, error_type)

    def value(self, name: str, *labels: str) -> float | None:
        """What was said last, None for a series that does not exist."""
        cell = self.slab.cells[PLACES[name, labels].start]
        return None if isnan(cell) else cell

    def histogram(self, name: str) -> tuple[float, float]:
        """How many observations, and their sum."""
        place = PLACES[name, ()]
        *counts, total = self.slab.cells[place.start : place.start + place.width]
        return sum(counts), total

    def states(self) -> dict[str, float]:
        found = {state: self.value("kv_blocks", state, "") for state in (*STATES, "null")}
        found["held"] = sum(filter(None, (self.value("kv_blocks", "held", cause) for cause in HELD)))
        return {state: count for state, count in found.items() if count is not None}


def agrees(meter: Meter) -> None:
    """Whatever has happened, what is said is what is there."""
    host = meter.host
    meter.publish()
    assert meter.states() == blocks_by_state(host.scheduler)
    assert sum(meter.states().values()) == len(host.pool.blocks)
    assert meter.value("kv_cache_usage_percent") == host.scheduler.get_kv_cache_usage() * 100
    ledger = meter.ledger
    assert ledger.allocated - ledger.freed == referenced_blocks(host.scheduler)
    assert meter.value("kv_block_alloc_total") == ledger.allocated
    assert meter.value("kv_block_free_total") == ledger.freed
    fills = [meter.value("kv_token_fill_ratio", str(group)) for group in range(len(host.reader.managers))]
    assert all(fill is None or 0 <= fill <= 1 for fill in fills)


@contextmanager
def metered_seams() -> Iterator[Ledger]:
    ledger = Ledger()
    for seam in metering_seams():
        assert ledger.install(seam), ledger.absent
    try:
        yield ledger
        assert {name: hook.faults for name, hook in ledger.hooks.items() if hook.faults} == {}
    finally:
        ledger.uninstall_all()


def hits_of(outputs: Any) -> dict[str, int]:
    """``num_cached_tokens`` of each request that has its first output among these, as the front end takes it."""
    return {
        output.request_id: output.prefill_stats.num_cached_tokens
        for client in outputs.values()
        for output in client.outputs
        if output.prefill_stats is not None
    }
