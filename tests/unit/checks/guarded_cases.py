"""Plans beside the pool: blocks that were released, reserved, somebody else's, shared, or never written."""

from __future__ import annotations

from collections.abc import Callable

from kvscope.checks.finding import Finding
from kvscope.facts.allocator import RECEIVE
from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import SLIDING_WINDOW
from unit.checks.cases import fires, silent
from unit.checks.guarded import Guarded, two_decode
from unit.checks.scenes import PARTS
from unit.checks.worlds import group, pool

STEP = {"known": [("a", None, 40, 1), ("b", None, 40, 1)]}
"""``a`` writes token 40 into slot 56 and ``b`` into slot 104, both in their third block."""
A_ROW = {"request_id": "a", "row": 0, "group_id": 0}
A_WRITES = {**A_ROW, "token_index": 0, "position": 40}


def planned(scene: Guarded, change: Callable[[Plan], object] = lambda _: None, **said: object) -> list[Finding]:
    declaration = scene.say(**(said or STEP))
    plan = scene.plan(declaration)
    change(plan)
    return scene.judge(declaration, plan)


def slot(value: int, token: int = 0) -> Callable[[Plan], object]:
    return lambda plan: plan.groups[0].slots.__setitem__(token, value)


def entry(value: int, logical: int = 2, row: int = 0) -> Callable[[Plan], object]:
    return lambda plan: plan.groups[0].tables.__setitem__((row, logical), value)


# Released: the declaration goes on ------------------------------------------------------------------------------------

KNEW = {"generation": 1, "expected": "generation 1, in which it had the block"}
FREED_2 = "freed in step 2 (finish)"


@fires(
    "write_after_release",
    {"reason": "read_after_release", **A_ROW, **KNEW, "block_id": 3, "position": 32,
     "actual": f"released since: generation 1, {FREED_2}"},
    **A_WRITES, **KNEW, block_id=3, slot=56, actual=f"released since: generation 1, {FREED_2}",
)  # fmt: skip
def a_request_goes_on_with_its_last_block_released() -> list[Finding]:
    """Plan and declaration agree, slot for slot."""
    scene = two_decode()
    scene.free("a", [3])
    return planned(scene)


@fires(
    "read_after_release", request_id="a", row=1, group_id=0, **KNEW, block_id=1, position=0, other_request_id="c",
    actual=f"released since: generation 2, handed out in step 2; {FREED_2}",
)  # fmt: skip
def a_request_reads_a_block_that_was_released_and_is_somebody_elses_by_now() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [1])
    scene.allocate("c", [1])
    return planned(scene, new=[("c", ([1],), 0, 3)], **STEP)


@fires(
    "read_after_release", **A_ROW, **KNEW, block_id=2, position=16, other_request_id="b",
    actual="released since: generation 1, handed out in step 1",
)  # fmt: skip
def a_request_reads_a_block_that_it_released_and_another_still_has() -> list[Finding]:
    scene = two_decode()
    scene.hit("b", [2], 3)
    scene.free("a", [2], "abort")
    return planned(scene)


@fires("read_after_release", **A_ROW, **KNEW, block_id=1, position=0, actual=f"released since: generation 1, {FREED_2}")
def the_released_block_is_told_in_later_steps_as_well() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [1])
    scene.say(**STEP)
    return planned(scene, known=[("a", None, 41, 1), ("b", None, 41, 1)])


@silent("read_after_release", "write_after_release")
def a_request_that_comes_back_with_other_blocks() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [3, 2, 1], "preempt")
    findings = planned(scene, preempted=["a"], known=[("b", None, 40, 1)])
    scene.allocate("a", [7, 3, 2])
    return findings + planned(scene, known=[("a", ([7, 3, 2],), 0, 40), ("b", None, 41, 1)], resumed=["a"])


@silent("read_after_release", "write_after_release", "read_uninitialized")
def blocks_before_the_window_are_given_back() -> list[Finding]:
    scene = two_decode(pool(group(0, SLIDING_WINDOW, 16, 8)))
    scene.free("a", [1, 2], "window")
    scene.allocate("b", [1], 3)
    return planned(scene, known=[("a", None, 40, 1), ("b", ([1],), 40, 9)])


# Released: the plan alone is wrong ------------------------------------------------------------------------------------


def with_a_free_block() -> Guarded:
    """Block 9 was of ``f`` until step 2."""
    scene = two_decode()
    scene.allocate("f", [9])
    scene.free("f", [9])
    return scene


@fires(
    "write_after_release", **A_WRITES, block_id=9, slot=152, generation=1, other_request_id="f",
    also=("write_block_not_declared", "write_target_mismatch"), expected="block 3, as declared",
    actual=f"generation 1, {FREED_2}",
)  # fmt: skip
def a_slot_lies_in_a_block_that_somebody_released() -> list[Finding]:
    return planned(with_a_free_block(), slot(152))


@fires(
    "read_after_release", **A_ROW, position=16, block_id=9, generation=1, other_request_id="f",
    also=("read_target_mismatch",), expected="block 2, as declared", actual=f"generation 1, {FREED_2}",
)  # fmt: skip
def an_entry_leads_to_a_block_that_somebody_released() -> list[Finding]:
    return planned(with_a_free_block(), entry(9, 1))


@silent("write_after_release", "read_after_release")
def an_entry_that_nothing_follows_leads_to_a_released_block() -> list[Finding]:
    return planned(with_a_free_block(), entry(9, 3))


@silent("read_after_release", "write_after_release", "write_block_not_declared", "write_foreign_owner")
def a_sound_plan_beside_a_sound_pool() -> list[Finding]:
    return planned(with_a_free_block())


# Reserved -------------------------------------------------------------------------------------------------------------


def receiving() -> Guarded:
    """``p`` waits for 20 tokens in blocks 9 and 10."""
    scene = two_decode()
    scene.allocate("p", [9, 10], cause="external", reserved=True)
    scene.say(known=[("b", None, 40, 1)])
    return scene


WAITS = "generation 1, handed out in step 2, waiting for a receive"
NOT_WAITING = {"generation": 1, "expected": "a block that no receive has yet to fill", "actual": WAITS}


@fires(
    "write_reserved_block", **A_WRITES, **NOT_WAITING, block_id=9, slot=144, other_request_id="p",
    also=("write_foreign_owner", "write_block_not_declared", "write_target_mismatch"),
)  # fmt: skip
def a_slot_lies_in_a_block_that_waits_for_a_receive() -> list[Finding]:
    return planned(receiving(), slot(144), known=[("a", None, 40, 1)])


@fires(
    "read_reserved_block", **A_ROW, **NOT_WAITING, block_id=10, position=32, other_request_id="p",
    also=("read_target_mismatch",),
)  # fmt: skip
def an_entry_leads_to_a_block_that_waits_for_a_receive() -> list[Finding]:
    return planned(receiving(), entry(10), known=[("a", None, 40, 1)])


@fires(
    "write_reserved_block",
    {"reason": "read_reserved_block", "request_id": "p", "row": 0, "group_id": 0, **NOT_WAITING, "block_id": 9,
     "position": 0, "also": ("read_uninitialized",)},
    request_id="p", row=0, group_id=0, token_index=0, position=20, **NOT_WAITING, block_id=10, slot=164,
)  # fmt: skip
def a_request_is_scheduled_before_its_receive_has_ended() -> list[Finding]:
    return planned(receiving(), new=[("p", ([9, 10],), 20, 1)])


@silent("read_reserved_block", "write_reserved_block", "read_uninitialized", "write_loaded_prefix")
def a_request_is_scheduled_after_its_receive() -> list[Finding]:
    scene = receiving()
    scene.pool(RECEIVE, [9, 10], "p", filled=[16, 4])
    return planned(scene, new=[("p", ([9, 10],), 20, 1)])


@silent("read_reserved_block", "write_reserved_block", "read_uninitialized")
def a_load_inside_the_step() -> list[Finding]:
    scene = two_decode()
    scene.allocate("p", [9, 10], cause="external")
    return planned(scene, new=[("p", ([9, 10],), 20, 1)])


# Whose it is ----------------------------------------------------------------------------------------------------------


@fires(
    "write_foreign_owner", **A_WRITES, block_id=5, slot=88, generation=1, other_request_id="b",
    also=("write_block_not_declared", "write_target_mismatch"), expected="a block of its own",
    actual="generation 1, handed out in step 1, given up and not yet released",
)  # fmt: skip
def a_slot_lies_in_a_block_that_a_finished_request_still_holds() -> list[Finding]:
    scene = two_decode()
    scene.hold("b", [4, 5, 6])
    return planned(scene, slot(88), finished=["b"], known=[("a", None, 40, 1)])


@fires(
    "write_foreign_owner",
    {"reason": "read_uninitialized", "request_id": "x", "row": 0, "group_id": 0, "position": 0, "block_id": 9,
     "generation": 1, "other_request_id": "w", "expected": "8 tokens of the block written",
     "actual": "0; generation 1, handed out in step 2"},
    request_id="x", row=0, group_id=0, token_index=0, position=8, block_id=9, slot=152, generation=1,
    other_request_id="w", expected="a block of its own", actual="generation 1, handed out in step 2",
)  # fmt: skip
def a_request_writes_as_declared_into_a_block_that_it_hit_and_lost() -> list[Finding]:
    """The pool took its share away; ``w`` has the block now. The plan agrees with the declaration."""
    scene = two_decode()
    scene.allocate("w", [9])
    scene.hit("x", [9])
    scene.free("x", [9])
    return planned(scene, new=[("x", ([9],), 8, 3)])


@fires(
    "write_block_not_declared", **A_WRITES, block_id=30, slot=488, generation=0, also=("write_target_mismatch",),
    expected="a block of its declared table", actual="never handed out",
)  # fmt: skip
def a_slot_lies_in_a_block_that_nobody_ever_had() -> list[Finding]:
    return planned(two_decode(), slot(488))


@fires(
    "write_block_not_declared", **A_WRITES, block_id=7, slot=120, generation=1, also=("write_target_mismatch",),
    expected="a block of its declared table", actual="generation 1, handed out in step 2",
)  # fmt: skip
def a_slot_lies_in_a_block_of_its_own_that_was_never_declared() -> list[Finding]:
    scene = two_decode()
    scene.allocate("a", [7], 3)
    return planned(scene, slot(120))


@silent("write_block_not_declared", "write_foreign_owner", "write_after_release")
def a_slot_is_off_inside_its_own_block() -> list[Finding]:
    return planned(two_decode(), slot(57))


@silent("write_block_not_declared", "write_foreign_owner", "write_after_release", "write_shared_block")
def slots_that_have_reasons_of_their_own() -> list[Finding]:
    """Outside the cache, the null block, no slot at all."""
    return [f for value in (1 << 30, -9, 3, -1) for f in planned(two_decode(), slot(value))]


@silent("write_foreign_owner", "write_foreign_block")
def a_request_writes_into_its_private_copy() -> list[Finding]:
    scene = two_decode()
    scene.hit("x", [3])
    scene.allocate("x", [9], 0, cause="copy")
    scene.pool("hold", [3], "x", cause="copy")
    scene.pool("touch", [9], cause="copy")
    return planned(scene, new=[("x", ([9],), 8, 3)], copies=[(3, 9)], known=[("a", None, 40, 1)])


def hit_and_written(offset: int, hashed: int, *, shared: bool) -> list[Finding]:
    """``x`` hits block 3 of ``a``, whose hash covers the first tokens, and goes on in it."""
    scene = two_decode()
    scene.cache("a", [3], hashed)
    if not shared:
        scene.free("a", [3, 2, 1])
    scene.hit("x", [3])
    gone = {"known": [("b", None, 40, 1)]} | ({} if shared else {"finished": ["a"]})
    return planned(scene, new=[("x", ([3],), offset, 2)], **gone)


X_SHARES = {"request_id": "x", "row": 0, "group_id": 0, "token_index": 0, "block_id": 3, "generation": 1}
ALONE = "a block that nobody else relies on"


@fires(
    "write_shared_block", **X_SHARES, position=8, slot=56, other_request_id="a", expected=ALONE,
    actual="2 references, 8 tokens covered by its hash; generation 1, handed out in step 1",
)  # fmt: skip
def a_hit_block_is_written_while_another_has_it() -> list[Finding]:
    return hit_and_written(8, 8, shared=True)


@fires(
    "write_shared_block", **X_SHARES, position=4, slot=52, other_request_id="a", expected=ALONE,
    actual="1 reference, 8 tokens covered by its hash; generation 1, handed out in step 1; freed in step 2 (finish) "
    "and hit again",
)  # fmt: skip
def a_hit_block_is_written_below_what_its_hash_covers() -> list[Finding]:
    return hit_and_written(4, 8, shared=False)


@silent("write_shared_block")
def a_hit_block_that_nobody_else_has_is_written_behind_its_hash() -> list[Finding]:
    return hit_and_written(8, 8, shared=False)


@fires(
    "write_shared_block", **A_WRITES, block_id=1, slot=24, generation=1, other_request_id="b",
    also=("write_target_mismatch",), expected=ALONE,
    actual="2 references, 16 tokens covered by its hash; generation 1, handed out in step 1",
)  # fmt: skip
def a_slot_lies_in_a_shared_block_of_its_own() -> list[Finding]:
    scene = two_decode()
    scene.hit("b", [1], 3)
    return planned(scene, slot(24))


@silent("write_shared_block", "read_uninitialized")
def a_request_writes_behind_what_it_has_hit() -> list[Finding]:
    scene = two_decode()
    scene.hit("x", [1, 2])
    scene.allocate("x", [9], 2)
    return planned(scene, new=[("x", ([1, 2, 9],), 32, 4)], **STEP)


# What is written ------------------------------------------------------------------------------------------------------


@fires(
    "read_uninitialized", request_id="x", row=0, group_id=0, position=40, block_id=3, generation=1,
    other_request_id="a", expected="16 tokens of the block written", actual="8; generation 1, handed out in step 1",
)  # fmt: skip
def a_request_comes_in_with_tokens_that_nobody_wrote() -> list[Finding]:
    """A hit on a block of which 8 tokens were there; that ``a`` goes on at the moment, too late, does not matter."""
    scene = two_decode()
    scene.cache("a", [1, 2, 3])
    scene.hit("x", [1, 2, 3])
    scene.allocate("x", [9], 3)
    return planned(scene, new=[("x", ([1, 2, 3, 9],), 48, 1)], known=[("a", None, 40, 1)])


@fires(
    "read_uninitialized", **A_ROW, position=0, block_id=30, generation=0, also=(), expected="a block that is written",
    actual="never handed out",
)  # fmt: skip
def with_trace_off_an_entry_leads_to_a_block_that_nobody_ever_had() -> list[Finding]:
    scene = two_decode()
    declaration = scene.say(**STEP)
    plan = scene.plan(declaration)
    entry(30, 0)(plan)
    return scene.judge(declaration, plan, ("kv_guard_config",))


@silent("read_uninitialized", "write_uninitialized_gap")
def a_prompt_that_is_computed_in_chunks() -> list[Finding]:
    scene = Guarded()
    scene.allocate("a", [1, 2])
    findings = planned(scene, new=[("a", ([1, 2],), 0, 20)])
    scene.allocate("a", [3, 4], 2)
    return findings + planned(scene, known=[("a", ([3, 4],), 20, 40)]) + planned(scene, known=[("a", None, 60, 4)])


@silent("read_uninitialized")
def a_request_shares_a_prefix_that_the_same_step_computes() -> list[Finding]:
    scene = Guarded()
    scene.allocate("a", [1, 2])
    scene.cache("a", [1])
    scene.hit("x", [1])
    scene.allocate("x", [3], 1)
    return planned(scene, new=[("a", ([1, 2],), 0, 20), ("x", ([1, 3],), 16, 4)])


@fires(
    "write_uninitialized_gap", request_id="a", row=0, group_id=0, token_index=0, position=43, block_id=3, slot=59,
    generation=1, expected="token 40, the first that is not written",
    actual="token 43; generation 1, handed out in step 1",
)  # fmt: skip
def a_request_goes_on_three_tokens_too_far() -> list[Finding]:
    return planned(two_decode(), known=[("a", None, 43, 1), ("b", None, 40, 1)])


@silent("write_uninitialized_gap")
def rejected_drafts_are_computed_again() -> list[Finding]:
    scene = two_decode()
    findings = planned(scene, known=[("a", None, 40, 4), ("b", None, 40, 1)])
    return findings + planned(scene, known=[("a", None, 42, 4), ("b", None, 41, 1)])


def loaded_again(computed: int) -> list[Finding]:
    """``p`` has received 32 tokens."""
    scene = receiving()
    scene.pool(RECEIVE, [9, 10], "p", filled=[16, 16])
    scene.cache("p", [9, 10])
    return planned(scene, new=[("p", ([9, 10],), computed, 32 - computed)])


@fires(
    "write_loaded_prefix", request_id="p", row=0, group_id=0, token_index=0, position=20, block_id=10, slot=164,
    generation=1, expected="tokens behind what was loaded",
    actual="token 4 of a block that a receive has filled; generation 1, handed out in step 2",
)  # fmt: skip
def what_a_load_has_brought_is_computed_again() -> list[Finding]:
    return loaded_again(20)


@silent("write_loaded_prefix", "write_shared_block")
def the_last_token_of_a_loaded_prompt_is_computed_again() -> list[Finding]:
    return loaded_again(31)


@silent("write_loaded_prefix", "read_uninitialized")
def what_a_failed_load_left_out_is_computed() -> list[Finding]:
    scene = receiving()
    scene.pool(RECEIVE, [9, 10], "p", filled=[16, 0], cause="load_failed")
    return planned(scene, new=[("p", ([9, 10],), 16, 10)])


# What is left out -----------------------------------------------------------------------------------------------------


def both_wrong(scene: Guarded) -> tuple[Declaration, Plan]:
    scene.free("a", [1])
    declaration = scene.say(**STEP)
    plan = scene.plan(declaration)
    slot(152)(plan)
    return declaration, plan


@silent("read_after_release", "write_after_release", "write_block_not_declared", "read_uninitialized")
def with_guard_off_the_pool_is_not_asked() -> list[Finding]:
    scene = two_decode()
    return scene.judge(*both_wrong(scene), ("kv_trace",))


@silent("read_after_release", "read_reserved_block", "write_after_release", "write_uninitialized_gap")
def requests_that_do_not_take_part_in_the_step() -> list[Finding]:
    scene = two_decode()
    scene.free("a", [3])
    return planned(scene, known=[("b", None, 40, 1)])


@silent("write_after_release", "read_after_release")
def another_group_than_the_one_whose_block_was_released() -> list[Finding]:
    scene = Guarded(pool(group(0), group(1)))
    scene.allocate("a", [1])
    scene.allocate("a", [2], group_id=1)
    declaration = scene.sound(new=[("a", ([1], [2]), 0, 5)])
    return scene.judge(declaration, scene.plan(declaration), PARTS)
