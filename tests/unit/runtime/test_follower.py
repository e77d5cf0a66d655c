"""A worker's own knowledge of the pool: what it was told, and nothing once something is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.runtime.follower import LOST, PoolFollower
from kvscope.state.legality import Legality
from unit.runtime.pools import PooledLive
from unit.runtime.support import last_coverage


def follower(live: PooledLive) -> PoolFollower:
    assert live.worker._pool is not None
    return live.worker._pool


def test_the_ledger_has_what_the_declarations_told(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    ledger, legality = follower(live).sides
    assert ledger is not None
    assert legality is not None
    assert ledger.is_owner("a", live.tables["a"]).all()
    assert ledger.written_of(live.tables["a"])[0].tolist() == [16, 16, 0]
    assert not follower(live).doubtful


def test_a_request_that_goes_on_with_a_released_block_is_found_where_its_plan_is(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    block = live.tables["a"][2]
    live.free("a", [block], "unknown")
    declaration = live.end(known=[("a", None, 40, 1)])
    live.worker.on_input(declaration, declaration.requests.copy())
    assert follower(live).doubtful
    live.worker.on_plan(live.scene.plan(declaration))
    released = [(reason, step, at) for reason, step, at in live.found() if reason.endswith("after_release")]
    assert ("write_after_release", 2, block) in released


def test_after_a_declaration_that_our_code_failed_on_nothing_is_said_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote was not taken over: the next step would begin behind that."""
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    declaration = live.end(known=[("a", None, 40, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(Legality, "advance", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):  # which the hook swallows and counts
            live.worker.on_input(declaration, declaration.requests.copy())
    live.worker.on_launched()
    assert follower(live).sides == (None, None)
    live.begin()
    live.carry_out(live.end(known=[("a", None, 41, 1)]))
    assert not follower(live).doubtful
    assert live.found() == []
    assert last_coverage(live.run)["checks_skipped"]["C2"] == {LOST: 1}


@pytest.mark.parametrize("change", ["one is missing", "nobody observes the pool"])
def test_after_a_gap_nothing_is_said_of_the_pool_and_the_rows_are_counted(tmp_path: Path, change: str) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    live.free("a", [live.tables["a"][2]], "unknown")
    declaration = live.end(known=[("a", None, 40, 1)])
    declaration.operations = []
    declaration.operations_before = None if change == "nobody observes the pool" else declaration.operations_before
    if change == "one is missing":
        assert declaration.operations_before is not None
        declaration.operations_before += 1
    live.carry_out(declaration)
    assert follower(live).sides == (None, None)
    assert not follower(live).doubtful
    live.back(declaration)
    live.idle(1)
    assert not any(reason.startswith(("write_", "read_")) for reason, _, _ in live.found())
    skipped: dict[str, Any] = last_coverage(live.run)["checks_skipped"]
    assert sum(causes.get(LOST, 0) for causes in skipped.values()) > 0


def test_all_other_rules_go_on_after_a_gap(tmp_path: Path) -> None:
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    declaration = live.end(known=[("a", None, 40, 1)])
    declaration.operations_before = 99
    live.worker.on_input(declaration, declaration.requests.copy())
    plan = live.scene.plan(declaration)
    plan.groups[0].slots[0] += 1
    live.worker.on_plan(plan)
    assert [reason for reason, _, _ in live.found()] == ["write_target_mismatch"]


def test_after_a_step_that_was_not_seen_the_pool_is_followed_no_more(tmp_path: Path) -> None:
    """The scheduler's hook missed a step, and nobody knows what it wrote."""
    live = PooledLive(tmp_path)
    live.start()
    live.begin()
    blocks = live.get("b", 2)
    unseen = live.scene.say(new=[("b", (blocks,), 0, 20)], known=[("a", None, 40, 1)])
    live.worker.on_input_unobserved(unseen.requests)
    live.engine.next_step()
    live.begin()
    live.cache("b", blocks[:1])
    live.hit("c", blocks[:1])
    table = live.tables["c"] + live.get("c", 1)
    live.carry_out(live.end(new=[("c", (table,), 16, 4)], known=[("a", None, 41, 1), ("b", None, 20, 1)]))
    assert follower(live).sides == (None, None)
    assert live.run.coverage.skipped["A", "scheduler_hook_fault"] > 0
    assert [reason for reason, _, _ in live.found() if "uninitialized" in reason or "release" in reason] == []
