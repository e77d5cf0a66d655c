"""How EngineCore follows the block pool: dates, judges and hands over what it did, and audits its books."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvscope.facts.allocator import ALLOC, PoolOperation
from kvscope.facts.requests import Declaration
from kvscope.runtime import pool as pools
from kvscope.runtime.pool import AUDIT_EVERY_STEPS, HOOK_FAULT, NOT_OBSERVED, UNSEEN_STEP, WALK_EVERY_STEPS
from kvscope.state.holds import CONNECTOR_LIMIT_SECONDS, DEFERRED_LIMIT_STEPS
from unit.checks.worlds import group, pool
from unit.runtime.pools import PooledLive
from unit.runtime.support import last_coverage, of_event


def kinds(declaration: Declaration) -> list[tuple[str, str | None]]:
    return [(operation.kind, operation.request_id) for operation in declaration.operations]


# What is handed on ----------------------------------------------------------------------------------------------------


def test_operations_travel_with_the_declaration_that_they_led_to_and_none_is_missing(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    first = live.start()
    live.leave("a")
    live.begin()
    blocks = live.get("b", 1)
    second = live.whole(new=[("b", (blocks,), 0, 9)], finished=["a"])
    live.begin()
    third = live.whole(known=[("b", None, 9, 1)])
    assert [kinds(d) for d in (first, second, third)] == [[("alloc", "a")], [("free", "a"), ("alloc", "b")], []]
    assert [d.operations_before for d in (first, second, third)] == [0, 1, 3]
    assert live.found() == []


def test_a_step_without_work_carries_what_happened_before_it(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.leave("a")
    live.begin()
    empty = live.end(finished=["a"])
    live.begin()
    blocks = live.get("b", 1)
    full = live.whole(new=[("b", (blocks,), 0, 9)])
    assert (kinds(empty), empty.operations_before) == ([("free", "a")], 1)
    assert (kinds(full), full.operations_before) == ([("alloc", "b")], 2)


def test_without_declarations_operations_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's hook is off after its faults, and those of the pool go on."""
    monkeypatch.setattr(pools, "MOST_OPERATIONS", 10)
    live = PooledLive(tmp_path)
    live.start()
    for number in range(8):
        live.get(f"b{number}", 1)
        live.leave(f"b{number}")
    assert live.engine.pool is not None
    assert live.engine.pool.lost == UNSEEN_STEP
    assert live.engine.pool._operations == []
    live.begin()
    assert live.end(known=[("a", None, 40, 1)]).operations_before is None
    assert live.found() == []


def test_an_operation_is_dated_by_its_step_or_the_one_before_it(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    first = live.start()
    live.leave("a")
    live.begin()
    blocks = live.get("b", 1)
    second = live.whole(new=[("b", (blocks,), 0, 9)], finished=["a"])
    dates = [(o.step, o.scheduling) for d in (first, second) for o in d.operations]
    assert dates == [(1, True), (1, False), (2, True)]
    said = sorted((r for event in ("kv.alloc", "kv.free") for r in of_event(live.run, event)), key=lambda r: r["seq"])
    assert [(r["event"], r.get("step"), r.get("after_step")) for r in said] == [
        *[("kv.alloc", 1, None), ("kv.free", None, 1)],
        ("kv.alloc", 2, None),
    ]
    assert [r.get("trace_id") for r in said] == ["run.0.1", None, "run.0.2"]


def test_a_block_that_is_handed_out_again_has_another_generation(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    first = live.start(tokens=16)
    live.leave("a")
    live.begin()
    blocks = live.get("b", 1)
    second = live.whole(new=[("b", (blocks,), 0, 9)], finished=["a"])
    assert first.operations[0].generations == [1]
    assert second.operations[-1].generations == [2]


def test_both_processes_know_the_same_of_every_block(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    live.cache("a", live.tables["a"][:2])
    live.hit("b", live.tables["a"][:2])
    live.get("b", 1)
    blocks = list(live.tables["b"])
    declaration = live.end(new=[("b", (blocks,), 32, 8)], known=[("a", None, 40, 1)])
    live.carry_out(declaration)
    assert live.engine.pool is not None
    assert live.worker._pool is not None
    ledger, _ = live.worker._pool.sides
    assert ledger is not None
    ours, theirs = live.engine.pool.ledger.snapshot(), ledger.snapshot()
    for name in ("block_ids", "generation", "references", "status", "hashes", "declared", "written_step"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    assert sorted(ours.shares, key=str) == sorted(theirs.shares, key=str)
    assert live.found() == []


# What is judged at once -----------------------------------------------------------------------------------------------


def test_a_double_free_is_found_when_it_happens_and_said_after_the_step_before_it(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    blocks = live.tables["a"]
    live.leave("a")
    live.tell("free", [blocks[2]], "a", cause="finish")
    assert live.found()[0] == ("double_free", 1, blocks[2])


def test_what_the_free_queue_hands_out_is_judged_before_vllm_stops_at_it(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    block = live.tables["a"][0]
    operation = PoolOperation(kind=ALLOC, block_ids=[block], cause="allocate", request_id="b")
    live.engine.on_handing_out(operation, "get_new_blocks")
    assert live.found() == [("alloc_live_block", 2, block)]
    assert live.engine.pool is not None
    assert live.engine.pool.ledger.generation_of([block]).tolist() == [1]


@pytest.mark.parametrize("is_back", [True, False])
def test_a_block_that_a_running_step_may_touch_is_not_to_be_reserved(tmp_path: Path, is_back: bool) -> None:
    live = PooledLive(tmp_path)
    live.start(tokens=15)
    live.begin()
    running = live.end(known=[("a", None, 15, 1)])
    live.carry_out(running)
    live.leave("a", "abort")
    live.begin()
    later = live.end(finished=["a"])
    if is_back:
        live.back(running)
    live.begin()
    (block,) = live.get("b", 1, cause="external", reserved=True)
    live.end()
    assert later.is_empty
    assert live.found() == ([] if is_back else [("free_inflight_step", 4, block)])


def test_a_fence_goes_with_its_own_step_though_others_are_on_their_way(tmp_path: Path) -> None:
    """With asynchronous scheduling there is always one."""
    live = PooledLive(tmp_path)
    live.start(tokens=15)
    live.begin()
    blocks = live.get("b", 1)
    first = live.end(known=[("a", None, 15, 1)], new=[("b", (blocks,), 0, 9)])
    live.carry_out(first)
    live.leave("a", "abort")
    live.begin()
    second = live.end(known=[("b", None, 9, 1)], finished=["a"])
    live.carry_out(second)
    live.back(first)
    live.begin()
    live.get("c", 1, cause="external", reserved=True)
    live.end(known=[("b", None, 10, 1)])
    assert live.found() == []


def test_who_finished_and_released_nothing_is_found_with_the_next_declaration(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    live.end(finished=["a"])
    assert [(reason, step) for reason, step, _ in live.found()] == [("leak_after_finish", 2)]


# Holds ----------------------------------------------------------------------------------------------------------------


def running_beside_a_hold(folder: Path, cause: str) -> PooledLive:
    """``b`` is over, and its blocks are held; ``a`` goes on."""
    live = PooledLive(folder)
    live.start()
    live.begin()
    blocks = live.get("b", 2)
    live.whole(new=[("b", (blocks,), 0, 20)], known=[("a", None, 40, 1)])
    live.hold("b", cause)
    live.begin()
    live.whole(known=[("a", None, 40, 1)], finished=["b"])
    return live


def test_a_deferred_free_that_never_comes_is_found_once_when_it_is_overdue(tmp_path: Path) -> None:
    live = running_beside_a_hold(tmp_path, "deferred")
    live.idle(2 * DEFERRED_LIMIT_STEPS)
    assert [(reason, step) for reason, step, _ in live.found()] == [
        ("hold_deadline_exceeded", 4 + DEFERRED_LIMIT_STEPS)
    ]


def test_a_deferred_free_that_comes_is_none(tmp_path: Path) -> None:
    live = running_beside_a_hold(tmp_path, "deferred")
    live.idle(2)
    live.free("b", [5, 4], "deferred")
    live.idle(2 * DEFERRED_LIMIT_STEPS)
    assert live.found() == []


def test_a_connector_may_take_its_time_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(pools, "monotonic_ns", lambda: now[0])
    live = running_beside_a_hold(tmp_path, "pin")
    live.idle(2 * DEFERRED_LIMIT_STEPS)
    now[0] = CONNECTOR_LIMIT_SECONDS * 10**9
    live.idle(1)
    last = live.engine._step
    now[0] += 1
    live.idle(2)
    assert [(reason, step) for reason, step, _ in live.found()] == [("hold_deadline_exceeded", last + 1)]


# The audit ------------------------------------------------------------------------------------------------------------


def test_a_reference_that_is_changed_past_the_pools_functions_is_found_in_the_next_audit(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.host.references[live.tables["a"][1]] += 1
    live.idle(AUDIT_EVERY_STEPS)
    ((reason, step, block),) = live.found()
    assert (reason, block) == ("ledger_pool_mismatch", live.tables["a"][1])
    assert step <= 1 + AUDIT_EVERY_STEPS


def test_every_block_of_a_large_pool_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "AUDITED_BLOCKS", 16)
    live = PooledLive(tmp_path)
    live.start()
    live.host.references[20] += 1
    live.idle(AUDIT_EVERY_STEPS * 64 // 16)
    assert ("ledger_pool_mismatch", 20) in {(reason, block) for reason, _, block in live.found()}
    assert live.run.coverage.audited_blocks >= 64


@pytest.mark.parametrize("damage", ["lost", "twice", "in use", "in a circle"])
@pytest.mark.parametrize("is_big", [False, True])
def test_a_damaged_free_queue_is_found_when_it_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, is_big: bool
) -> None:
    if is_big:
        monkeypatch.setattr(pools, "COUNTED_BLOCKS", 32)
        monkeypatch.setattr(pools, "AUDITED_BLOCKS", 24)
    live = PooledLive(tmp_path)
    counted: list[int] = []
    count = live.counts
    monkeypatch.setattr(live, "counts", lambda first, last: counted.append(last - first) or count(first, last))
    live.start()
    live.idle(1)
    queue = live.host.free_list
    if damage == "lost":
        queue.remove(20)
    elif damage == "twice":
        queue.append(20)
    elif damage == "in use":
        queue.append(live.tables["a"][0])
    else:
        monkeypatch.setattr(live, "free_ids", lambda limit: (queue * 100)[:limit])
    live.idle(WALK_EVERY_STEPS + AUDIT_EVERY_STEPS)
    reasons = {reason for reason, _, _ in live.found()}
    assert reasons == {"free_list_damaged"}
    assert max(counted) == (24 if is_big else 64)


def test_a_healthy_pool_is_audited_and_nothing_is_found(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.host.references[0] = -3  # the null block's count means nothing
    live.start()
    live.idle(3 * AUDIT_EVERY_STEPS)
    assert live.found() == []
    assert last_coverage(live.run)["checks_run"]["audit"] == 3 * 64


# What is not known is not judged --------------------------------------------------------------------------------------


def test_a_pool_that_nobody_observes_is_counted_and_not_judged(tmp_path: Path) -> None:
    live = PooledLive(tmp_path, observed=False)
    declaration = live.start()
    live.idle(1)
    assert declaration.operations_before is None
    assert live.found() == []
    assert last_coverage(live.run)["checks_skipped"]["A"] == {NOT_OBSERVED: 2}


def test_after_a_fault_of_a_hook_nothing_is_said_of_the_pool_any_more(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.hooks.faults = 1
    live.host.free(live.tables.pop("a"))  # nobody heard that
    live.begin()
    blocks = live.get("b", 3)
    live.engine.on_handing_out(PoolOperation(kind=ALLOC, block_ids=blocks, request_id="b"), "get_new_blocks")
    declaration = live.whole(new=[("b", (blocks,), 0, 40)], finished=["a"])
    assert declaration.operations_before is None
    assert live.found() == []
    assert last_coverage(live.run)["checks_skipped"]["A"] == {HOOK_FAULT: 1}


def test_a_result_that_our_code_failed_on_is_not_taken_for_one_that_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = PooledLive(tmp_path)
    live.begin()
    blocks = live.get("a", 3)
    first = live.end(new=[("a", (blocks,), 0, 40)])
    live.carry_out(first)
    with monkeypatch.context() as patch:
        patch.setattr(live.run.stream, "put", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):  # which the hook swallows and counts
            live.back(first)
    live.begin()
    live.cache("a", blocks[:2])
    live.whole(known=[("a", None, 40, 1)])
    live.idle(2)
    assert live.found() == []
    assert last_coverage(live.run)["checks_skipped"]["A"] == {UNSEEN_STEP: 3}


def test_faults_of_an_engine_before_this_one_are_not_its_own(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    assert live.engine.pool is not None
    assert live.engine.pool.lost is None


def test_with_the_guard_off_nobody_follows_the_pool(tmp_path: Path) -> None:
    live = PooledLive(tmp_path, observed=False, guard=None)
    assert live.engine.pool is None
    declaration = live.start()
    assert (declaration.operations, declaration.operations_before) == ([], None)
    assert of_event(live.run, "kv.alloc") == []


def test_what_the_pool_did_is_counted(tmp_path: Path) -> None:
    live = PooledLive(tmp_path, topology=pool(group(0)))
    live.start()
    live.leave("a")
    live.begin()
    live.end(finished=["a"])
    assert last_coverage(live.run)["checks_run"]["A"] == 2


def test_an_operation_that_is_handed_over_can_be_sent(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    declaration = live.start()
    assert msgspec.json.decode(msgspec.json.encode(declaration), type=Declaration) == declaration
