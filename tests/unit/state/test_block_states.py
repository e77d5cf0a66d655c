"""Blocks by state, counted as the pool's operations are told, beside a count of every block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant
from tests.budget import examples

from kvscope.facts import allocator as facts
from kvscope.facts.allocator import ALLOC, CACHE, EVICT, FREE, HOLD, KINDS, RESET, TOUCH, PoolOperation
from kvscope.state import block_states
from kvscope.state.block_states import HELD_BECAUSE, CountedLedger
from unit.state.block_lives import GROUPS, NUM_BLOCKS, BlockLives
from unit.state.pools import NULL, DictPool

SIZE = 12


def totals(ledger: CountedLedger) -> dict[str, int]:
    """All states, those with no block left out."""
    counts = {"free": ledger.free, "cached": ledger.cached, "used": ledger.used}
    counts |= {because: ledger.held(because) for because in HELD_BECAUSE}
    return {state: count for state, count in counts.items() if count}


def walked(ledger: CountedLedger) -> dict[str, int]:
    """The same by a look at every block, held ones without their reason."""
    everything = [block for block in range(ledger.num_blocks) if block != ledger.null_block_id]
    found: Counter[str] = Counter()
    columns = (ledger.references_of, ledger.places_of, ledger.hashes_of)
    for references, owners, hashes in zip(*(column(everything).tolist() for column in columns), strict=True):
        if references:
            found["used" if owners > 0 else "held"] += 1
        else:
            found["cached" if hashes else "free"] += 1
    return dict(found)


def as_walked(ledger: CountedLedger) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for state, count in totals(ledger).items():
        counts["held" if state in HELD_BECAUSE else state] += count
    return dict(counts)


def used_by_group(ledger: CountedLedger) -> list[int]:
    return [ledger.used_of(group) for group in (-1, *range(GROUPS))]


class CountedLives(BlockLives):
    """What becomes of blocks, with the ledger that counts. What it says of them is held against the pool itself, too,
    by the machine that this one adds to.
    """

    make_pool = DictPool

    @staticmethod
    def make_ledger() -> CountedLedger:
        return CountedLedger(NUM_BLOCKS, NULL, GROUPS)

    @invariant()
    def counts_what_there_is(self) -> None:
        if not hasattr(self, "pool"):
            return
        ledger = self.said.ledger
        assert isinstance(ledger, CountedLedger)
        assert as_walked(ledger) == walked(ledger)
        assert sum(totals(ledger).values()) + ledger.has_null == NUM_BLOCKS
        assert ledger.used == sum(used_by_group(ledger))
        in_use = sum(count > 0 for count in self.pool.ref_counts())
        assert ledger.allocated - ledger.freed == in_use
        assert ledger.allocated >= sum(self.generations.values())
        owned = {block for name in self.live() for _, _, _, block in self.places(name)}
        assert ledger.used >= len(owned)


TestCountedLives = CountedLives.TestCase
TestCountedLives.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def say(kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> PoolOperation:
    group = None if request_id is None else 0
    return PoolOperation(
        **{"kind": kind, "block_ids": block_ids, "request_id": request_id, "group_id": group, **fields}
    )


def told(*operations: PoolOperation, num_blocks: int = SIZE) -> CountedLedger:
    ledger = CountedLedger(num_blocks, NULL, 2)
    for step, operation in enumerate(operations, start=1):
        ledger.apply(operation, step)
    return ledger


COMES = say(ALLOC, [1, 2, 3], "a", first_index=0, cause="allocate")
IS_FULL = say(CACHE, [1, 2], "a", hash_counts=[1, 1], hash_tokens=[16, 16])
ENDS = say(FREE, [3, 2, 1], "a", cause="finish")


def test_a_pool_that_was_never_used_is_free() -> None:
    assert totals(told()) == {"free": SIZE - 1}
    assert totals(CountedLedger(SIZE, -1, 1)) == {"free": SIZE}


def test_a_life_from_free_over_used_to_cached_and_back() -> None:
    assert totals(told(COMES)) == {"free": 8, "used": 3}
    assert totals(told(COMES, IS_FULL, ENDS)) == {"free": 9, "cached": 2}
    hit = say(TOUCH, [1, 2], "b", first_index=0, cause="hit")
    again = told(COMES, IS_FULL, ENDS, hit)
    assert totals(again) == {"free": 9, "used": 2}
    assert (again.allocated, again.freed, again.touched, again.released) == (5, 3, 2, 3)
    assert totals(told(COMES, IS_FULL, ENDS, say(RESET, [], cause="reset"))) == {"free": 11}


def test_only_a_block_whose_last_reference_goes_is_freed() -> None:
    ledger = told(COMES, say(TOUCH, [1], "b", first_index=0, cause="hit"), ENDS)
    assert (ledger.released, ledger.freed, ledger.used) == (3, 2, 1)


@pytest.mark.parametrize(
    ("loses", "evicted"),
    [
        (say(ALLOC, [1, 2, 4], "b", first_index=0, cause="allocate"), 2),
        (say(EVICT, [1], cause="evict"), 1),
        (say(RESET, [], cause="reset"), 0),
    ],
)
def test_a_cached_block_is_evicted_as_it_is_handed_out_or_dropped_and_not_by_a_reset(
    loses: PoolOperation, evicted: int
) -> None:
    assert told(COMES, IS_FULL, ENDS, loses).evicted == evicted


def test_a_block_in_use_that_loses_its_hash_was_not_cached() -> None:
    ledger = told(COMES, IS_FULL, say(EVICT, [1, 2], cause="load_failed"))
    assert (ledger.evicted, totals(ledger)) == (0, {"free": 8, "used": 3})


HOLDS = {
    "deferred": (say(HOLD, [1, 2, 3], "a", cause="deferred"), 3),
    "connector": (say(HOLD, [1, 2, 3], "a", cause="pin"), 3),
}


@pytest.mark.parametrize("because", HOLDS)
def test_what_a_request_gave_up_is_held_for_a_reason(because: str) -> None:
    operation, count = HOLDS[because]
    assert totals(told(COMES, operation)) == {"free": 8, because: count}
    released = say(FREE, [3, 2, 1], "a", cause="deferred")
    assert totals(told(COMES, operation, released)) == {"free": 11}


def test_a_held_block_that_somebody_else_uses_is_used() -> None:
    hit = say(TOUCH, [1], "b", first_index=0, cause="hit")
    assert totals(told(COMES, hit, HOLDS["deferred"][0])) == {"free": 8, "used": 1, "deferred": 2}


def test_both_ends_of_a_copy_wait_for_the_step_that_copies() -> None:
    ledger = told(
        COMES,
        say(ALLOC, [4], "a", first_index=2, cause="copy"),
        say(TOUCH, [4], cause="copy"),
        say(HOLD, [3], "a", cause="copy"),
    )
    assert totals(ledger) == {"free": 7, "used": 3, "deferred": 1}


def test_a_pin_keeps_what_its_request_releases() -> None:
    pinned = told(COMES, say(TOUCH, [1, 2], cause="pin"), ENDS)
    assert totals(pinned) == {"free": 9, "connector": 2}
    pinned.apply(say(FREE, [1, 2], cause="unpin"), 9)
    assert totals(pinned) == {"free": 11}


def test_what_is_isolated_is_told_from_what_a_connector_pins() -> None:
    ledger = told(COMES, say(TOUCH, [1, 2], cause="pin"))
    ledger.isolate([1, 2, NULL, SIZE])
    assert totals(ledger) == {"free": 8, "used": 3}
    ledger.apply(ENDS, 5)
    assert totals(ledger) == {"free": 9, "isolated": 2}
    ledger.end_isolation([1])
    assert totals(ledger) == {"free": 9, "isolated": 1, "connector": 1}
    ledger.apply(say(FREE, [1, 2], cause="unpin"), 6)
    assert totals(ledger) == {"free": 11}


def test_a_request_that_ends_without_releasing_has_its_blocks_held_for_no_known_reason() -> None:
    ledger = told(COMES)
    ledger.request_ended("a")
    ledger.request_ended("nobody")
    assert totals(ledger) == {"free": 8, "other": 3}


def test_a_reason_ends_with_the_reference() -> None:
    ledger = told(COMES, HOLDS["connector"][0], ENDS, say(ALLOC, [1], cause="unknown"))
    assert totals(ledger) == {"free": 10, "other": 1}


def anything() -> Iterator[st.SearchStrategy[Any]]:
    yield st.sampled_from(KINDS)
    yield st.lists(st.integers(-1, SIZE + 1), max_size=6)
    yield st.sampled_from([None, "a", "b"])
    yield st.sampled_from(facts.CAUSES)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(*anything()), max_size=12), st.booleans())
def test_damaged_facts_keep_the_sum(operations: list[tuple[Any, ...]], at_once: bool) -> None:
    """Double frees, blocks outside the pool, the null block: each block stays in exactly one state."""
    before = block_states.COUNTED_ONE_BY_ONE
    block_states.COUNTED_ONE_BY_ONE = 0 if at_once else before
    try:
        ledger = CountedLedger(SIZE, NULL, 1)
        for step, (kind, blocks, name, cause) in enumerate(operations):
            ledger.apply(say(kind, blocks, name, cause=cause, hash_counts=[1] * len(blocks)), step)
            if kind == RESET:
                ledger.request_ended("a")
            assert as_walked(ledger) == walked(ledger)
            assert sum(totals(ledger).values()) == SIZE - 1
            in_use = as_walked(ledger)
            assert ledger.allocated - ledger.freed == in_use.get("used", 0) + in_use.get("held", 0)
            assert min(ledger.allocated, ledger.freed, ledger.evicted) >= 0
    finally:
        block_states.COUNTED_ONE_BY_ONE = before


def test_many_blocks_count_as_few_do() -> None:
    many = list(range(1, 101))
    ledger = told(say(ALLOC, many, "a", first_index=0, cause="allocate"), num_blocks=200)
    assert totals(ledger) == {"free": 99, "used": 100}
    ledger.apply(say(CACHE, many, "a", hash_counts=[1] * 100, hash_tokens=[16] * 100), 2)
    ledger.apply(say(TOUCH, many[:10], cause="pin"), 3)
    ledger.apply(say(FREE, many[::-1], "a", cause="finish"), 4)
    assert totals(ledger) == {"free": 99, "cached": 90, "connector": 10}
    assert (ledger.allocated, ledger.freed) == (100, 90)
