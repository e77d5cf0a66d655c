"""The connector's side of an observer: what it records, and what it finds and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ViolationError
from kvscope.facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp
from kvscope.facts.requests import Declaration, StepResult
from unit.runtime.support import Hooks, Live, last_coverage, of_event

PLAN = ConnectorPlan(
    receives=[PlannedReceive(request_id="r", computed_tokens=32, external_tokens=16, waits=True, blocks=([7, 8],))]
)
DONE = ConnectorResult(finished_recving=["r"])
RESULT = StepResult(request_ids=("a", "b"), sampled_tokens=(1, 1))


class Failing(Hooks):
    """From some point on a hook of the connector has failed."""

    faults = 0

    def connector_faults(self) -> int:
        return self.faults


def connected(folder: Path, **run: Any) -> tuple[Live, Declaration]:
    """``a`` and ``b`` decode, and ``r`` waits for a load since step 1."""
    live = Live(folder, **run)
    live.engine.observe_connector()
    live.engine.on_schedule_begin()
    live.engine.on_connector_plan(PLAN)
    step, _ = live.engine.next_step()
    declaration = live.scene.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])
    assert declaration.step == step == 1
    live.engine.on_schedule(declaration)
    return live, declaration


def test_plan_result_and_what_became_of_it_are_recorded_with_their_step(tmp_path: Path) -> None:
    live, step = connected(tmp_path)
    live.engine.on_connector_plan(ConnectorPlan(sends=["s"]))
    live.engine.on_connector_result(step, ConnectorResult(finished_recving=["r"], failed_recving=["r"]))
    assert live.engine.failed_loads == ["r"]
    stands = TakenUp(request_id="r", is_over=False, is_marked=True, computed_tokens=0)
    live.engine.on_taken_up(step, [stands])
    assert live.engine.failed_loads == []
    plans = of_event(live.run, "kv.boundary", "connector_plan")
    assert [(p.get("step"), p.get("after_step"), p["component"]) for p in plans] == [
        (1, None, "connector"),
        (None, 1, "connector"),
    ]
    (receive,) = plans[0]["receives"]
    assert (receive["request_id"], receive["external_tokens"], receive["blocks"]) == ("r", 16, [[[7, 8]]])
    said, became = of_event(live.run, "kv.boundary", "connector_result")
    assert (said["step"], said["failed_recving"], said["trace_id"]) == (1, ["r"], "run.0.1")
    assert became["taken_up"][0]["is_marked"] is True
    assert of_event(live.run, "kv.violation") == []


def test_a_report_that_cannot_be_true_stops_the_engine_before_it_takes_effect(tmp_path: Path) -> None:
    live, step = connected(tmp_path, trace="raise")
    live.engine.on_connector_result(step, DONE)
    live.engine.on_update(step, RESULT)
    live.engine.on_connector_result(step, DONE)
    with pytest.raises(ViolationError, match="reason=connector_duplicate_completion") as stopped:
        live.engine.on_update(step, RESULT)
    assert (stopped.value.request, stopped.value.step) == ("r", 1)


def test_a_failed_load_that_is_passed_over_stops_the_engine_before_the_result_is_let_out(tmp_path: Path) -> None:
    live, step = connected(tmp_path, trace="raise")
    live.engine.on_connector_result(step, ConnectorResult(finished_recving=["r"], failed_recving=["r"]))
    live.engine.on_update(step, RESULT)
    live.engine.on_taken_up(step, [TakenUp(request_id="r", is_over=False, is_marked=False, computed_tokens=32)])
    with pytest.raises(ViolationError, match="reason=connector_failed_receive_lost"):
        live.engine.on_updated()


def test_after_a_fault_of_a_hook_nothing_follows_from_a_plan_that_is_not_there(tmp_path: Path) -> None:
    hooks = Failing()
    live, step = connected(tmp_path, hooks=hooks)
    hooks.faults = 1
    live.engine.on_connector_result(step, ConnectorResult(finished_recving=["x"], unknown=["y"]))
    assert of_event(live.run, "kv.violation") == []
    assert last_coverage(live.run)["checks_skipped"]["L"] == {"connector_hook_fault": 1}


def test_without_a_connector_that_is_read_its_reports_are_not_judged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.engine.on_connector_result(live.declare(new=[("a", ([1, 2, 3],), 0, 40)]), DONE)
    assert live.engine.failed_loads == []
    assert of_event(live.run, "kv.boundary", "connector_result") == []
