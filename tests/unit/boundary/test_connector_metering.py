"""What KV Monitor says of transfers between engines, beside a real scheduler that plans them with a connector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from hypothesis import given, settings
from tests.budget import examples
from vllm.v1.request import RequestStatus

from kvscope.boundary.connector import connector_seams
from kvscope.boundary.ledger import Ledger
from kvscope.facts.connector import ConnectorPlan, PlannedReceive
from kvscope.runtime import connector_meter
from unit.boundary import schedulers
from unit.boundary.metered import Meter, agrees, metered_seams
from unit.boundary.schedulers import Connector, Host, make_scheduler, request
from unit.boundary.test_pool_lives import ACTS, Life
from unit.boundary.test_pool_lives import SETTINGS as EVERYTHING

ABORTED = RequestStatus.FINISHED_ABORTED


class Told(Connector):
    """A connector whose class has the method that is wrapped."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """It is told."""


@pytest.fixture(autouse=True)
def wrapped() -> Iterator[None]:
    ledger = Ledger()
    with schedulers.seams(), metered_seams():
        for seam in connector_seams():
            assert ledger.install(seam.on(Told) if seam.interface else seam), ledger.absent
        yield
        assert {name: hook.faults for name, hook in ledger.hooks.items() if hook.faults} == {}
        ledger.uninstall_all()


def connected() -> tuple[Host, Meter, Connector]:
    host = Host(make_scheduler())
    meter = Meter(host)
    return host, meter, meter.connect(Told)


def transfers(meter: Meter) -> dict[str, float | None]:
    meter.publish()
    named = {
        "sent": meter.value("pd_transfer_tokens_total", "sent"),
        "received": meter.value("pd_transfer_tokens_total", "received"),
        "queued": meter.value("pd_transfer_queue_depth"),
        "in flight": meter.value("pd_transfer_in_flight"),
        "load failed": meter.value("pd_transfer_failures_total", "load_failed"),
        "aborted": meter.value("pd_transfer_failures_total", "aborted"),
        "host shutdown": meter.value("pd_transfer_failures_total", "host_shutdown"),
    }
    return {name: value for name, value in named.items() if value != 0}


def loading(tokens: int = 32) -> tuple[Host, Meter]:
    host, meter, connector = connected()
    connector.elsewhere["a"] = (tokens, True)
    host.add("a", range(40))
    host.schedule()
    return host, meter


def test_a_load_is_in_flight_until_it_is_reported_and_its_request_waits_until_it_is_taken_up() -> None:
    host, meter = loading()
    assert transfers(meter) == {"in flight": 1}
    host.finish_step(finished_recving={"a"})
    assert transfers(meter) == {"received": 32}
    assert meter.histogram("pd_transfer_latency_seconds")[0] == 1
    assert meter.histogram("pd_wait_seconds")[0] == 0
    host.step()
    waited, seconds = meter.histogram("pd_wait_seconds")
    assert (waited, seconds >= meter.histogram("pd_transfer_latency_seconds")[1]) == (1, True)


def test_what_p_keeps_is_in_flight_until_it_is_sent() -> None:
    host, meter, connector = connected()
    connector.keeps.add("a")
    host.add("a", range(40), max_tokens=1)
    host.step()
    assert transfers(meter) == {"in flight": 1}
    host.schedule()
    host.finish_step(finished_sending={"a"})
    assert transfers(meter) == {"sent": 40}
    assert meter.histogram("pd_transfer_latency_seconds")[0] == 1
    assert meter.histogram("pd_wait_seconds")[0] == 0


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_load_that_failed_brought_nothing(recomputes: bool) -> None:
    host, meter = loading()
    host.scheduler.recompute_kv_load_failures = recomputes
    host.finish_step(failed_recving={"a"}, finished_recving={"a"})
    assert transfers(meter) == {"load failed": 1}
    assert meter.histogram("pd_transfer_latency_seconds")[0] == meter.histogram("pd_wait_seconds")[0] == 0


def test_a_load_that_lacks_blocks_failed() -> None:
    host, meter = loading()
    host.finish_step(invalid_block_ids=set(host.blocks_of("a")[1:2]), finished_recving={"a"})
    assert transfers(meter) == {"load failed": 1}


def test_a_load_whose_request_was_aborted_ends_when_it_is_reported() -> None:
    host, meter = loading()
    host.scheduler.finish_requests("a", ABORTED)
    assert transfers(meter) == {"in flight": 1}
    host.finish_step(finished_recving={"a"})
    assert transfers(meter) == {"aborted": 1}
    assert meter.histogram("pd_wait_seconds")[0] == 0


def test_a_load_inside_of_a_step_is_reported_by_nobody() -> None:
    host, meter, connector = connected()
    connector.elsewhere["a"] = (32, False)
    host.add("a", range(40))
    host.step()
    assert transfers(meter) == {}


def test_a_request_whose_kv_is_elsewhere_is_queued_until_its_load_is_planned() -> None:
    host, meter, connector = connected()
    connector.elsewhere |= {"a": (32, True), "b": (32, True)}
    for name in "ab":
        asked = request(name, range(ord(name), ord(name) + 40))
        asked.kv_transfer_params = {"do_remote_prefill": True}
        host.scheduler.add_request(asked)
    host.add("here", range(20))
    assert transfers(meter) == {"queued": 2}
    host.scheduler.finish_requests("b", ABORTED)
    assert transfers(meter) == {"queued": 1}
    host.schedule()
    assert transfers(meter) == {"in flight": 1}


def test_reports_of_what_nobody_planned_count_for_nothing() -> None:
    _, meter = loading()
    assert meter.meter.connector is not None
    meter.meter.connector.on_transfers(["x"], ["y"])
    assert transfers(meter) == {"in flight": 1}


def test_what_is_under_way_ends_with_the_engine() -> None:
    host, meter, connector = connected()
    connector.elsewhere |= {"a": (32, True), "b": (32, True)}
    connector.keeps.add("c")
    for name in "ab":
        host.add(name, range(ord(name), ord(name) + 40))
    host.add("c", range(40), max_tokens=1)
    host.step()
    assert transfers(meter) == {"in flight": 3}
    for _ in range(2):
        meter.meter.say_last()
        assert transfers(meter) == {"host shutdown": 3}


def test_after_a_fault_of_a_hook_nobody_says_what_ended_with_the_engine() -> None:
    _, meter = loading()
    meter.lost = True
    meter.meter.say_last()
    assert transfers(meter) == {"in flight": None}


def test_after_a_fault_of_a_hook_nobody_says_what_is_in_flight() -> None:
    _, meter = loading()
    meter.lost = True
    assert transfers(meter)["in flight"] is None


def test_more_than_can_be_kept_are_not_counted_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_meter, "MOST_TRANSFERS", 2)
    _, meter, _ = connected()
    assert meter.meter.connector is not None
    planned = [
        PlannedReceive(request_id=name, computed_tokens=32, external_tokens=32, waits=True, blocks=([1, 2],))
        for name in "abc"
    ]
    meter.meter.connector.on_connector_plan(ConnectorPlan(receives=planned))
    assert transfers(meter)["in flight"] is None


@settings(EVERYTHING, max_examples=examples(12))
@given(ACTS)
def test_whatever_happens_every_transfer_ends_once(acts: list[tuple[str, int, int]]) -> None:
    life = Life(make_scheduler(num_blocks=20), connected=True)
    meter = Meter(life.host)
    told = meter.connect(Told)
    assert isinstance(life.connector, Connector)
    told.elsewhere, told.keeps = life.connector.elsewhere, life.connector.keeps
    for act in acts:
        life.act(*act)
        agrees(meter)
        found = transfers(meter)
        assert found.get("in flight", 0) is not None
        under_way = sum(
            r.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and name not in life.host.scheduler.finished_recving_kv_req_ids
            for name, r in life.host.scheduler.requests.items()
        ) + sum(r.is_finished() for r in life.host.scheduler.requests.values())
        assert found.get("in flight", 0) == under_way
