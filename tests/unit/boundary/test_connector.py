"""What a real scheduler plans with a connector is read, and what it makes of the connector's reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from hypothesis import given
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvscope.boundary.connector import (
    PlanReader,
    connector_seams,
    read_connector_result,
    read_taken_up,
    says_something,
)
from kvscope.boundary.ledger import Ledger
from kvscope.checks.judge import judge_completions, judge_failed_loads, judge_receives
from kvscope.facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp
from kvscope.state.transfers import Transfers
from unit.boundary import schedulers
from unit.boundary.schedulers import Connector, Host, full, make_scheduler, sliding
from unit.boundary.test_pool_lives import ACTS, SETTINGS, Life

ABORTED = RequestStatus.FINISHED_ABORTED
PARTS = ("kv_trace", "kv_guard_config")


class Told(Connector):
    """A connector whose class has the method that is wrapped."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """It is told."""


class Derived(Told):
    """Has it from its base."""


@pytest.fixture(scope="module", autouse=True)
def wrapped() -> Iterator[None]:
    ledger = Ledger()
    with schedulers.seams():
        for seam in connector_seams():
            assert ledger.install(seam.on(Told) if seam.interface else seam), ledger.absent
        yield
        assert {name: hook.faults for name, hook in ledger.hooks.items() if hook.faults} == {}
        ledger.uninstall_all()


class Watched(Host):
    """A :class:`Host` whose connector is read, and whose reports are judged before and after they take effect."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.plans: list[ConnectorPlan] = []
        self.transfers = Transfers()
        scheduler.connector = self.connector = Derived()
        PlanReader(self, scheduler)

    def connect(self) -> Connector:
        return self.connector

    def on_connector_plan(self, plan: ConnectorPlan) -> None:
        self.plans.append(plan)
        step, topology = self.follower.step + 1, self.follower.bindings.topology
        self.transfers.plan(plan, step)
        assert judge_receives(plan.receives, step, str(step), topology, PARTS, self.follower.ledger) == []

    def finish_step(self, sampled: dict[str, list[int]] | None = None, **said: Any) -> None:
        _, _, declaration = self.outputs[0]
        step, trace_id = declaration.step, declaration.trace_id
        result = read_connector_result(self.scheduler, KVConnectorOutput(**said))
        failed = self.transfers.failed(result, declaration, self.follower.bindings)
        completions = self.transfers.complete(result, step)
        assert judge_completions(completions, step, trace_id, PARTS, is_partial=self.transfers.is_partial) == []
        super().finish_step(sampled, **said)
        taken_up = read_taken_up(self.scheduler, [load.request_id for load in failed])
        assert judge_failed_loads(failed, taken_up, step, trace_id, PARTS) == []


def loading(tokens: int = 32, *, asynchronous: bool = True, recomputes: bool = False) -> Watched:
    host = Watched(make_scheduler())
    host.scheduler.recompute_kv_load_failures = recomputes
    host.connector.elsewhere["a"] = (tokens, asynchronous)
    host.add("a", range(40))
    host.schedule()
    return host


def planned(host: Watched, *, waits: bool) -> list[PlannedReceive]:
    blocks = host.blocks_of("a")
    return [
        PlannedReceive(
            request_id="a", computed_tokens=32, external_tokens=32, waits=waits, blocks=(blocks[: 2 if waits else 3],)
        )
    ]


def test_a_load_that_a_request_waits_for_is_planned() -> None:
    host = loading()
    assert host.plans == [ConnectorPlan(receives=planned(host, waits=True))]
    host.finish_step(finished_recving={"a"})
    host.step()
    assert len(host.plans) == 1, "blocks for what is left to compute are no second load"


def test_a_load_inside_of_the_step_is_planned() -> None:
    host = loading(asynchronous=False)
    assert host.plans == [ConnectorPlan(receives=planned(host, waits=False))]


def test_a_finished_request_that_the_connector_keeps_is_a_send() -> None:
    host = Watched(make_scheduler())
    host.connector.keeps.add("a")
    host.add("a", range(20), max_tokens=1)
    host.add("b", range(20), max_tokens=1)
    host.step()
    assert host.plans == [ConnectorPlan(sends=["a"])]
    host.step(finished_sending={"a"})
    assert not host.scheduler.requests


def test_a_request_that_is_aborted_under_its_load_is_received_all_the_same() -> None:
    host = loading()
    host.scheduler.finish_requests("a", ABORTED)
    host.finish_step(finished_recving={"a"})
    assert host.blocks_of("a") == []


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_load_that_fails_is_taken_up_by_the_scheduler(asynchronous: bool, recomputes: bool) -> None:
    host = loading(asynchronous=asynchronous, recomputes=recomputes)
    said = {"finished_recving": {"a"}} if asynchronous else {}
    host.finish_step(invalid_block_ids={host.blocks_of("a")[1]}, **said)
    assert ("a" in host.scheduler.requests) == recomputes


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_request_whose_load_fails_whole_is_taken_up_by_the_scheduler(recomputes: bool) -> None:
    host = loading(recomputes=recomputes)
    host.finish_step(finished_recving={"a"}, failed_recving={"a"})
    assert ("a" in host.scheduler.requests) == recomputes


def test_where_requests_stand_is_read() -> None:
    host = loading(recomputes=True)
    host.add("b", range(5))
    host.add("c", range(5))
    host.scheduler.failed_recving_kv_req_ids.add("a")
    host.scheduler.finish_requests("c", ABORTED)
    assert read_taken_up(host.scheduler, ["a", "b", "c", "x"]) == [
        TakenUp(request_id="a", is_over=False, is_marked=True, computed_tokens=32),
        TakenUp(request_id="b", is_over=False, is_marked=False, computed_tokens=0),
        TakenUp(request_id="c", is_over=True, is_marked=False, computed_tokens=0),
        TakenUp(request_id="x", is_over=True, is_marked=False, computed_tokens=0),
    ]


def test_what_a_connector_says_is_read_in_order_and_strangers_are_named() -> None:
    host = loading()
    said = KVConnectorOutput(finished_sending={"z", "a"}, finished_recving={"y", "a"}, invalid_block_ids={9, 2})
    assert says_something(said)
    assert read_connector_result(host.scheduler, said) == ConnectorResult(
        finished_sending=["a", "z"], finished_recving=["a", "y"], invalid_blocks=[2, 9], unknown=["y", "z"]
    )
    assert not says_something(KVConnectorOutput(finished_sending=set()))


def test_the_seam_of_an_interface_goes_where_the_method_is() -> None:
    (seam,) = [seam for seam in connector_seams() if seam.interface]
    on = seam.on(Derived)
    assert on.resolve(load=False)[0] is Told
    assert (on.name, on.target) == ("connector.alloc.Told", f"{__name__}:Told.update_state_after_alloc")
    with pytest.raises(LookupError, match="Connector has no update_state_after_alloc"):
        seam.on(Connector)
    before = vars(Derived).copy(), vars(Told)["update_state_after_alloc"]
    ledger = Ledger()
    assert ledger.install(on)
    assert vars(Told)["update_state_after_alloc"] is not before[1]
    ledger.uninstall_all()
    assert (vars(Derived), vars(Told)["update_state_after_alloc"]) == before


class WatchedLife(Life):
    """A :class:`Life` with a connector that is read, until it ends: then it says of everything that it is sent."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.host = Watched(scheduler)
        self.connector = self.host.connector

    def end(self) -> None:
        self.host.transfers.lose()


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("windows", [True, False])
def test_whatever_an_honest_connector_reports_is_what_was_planned(recomputes: bool, windows: bool) -> None:
    @SETTINGS
    @given(ACTS)
    def live(acts: list[tuple[str, int, int]]) -> None:
        scheduler = make_scheduler(full(), sliding(32), num_blocks=32) if windows else make_scheduler(num_blocks=20)
        scheduler.recompute_kv_load_failures = recomputes
        life = WatchedLife(scheduler)
        for act in acts:
            life.act(*act)
        life.end()

    live()
