"""EngineCore: steps are numbered and judged, and an action ``raise`` stops it when the result is due."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope.checks.finding import Finding
from kvscope.errors import ViolationError
from kvscope.facts.allocator import ALLOC, CAUSE_DEFERRED, HOLD, PoolOperation
from kvscope.facts.plans import Plan
from kvscope.facts.requests import StepResult
from kvscope.facts.topology import Ranks
from kvscope.runtime.engine import EngineJudge
from kvscope.state.holds import DEFERRED_LIMIT_STEPS
from unit.checks.scenes import ONE_GROUP, declare
from unit.checks.worlds import group, pool
from unit.runtime.support import Live, last_coverage, make_run, of_event

RESULT = StepResult(request_ids=("a", "b"), sampled_tokens=(1, 1))


def pending(step: int, reason: str = "write_target_mismatch") -> Finding:
    return Finding(reason=reason, step=step, trace_id=f"t{step}", request_id="a", group_id=0)


def next_slot(plan: Plan) -> None:
    plan.groups[0].slots[0] += 1


def test_steps_are_numbered_from_one_and_named_in_every_process_alike(tmp_path: Path) -> None:
    engine = EngineJudge(make_run(tmp_path), ONE_GROUP)
    assert [engine.next_step() for _ in range(3)] == [(1, "run.0.1"), (2, "run.0.2"), (3, "run.0.3")]


def test_a_sound_run_is_recorded_and_not_stopped(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise", guard="raise")
    live.warm()
    for computed in (40, 41):
        declaration = live.decode(computed)
        live.engine.on_update(declaration, RESULT)
        live.worker.on_result(RESULT)
    live.engine.on_shutdown()
    assert [said["step"] for said in of_event(live.run, "kv.bind")] == [1, 2, 3]
    assert [said["step"] for said in of_event(live.run, "kv.boundary", "update_input")] == [2, 3]
    assert of_event(live.run, "kv.violation") == []
    last = last_coverage(live.run)
    assert (last["steps"], last["empty_steps"], last["rows_scheduled"]) == (3, 0, 6)


def test_the_result_of_another_step_stops_the_engine_before_it_takes_effect(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise", guard="raise")
    live.warm()
    declaration = live.decode()
    with pytest.raises(ViolationError, match="reason=result_trace_mismatch"):
        live.engine.on_update(declaration, msgspec.structs.replace(RESULT, trace_id="t1"))
    (found,) = of_event(live.run, "kv.violation")
    assert (found["step"], found["expected"], found["actual"]) == (2, "t2", "t1")
    (told,) = of_event(live.run, "kv.boundary", "update_input")
    assert told["result_trace_id"] == "t1"


def test_a_result_that_does_not_say_where_it_comes_from_is_counted(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise", guard="raise")
    live.warm()
    live.engine.on_update(live.decode(), msgspec.structs.replace(RESULT, trace_id=""))
    assert last_coverage(live.run)["checks_skipped"]["L"] == {"result_without_trace": 1}
    assert of_event(live.run, "kv.violation") == []


def test_a_request_that_was_never_admitted_stops_the_engine_when_the_result_is_due(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise", guard="raise")
    live.warm()
    declaration = live.declare(known=[("a", None, 40, 1), ("x", None, 40, 1)])
    with pytest.raises(ViolationError, match="reason=bind_unknown_request"):
        live.engine.on_update(declaration, msgspec.structs.replace(RESULT, request_ids=("a", "x")))


def test_after_a_step_that_was_not_observed_an_unknown_request_is_counted_and_not_judged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.engine.on_schedule_begin()
    live.decode(names=("a", "x"))
    live.decode(41, names=("a", "x"))
    live.engine.on_shutdown()
    assert of_event(live.run, "kv.violation") == []
    assert last_coverage(live.run)["checks_skipped"]["L"] == {"admission_unseen": 2}


def test_an_empty_step_that_does_not_add_up_is_recorded_and_judged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    declaration = declare(2, known=[("a", None, 40, 1)])
    declaration.total_num_scheduled_tokens = 0
    live.engine.on_schedule_begin()
    live.engine.next_step()
    live.engine.on_schedule(declaration)
    assert [said["reason"] for said in of_event(live.run, "kv.violation")] == ["bind_token_total_mismatch"]
    assert [said["step"] for said in of_event(live.run, "kv.bind")] == [1, 2]


def test_a_load_that_failed_is_recorded_even_of_a_step_without_work(tmp_path: Path) -> None:
    live = Live(tmp_path, guard=None)
    live.warm()
    declaration = live.declare()
    live.worker.on_input(declaration, declaration.requests)
    live.engine.on_update(declaration, StepResult(request_ids=(), sampled_tokens=(), load_failed=True))
    live.decode(16)
    assert of_event(live.run, "kv.violation") == []
    (told,) = of_event(live.run, "kv.boundary", "update_input")
    assert (told["step"], told["load_failed"]) == (2, True)


def test_only_rows_of_groups_that_can_be_judged_are_scheduled(tmp_path: Path) -> None:
    live = Live(tmp_path, topology=pool(group(0), group(1, "mamba"), group(2)))
    live.declare(new=[("a", ([1], [2], [3]), 0, 4), ("b", ([4], [5], [6]), 0, 4)])
    assert live.run.coverage.rows_scheduled == 4
    live.run.close()


def test_an_empty_step_takes_a_number_and_is_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.engine.on_update(live.declare(), None)
    live.decode()
    last = last_coverage(live.run)
    assert (last["steps"], last["empty_steps"]) == (2, 1)
    assert [said["step"] for said in of_event(live.run, "kv.bind")] == [1, 3]


def test_an_empty_step_that_ends_a_request_is_taken_over(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.declare(finished=["a"])
    live.declare(new=[("c", ([1],), 0, 5)])
    assert of_event(live.run, "kv.violation") == []
    assert live.engine._bindings.holders(0, 1) == ["c"]


class Pool:
    """A host's pool in which nobody has a block, before the first audit."""

    num_free = 0

    def counts(self, first: int, last: int) -> list[int]:
        return [0] * (last - first)

    def free_ids(self, limit: int) -> list[int] | None:
        return [] if limit else None


def observed(folder: Path) -> Live:
    live = Live(folder)
    assert live.engine.pool is not None
    live.engine.pool.observe(Pool())
    return live


def grow(live: Live) -> None:
    """Both get the blocks that they need for their next 16 tokens, and nobody hears of it."""
    live.scene.say(known=[("a", ([7],), 48, 1), ("b", ([8],), 48, 1)])
    live.engine.next_step()


def goes_on(live: Live) -> list[dict[str, Any]]:
    """Two steps later; what is recorded of them."""
    for computed in (49, 50):
        live.declare(known=[("a", None, computed, 1), ("b", None, computed, 1)])
    assert of_event(live.run, "kv.violation") == []
    return of_event(live.run, "kv.bind")[-2:]


def test_behind_a_step_that_was_not_seen_nothing_is_judged_by_what_was_known_before(tmp_path: Path) -> None:
    live = observed(tmp_path)
    live.warm()
    live.engine.on_schedule_begin()
    grow(live)
    said = goes_on(live)
    assert [record.get("after_unseen") for record in said] == [True, None]
    assert not any("operations_before" in record for record in said)
    assert live.run.coverage.skipped["A", "scheduler_hook_fault"] == 2


def test_a_step_whose_judgement_failed_counts_as_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    live = observed(tmp_path)
    live.warm()
    with monkeypatch.context() as patch:
        patch.setattr(live.engine.pool, "declare", fails)
        with pytest.raises(ZeroDivisionError):
            live.declare(known=[("a", ([7],), 48, 1), ("b", ([8],), 48, 1)])
    assert [record.get("after_unseen") for record in goes_on(live)] == [True, None]
    assert live.engine.pool is not None
    assert live.engine.pool.lost == "scheduler_hook_fault"


def test_an_empty_step_in_which_something_is_found_is_recorded(tmp_path: Path) -> None:
    """A hold that is overdue: nothing else happens in that step, and a replay has to find it, too."""
    live = observed(tmp_path)
    assert live.engine.pool is not None
    pool = live.engine.pool
    pool.take(PoolOperation(kind=ALLOC, block_ids=[9], request_id="c", group_id=0, first_index=0), "alloc", "t")
    pool.take(PoolOperation(kind=HOLD, block_ids=[9], request_id="c", cause=CAUSE_DEFERRED), "hold", "t")
    live.warm()
    pool._last_returned = DEFERRED_LIMIT_STEPS + 1
    live.declare()
    live.declare()
    assert [said["step"] for said in of_event(live.run, "kv.bind")] == [1, 2]
    found = [(said["reason"], said["step"]) for said in of_event(live.run, "kv.violation")]
    assert found == [("hold_deadline_exceeded", 2)]


def test_a_declaration_is_judged_and_logged(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.declare(new=[("a", ([1, 99],), 0, 20)])
    (said,) = of_event(live.run, "kv.violation")
    assert (said["reason"], said["component"], said["boundary"]) == ("bind_block_out_of_range", "scheduler", "schedule")
    assert said["action"] == "log"


def test_a_fatal_declaration_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise")
    with pytest.raises(ViolationError, match="bind_block_out_of_range") as raised:
        live.declare(new=[("a", ([1, 99],), 0, 20)])
    assert raised.value.block == 99
    with pytest.raises(ViolationError) as again:
        live.engine.on_schedule_begin()
    assert again.value is raised.value
    assert len(of_event(live.run, "kv.violation")) == 1


def test_a_declaration_that_is_wrong_but_harmless_stops_with_its_result(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise")
    declaration = live.declare(new=[("a", ([1, 1],), 0, 20)])
    with pytest.raises(ViolationError, match="bind_duplicate_block"):
        live.engine.on_update(declaration, RESULT)
    live.run.close()


def test_a_finding_stops_the_engine_before_the_result_of_its_step_takes_effect(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise")
    live.warm()
    declaration = live.decode(change=next_slot)
    with pytest.raises(ViolationError, match="write_target_mismatch") as raised:
        live.engine.on_update(declaration, RESULT)
    assert (raised.value.step, raised.value.request) == (2, "a")
    with pytest.raises(ViolationError):
        live.engine.on_schedule_begin()
    with pytest.raises(ViolationError):
        live.engine.on_update(declaration, RESULT)
    live.run.close()


def test_a_finding_of_a_later_step_waits_for_its_own_result(tmp_path: Path) -> None:
    """With asynchronous scheduling step 3 runs while the result of step 2 comes in."""
    live = Live(tmp_path, trace="raise")
    live.warm()
    second = live.decode(40)
    third = live.decode(41, change=next_slot)
    live.engine.on_update(second, RESULT)
    with pytest.raises(ViolationError):
        live.engine.on_update(third, RESULT)
    live.run.close()


def test_no_further_step_is_scheduled_after_a_finding_of_one_that_was(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="raise")
    live.warm()
    live.decode(change=next_slot)
    with pytest.raises(ViolationError):
        live.engine.on_schedule_begin()
    live.run.close()


def test_a_finding_of_the_part_whose_action_is_log_does_not_stop(tmp_path: Path) -> None:
    live = Live(tmp_path, trace="log", guard="raise")
    live.warm()
    declaration = live.decode(change=next_slot)
    live.engine.on_update(declaration, RESULT)
    live.engine.on_schedule_begin()
    assert [said["action"] for said in of_event(live.run, "kv.violation")] == ["log"]


def test_a_result_without_its_declaration_stops_for_what_is_known_so_far(tmp_path: Path) -> None:
    engine = EngineJudge(run := make_run(tmp_path, trace="raise"), ONE_GROUP)
    for _ in range(4):
        engine.next_step()
    run.pending.append(pending(5))
    engine.on_update(None, RESULT)
    run.pending.append(pending(4))
    with pytest.raises(ViolationError):
        engine.on_update(None, None)
    assert of_event(run, "kv.boundary", "update_input") == []


def test_an_empty_steps_result_is_not_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    EngineJudge(run, ONE_GROUP).on_update(declare(1), RESULT)
    assert of_event(run, "kv.boundary") == []


def test_a_native_error_of_the_scheduler_is_recorded_after_its_step(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.engine.on_native_error("scheduler.schedule", "RuntimeError")
    (said,) = of_event(live.run, "kv.error")
    assert (said["error_type"], said["after_step"], said["component"]) == ("RuntimeError", 1, "scheduler")


WORKER = """
import sys
from pathlib import Path
from kvscope.facts.topology import Ranks
from kvscope.runtime.worker import WorkerJudge
from unit.checks.scenes import ONE_GROUP, Scene
from unit.runtime.support import make_run

rank = int(sys.argv[2])
run = make_run(Path(sys.argv[1]), "worker", trace="raise", ranks=Ranks(dp=0, tp=rank, pp=0, world=rank))
run.open()
worker = WorkerJudge(run, returns_results=rank == 0)
worker.bind_topology(ONE_GROUP)
scene = Scene()
for said in ({"new": [("a", ([1, 2, 3],), 0, 40)]}, {"known": [("a", None, 40, 1)]}):
    declaration = scene.say(**said)
    worker.on_input(declaration, declaration.requests)
    plan = scene.plan(declaration)
    if rank and declaration.step == 2:
        plan.groups[0].slots[0] += 1
    worker.on_plan(plan)
    worker.on_launched()
worker.on_shutdown()
"""


def test_a_finding_of_a_worker_in_another_process_stops_the_engine(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for rank in range(2):
        subprocess.run([sys.executable, "-c", WORKER, str(tmp_path), str(rank)], check=True, env=environment)
    run = make_run(tmp_path, "engine", trace="raise")
    engine = EngineJudge(run, ONE_GROUP)
    engine.next_step()
    engine.on_schedule_begin()  # of step 2; only step 1 was scheduled so far
    engine.on_update(declare(1), RESULT)
    engine.next_step()
    with pytest.raises(ViolationError, match="write_target_mismatch") as raised:
        engine.on_update(declare(2), RESULT)
    assert (raised.value.step, raised.value.request, raised.value.block) == (2, "a", 3)
    assert run.pending == []
    run.close()


def test_what_was_posted_under_hashed_ids_is_named_as_in_the_records(tmp_path: Path) -> None:
    worker = make_run(tmp_path, "worker", trace="raise", request_ids="hashed", ranks=Ranks(dp=0, tp=1, pp=0, world=1))
    worker.open()
    run = make_run(tmp_path, "engine", trace="raise", request_ids="hashed")
    engine = EngineJudge(run, ONE_GROUP)
    worker.deliver(pending(1))
    engine.next_step()
    with pytest.raises(ViolationError) as raised:
        engine.on_update(None, None)
    name = worker.names("a")
    assert raised.value.request == name
    assert f"request={name} " in str(raised.value)
    worker.close()
    run.close()
