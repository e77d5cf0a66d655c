"""Blocks that nobody uses and nobody releases: how long that is all right."""

from __future__ import annotations

import pytest

from kvscope.facts.allocator import ALLOC, FREE, HOLD, PoolOperation
from kvscope.state.blocks import BlockLedger
from kvscope.state.holds import CONNECTOR_LIMIT_SECONDS, DEFERRED_LIMIT_STEPS, Held, Holds

LIMIT_NS = CONNECTOR_LIMIT_SECONDS * 10**9


class TwoHolds:
    """``a`` has given up the blocks 1 and 2 after step 5, ``b`` the blocks 3 and 4; ``cause`` says to what."""

    def __init__(self, cause: str) -> None:
        self.ledger, self.holds = BlockLedger(8, 0), Holds()
        for name, blocks in (("a", [1, 2]), ("b", [3, 4])):
            self.tell(ALLOC, name, blocks)
            self.tell(HOLD, name, blocks, cause)

    def tell(self, kind: str, name: str | None, blocks: list[int], cause: str = "finish", now: int = 0) -> None:
        operation = PoolOperation(
            kind=kind, block_ids=blocks, request_id=name, group_id=0, first_index=0, cause=cause, step=5
        )
        self.ledger.apply(operation, 5)
        if kind in {FREE, HOLD}:
            self.holds.take(operation, self.ledger, now)


def test_a_deferred_release_is_due_some_steps_after_its_own() -> None:
    held = TwoHolds("deferred")
    assert held.holds.overdue(5 + DEFERRED_LIMIT_STEPS, LIMIT_NS * 9) == []
    late = held.holds.overdue(6 + DEFERRED_LIMIT_STEPS, 0)
    assert late[0] == Held(
        request_id="a", block_ids=[1, 2], cause="deferred", since_step=5, limit=f"{DEFERRED_LIMIT_STEPS} steps"
    )
    assert [hold.request_id for hold in late] == ["a", "b"]


def test_a_connector_has_its_time_whatever_the_steps_are() -> None:
    held = TwoHolds("pin")
    assert held.holds.overdue(10**6, LIMIT_NS) == []
    late = held.holds.overdue(6, LIMIT_NS + 1)
    assert [(hold.request_id, hold.limit) for hold in late] == [("a", "900 s"), ("b", "900 s")]


def test_what_is_overdue_is_said_once() -> None:
    held = TwoHolds("deferred")
    assert len(held.holds.overdue(100, 0)) == 2
    assert held.holds.overdue(101, 0) == []
    assert not held.holds.open


@pytest.mark.parametrize("named", [True, False])
def test_a_hold_ends_with_the_release_of_all_its_blocks(named: bool) -> None:
    held = TwoHolds("deferred")
    assert held.holds.open
    held.tell(FREE, "a" if named else None, [2], "deferred")
    assert len(held.holds.overdue(0, 0)) == 0
    held.tell(FREE, "a" if named else None, [1], "deferred")
    assert [hold.request_id for hold in held.holds.overdue(100, 0)] == ["b"]


def test_a_hold_of_which_a_block_is_left_goes_on() -> None:
    held = TwoHolds("deferred")
    held.tell(FREE, "a", [2], "deferred")
    assert [hold.request_id for hold in held.holds.overdue(100, 0)] == ["a", "b"]


def test_blocks_that_somebody_else_goes_on_using_are_held_no_longer() -> None:
    """``c`` has hit a block of ``a``: the release of ``a`` leaves a reference, and the hold is over."""
    held = TwoHolds("pin")
    held.tell("touch", "c", [1])
    held.tell(FREE, "a", [2, 1])
    assert [hold.request_id for hold in held.holds.overdue(0, LIMIT_NS + 1)] == ["b"]


def test_the_source_of_a_copy_is_held_by_nobody() -> None:
    ledger, holds = BlockLedger(8, 0), Holds()
    holds.take(PoolOperation(kind=HOLD, block_ids=[1], request_id="a", cause="copy"), ledger, 0)
    holds.take(PoolOperation(kind=HOLD, block_ids=[1], cause="pin"), ledger, 0)
    assert not holds.open
