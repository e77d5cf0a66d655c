"""Released blocks that a step on its way may still touch."""

from __future__ import annotations

from kvscope.facts.allocator import ALLOC, FREE, HOLD, PoolOperation
from kvscope.state.fences import MOST_STEPS, Fences
from unit.checks.scenes import declare


def released(name: str | None, *blocks: int, cause: str = "abort") -> PoolOperation:
    return PoolOperation(kind=FREE, block_ids=list(blocks), request_id=name, cause=cause)


def two_on_their_way() -> Fences:
    """``a`` is in the steps 1 and 2, ``b`` in step 1 alone."""
    fences = Fences()
    fences.declare(declare(1, new=[("a", ([1],), 0, 8), ("b", ([2],), 0, 8)]))
    fences.declare(declare(2, known=[("a", None, 8, 1)]))
    return fences


def test_a_block_is_fenced_until_the_last_step_of_its_request_is_back() -> None:
    fences = two_on_their_way()
    fences.take(released("a", 1))
    fences.take(released("b", 2))
    assert fences.blocks == {1: 2, 2: 1}
    fences.returned(1)
    assert fences.blocks == {1: 2}
    fences.declare(declare(3, known=[("c", None, 8, 1)]))
    fences.returned(2)
    assert fences.blocks == {}


def test_blocks_of_requests_that_are_in_no_step_on_its_way_are_free_at_once() -> None:
    fences = two_on_their_way()
    fences.take(released("c", 3))
    fences.take(released(None, 4))
    fences.returned(2)
    fences.take(released("a", 1))
    assert fences.blocks == {}


def test_what_has_left_a_window_is_seen_by_no_step_on_its_way() -> None:
    fences = two_on_their_way()
    fences.take(released("a", 1, cause="window"))
    assert fences.blocks == {}


def test_a_table_that_was_given_up_is_fenced_by_the_steps_of_then_whoever_its_request_is_in_now() -> None:
    """It is released when those are back; by then the request may run again, with other blocks."""
    fences = two_on_their_way()
    fences.take(PoolOperation(kind=HOLD, block_ids=[1], request_id="a", cause="deferred"))
    assert fences.blocks == {1: 2}
    fences.declare(declare(3, known=[("a", ([3],), 0, 9)], resumed=["a"]))
    fences.take(released("a", 1, cause="deferred"))
    assert fences.blocks == {1: 2}
    fences.returned(2)
    assert fences.blocks == {}
    fences.take(released("a", 1, cause="deferred"))
    assert fences.blocks == {}


def test_only_releases_are_fenced_and_a_step_without_work_fences_nothing() -> None:
    fences = Fences()
    fences.declare(declare(1))
    fences.take(released("a", 1))
    fences.declare(declare(2, new=[("a", ([1],), 0, 8)]))
    fences.take(PoolOperation(kind=ALLOC, block_ids=[1], request_id="a"))
    assert fences.blocks == {}


def test_results_that_never_come_are_not_waited_for_without_end() -> None:
    fences = Fences()
    fences.declare(declare(1, new=[("a", ([1],), 0, 8)]))
    fences.take(released("a", 1))
    for step in range(2, MOST_STEPS + 1):
        fences.declare(declare(step, known=[("b", None, 8, 1)]))
    assert fences.blocks == {1: 1}
    for step in range(MOST_STEPS + 1, 3 * MOST_STEPS):
        fences.declare(declare(step, known=[("b", None, 8, 1)]))
    assert fences.blocks == {}
    assert len(fences._in_flight) == MOST_STEPS
