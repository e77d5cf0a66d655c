"""A worker whose tensors are on a device: judged later, as if no time had passed, and every row accounted for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ViolationError
from kvscope.facts.plans import DummyRun, Plan
from kvscope.facts.requests import Declaration, StepResult
from kvscope.facts.topology import Ranks
from kvscope.runtime import deferred
from kvscope.runtime.deferred import DeferredJudge, Due
from kvscope.runtime.worker import WorkerJudge
from unit.checks.changes import CHANGES
from unit.checks.scenes import declare
from unit.checks.worlds import LAYOUTS, World, copied
from unit.runtime.support import Live, of_event, records
from unit.runtime.test_worker import accounted, reasons

RESULT = StepResult(request_ids=("a", "b"), sampled_tokens=(1, 1))
Change = Callable[[Plan], Any]


class OnItsWay:
    """A copy that arrives when the test says so, or when it is waited for."""

    def __init__(self, holds: Any) -> None:
        self.holds = holds
        self.arrived = False
        self.fails = self.fails_waiting = False
        self.waits = 0
        self.released = 0

    def ready(self) -> bool:
        if self.fails:
            raise RuntimeError("the device is gone")
        return self.arrived

    def wait(self) -> None:
        self.waits += 1
        if self.fails or self.fails_waiting:
            raise RuntimeError("the device is gone")
        self.arrived = True

    def read(self) -> Any:
        assert self.arrived
        return self.holds

    def release(self) -> None:
        self.released += 1


class Later:
    """An engine and one worker of it, whose plans arrive later; ``copies`` has them in order."""

    def __init__(self, folder: Path, *, returns_results: bool = True, **run: Any) -> None:
        self.live = Live(folder, returns_results=returns_results, **run)
        self.worker = DeferredJudge(self.live.worker, self.live.run, returns_results=returns_results)
        self.copies: list[OnItsWay] = []

    def launch(self, change: Change | None = None, **said: Any) -> Due:
        """A step up to its launch, with a result that is on its way as well."""
        declaration = self.live.declare(**said)
        self.worker.on_input(declaration, declaration.requests.copy())
        assert self.worker.expects_no_plan is declaration.is_empty
        plan = copied(self.live.scene.plan(declaration))
        if change is not None:
            change(plan)
        self.hand_over(plan)
        self.worker.on_launched()
        assert self.worker.expects_no_plan
        self.worker.on_result(RESULT)
        return self.worker.due()

    def hand_over(self, holds: Any) -> None:
        copy = OnItsWay(holds)
        self.copies.append(copy)
        if isinstance(holds, DummyRun):
            self.worker.on_dummy_clone(copy)
        else:
            self.worker.on_plan_clone(copy)

    def warm(self) -> Due:
        return self.launch(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])

    def decode(self, computed: int, change: Change | None = None, names: str = "ab", **said: Any) -> Due:
        return self.launch(change, known=[(name, None, computed, 1) for name in names], **said)


def wrong_slot(plan: Plan) -> None:
    plan.groups[0].slots[0] += 1


def no_positions(plan: Plan) -> None:
    """What no host can hand over, and no rule is made for."""
    plan.positions = None  # type: ignore[assignment]  # that is the fault


# When a plan is judged ------------------------------------------------------------------------------------------------


def test_nothing_waits_at_the_launch_and_everything_is_judged_when_the_result_is_taken(tmp_path: Path) -> None:
    later = Later(tmp_path)
    first, second = later.warm(), later.decode(40, wrong_slot)
    assert [copy.waits for copy in later.copies] == [0, 0]
    assert later.live.run.coverage.rows == 0
    first.settle()
    assert [copy.waits for copy in later.copies] == [1, 0]
    assert [copy.released for copy in later.copies] == [1, 0]
    assert (later.live.run.coverage.rows, later.live.run.coverage.findings) == (2, {})
    second.settle()
    assert accounted(later.live) == {}
    (said,) = of_event(later.live.run, "kv.violation")
    assert (said["reason"], said["step"], said["request_id"]) == ("write_target_mismatch", 2, "a")


def test_a_plan_is_judged_by_what_was_bound_at_its_own_step(tmp_path: Path) -> None:
    """Before the first plan is judged, ``a`` has finished and its blocks are ``c``'s."""
    later = Later(tmp_path)
    later.warm()
    later.decode(40)
    last = later.launch(
        new=[("c", ([1, 2, 3],), 0, 40)], known=[("b", None, 41, 1)], finished=["a"]
    )  # fmt: skip
    last.settle()
    assert reasons(later.live) == []
    assert accounted(later.live) == {}


def test_an_error_of_an_earlier_step_is_found_with_that_steps_owners(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    later.decode(40, lambda plan: plan.groups[0].slots.__setitem__(0, 16 * 6 + 8))  # b's last block
    later.launch(new=[("c", ([4, 5, 6],), 0, 40)], known=[("a", None, 41, 1)], finished=["b"]).settle()
    (said,) = of_event(later.live.run, "kv.violation")
    assert (said["reason"], said["step"], said["request_id"], said["other_request_id"], said["block_id"]) == (
        "write_foreign_block", 2, "a", "b", 6,
    )  # fmt: skip


def test_copies_that_arrive_in_another_order_are_judged_in_the_order_of_the_steps(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    later.decode(40, wrong_slot)
    due = later.decode(41)
    later.copies[1].arrived = later.copies[2].arrived = True
    later.worker.make_room()
    assert later.live.run.coverage.rows == 0
    later.copies[0].arrived = True
    later.worker.make_room()
    assert later.live.run.coverage.rows == 6
    due.settle()
    steps = [(r["event"], r["step"]) for r in records(later.live.run) if r["event"] in {"kv.write", "kv.violation"}]
    assert steps == [("kv.write", 1), ("kv.write", 2), ("kv.violation", 2), ("kv.write", 3)]


def test_room_is_made_without_waiting(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    later.decode(40)
    later.copies[0].arrived = True
    later.worker.make_room()
    assert [(copy.waits, copy.released) for copy in later.copies] == [(0, 1), (0, 0)]
    with later.worker._playing:
        later.copies[1].arrived = True
        later.worker.make_room()  # another thread is at it
    assert later.copies[1].released == 0


def test_a_final_result_settles_everything_so_far(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    later.worker.settle()
    assert later.live.run.coverage.rows == 2


@pytest.mark.parametrize("name", sorted(CHANGES))
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_wrong_is_told_as_it_would_have_been_at_once(tmp_path: Path, name: str, seed: int) -> None:
    """The same steps, judged at once and three steps later: the same records, in the same order."""

    def run(folder: Path, depth: int) -> list[Any]:
        world, rng = World(seed, LAYOUTS["full"]), random.Random(seed)
        live = Live(folder, topology=world.topology)
        worker: Any = live.worker if depth == 0 else DeferredJudge(live.worker, live.run, returns_results=True)
        dues: list[Due] = []
        for number in range(12):
            declaration = world.step()
            worker.on_input(declaration, declaration.requests)
            if declaration.requests.scheduled:
                plan = world.plan(declaration)
                if number > 6:
                    CHANGES[name](world, plan, rng.randrange(len(world.groups)), rng)
                if depth == 0:
                    worker.on_plan(plan)
                else:
                    worker.on_plan_clone(OnItsWay(copied(plan)))
            worker.on_launched()
            worker.on_result(None)
            if depth:
                dues.append(worker.due())
                if len(dues) > depth:
                    dues.pop(0).settle()
        for due in dues:
            due.settle()
        told = [{k: v for k, v in r.items() if not k.endswith("_ns") and k != "seq"} for r in records(live.run)]
        return [r for r in told if r["event"] not in {"kv.coverage", "kv.enabled"}] + [
            live.run.coverage.rows, live.run.coverage.tokens, dict(live.run.coverage.skipped),
        ]  # fmt: skip

    at_once = run(tmp_path / "at once", 0)
    assert run(tmp_path / "later", 3) == at_once
    assert len(at_once) > 12


# What is raised, and where --------------------------------------------------------------------------------------------


def worker_without_mailbox(folder: Path) -> Later:
    """A worker in a process of its own that could not have a mailbox: only its own exception reaches EngineCore."""
    folder.mkdir()
    (folder / "run").write_text("in the way of the run's folder")
    later = Later(folder, trace="raise", guard="raise")
    later.live.run.roles.clear()
    later.live.run.roles.add("worker")
    return later


def test_raise_withholds_the_result_of_the_very_step(tmp_path: Path) -> None:
    later = worker_without_mailbox(tmp_path / "out")
    sound, wrong = later.warm(), later.decode(40, wrong_slot)
    later.copies[0].arrived = later.copies[1].arrived = True
    later.worker.make_room()  # judged on the launching thread, which is not the one to raise it
    sound_again = later.decode(41)
    with pytest.raises(ViolationError) as stopped:
        sound.settle()
    assert (stopped.value.reason, stopped.value.step) == ("write_target_mismatch", 2)
    wrong.settle()
    sound_again.settle()


def test_in_one_process_the_finding_is_there_before_the_result_takes_effect(tmp_path: Path) -> None:
    later = Later(tmp_path, trace="raise", guard="raise")
    later.warm().settle()
    due = later.decode(40, wrong_slot)
    due.settle()
    with pytest.raises(ViolationError) as stopped:
        later.live.engine.on_update(declare(2, known=[("a", None, 40, 1), ("b", None, 40, 1)]), RESULT)
    assert (stopped.value.reason, stopped.value.step, stopped.value.request) == ("write_target_mismatch", 2, "a")


def test_an_access_outside_the_cache_is_found_after_it_was_launched(tmp_path: Path) -> None:
    later = Later(tmp_path, trace="raise", guard="raise")
    later.warm().settle()
    due = later.decode(40, lambda plan: plan.groups[0].slots.__setitem__(0, 1 << 40))
    with pytest.raises(ViolationError, match="write_outside_cache"):
        due.settle()
    assert later.copies[1].released == 1


def test_a_fault_of_a_rule_is_raised_once_where_the_hook_counts_it_and_the_rest_is_judged(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    broken = later.decode(40, no_positions)
    due = later.decode(41)
    with pytest.raises(AttributeError):
        broken.settle()
    due.settle()
    assert accounted(later.live) == {"no_plan": 2}
    assert [copy.released for copy in later.copies] == [1, 1, 1]


# What is counted ------------------------------------------------------------------------------------------------------


def test_a_step_that_was_not_cloned_is_counted_in_its_turn(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    declaration = later.live.declare(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    later.worker.on_input(declaration, declaration.requests)
    later.worker.on_plan_skipped("ring_full")
    later.worker.on_launched()
    later.worker.on_result(RESULT)
    later.worker.on_dummy_skipped("warm_up")
    later.worker.due().settle()
    assert later.live.run.coverage.skipped["dummy", "warm_up"] == 1
    assert accounted(later.live) == {"ring_full": 2}


def test_every_step_that_cannot_be_judged_is_followed_in_its_turn(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    lost = later.live.declare(known=[("a", ([9],), 48, 1)])
    later.worker.on_input_without_declaration(lost.requests)
    assert later.worker.expects_no_plan
    later.worker.on_launched()
    unseen = later.live.declare(known=[("a", None, 49, 1)])
    later.worker.on_input_unobserved(unseen.requests)
    later.worker.on_launched()
    failed = later.live.declare(known=[("a", None, 50, 1)])
    later.worker.on_input(failed, failed.requests)
    later.worker.on_native_error("worker.execute", "RuntimeError")
    assert later.worker.expects_no_plan
    later.launch(known=[("a", None, 51, 1)]).settle()
    later.live.run.coverage.rows_scheduled -= 2  # which nobody was told of
    assert reasons(later.live) == ["handover_missing"]
    assert later.live.run.coverage.skipped["plan", "native_error"] == 1
    assert later.live.run.coverage.rows == 3


def test_a_dummy_run_is_judged_between_the_steps_where_it_ran(tmp_path: Path) -> None:
    import numpy as np

    later = Later(tmp_path)
    later.warm()
    later.hand_over(DummyRun(slots={0: np.array([-1, 70], np.int64)}, num_tokens=2))
    later.launch(finished=["b"], known=[("a", None, 40, 1)]).settle()
    (said,) = of_event(later.live.run, "kv.violation")
    assert (said["reason"], said["other_request_id"]) == ("dummy_slot_enabled", "b")


def test_what_has_not_arrived_at_the_end_is_waited_for_and_then_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "SHUTDOWN_SECONDS", 0.05)
    later = Later(tmp_path)
    later.warm()
    later.decode(40)
    later.decode(41)
    later.copies[0].arrived = later.copies[2].arrived = True
    threading.Timer(0.01, lambda: setattr(later.copies[0], "arrived", True)).start()
    later.live.run.close()
    later.worker.on_shutdown()
    assert accounted(later.live) == {"not_arrived": 2}
    assert [copy.released for copy in later.copies] == [1, 0, 1]
    assert [r["step"] for r in of_event(later.live.run, "kv.write")] == [1, 3]


def test_a_device_that_has_failed_is_no_reason_to_wait_and_its_rows_are_counted(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    due = later.decode(40)
    later.copies[0].fails = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        due.settle()
    assert accounted(later.live) == {"not_arrived": 2}
    assert (later.copies[0].released, later.live.run.coverage.rows) == (0, 2)


def test_a_device_that_fails_while_it_is_waited_for_is_given_up(tmp_path: Path) -> None:
    later = Later(tmp_path)
    due = later.warm()
    later.copies[0].fails_waiting = True
    with pytest.raises(RuntimeError):
        due.settle()
    assert accounted(later.live) == {"not_arrived": 2}


def test_where_nobody_takes_results_the_line_stays_bounded(tmp_path: Path) -> None:
    """The hook that settles is off after too many faults: what arrives is judged, the rest is counted."""
    later = Later(tmp_path)
    later.warm()
    for number in range(100):
        later.decode(40 + number, names="a") if number < 8 else later.decode(48 + number, names="b")
        later.copies[-1].arrived = number % 2 == 0
        assert len(later.worker._waiting) <= deferred.MOST_WAITING + 8
    later.live.run.close()
    assert set(accounted(later.live)) == {"not_arrived"}


def test_a_new_pool_begins_with_nothing_waiting(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm()
    later.copies[0].arrived = True
    later.worker.bind_topology(later.live.run.topology)  # type: ignore[arg-type]  # it has one
    assert later.live.run.coverage.rows == 2
    later.warm().settle()
    assert reasons(later.live) == []


def test_an_error_of_the_host_when_the_result_is_taken_ends_no_later_step(tmp_path: Path) -> None:
    later = Later(tmp_path)
    first = later.warm()
    second = later.decode(40)
    first.on_native_error("runner_v2.output", "RuntimeError")
    second.settle()
    later.worker.settle()
    assert accounted(later.live) == {}
    (said,) = of_event(later.live.run, "kv.error")
    assert (said["boundary"], said["error_type"]) == ("runner_v2.output", "RuntimeError")


# A rank whose results nobody takes ------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_rank_whose_results_nobody_takes_is_judged_by_a_thread_of_its_own(tmp_path: Path) -> None:
    later = Later(tmp_path, returns_results=False, ranks=Ranks(dp=0, tp=1, pp=0, world=1))
    later.warm()
    later.decode(40, wrong_slot)
    until(lambda: later.live.run.coverage.rows == 4)
    assert later.worker._sweeper is not None
    assert later.worker._sweeper.daemon
    later.decode(41)
    until(lambda: later.live.run.coverage.rows == 6)
    later.worker.on_shutdown()
    later.worker._sweeper.join(10)
    assert not later.worker._sweeper.is_alive()
    assert reasons(later.live) == ["write_target_mismatch"]


def test_a_fault_in_that_thread_is_raised_where_a_hook_counts_it(tmp_path: Path) -> None:
    later = Later(tmp_path, returns_results=False)
    later.warm()
    later.decode(40, no_positions)
    until(lambda: later.worker._fault is not None)
    with pytest.raises(AttributeError):
        later.decode(41)
    later.worker.on_shutdown()


def test_a_rank_whose_results_are_taken_has_no_thread(tmp_path: Path) -> None:
    later = Later(tmp_path)
    later.warm().settle()
    assert later.worker._sweeper is None


def test_a_judge_may_be_given_what_the_host_has_already(tmp_path: Path) -> None:
    later = Later(tmp_path)
    declaration: Declaration = later.live.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    later.worker.on_input(declaration, declaration.requests)
    later.worker.on_plan(later.live.scene.plan(declaration))
    later.worker.on_dummy(DummyRun(slots={}, num_tokens=1))
    later.worker.settle()
    assert (later.live.run.coverage.rows, later.live.run.coverage.dummy_runs) == (1, 1)
    assert isinstance(later.worker.judge, WorkerJudge)
