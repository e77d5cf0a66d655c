"""Hits, hashes and clearing against what is written, and what requests leave behind."""

from __future__ import annotations

import numpy as np

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_content, judge_dummy, judge_held
from kvscope.facts.allocator import RECEIVE
from kvscope.facts.plans import DummyRun
from kvscope.facts.topology import SLIDING_WINDOW
from kvscope.state.holds import Held
from unit.checks.cases import fires, silent
from unit.checks.guarded import Guarded, two_decode
from unit.checks.scenes import PARTS, Scene
from unit.checks.worlds import group, pool

# Hits -----------------------------------------------------------------------------------------------------------------


def hits(scene: Guarded, blocks: list[int], *, tokens: int | None = None) -> list[Finding]:
    """``x`` hits these blocks, and computes 3 tokens behind them in a block of its own."""
    scene.hit("x", blocks)
    scene.allocate("x", [20], len(blocks))
    computed = 16 * len(blocks) if tokens is None else tokens
    return scene.content(new=[("x", ([*blocks, 20],), computed, 3)], known=[("a", None, 40, 1), ("b", None, 40, 1)])


X_HITS = {"request_id": "x", "group_id": 0}


@fires(
    "hit_uninitialized", **X_HITS, position=16, block_id=3, generation=1, other_request_id="a",
    expected="16 tokens of the block written", actual="9; generation 1, handed out in step 1",
)  # fmt: skip
def a_hit_on_a_block_that_is_half_written() -> list[Finding]:
    """Its hash was published before its last tokens were computed, and no step of theirs is on its way."""
    scene = two_decode()
    scene.cache("a", [3])
    return hits(scene, [2, 3])


@fires(
    "hit_uninitialized", **X_HITS, position=0, block_id=9, generation=1, other_request_id="p",
    expected="16 tokens of the block written",
    actual="0; generation 1, handed out in step 2; freed in step 2 (preempt)",
)  # fmt: skip
def a_hit_on_a_block_whose_request_was_preempted_before_it_ran() -> list[Finding]:
    scene = two_decode()
    scene.allocate("p", [9])
    scene.cache("p", [9])
    scene.free("p", [9], "preempt")
    return hits(scene, [9])


@fires(
    "hit_uninitialized", **X_HITS, position=0, block_id=9, generation=1, other_request_id="p",
    expected="12 tokens of the block written", actual="5; generation 1, handed out in step 2",
)  # fmt: skip
def a_hit_on_more_than_a_failed_receive_has_brought() -> list[Finding]:
    scene = two_decode()
    scene.allocate("p", [9], cause="external", reserved=True)
    scene.pool(RECEIVE, [9], "p", filled=[5])
    scene.cache("p", [9], 12)
    return hits(scene, [9], tokens=12)


@silent("hit_uninitialized", "hit_before_write", "aborted_block_still_cached")
def a_hit_on_blocks_that_are_written() -> list[Finding]:
    return hits(two_decode(), [1, 2])


@silent("hit_uninitialized", "hit_before_write")
def a_hit_on_a_block_that_the_same_step_fills() -> list[Finding]:
    scene = Guarded()
    scene.allocate("a", [1, 2])
    scene.cache("a", [1])
    scene.hit("x", [1])
    scene.allocate("x", [3], 1)
    return scene.content(new=[("a", ([1, 2],), 0, 20), ("x", ([1, 3],), 16, 4)])


@silent("hit_uninitialized")
def a_hit_on_part_of_a_block_that_the_same_step_goes_on_with() -> list[Finding]:
    """The hash covers 12 tokens, which are there; the block is not full."""
    scene = two_decode()
    scene.cache("a", [3], 9)
    return hits(scene, [1, 2, 3], tokens=41)


@silent("hit_uninitialized")
def a_hit_on_a_block_that_a_receive_has_filled() -> list[Finding]:
    scene = two_decode()
    scene.allocate("p", [9], cause="external", reserved=True)
    scene.pool(RECEIVE, [9], "p", filled=[16])
    scene.cache("p", [9])
    return hits(scene, [9])


@silent("hit_uninitialized")
def a_hit_in_a_group_whose_blocks_mean_something_else() -> list[Finding]:
    scene = Guarded(pool(group(0, "mamba"), group(1)))
    scene.allocate("a", [1])
    scene.cache("a", [1])
    scene.hit("x", [1])
    return scene.content(new=[("x", ([1], [2]), 0, 3)])


@silent("hit_uninitialized")
def a_hit_that_was_given_back_in_the_same_step() -> list[Finding]:
    scene = two_decode()
    scene.cache("a", [3])
    scene.hit("x", [3])
    scene.free("x", [3], "preempt")
    return scene.content(known=[("a", None, 40, 1)])


def failed(scene: Guarded) -> None:
    """Step 2 is to fill block 9 of ``p`` and never returns; step 3, which is nobody's of these, does."""
    scene.allocate("p", [9, 10])
    scene.cache("p", [9])
    scene.sound(new=[("p", ([9, 10],), 0, 20)])
    scene.returned(scene.sound(known=[("a", None, 40, 1)]))


BY_FAILED = {"block_id": 9, "generation": 1, "other_request_id": "p"}


@fires(
    "hit_before_write", **X_HITS, **BY_FAILED, position=0, also=("hit_uninitialized", "aborted_block_still_cached"),
    expected="a block whose writing step has returned",
    actual="written by a step that failed; generation 1, handed out in step 2",
)  # fmt: skip
def a_hit_on_a_block_whose_writing_step_failed() -> list[Finding]:
    scene = two_decode()
    failed(scene)
    return hits(scene, [9])


@fires(
    "aborted_block_still_cached", **BY_FAILED, expected="no hash that leads to it",
    actual="cached; written by a step that failed; generation 1, handed out in step 2",
)  # fmt: skip
def a_hash_is_left_on_a_block_whose_writing_step_failed() -> list[Finding]:
    scene = two_decode()
    failed(scene)
    return scene.content(known=[("a", None, 41, 1)])


@silent("aborted_block_still_cached", "hit_before_write", "hit_uninitialized")
def a_block_whose_writing_step_failed_is_written_again() -> list[Finding]:
    scene = two_decode()
    failed(scene)
    scene.free("p", [10, 9], "preempt")
    scene.say(preempted=["p"])
    scene.allocate("p", [9, 10])
    scene.cache("p", [9])
    scene.returned(scene.sound(known=[("p", ([9, 10],), 0, 20)], resumed=["p"]))
    return hits(scene, [9])


@silent("aborted_block_still_cached", "hit_before_write")
def a_step_that_is_still_on_its_way() -> list[Finding]:
    scene = two_decode()
    scene.allocate("p", [9, 10])
    scene.cache("p", [9])
    scene.sound(new=[("p", ([9, 10],), 0, 20)])
    return hits(scene, [9])


# Clearing -------------------------------------------------------------------------------------------------------------

DECODE = {"known": [("a", None, 40, 1), ("b", None, 40, 1)]}
CLEARED_A = {"request_id": "a", "group_id": 0, "expected": "a block that nobody has written", "generation": 1}


@fires("zero_live_block", **CLEARED_A, block_id=1, position=0, actual="cleared; generation 1, handed out in step 1")
def a_full_block_is_cleared() -> list[Finding]:
    return two_decode().content(zero=[1], **DECODE)


@fires("zero_live_block", **CLEARED_A, block_id=3, position=32, actual="cleared; generation 1, handed out in step 1")
def a_last_block_of_a_request_that_does_not_take_part_is_cleared() -> list[Finding]:
    return two_decode().content(zero=[3], known=[("b", None, 40, 1)])


@fires(
    "zero_live_block", block_id=2, generation=1, other_request_id="a", expected="a block that nobody has written",
    actual="cleared; generation 1, handed out in step 1, given up and not yet released",
)  # fmt: skip
def a_block_that_a_connector_still_sends_is_cleared() -> list[Finding]:
    scene = two_decode()
    scene.hold("a", [1, 2, 3])
    scene.sound(finished=["a"], known=[("b", None, 40, 1)])
    return scene.content(zero=[2], known=[("b", None, 41, 1)])


@silent("zero_live_block", "zero_after_receive")
def new_blocks_are_cleared_before_the_step_writes_them() -> list[Finding]:
    scene = two_decode()
    scene.allocate("c", [7, 8])
    return scene.content(zero=[7, 8], new=[("c", ([7, 8],), 0, 20)], **DECODE)


@silent("zero_live_block", "zero_after_receive")
def a_block_from_before_is_cleared_before_its_first_token() -> list[Finding]:
    """Handed out ahead of its tokens; a failed load leaves such blocks as well."""
    scene = two_decode()
    scene.allocate("a", [7], 3)
    scene.sound(known=[("a", ([7],), 40, 8), ("b", None, 40, 1)])
    return scene.content(zero=[7], known=[("a", None, 48, 1)])


@silent("zero_live_block", "zero_after_receive")
def a_free_block_is_cleared() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [3, 2, 1])
    return scene.content(zero=[1, 0, 99], finished=["a"], known=[("b", None, 40, 1)])


def receiving() -> Guarded:
    """``p`` waits for 20 tokens in blocks 9 and 10."""
    scene = two_decode()
    scene.allocate("p", [9, 10], cause="external", reserved=True)
    scene.sound(**DECODE)
    return scene


CLEARED_P = {"request_id": "p", "group_id": 0, "expected": "a block that no receive fills", "generation": 1}


@fires(
    "zero_after_receive", **CLEARED_P, block_id=10, position=16,
    actual="cleared; generation 1, handed out in step 2",
)  # fmt: skip
def a_block_that_a_receive_has_filled_is_cleared() -> list[Finding]:
    scene = receiving()
    scene.pool(RECEIVE, [9, 10], "p", filled=[16, 4])
    return scene.content(zero=[10], new=[("p", ([9, 10],), 20, 1)])


@fires(
    "zero_after_receive", **CLEARED_P, block_id=9, position=0,
    actual="cleared; generation 1, handed out in step 2, waiting for a receive",
)  # fmt: skip
def a_block_that_a_receive_is_filling_is_cleared() -> list[Finding]:
    return receiving().content(zero=[9], known=[("a", None, 41, 1)])


@silent("zero_after_receive", "zero_live_block")
def what_a_failed_load_left_unwritten_is_cleared() -> list[Finding]:
    """As ``KVCacheManager.record_blocks_for_zeroing`` has it: from the first block that is not valid on."""
    scene = receiving()
    scene.pool(RECEIVE, [9, 10], "p", filled=[16, 0], cause="load_failed")
    return scene.content(zero=[10], new=[("p", ([9, 10],), 16, 5)])


# What is left behind --------------------------------------------------------------------------------------------------


@fires(
    "leak_after_finish", request_id="a", group_id=0, block_id=1, generation=1,
    expected="all its blocks released or held",
    actual="2 blocks still in its table; the first: generation 1, handed out in step 1",
)  # fmt: skip
def a_finished_request_has_released_one_block_of_three() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [3])
    return scene.content(finished=["a"], known=[("b", None, 40, 1)])


@silent("leak_after_finish")
def a_finished_request_has_released_everything_and_its_hashes_stay() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [3, 2, 1])
    return scene.content(finished=["a"], known=[("b", None, 40, 1)])


@silent("leak_after_finish")
def a_finished_request_whose_blocks_are_released_later() -> list[Finding]:
    scene = two_decode()
    scene.hold("a", [1, 2, 3])
    findings = scene.content(finished=["a"], known=[("b", None, 40, 1)])
    scene.free(None, [3, 2, 1], "deferred")
    return findings + scene.content(known=[("b", None, 41, 1)])


@silent("leak_after_finish")
def a_request_that_ended_before_it_had_a_block() -> list[Finding]:
    return two_decode().content(finished=["never"], known=[("b", None, 40, 1)])


def held(scene: Guarded, *blocks: int) -> list[Finding]:
    hold = Held(request_id="a", block_ids=list(blocks), cause="finish", since_step=2, limit="900 s")
    assert scene.declaration is not None
    return judge_held([hold], scene.declaration, scene.ledger, PARTS)


def holding() -> Guarded:
    scene = two_decode()
    scene.hold("a", [1, 2, 3])
    scene.sound(finished=["a"], known=[("b", None, 40, 1)])
    return scene


@fires(
    "hold_deadline_exceeded", request_id="a", group_id=0, block_id=1, generation=1, expected="released within 900 s",
    actual="3 blocks held since step 2 (finish)",
)  # fmt: skip
def blocks_are_held_past_their_deadline() -> list[Finding]:
    return held(holding(), 1, 2, 3)


@silent("hold_deadline_exceeded")
def blocks_that_were_held_too_long_have_just_come_back() -> list[Finding]:
    scene = holding()
    scene.free(None, [3, 2, 1], "deferred")
    return held(scene, 1, 2, 3)


@fires(
    "watermark_exceeded", request_id="a", group_id=0, position=48,
    expected="at most 48 tokens, for which it has blocks", actual="64 tokens",
)  # fmt: skip
def a_request_is_given_a_block_that_the_pool_did_not_hand_out() -> list[Finding]:
    return two_decode().content(known=[("a", ([7],), 40, 24), ("b", None, 40, 1)])


@silent("watermark_exceeded")
def a_request_fills_the_last_block_that_it_was_given() -> list[Finding]:
    scene = two_decode()
    scene.allocate("a", [7], 3)
    return scene.content(known=[("a", ([7],), 40, 24), ("b", None, 40, 1)])


@silent("leak_after_finish", "zero_live_block", "hit_uninitialized")
def with_guard_off_contents_are_not_judged() -> list[Finding]:
    scene = two_decode()
    scene.hit("x", [3])
    return scene.content(("kv_trace",), zero=[1], finished=["a"], known=[("b", None, 40, 1)])


# Declared null blocks, dummy runs -------------------------------------------------------------------------------------

NULL = {"group_id": 0, "block_id": 0, "expected": "a block that somebody owns", "actual": 0}


@fires("bind_null_block_declared", request_id="a", position=16, **NULL)
def the_null_block_for_tokens_of_this_step() -> list[Finding]:
    return Scene().bound(new=[("a", ([1, 0, 3],), 0, 40)])


@fires("bind_null_block_declared", request_id="a", position=48, **NULL)
def the_null_block_is_appended_for_the_next_token() -> list[Finding]:
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 48)])
    return scene.bound(known=[("a", ([0],), 48, 1)])


@fires("bind_null_block_declared", request_id="a", position=32, **NULL)
def the_null_block_inside_the_window() -> list[Finding]:
    return Scene(pool(group(0, SLIDING_WINDOW, 16, 20))).bound(new=[("a", ([0, 0, 0, 0, 8],), 64, 16)])


@silent("bind_null_block_declared")
def null_blocks_before_the_window() -> list[Finding]:
    return Scene(pool(group(0, SLIDING_WINDOW, 16, 20))).bound(new=[("a", ([0, 0, 7, 8, 9],), 64, 16)])


@silent("bind_null_block_declared")
def null_blocks_of_a_state_group_and_behind_the_tokens() -> list[Finding]:
    scene = Scene(pool(group(0), group(1, "mamba")))
    return scene.bound(new=[("a", ([1, 2, 3, 0], [0, 0, 5]), 0, 40)])


@silent("bind_null_block_declared")
def the_null_block_of_a_request_whose_table_begins_somewhere() -> list[Finding]:
    return Scene().bound(known=[("a", ([0],), 40, 1)])


def dummy(scene: Guarded, *slots: int) -> list[Finding]:
    run = DummyRun(slots={0: np.array(slots, np.int64)}, num_tokens=len(slots))
    return judge_dummy(run, 1, scene.bindings, PARTS, ledger=scene.ledger)


DUMMY = {"group_id": 0, "generation": 1, "also": ("dummy_slot_enabled",), "expected": "a padding slot"}


@fires(
    "dummy_table_live", **DUMMY, other_request_id="b", token_index=1, block_id=5, slot=81,
    actual="a token that is written; generation 1, handed out in step 1",
)  # fmt: skip
def a_dummy_run_may_overwrite_a_token_of_a_full_block() -> list[Finding]:
    return dummy(two_decode(), -1, 81, 17)


@fires(
    "dummy_table_live", **DUMMY, other_request_id="a", token_index=0, block_id=3, slot=55,
    actual="a token that is written; generation 1, handed out in step 1",
)  # fmt: skip
def a_dummy_run_may_overwrite_the_last_token_of_a_request() -> list[Finding]:
    return dummy(two_decode(), 55)


@fires(
    "dummy_table_live", **DUMMY, other_request_id="a", token_index=0, block_id=1, slot=16,
    actual="a token that is written; generation 1, handed out in step 1, given up and not yet released",
)  # fmt: skip
def a_dummy_run_may_overwrite_what_a_connector_still_sends() -> list[Finding]:
    return dummy(holding(), 16)


@silent("dummy_table_live")
def a_dummy_run_writes_behind_the_last_token_of_a_request() -> list[Finding]:
    return dummy(two_decode(), 56)


@silent("dummy_table_live")
def a_dummy_run_writes_into_free_blocks_outside_and_nowhere() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [3, 2, 1])
    scene.say(finished=["a"], known=[("b", None, 40, 1)])
    return dummy(scene, 16, 900, -1, 1 << 40, 3)


@silent("dummy_table_live")
def a_dummy_run_where_the_pool_is_not_followed() -> list[Finding]:
    run = DummyRun(slots={0: np.array([16], np.int64)}, num_tokens=1)
    return judge_dummy(run, 1, two_decode().bindings, PARTS)


@silent("zero_live_block", "aborted_block_still_cached")
def a_step_that_clears_nothing() -> list[Finding]:
    scene = two_decode()
    return judge_content(scene.say(**DECODE), scene.legality, PARTS)
