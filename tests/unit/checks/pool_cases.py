"""Calls of the block pool and its books: what fires each rule about them, and what it must let pass."""

from __future__ import annotations

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_pool, judge_settled
from kvscope.facts.allocator import ALLOC, CACHE, EVICT, FREE, HOLD, RECEIVE, RESET, TOUCH, PoolOperation
from kvscope.state.blocks import BlockLedger
from unit.checks.cases import fires, silent
from unit.checks.pool_scenes import FREE_IDS, HASH_COUNTS, REF_COUNTS, TABLES, Calls, lives

HAS_C = {"block_id": 3, "generation": 2}
"""Block 3: of ``a`` until step 5, of ``c`` from step 6 on."""
TOLD_3 = "generation 2, handed out in step 6; freed in step 5 (finish) before that"
SHARED_CALL = {"request_id": "x", "group_id": 0}

# Handing out ----------------------------------------------------------------------------------------------------------


@fires(
    "alloc_live_block", **SHARED_CALL, **HAS_C, other_request_id="c", expected="a free block", actual=TOLD_3
)  # fmt: skip
def a_block_in_use_is_handed_out_again() -> list[Finding]:
    return lives().call(ALLOC, [6, 3], "x", first_index=0, cause="allocate")


@fires(
    "alloc_live_block", **SHARED_CALL, block_id=6, generation=0, expected="a free block", actual="2 times in one call"
)
def a_block_is_handed_out_twice_in_one_call() -> list[Finding]:
    return lives().call(ALLOC, [6, 7, 6], "x", first_index=0, cause="allocate")


@fires(
    "alloc_live_block",
    *[
        {
            "reason": "alloc_live_block", **SHARED_CALL, "block_id": block, "generation": 1, "other_request_id": "w",
            "expected": "a free block", "actual": "generation 1, handed out in step 1; 1 of 12 such blocks",
        }
        for block in range(3, 10)
    ],
    **SHARED_CALL, block_id=2, generation=1, other_request_id="w", expected="a free block",
    actual="generation 1, handed out in step 1; 1 of 12 such blocks",
)  # fmt: skip
def more_blocks_in_use_are_handed_out_than_anybody_reads_about() -> list[Finding]:
    calls = Calls()
    calls.sound(ALLOC, list(range(2, 14)), "w", first_index=0)
    return calls.call(ALLOC, list(range(2, 14)), "x", first_index=0)


@silent("alloc_live_block", "ledger_pool_mismatch", "alias_owner_mismatch")
def free_blocks_are_handed_out_hashed_or_not() -> list[Finding]:
    calls = lives()
    findings = calls.call(FREE, [4, 2, 1], "b", cause="finish")
    return findings + calls.call(ALLOC, [1, 2, 7, 8], "x", first_index=0, cause="allocate")


@silent("alloc_live_block", "alloc_null_block", "free_inflight_step")
def many_free_blocks_are_handed_out_at_once() -> list[Finding]:
    calls = Calls(200)
    calls.in_flight = dict.fromkeys(range(1, 200), 1)
    return calls.call(ALLOC, list(range(1, 200)), "x", first_index=0)


@fires(
    "alloc_null_block", **SHARED_CALL, block_id=0, generation=0, expected="a block that somebody may own",
    actual="the null block",
)  # fmt: skip
def the_null_block_is_handed_out() -> list[Finding]:
    return lives().call(ALLOC, [6, 0], "x", first_index=0)


@silent("alloc_null_block", "alias_owner_mismatch", "ledger_pool_mismatch")
def a_table_begins_with_null_blocks_that_no_call_gave_it() -> list[Finding]:
    return lives().call(ALLOC, [6, 7], "x", first_index=9)


RESERVES = {"first_index": 0, "cause": "external", "reserved": True}


@fires(
    "free_inflight_step", **SHARED_CALL, block_id=7, generation=1, other_request_id="a",
    expected="a block that no running step touches",
    actual="step 4 may still touch it; generation 1, freed in step 2 (abort)",
)  # fmt: skip
def a_block_of_a_running_step_is_reserved_for_a_receive() -> list[Finding]:
    calls = Calls()
    calls.sound(ALLOC, [7], "a", first_index=0)
    calls.sound(FREE, [7], "a", cause="abort")
    calls.in_flight = {7: 4}
    return calls.call(ALLOC, [8, 7], "x", **RESERVES)


@silent("free_inflight_step")
def a_block_of_a_running_step_is_handed_out_for_the_next_step() -> list[Finding]:
    calls = lives()
    calls.in_flight = {6: 5, 7: 6}
    return calls.call(ALLOC, [6, 7], "x", first_index=0, cause="allocate")


@silent("free_inflight_step")
def blocks_that_no_step_touches_are_reserved_beside_a_running_one() -> list[Finding]:
    calls = lives()
    calls.in_flight = {1: 6, 4: 6}
    return calls.call(ALLOC, [6, 7], "x", **RESERVES)


# Letting go -----------------------------------------------------------------------------------------------------------


@fires(
    "free_unallocated", **SHARED_CALL, block_id=9, generation=0, also=("ref_underflow",),
    expected="a block that was handed out", actual="never handed out",
)  # fmt: skip
def a_block_that_nobody_ever_had_is_freed() -> list[Finding]:
    return lives().call(FREE, [9], "x", cause="finish")


@fires(
    "free_unallocated",
    {
        "reason": "free_unallocated", **SHARED_CALL, "block_id": -1,
        "expected": "a block that was handed out", "actual": "outside the pool of 24 blocks",
    },
    **SHARED_CALL, block_id=24, expected="a block that was handed out", actual="outside the pool of 24 blocks",
)  # fmt: skip
def a_block_outside_the_pool_is_freed() -> list[Finding]:
    return lives().call(FREE, [24, -1], "x", cause="finish", ref_counts=None)


@silent("free_unallocated", "double_free", "ref_underflow")
def the_null_block_is_freed() -> list[Finding]:
    return lives().call(FREE, [0], "x", cause="finish")


@fires(
    "double_free", request_id="b", group_id=0, block_id=1, generation=1, also=("ref_underflow",),
    expected="no more references released than it has",
    actual="1 released of 0; generation 1, freed in step 7 (finish)",
)  # fmt: skip
def a_block_is_freed_again_by_who_freed_it() -> list[Finding]:
    calls = lives()
    calls.sound(FREE, [4, 2, 1], "b", cause="finish")
    return calls.call(FREE, [1], "b", cause="abort")


@fires(
    "double_free", **SHARED_CALL, block_id=1, generation=1, other_request_id="b", also=("ref_underflow",),
    expected="no more references released than it has",
    actual="1 released of 0; generation 1, freed in step 7 (finish)",
)  # fmt: skip
def a_block_is_freed_again_by_another_request() -> list[Finding]:
    calls = lives()
    calls.sound(FREE, [4, 2, 1], "b", cause="finish")
    return calls.call(FREE, [1], "x", cause="abort")


@fires(
    "double_free", request_id="c", group_id=0, **HAS_C, other_request_id="a", also=("ref_underflow",),
    expected="no more references released than it has", actual=f"2 released of 1; {TOLD_3}",
)  # fmt: skip
def a_block_is_freed_twice_in_one_batch() -> list[Finding]:
    return lives().call(FREE, [5, 3, 3], "c", cause="finish")


@silent("double_free", "free_unallocated", "alias_owner_mismatch")
def a_shared_block_is_freed_once_by_each() -> list[Finding]:
    calls = Calls()
    calls.sound(ALLOC, [1, 2], "a", first_index=0)
    calls.sound(TOUCH, [1, 2], "b", first_index=0, cause="hit")
    return calls.call(FREE, [2, 1], "a", cause="finish") + calls.call(FREE, [2, 1], "b", cause="finish")


@silent("double_free", "alias_owner_mismatch")
def a_deferred_free_of_two_requests_names_a_shared_block_twice() -> list[Finding]:
    calls = Calls()
    calls.sound(ALLOC, [1], "a", first_index=0)
    calls.sound(TOUCH, [1], "b", first_index=0, cause="hit")
    calls.sound(HOLD, [1], "a", cause="abort")
    calls.sound(HOLD, [1], "b", cause="abort")
    return calls.call(FREE, [1, 1], cause="deferred")


@fires(
    "ref_underflow", request_id="b", group_id=0, block_id=4, generation=1, expected="0 or more references", actual="-1"
)
def the_host_counts_below_zero_where_the_calls_do_not() -> list[Finding]:
    """Somebody took a reference away past the pool."""
    return lives().call(FREE, [4], "b", cause="finish", ref_counts=[-1])


@silent("ref_underflow")
def the_count_of_the_null_block_drifts() -> list[Finding]:
    return lives().call(CACHE, [0, 4], "b", ref_counts=[-7, 1])


@silent("ref_underflow", "ledger_pool_mismatch", "double_free")
def a_call_whose_counts_are_not_known() -> list[Finding]:
    return lives().call(FREE, [4], "b", cause="finish", ref_counts=None)


# Hashes ---------------------------------------------------------------------------------------------------------------


@fires(
    "evict_referenced", block_id=1, generation=1, other_request_id="b", expected="a block without references",
    actual="generation 1, handed out in step 1",
)  # fmt: skip
def the_hash_of_a_block_in_use_is_dropped() -> list[Finding]:
    return lives().call(EVICT, [1, 9])


@fires(
    "evict_referenced",
    block_id=4, generation=1, other_request_id="b", expected="a block without references",
    actual="generation 1, handed out in step 1",
)  # fmt: skip
def the_prefix_cache_is_reset_under_a_request() -> list[Finding]:
    calls = Calls()
    calls.sound(ALLOC, [4], "b", first_index=0)
    return calls.call(RESET, [], cause="reset")


@silent("evict_referenced")
def an_invalid_load_drops_the_hashes_of_its_blocks() -> list[Finding]:
    return lives().call(EVICT, [1, 2], cause="load_failed")


@silent("evict_referenced")
def a_transient_checkpoint_is_dropped() -> list[Finding]:
    return lives().call(EVICT, [1], "b", cause="evict")


@silent("evict_referenced")
def the_hashes_of_free_blocks_are_dropped() -> list[Finding]:
    calls = lives()
    calls.sound(FREE, [4, 2, 1], "b", cause="finish")
    return calls.call(EVICT, [1, 2])


@silent("evict_referenced")
def the_prefix_cache_is_reset_when_nobody_is_there() -> list[Finding]:
    calls = lives()
    calls.sound(FREE, [4, 2, 1], "b", cause="finish")
    calls.sound(FREE, [5, 3], "c", cause="finish")
    return calls.call(RESET, [], cause="reset")


# The books ------------------------------------------------------------------------------------------------------------


@fires(
    "alias_owner_mismatch", **SHARED_CALL, **HAS_C, other_request_id="c",
    expected="1 reference, one for each place in a table", actual="0; generation 2, freed in step 7 (abort)",
)  # fmt: skip
def a_block_is_freed_under_its_owner() -> list[Finding]:
    return lives().call(FREE, [3], "x", cause="abort")


@fires(
    "alias_owner_mismatch", request_id="a", group_id=0, block_id=1, generation=1, other_request_id="b",
    expected="1 reference, one for each place in a table", actual="0; generation 1, freed in step 7 (finish)",
)  # fmt: skip
def a_shared_block_is_freed_twice_by_one_of_its_owners() -> list[Finding]:
    """Every single release fits: there was a reference each time."""
    return lives().call(FREE, [1], "a", cause="finish")


@fires(
    "alias_owner_mismatch", request_id="b", other_request_id="c", block_id=4, generation=1,
    expected="2 references, one for each place in a table", actual="1; generation 1, handed out in step 4",
)  # fmt: skip
def an_audit_finds_a_block_in_two_tables_with_one_reference() -> list[Finding]:
    calls = lives()
    calls.sound(TOUCH, [4], "c", first_index=2, cause="hit")
    calls.ledger.apply(PoolOperation(kind=FREE, block_ids=[4], request_id="x", group_id=0), calls.step)
    return calls.audit(REF_COUNTS, FREE_IDS, {"b": [[1, 2, 4]], "c": [[3, 5, 4]]}, HASH_COUNTS)


@silent("alias_owner_mismatch", "ledger_pool_mismatch")
def references_of_nobody_only_add_to_the_count() -> list[Finding]:
    """A copy on write keeps both its ends; a connector pins a block."""
    calls = lives()
    findings = calls.call(ALLOC, [6], "b", first_index=2, cause="copy")
    findings += calls.call(HOLD, [4], "b", cause="copy")
    findings += calls.call(TOUCH, [6], cause="copy")
    findings += calls.call(TOUCH, [5], cause="pin")
    return findings + calls.call(FREE, [4, 6], cause="copy") + calls.call(FREE, [5], cause="unpin")


@silent("alias_owner_mismatch", "ledger_pool_mismatch", "double_free")
def a_request_gives_its_blocks_up_and_they_come_back_later() -> list[Finding]:
    calls = lives()
    findings = calls.call(HOLD, [1, 2, 4], "b", cause="abort")
    return findings + calls.call(FREE, [4, 2, 1], cause="deferred")


@silent("alias_owner_mismatch", "ledger_pool_mismatch", "alloc_live_block")
def a_receive_ends_in_blocks_that_were_reserved_for_it() -> list[Finding]:
    calls = lives()
    findings = calls.call(ALLOC, [6, 7], "x", **RESERVES)
    return findings + calls.call(RECEIVE, [6, 7], "x", filled=[16, 3])


@fires("ledger_pool_mismatch", request_id="b", group_id=0, block_id=1, generation=1, expected="1 reference", actual="2")
def the_host_counts_a_reference_that_no_call_gave() -> list[Finding]:
    return lives().call(CACHE, [1, 2], "b", ref_counts=[2, 1])


@fires(
    "ledger_pool_mismatch", **SHARED_CALL, block_id=6, generation=1, expected="1 reference", actual="2",
)  # fmt: skip
def a_new_block_has_two_references_from_the_start() -> list[Finding]:
    return lives().call(ALLOC, [6], "x", first_index=0, ref_counts=[2])


@silent("ledger_pool_mismatch")
def the_null_block_and_one_that_the_pool_does_not_have_are_counted_anyhow() -> list[Finding]:
    return lives().call(CACHE, [0, 99, 1], "b", ref_counts=[44, 7, 1])


@fires(
    "alias_owner_mismatch",
    {"reason": "ledger_pool_mismatch", "block_id": 2, "generation": 1, "other_request_id": "b",
     "expected": "1 reference", "actual": "2"},
    {"reason": "ledger_pool_mismatch", "block_id": 4, "generation": 1, "other_request_id": "b",
     "expected": "0 hashes", "actual": "1"},
    block_id=9, generation=0, request_id="c", group_id=0, also=("ledger_pool_mismatch",),
    expected="1 reference, one for each place in a table", actual="0; never handed out",
)  # fmt: skip
def an_audit_finds_a_count_a_hash_and_a_place_in_a_table_changed() -> list[Finding]:
    counts, hashes = list(REF_COUNTS), list(HASH_COUNTS)
    counts[2], hashes[4] = 2, 1
    return lives().audit(counts, FREE_IDS, {"b": [[1, 2, 4]], "c": [[3, 9]]}, hashes)


@fires(
    "ledger_pool_mismatch", block_id=4, generation=1, request_id="b", group_id=0, expected="block 4 at logical block 2",
    actual="no block",
)  # fmt: skip
def an_audit_finds_a_block_lost_from_a_table() -> list[Finding]:
    return lives().audit(REF_COUNTS, FREE_IDS, {"b": [[1, 2]], "c": [[3, 5]]}, HASH_COUNTS)


@silent("ledger_pool_mismatch", "free_list_damaged", "alias_owner_mismatch")
def an_audit_of_a_healthy_pool() -> list[Finding]:
    return lives().audit(REF_COUNTS, FREE_IDS, TABLES, HASH_COUNTS)


@fires(
    "free_list_damaged", block_id=6, generation=0, expected="once in the free queue",
    actual="0 times in it; never handed out",
)  # fmt: skip
def a_free_block_is_lost_from_the_queue() -> list[Finding]:
    return lives().audit(REF_COUNTS, FREE_IDS[1:])


@fires(
    "free_list_damaged", **HAS_C, other_request_id="c", expected="not in the free queue",
    actual=f"1 times in it; {TOLD_3}",
)  # fmt: skip
def a_block_in_use_stands_in_the_queue() -> list[Finding]:
    return lives().audit(REF_COUNTS, [*FREE_IDS, 3])


@fires(
    "free_list_damaged",
    {"reason": "free_list_damaged", "block_id": 7, "generation": 0, "expected": "once in the free queue",
     "actual": "2 times in it; never handed out"},
    {"reason": "free_list_damaged", "block_id": 30, "expected": "not in the free queue",
     "actual": "1 times in it; outside the pool of 24 blocks"},
    block_id=0, generation=0, expected="not in the free queue", actual="1 times in it; the null block",
)  # fmt: skip
def the_queue_has_the_null_block_a_block_twice_and_one_that_does_not_exist() -> list[Finding]:
    return lives().audit(REF_COUNTS, [0, *FREE_IDS, 7, 30])


@silent("free_list_damaged")
def the_queue_has_its_blocks_in_another_order() -> list[Finding]:
    return lives().audit(REF_COUNTS, FREE_IDS[::-1])


@silent("alloc_live_block", "double_free", "ledger_pool_mismatch")
def with_guard_off_no_call_is_judged() -> list[Finding]:
    ledger = BlockLedger(8, 0)
    twice = PoolOperation(kind=ALLOC, block_ids=[1, 1], step=1, ref_counts=[5, 5])
    return judge_pool(twice, ledger, "t", ("kv_trace",)) + judge_settled(twice, ledger, "t", ("kv_trace",))
