"""A worker: replays what it was told, judges what its runner hands over, and accounts for every row."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.finding import Finding
from kvscope.errors import ViolationError
from kvscope.facts.plans import AgreedPlan, DummyRun, GroupPlan, Plan, PlanSnapshot
from kvscope.facts.requests import Declaration, Drafts, StepRequests, StepResult
from kvscope.facts.topology import Ranks
from kvscope.runtime.checks_counted import checks_run
from kvscope.runtime.follower import PoolFollower
from kvscope.runtime.worker import WorkerJudge
from unit.checks.changes import CHANGES
from unit.checks.scenes import ONE_GROUP, declare, decoding
from unit.checks.worlds import LAYOUTS, World, blocks_for, copied, group, pool
from unit.events.samples import same
from unit.runtime.support import Live, last_coverage, make_run, of_event

RESULT = StepResult(request_ids=("a", "b"), sampled_tokens=(1, 1))


def decoding_plan() -> Plan:
    scene, declaration = decoding()
    return scene.plan(declaration)


def reasons(live: Live) -> list[str]:
    return [said["reason"] for said in of_event(live.run, "kv.violation")]


def accounted(live: Live) -> dict[str, int]:
    """Causes of what was not judged, once it is clear that judged and skipped rows are all that were scheduled.

    Rows of groups that no check is for stand beside these numbers: nobody counts them as scheduled.
    """
    coverage = live.run.coverage
    skipped = {cause: count for (check, cause), count in coverage.skipped.items() if check == "plan"}
    judgeable = [count for cause, count in skipped.items() if not cause.startswith("semantics:")]
    assert coverage.rows_scheduled == coverage.rows + sum(judgeable)
    run = checks_run(coverage, live.run.parts)
    assert all(run.get(check, 0) == coverage.rows for check in ("C1", "C3", "C4", "C6"))
    live.run.close()
    return skipped


# What is judged -------------------------------------------------------------------------------------------------------


def test_a_plan_is_judged_and_recorded(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.decode(change=lambda plan: plan.groups[0].slots.__iadd__([1, 0, 0, 0, 0]))
    live.worker.on_result(RESULT)
    (said,) = of_event(live.run, "kv.violation")
    assert (said["reason"], said["step"], said["component"], said["boundary"]) == (
        "write_target_mismatch", 2, "runner", "plan",
    )  # fmt: skip
    assert [r["step"] for r in of_event(live.run, "kv.write")] == [1, 2]
    assert [r["step"] for r in of_event(live.run, "kv.read")] == [1, 2]
    assert [r["step"] for r in of_event(live.run, "kv.boundary", "worker_input")] == [1, 2]
    assert [r["step"] for r in of_event(live.run, "kv.boundary", "worker_result")] == [2]


def test_every_row_of_sound_steps_is_judged(tmp_path: Path) -> None:
    live = Live(tmp_path, topology=pool(group(0), group(1, "mamba"), group(2)))
    live.step(new=[("a", ([1, 2], [3], [4, 5]), 0, 20), ("b", ([6], [7], [8]), 0, 3)])
    live.step(known=[("a", None, 20, 1), ("b", None, 3, 1)])
    live.step(known=[("a", None, 21, 1)], finished=["b"])
    assert accounted(live) == {"semantics:mamba": 5}
    last = last_coverage(live.run)
    assert (last["steps"], last["rows_scheduled"], last["rows"], last["tokens"]) == (3, 10, 10, 26)
    assert last["checks_run"] == dict.fromkeys(("C1", "C2", "C3", "C4", "C5", "C6"), 10) | {"L": 5}
    assert reasons(live) == []


def test_a_message_that_differs_from_its_declaration_is_reported(tmp_path: Path) -> None:
    live = Live(tmp_path)
    declaration = live.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    message = declaration.requests.copy()
    message.new_blocks[0][0][1] = 9
    live.worker.on_input(declaration, message)
    assert reasons(live) == ["handover_delta_mismatch"]
    (recorded,) = of_event(live.run, "kv.boundary", "worker_input")
    assert recorded["as_declared"] is False
    assert live.worker._bindings is not None
    assert live.worker._bindings.table("a", 0).tolist() == [1, 2, 3]


def arrive(live: Live, declaration: Declaration) -> None:
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_launched()


def out_of_turn(live: Live) -> list[tuple[int, str]]:
    found = [said for said in of_event(live.run, "kv.violation") if said["reason"] == "handover_out_of_order"]
    return [(said["step"], said["expected"]) for said in found]


def test_a_step_that_is_lost_on_its_way_is_reported_with_the_next_that_comes(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.declare()
    live.decode()
    live.decode(41)
    assert out_of_turn(live) == [(3, "step 2")]
    (recorded,) = [r for r in of_event(live.run, "kv.boundary", "worker_input") if "previous_step" in r]
    assert (recorded["step"], recorded["previous_step"], recorded["as_declared"]) == (3, 1, True)


def test_steps_that_change_places_or_come_twice_are_reported(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    second, third = live.declare(), live.declare()
    for declaration in (third, second, second):
        arrive(live, declaration)
    live.decode()
    assert out_of_turn(live) == [(3, "step 2"), (2, "step 4"), (2, "step 4")]
    assert [r["step"] for r in of_event(live.run, "kv.boundary", "worker_input")] == [1, 3, 2, 2, 4]


def test_after_a_step_that_was_not_seen_as_it_came_none_is_out_of_turn(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    missed = [live.declare() for _ in range(3)]
    live.worker.on_input_unobserved(missed[0].requests)
    live.worker.on_launched()
    arrive(live, missed[1])  # the scheduler's hook had missed one before it
    live.worker.on_launched()  # our own hook failed, and the step went on
    live.decode()
    live.declare()
    live.worker.on_native_error("worker.execute", "RuntimeError")
    live.decode(41)
    assert out_of_turn(live) == []


def test_a_step_that_failed_in_the_host_had_its_turn(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare()
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_native_error("worker.execute", "RuntimeError")
    live.declare()
    live.decode()
    assert out_of_turn(live) == [(4, "step 3")]


def test_other_drafts_than_declared_are_reported(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests, Drafts(spec_tokens={"a": 2}, invalid_spec_tokens={}))
    assert reasons(live) == ["handover_spec_mismatch"]
    recorded = of_event(live.run, "kv.boundary", "worker_input")[-1]
    assert [entry["spec_tokens"] for entry in recorded["requests"]] == [2, 0]


def test_a_message_is_kept_as_it_was_when_the_worker_changes_it_later(tmp_path: Path) -> None:
    live = Live(tmp_path)
    declaration = live.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    message = declaration.requests.copy()
    message.scheduled["a"] = 39
    live.worker.on_input(declaration, message)
    message.scheduled["a"] = 12345
    assert "12345" not in str(of_event(live.run, "kv.boundary", "worker_input"))
    assert reasons(live) == ["handover_request_mismatch"]


def test_a_batch_without_a_scheduled_request_is_reported_and_the_rest_judged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    plan = live.scene.plan(declare(2, known=[("b", None, 40, 1)]))
    plan.groups[0].slots[0] += 1
    live.worker.on_plan(plan)
    live.worker.on_launched()
    assert accounted(live) == {"not_in_batch": 1}
    assert reasons(live) == ["handover_request_mismatch", "write_target_mismatch"]


def test_a_batch_with_a_request_too_many_is_reported_and_the_rest_judged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_plan(live.scene.plan(declare(2, known=[("b", None, 40, 1), ("a", None, 40, 1)])))
    live.worker.on_launched()
    assert accounted(live) == {}
    assert reasons(live) == ["handover_request_mismatch"]


def test_a_dummy_run_is_recorded_after_the_step_before_it(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    slots = np.array([-1, 70], np.int64)
    live.worker.on_dummy(DummyRun(slots={0: slots}, num_tokens=2))
    slots[:] = 99
    (said,) = of_event(live.run, "kv.violation")
    assert (said["reason"], said["slot"], said["other_request_id"]) == ("dummy_slot_enabled", 70, "b")
    (recorded,) = of_event(live.run, "kv.boundary", "dummy")
    assert recorded["after_step"] == 1
    assert "99" not in str({name: value for name, value in recorded.items() if "slot" in name})
    assert last_coverage(live.run)["checks_run"]["dummy"] == 1


def test_a_dummy_run_that_is_off_is_counted_and_silent(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.worker.on_dummy(DummyRun(slots={0: np.full(4, -1)}, num_tokens=4))
    assert reasons(live) == []
    assert last_coverage(live.run)["checks_run"]["dummy"] == 1


@pytest.mark.parametrize(
    ("trace", "guard", "expected"),
    [
        ("log", "log", ["write_foreign_block", "write_slot_collision", "write_target_mismatch"]),
        ("log", None, ["write_slot_collision", "write_target_mismatch"]),
        (None, "log", ["write_foreign_block"]),
    ],
)
def test_a_part_that_is_off_finds_nothing(tmp_path: Path, trace: Any, guard: Any, expected: list[str]) -> None:
    live = Live(tmp_path, trace=trace, guard=guard)
    live.warm()
    live.decode(change=lambda plan: plan.groups[0].slots.__setitem__(0, 104))
    (said,) = of_event(live.run, "kv.violation")
    assert [said["reason"], *said.get("also", ())] == expected


# What is not judged, and why ------------------------------------------------------------------------------------------


def test_rows_whose_table_is_not_known_are_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.step(known=[("old", ([1, 2, 3],), 40, 1)], new=[("a", ([4, 5],), 0, 20)])
    assert accounted(live) == {"table_unknown": 1}
    assert live.run.coverage.rows == 1
    assert reasons(live) == ["bind_unknown_request"]


def test_a_batch_of_which_nothing_is_known_is_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.step(known=[("old", ([1, 2, 3],), 40, 1), ("older", ([4],), 3, 1)])
    assert accounted(live) == {"table_unknown": 2}


def test_plans_in_device_memory_are_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    declaration = live.declare(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_plan_skipped("device_tensors")
    live.worker.on_launched()
    live.worker.on_plan_skipped("device_tensors")  # outside a step
    assert accounted(live) == {"device_tensors": 2}


def test_a_step_whose_plan_was_never_seen_is_counted(tmp_path: Path) -> None:
    """The runner's seam is off after too many faults, or a subclass has gone another way."""
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_launched()
    assert accounted(live) == {"no_plan": 2}


def test_checks_whose_seam_stands_still_are_named_with_the_step_at_which_it_last_fired(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    for more in range(100):
        declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
        live.worker.on_input(declaration, declaration.requests)
        live.worker.on_launched()
        live.engine.on_update(declaration, None)
        assert (live.run.coverage.stalled()[0] is None) == (more < 99)
    said = last_coverage(live.run)
    assert said["checks_stalled"] == dict.fromkeys(("C1", "C2", "C3", "C4", "C5", "C6"), 1)


def test_a_step_that_the_host_failed_is_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_native_error("worker.execute", "RuntimeError")
    (said,) = of_event(live.run, "kv.error")
    assert (said["error_type"], said["component"], said["after_step"]) == ("RuntimeError", "worker", 2)
    assert accounted(live) == {"native_error": 2}
    assert live.worker.expects_no_plan


def test_a_step_that_failed_after_its_plan_is_counted_once(tmp_path: Path) -> None:
    live = Live(tmp_path)
    declaration = live.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_plan(live.scene.plan(declaration))
    live.worker.on_native_error("worker.execute", "RuntimeError")
    live.worker.on_launched()
    assert accounted(live) == {}


def test_a_plan_that_our_rules_failed_on_is_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    declaration = live.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    live.worker.on_input(declaration, declaration.requests)
    plan = live.scene.plan(declaration)
    plan.groups[0] = cast("GroupPlan", None)
    with pytest.raises(AttributeError):  # which the hook swallows and counts
        live.worker.on_plan(plan)
    live.worker.on_launched()
    assert accounted(live) == {"no_plan": 1}


@pytest.mark.parametrize("fails", ["take", "advance"])
def test_a_message_that_our_code_failed_on_is_replayed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", ([9],), 48, 1), ("b", None, 40, 1)])
    declaration.operations_before = 3
    with monkeypatch.context() as patch:
        patch.setattr(PoolFollower, fails, lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):  # which the hook swallows and counts
            live.worker.on_input(declaration, declaration.requests)
    assert live.worker.expects_no_plan
    live.worker.on_plan(live.scene.plan(declaration))
    live.worker.on_launched()
    live.step(known=[("a", None, 49, 1)])
    assert accounted(live) == {"no_plan": 2}
    assert reasons(live) == []


def test_a_step_that_the_schedulers_hook_missed_is_followed_and_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    missed = live.declare(known=[("a", ([9],), 48, 1), ("b", None, 40, 1)])
    live.worker.on_input_unobserved(missed.requests)
    assert live.worker.expects_no_plan
    live.worker.on_plan(live.scene.plan(missed))
    live.worker.on_launched()
    live.step(known=[("a", None, 49, 1)])
    assert accounted(live) == {"scheduler_hook_fault": 2}
    assert reasons(live) == []


def test_a_message_that_lost_its_declaration_is_a_finding_and_followed(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    lost = live.declare(known=[("a", ([9],), 48, 1)])
    live.worker.on_input_without_declaration(lost.requests)
    live.worker.on_launched()
    live.step(known=[("a", None, 49, 1)])
    (said,) = of_event(live.run, "kv.violation")
    assert (said["reason"], said["step"]) == ("handover_missing", 2)
    assert accounted(live) == {"declaration_missing": 1}


def test_messages_from_before_the_first_declaration_are_no_finding(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.worker.on_input_without_declaration(declare(1, new=[("a", ([1],), 0, 3)]).requests)
    assert reasons(live) == []
    assert live.run.coverage.skipped == {("plan", "before_first_declaration"): 1}


def test_context_parallel_plans_are_not_judged_and_counted(tmp_path: Path) -> None:
    """Each rank computes its own part of the positions: neither slots nor positions follow from the declaration."""
    live = Live(tmp_path, cause="context_parallel")

    def other_part(plan: Plan) -> None:
        plan.positions += 7
        plan.groups[0].slots += 3

    live.step(other_part, new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4],), 0, 3)])
    assert accounted(live) == {"context_parallel": 2}
    assert reasons(live) == []
    assert of_event(live.run, "kv.write") == []


def test_estimated_lengths_are_counted_beside_what_is_judged(tmp_path: Path) -> None:
    live = Live(tmp_path)

    def estimated(plan: Plan) -> None:
        plan.exact = False

    live.step(estimated, new=[("a", ([1, 2, 3],), 0, 40)])
    assert last_coverage(live.run)["checks_skipped"]["C1"] == {"estimated_lengths": 1}
    assert accounted(live) == {}


# When nothing is expected ---------------------------------------------------------------------------------------------


def test_before_the_pool_is_known_nothing_is_looked_at(tmp_path: Path) -> None:
    run = make_run(tmp_path, "worker")
    worker = WorkerJudge(run, returns_results=True)
    declaration = declare(1, new=[("a", ([1],), 0, 3)])
    worker.on_input(declaration, declaration.requests)
    worker.on_dummy(DummyRun(slots={0: np.array([5])}, num_tokens=1))
    worker.on_input_unobserved(declaration.requests)
    worker.on_plan(decoding_plan())
    assert worker.expects_no_plan
    assert run.coverage.findings == {}
    run.close()


def test_a_plan_is_expected_only_within_a_step_that_has_work(tmp_path: Path) -> None:
    live = Live(tmp_path)
    assert live.worker.expects_no_plan
    declaration = live.declare(new=[("a", ([1],), 0, 3)])
    live.worker.on_input(declaration, declaration.requests)
    assert not live.worker.expects_no_plan
    live.worker.on_launched()
    assert live.worker.expects_no_plan
    empty = live.declare()
    live.worker.on_input(empty, empty.requests)
    assert live.worker.expects_no_plan
    live.worker.on_launched()
    live.run.close()


def test_an_empty_step_as_declared_is_not_recorded(tmp_path: Path) -> None:
    live = Live(tmp_path)
    empty = live.declare()
    live.worker.on_input(empty, empty.requests.copy())
    live.worker.on_result(RESULT)
    ending = live.declare(finished=["a"])
    live.worker.on_input(ending, StepRequests(**{**_fields(ending.requests), "finished": set()}))
    assert [said["step"] for said in of_event(live.run, "kv.boundary", "worker_input")] == [2]
    assert reasons(live) == ["handover_request_mismatch"]
    assert of_event(live.run, "kv.boundary", "worker_result") == []


def _fields(requests: StepRequests) -> dict[str, Any]:
    return {name: getattr(requests, name) for name in requests.__struct_fields__}


def test_a_result_is_recorded_once(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.worker.on_result(RESULT)
    live.worker.on_result(RESULT)
    declaration = live.declare(known=[("a", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_result(None)
    assert len(of_event(live.run, "kv.boundary", "worker_result")) == 1


def test_tables_start_anew_with_a_new_pool(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.worker.bind_topology(ONE_GROUP)
    live.scene.bindings.apply(declare(9, finished=["a", "b"]).requests)
    declaration = live.declare(new=[("c", ([1],), 0, 3)], finished=["a", "b"])
    live.worker.on_input(declaration, declaration.requests)
    live.worker.on_plan(live.scene.plan(declaration))
    assert reasons(live) == []


def test_a_worker_beside_the_scheduler_leaves_the_end_to_it(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.worker.on_shutdown()
    live.run.stream.flush()
    assert live.run.stream.balance().dropped == {}
    live.decode()
    assert last_coverage(live.run)["steps"] == 2


def test_a_worker_of_its_own_ends_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "worker")
    run.open()
    WorkerJudge(run, returns_results=True).on_shutdown()
    (last,) = of_event(run, "kv.coverage")
    assert (last["component"], last["boundary"]) == ("worker", "shutdown")


# An access outside the cache ------------------------------------------------------------------------------------------


def outside(plan: Plan) -> None:
    plan.groups[0].slots[0] = 64 * 16
    plan.groups[0].slots[3] = -9
    plan.groups[0].tables[0, 0] = 64
    plan.groups[0].tables[1, 1] = -3


def test_under_log_it_is_recorded_and_launched_unchanged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    plan = live.scene.plan(declaration)
    outside(plan)
    before = copied(plan)
    live.worker.on_plan(plan)
    assert same(plan, before)
    (path,) = live.run.stream.folder.glob("all-*.jsonl")
    assert b"write_outside_cache" in path.read_bytes()  # on disk before the launch
    live.run.close()


def test_under_raise_it_is_refused_before_the_launch(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise")
    live.warm()
    with pytest.raises(ViolationError, match="write_outside_cache") as raised:
        live.decode(change=outside)
    assert (raised.value.step, raised.value.request) == (2, "a")
    assert set(reasons(live)) == {"write_outside_cache", "read_outside_cache", "write_padding_slot_enabled"}
    assert live.run.coverage.rows == live.run.coverage.rows_scheduled


def test_a_harmless_finding_does_not_keep_a_step_from_being_launched(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise", guard="raise")
    live.warm()
    live.decode(change=lambda plan: plan.groups[0].slots.__setitem__(0, 88))
    assert reasons(live) == ["write_foreign_block"]


@pytest.mark.parametrize("returns_results", [True, False])
def test_under_isolate_it_is_made_harmless_and_the_step_goes_on(tmp_path: Path, returns_results: bool) -> None:
    live = Live(tmp_path, trace="isolate", returns_results=returns_results)
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    plan = live.scene.plan(declaration)
    outside(plan)
    live.worker.on_plan(plan)
    assert plan.groups[0].slots[0] == -1
    assert (plan.groups[0].tables[0, 0], plan.groups[0].tables[1, 1]) == (0, 0)
    assert {("write_outside_cache", "a"), ("read_outside_cache", "b")} <= {
        (found.reason, found.request_id) for found in live.run.pending
    }


def test_on_a_rank_whose_result_is_not_returned_it_is_made_harmless(tmp_path: Path) -> None:
    worker = make_run(tmp_path, "worker", trace="raise", ranks=Ranks(dp=0, tp=1, pp=0, world=1))
    live = Live(tmp_path / "scene", returns_results=False)
    live.worker._run = worker
    worker.open()
    (mailbox,) = make_run(tmp_path, "engine").mailboxes()
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    plan = live.scene.plan(declaration)
    harmless = copied(plan)
    outside(plan)
    harmless.groups[0].slots[0] = -1
    harmless.groups[0].tables[0, 0] = 0
    harmless.groups[0].tables[1, 1] = 0
    live.worker.on_plan(plan)
    assert same(plan, harmless)
    posted = {(f.reason, f.request_id, f.step) for f in mailbox.poll()}
    assert posted == {
        ("write_outside_cache", "a", 2),
        ("read_outside_cache", "a", 2),
        ("read_outside_cache", "b", 2),
        ("write_padding_slot_enabled", None, 2),
    }
    worker.close()
    live.run.close()


@pytest.mark.parametrize("returns_results", [True, False])
def test_where_nothing_can_be_posted_the_result_itself_is_withheld(tmp_path: Path, returns_results: bool) -> None:
    """A folder that cannot be used must not turn ``raise`` into ``log``."""
    (tmp_path / "file").write_text("in the way")
    worker = make_run(tmp_path / "file", "worker", trace="raise", guard="raise")
    live = Live(tmp_path / "scene", returns_results=returns_results)
    live.worker._run = worker
    worker.open()
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests)
    plan = live.scene.plan(declaration)
    plan.groups[0].slots[0] = 88
    with pytest.raises(ViolationError, match="write_foreign_block") if returns_results else contextlib.nullcontext():
        live.worker.on_plan(plan)
    worker.close()
    live.run.close()


# Long steady decoding -------------------------------------------------------------------------------------------------


class Told:
    """A run that keeps what it is told instead of writing it."""

    def __init__(self, folder: Path, world: World, **output: Any) -> None:
        self.run = make_run(folder, "worker", topology=world.topology, **output)
        self.findings: list[Finding] = []
        self.plans: list[AgreedPlan | PlanSnapshot] = []
        self.plan_bytes: list[int] = []
        self.run.report = lambda findings, *_, **__: self.findings.extend(findings)  # type: ignore[method-assign]  # the run itself, with what it is told kept
        self.run.stream.put = self._put  # type: ignore[method-assign]  # the run itself, with what it is told kept
        self.worker = WorkerJudge(self.run, returns_results=True)
        self.worker.bind_topology(world.topology)

    def _put(self, kind: str, fact: Any, *, approx_bytes: int = 0, **_: Any) -> bool:
        if kind == "plan":
            self.plans.append(fact)
            self.plan_bytes.append(approx_bytes)
        return True

    def step(self, declaration: Declaration, plan: Plan | None) -> list[Finding]:
        """What is found in a step; without a plan it only passes."""
        self.findings.clear()
        self.worker.on_input(declaration, declaration.requests.copy())
        if plan is not None:
            self.worker.on_plan(plan)
        self.worker.on_launched()
        return list(self.findings)


def spelled(kept: AgreedPlan | PlanSnapshot) -> PlanSnapshot:
    return kept.snapshot() if isinstance(kept, AgreedPlan) else kept


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(CHANGES)), steps=st.integers(0, 40))
def test_a_fault_in_long_steady_decoding_is_found_as_on_the_first_plan_and_then_all_is_well(
    tmp_path_factory: pytest.TempPathFactory, layout: str, seed: int, name: str, steps: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    world, rng = World(seed, LAYOUTS[layout]), random.Random(seed)
    old, fresh = Told(folder, world), Told(folder, world)
    while len(world.live) < 2:
        declaration = world.step()
        plan = world.plan(declaration) if declaration.requests.scheduled else None
        assert old.step(declaration, plan) == fresh.step(declaration, None) == []
    rows = old.run.coverage.rows
    old.plans.clear()
    for number in range(steps + 6):
        declaration = world.step(decode_only=True)
        if not declaration.requests.scheduled:
            return
        plan = world.plan(declaration, shuffle=False)
        if number != steps:
            assert old.step(declaration, plan) == []
            assert isinstance(old.plans[-1], AgreedPlan)
            fresh.step(declaration, None)
        else:
            CHANGES[name](world, plan, rng.randrange(len(world.groups)), rng)
            found = old.step(declaration, copied(plan))
            assert same(found, fresh.step(declaration, copied(plan)))
            assert isinstance(old.plans[-1], AgreedPlan) is (found == [])
            assert same(spelled(old.plans[-1]), spelled(fresh.plans[-1]))
        rows += len(plan.request_ids) * len(world.groups)
        assert old.run.coverage.rows == rows
    assert {check for check, _ in old.run.coverage.skipped} <= {"C2"}  # no pool is observed here, which is counted
    assert len(old.plans) == steps + 6


def test_with_all_tables_spelled_out_a_decoding_batch_is_kept_with_its_tables(tmp_path: Path) -> None:
    world = World(1, LAYOUTS["full"])
    told = Told(tmp_path, world, records="full")
    while len(world.live) < 2:
        told.step(world.step(), None)
    declaration = world.step(decode_only=True)
    told.step(declaration, world.plan(declaration))
    (kept,) = told.plans
    assert isinstance(kept, PlanSnapshot)
    tables = kept.groups[0].tables
    assert [tables[row].tolist() for row in range(len(kept.request_ids))] == [
        world.live[name].tables[0][: blocks_for(world.live[name].declared, 16)] for name in kept.request_ids
    ]


def test_tables_that_several_steps_share_weigh_in_the_queue_once(tmp_path: Path) -> None:
    world = World(1, LAYOUTS["full"])
    told = Told(tmp_path, world)
    while len(world.live) < 2:
        told.step(world.step(), None)
    for _ in range(12):
        declaration = world.step(decode_only=True)
        told.step(declaration, world.plan(declaration, shuffle=False))
    shared = [plan.groups[0] for plan in told.plans if isinstance(plan, AgreedPlan)]
    assert len(shared) == 12
    weights = [told.plan_bytes[0] - len(shared[0].tables)]
    for before, now, weight in zip(shared[:-1], shared[1:], told.plan_bytes[1:], strict=True):
        weights.append(weight - (0 if now is before else len(now.tables)))
    assert len(set(weights)) == 1
    assert any(now is before for before, now in pairwise(shared))
