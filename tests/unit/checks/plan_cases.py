"""Positions, lengths, slots and tables: what fires each rule about plans, and what it must let pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvscope.checks.finding import Finding
from kvscope.facts.plans import Plan
from kvscope.facts.topology import SLIDING_WINDOW, Topology
from unit.checks.cases import fires, silent
from unit.checks.scenes import ONE_GROUP, Scene, changed, decoding
from unit.checks.worlds import group, pool

A_WRITES = {"request_id": "a", "row": 0, "group_id": 0, "token_index": 0, "position": 40, "expected": 56}
A_READS = {"request_id": "a", "row": 0, "group_id": 0, "position": 32, "expected": 3}
OWNED = {"expected": "a block that somebody owns"}
A_WRITES_OUTSIDE = {**A_WRITES, "expected": "0 to 1023"}
WINDOW = pool(group(0, SLIDING_WINDOW, 16, 8))
WITH_STATE = pool(group(0), group(1, "mamba"))


Change = Callable[[Plan], object]


def unchanged(_: Plan) -> None:
    pass


def slot(value: int, token: int = 0, index: int = 0) -> list[Finding]:
    return changed(lambda plan: plan.groups[index].slots.__setitem__(token, value))


def entry(value: int, row: int = 0, logical: int = 2) -> list[Finding]:
    return changed(lambda plan: plan.groups[0].tables.__setitem__((row, logical), value))


def prefill(change: Change = unchanged) -> list[Finding]:
    """``a`` and ``b`` compute 40 tokens each, ``a`` the tokens 0 to 39 of the batch."""
    scene = Scene()
    declaration = scene.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])
    plan = scene.plan(declaration)
    change(plan)
    return scene.judge(declaration, plan)


def shared_prefix(change: Change = unchanged) -> list[Finding]:
    """``b`` has hit the first two blocks of ``a``; its row is the first one."""
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 40)])
    declaration = scene.say(new=[("b", ([1, 2, 6],), 32, 8)], known=[("a", None, 40, 1)])
    plan = scene.plan(declaration)
    change(plan)
    return scene.judge(declaration, plan)


def windowed(change: Change = unchanged) -> list[Finding]:
    """A window of 8 tokens before token 40: only the third block is looked at."""
    return changed(change, WINDOW)


# Writes: outside, null, foreign, twice, elsewhere, padding ------------------------------------------------------------


@fires(
    "write_outside_cache", **A_WRITES_OUTSIDE, block_id=64, slot=1024, actual=1024, also=("write_target_mismatch",),
    launch_fatal=True,
)  # fmt: skip
def one_slot_past_the_cache() -> list[Finding]:
    return slot(1024)


@fires(
    "write_outside_cache", **A_WRITES_OUTSIDE, block_id=-1, slot=-2, actual=-2,
    also=("write_slot_negative", "write_target_mismatch"), launch_fatal=True,
)  # fmt: skip
def a_negative_slot_that_is_not_the_padding_value() -> list[Finding]:
    return slot(-2)


@silent("write_outside_cache")
def the_last_slot_of_the_cache() -> list[Finding]:
    return slot(1023)


@silent("write_outside_cache", "write_slot_collision", "null_block_write", "write_target_mismatch")
def padding_that_is_off() -> list[Finding]:
    return prefill()


@silent("write_outside_cache", "null_block_write", "write_foreign_block")
def a_real_token_that_is_switched_off() -> list[Finding]:
    return slot(-1)


@fires("null_block_write", **{**A_WRITES, **OWNED}, block_id=0, slot=8, actual=8, also=("write_target_mismatch",))
def a_slot_in_the_null_block() -> list[Finding]:
    return slot(8)


@fires(
    "null_block_write",
    {"reason": "read_null_block", "request_id": "a", "row": 0, "group_id": 0, "position": 32, "block_id": 0,
     "actual": 0, **OWNED},
    request_id="a", row=0, group_id=0, token_index=0, position=40, block_id=0, slot=8, actual=8, **OWNED,
)  # fmt: skip
def a_null_block_that_was_declared() -> list[Finding]:
    """It is where the declaration puts it, so that only the invariant is hurt, by the write and by the read."""
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 0],), 0, 40)])
    declaration = scene.say(known=[("a", None, 40, 1)])
    return scene.judge(declaration, scene.plan(declaration))


@silent("null_block_write", "write_target_mismatch", "read_target_mismatch", "read_null_block")
def a_state_group_whose_slots_mean_something_else() -> list[Finding]:
    def other_semantics(plan: Plan) -> None:
        plan.groups[1].slots[:] = 0
        plan.groups[1].tables[:] = 0

    return changed(other_semantics, WITH_STATE)


@fires(
    "write_foreign_block", **A_WRITES, other_request_id="b", block_id=5, slot=88, actual=88,
    also=("write_target_mismatch",),
)  # fmt: skip
def a_slot_in_a_block_of_another_request() -> list[Finding]:
    return slot(88)


@fires(
    "write_foreign_block", **A_WRITES, other_request_id="b", block_id=6, slot=104, actual=104,
    also=("write_slot_collision", "write_target_mismatch"),
)  # fmt: skip
def the_very_slot_of_another_request() -> list[Finding]:
    return slot(104)


@silent("write_foreign_block", "read_foreign_block", "read_row_request_mismatch", "write_slot_collision")
def blocks_that_are_shared_by_a_prefix_hit() -> list[Finding]:
    return shared_prefix()


@silent("write_foreign_block")
def a_slot_elsewhere_in_a_shared_block() -> list[Finding]:
    return shared_prefix(lambda plan: plan.groups[0].slots.__setitem__(0, 20))


@silent("write_foreign_block", "read_foreign_block")
def a_block_that_nobody_has() -> list[Finding]:
    return slot(50 * 16 + 8) + entry(50)


@fires(
    "write_slot_collision", request_id="a", row=0, group_id=0, token_index=1, position=1, block_id=1, slot=16,
    expected=17, actual=16, also=("write_target_mismatch",),
)  # fmt: skip
def two_tokens_of_one_request_in_one_slot() -> list[Finding]:
    return prefill(lambda plan: plan.groups[0].slots.__setitem__(1, 16))


@fires(
    "write_slot_collision", other_request_id="a", request_id="b", row=1, group_id=0, token_index=1, position=40,
    block_id=3, slot=56, expected=56, actual=56,
)  # fmt: skip
def two_requests_that_were_given_the_same_block() -> list[Finding]:
    """Both claim the slot rightly, so that nothing but the invariant is hurt."""
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 3],), 0, 32)])
    declaration = scene.say(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    return scene.judge(declaration, scene.plan(declaration))


@silent("write_slot_collision")
def the_same_slot_in_two_groups() -> list[Finding]:
    scene = Scene(pool(group(0), group(1)))
    declaration = scene.say(new=[("a", ([1, 2, 3], [1, 2, 3]), 0, 40)])
    return scene.judge(declaration, scene.plan(declaration))


@silent("write_slot_collision")
def the_same_slot_in_two_steps() -> list[Finding]:
    scene, declaration = decoding()
    findings = scene.judge(declaration, scene.plan(declaration))
    again = scene.say(known=[("a", None, 40, 1), ("b", None, 40, 1)])
    return findings + scene.judge(again, scene.plan(again))


@silent("write_slot_collision", "write_target_mismatch")
def two_requests_that_write_apart_in_a_block_of_both() -> list[Finding]:
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 3],), 0, 33)])
    declaration = scene.say(known=[("a", None, 40, 1), ("b", None, 33, 1)])
    return scene.judge(declaration, scene.plan(declaration))


@silent("write_slot_collision")
def two_tokens_that_are_switched_off() -> list[Finding]:
    return prefill(lambda plan: plan.groups[0].slots.__setitem__(slice(0, 2), -1))


@fires("write_target_mismatch", **A_WRITES, block_id=3, slot=57, actual=57)
def the_next_slot_of_the_own_block() -> list[Finding]:
    return slot(57)


@fires("write_slot_negative", **A_WRITES, block_id=-1, slot=-1, actual=-1, also=("write_target_mismatch",))
def a_real_token_that_would_not_be_written() -> list[Finding]:
    return slot(-1)


@silent("write_slot_negative")
def the_first_slot_of_the_cache_and_padding() -> list[Finding]:
    return slot(0) + slot(-1, token=3)


def slots_of(count: int, *, topology: Topology = ONE_GROUP, index: int = 0) -> list[Finding]:
    """A mapping that has only so many of the two slots and three entries of padding."""

    def cut(plan: Plan) -> None:
        plan.groups[index].slots = plan.groups[index].slots[:count]

    return changed(cut, topology)


@fires(
    "write_slot_count_mismatch", request_id="b", row=1, group_id=0, token_index=1, position=40, expected=2, actual=1,
)  # fmt: skip
def a_mapping_that_lacks_the_last_token() -> list[Finding]:
    return slots_of(1)


@fires(
    "write_slot_count_mismatch", request_id="a", row=0, group_id=1, token_index=0, position=40, expected=2, actual=0,
)  # fmt: skip
def a_group_whose_mapping_is_empty() -> list[Finding]:
    return slots_of(0, topology=pool(group(0), group(1)), index=1)


@fires(
    "write_target_mismatch",
    {"reason": "write_slot_count_mismatch", "request_id": "b", "row": 1, "group_id": 0, "token_index": 1,
     "position": 40, "expected": 2, "actual": 1},
    **A_WRITES, block_id=3, slot=57, actual=57,
)  # fmt: skip
def a_short_mapping_that_is_wrong_as_well() -> list[Finding]:
    def cut(plan: Plan) -> None:
        plan.groups[0].slots = np.array([57], np.int64)

    return changed(cut)


@silent("write_slot_count_mismatch")
def a_mapping_without_padding() -> list[Finding]:
    return slots_of(2)


@fires(
    "write_target_mismatch", request_id="b", row=1, group_id=1, token_index=1, position=40, block_id=50, slot=808,
    expected=264, actual=808,
)  # fmt: skip
def a_slot_in_the_second_group() -> list[Finding]:
    return changed(lambda plan: plan.groups[1].slots.__setitem__(1, 808), pool(group(0), group(1)))


@silent("write_target_mismatch", "write_position_mismatch", "write_length_mismatch", "read_length_exceeds_declared")
def lengths_that_the_host_only_estimates() -> list[Finding]:
    """One draft token was rejected on the device: the plan is one token behind what was declared."""

    def behind(plan: Plan) -> None:
        plan.exact = False
        plan.positions -= 1
        plan.seq_lens -= 1
        plan.groups[0].slots[:2] -= 1

    return changed(behind)


@fires(
    "write_target_mismatch", request_id="a", row=0, group_id=0, token_index=0, position=39, block_id=3, slot=56,
    expected=55, actual=56,
)  # fmt: skip
def a_slot_that_does_not_follow_from_an_estimated_position() -> list[Finding]:
    def behind(plan: Plan) -> None:
        plan.exact = False
        plan.positions[0] -= 1
        plan.seq_lens[0] -= 1

    return changed(behind)


@fires("write_padding_slot_enabled", group_id=0, token_index=3, block_id=56, slot=900, expected=-1, actual=900)
def padding_that_points_into_a_free_block() -> list[Finding]:
    return slot(900, token=3)


@fires(
    "write_padding_slot_enabled", other_request_id="b", group_id=0, token_index=4, block_id=5, slot=83, expected=-1,
    actual=83,
)  # fmt: skip
def padding_that_points_into_a_live_block() -> list[Finding]:
    return slot(83, token=4)


@fires(
    "write_padding_slot_enabled", group_id=0, token_index=2, block_id=64, slot=1024, expected=-1, actual=1024,
    launch_fatal=True,
)  # fmt: skip
def padding_that_points_outside() -> list[Finding]:
    return slot(1024, token=2)


@silent("write_padding_slot_enabled")
def a_mapping_that_ends_with_the_real_tokens() -> list[Finding]:
    scene, declaration = decoding()
    return scene.judge(declaration, scene.plan(declaration, pad=0))


# Reads: outside, null, a whole row, a block, the order, the length ----------------------------------------------------


@fires(
    "read_outside_cache",
    **{**A_READS, "expected": "0 to 63"},
    block_id=64,
    actual=64,
    also=("read_target_mismatch",),
    launch_fatal=True,
)
def an_entry_one_past_the_pool() -> list[Finding]:
    return entry(64)


@fires(
    "read_outside_cache",
    **{**A_READS, "expected": "0 to 63"},
    block_id=-1,
    actual=-1,
    also=("read_target_mismatch",),
    launch_fatal=True,
)
def a_negative_entry() -> list[Finding]:
    return entry(-1)


@silent("read_outside_cache", "read_null_block", "read_target_mismatch", "read_foreign_block")
def rubbish_behind_the_sequence() -> list[Finding]:
    return entry(-77, logical=3) + entry(0, logical=3) + entry(5, logical=3)


@silent("read_outside_cache", "read_null_block", "read_target_mismatch", "read_row_request_mismatch")
def rubbish_before_the_window() -> list[Finding]:
    return windowed(lambda plan: plan.groups[0].tables.__setitem__((slice(None), slice(0, 2)), [[99, 0], [4, -1]]))


@fires("read_null_block", **{**A_READS, **OWNED}, block_id=0, actual=0, also=("read_target_mismatch",))
def an_entry_that_is_the_null_block() -> list[Finding]:
    return entry(0)


@fires("read_null_block", **{**A_READS, **OWNED}, block_id=0, actual=0, also=("read_target_mismatch",))
def a_table_that_is_too_narrow_for_the_sequence() -> list[Finding]:
    def narrow(plan: Plan) -> None:
        plan.groups[0].tables = np.ascontiguousarray(plan.groups[0].tables[:, :2])

    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 40)])
    declaration = scene.say(known=[("a", None, 40, 1)])
    plan = scene.plan(declaration)
    narrow(plan)
    return scene.judge(declaration, plan)


@fires(
    "read_row_request_mismatch",
    {"reason": "read_row_request_mismatch", "request_id": "b", "other_request_id": "a", "row": 1, "group_id": 0,
     "position": 0, "block_id": 1, "expected": 4, "actual": 1, "also": ("read_foreign_block", "read_target_mismatch")},
    request_id="a", other_request_id="b", row=0, group_id=0, position=0, block_id=4, expected=1, actual=4,
    also=("read_foreign_block", "read_target_mismatch"),
)  # fmt: skip
def two_rows_in_each_others_place() -> list[Finding]:
    def exchange(plan: Plan) -> None:
        plan.groups[0].tables[[0, 1]] = plan.groups[0].tables[[1, 0]]

    return changed(exchange)


@fires(
    "read_row_request_mismatch", **A_READS, other_request_id="b", block_id=6, actual=6,
    also=("read_foreign_block", "read_target_mismatch"),
)  # fmt: skip
def a_window_that_looks_at_another_request() -> list[Finding]:
    """What stands before the window is not looked at, and need not be the other request's."""
    return windowed(lambda plan: plan.groups[0].tables.__setitem__((0, slice(0, 3)), [1, 0, 6]))


@fires("read_foreign_block", **A_READS, other_request_id="b", block_id=5, actual=5, also=("read_target_mismatch",))
def an_entry_that_is_a_block_of_another_request() -> list[Finding]:
    return entry(5)


@silent("read_row_request_mismatch")
def a_single_foreign_entry() -> list[Finding]:
    return entry(6)


@silent("read_foreign_block")
def an_entry_that_is_another_block_of_a_shared_prefix() -> list[Finding]:
    return shared_prefix(lambda plan: plan.groups[0].tables.__setitem__((0, 0), 2))


@fires("read_target_mismatch", **A_READS, block_id=50, actual=50)
def an_entry_that_nobody_has() -> list[Finding]:
    return entry(50)


@fires("read_target_mismatch", request_id="a", row=0, group_id=0, position=0, block_id=2, expected=1, actual=2)
def two_entries_in_each_others_place() -> list[Finding]:
    return changed(lambda plan: plan.groups[0].tables.__setitem__((0, slice(0, 2)), [2, 1]))


@fires("read_table_short", **{**A_READS, "expected": 3}, block_id=3, actual=2)
def a_row_that_ends_before_the_sequence() -> list[Finding]:
    return changed(lambda plan: plan.groups[0].table_blocks.__setitem__(0, 2))


def entries(*blocks: int, topology: Topology = ONE_GROUP) -> list[Finding]:
    """The row of ``a``, which has blocks 1, 2, 3, leads to these instead."""
    return changed(lambda plan: plan.groups[0].tables.__setitem__((0, slice(0, len(blocks))), blocks), topology)


@fires(
    "logical_order_mismatch", request_id="a", row=0, group_id=0, position=0, block_id=3, expected=1, actual=3,
    also=("read_target_mismatch",),
)  # fmt: skip
def three_entries_that_went_around() -> list[Finding]:
    return entries(3, 1, 2)


@silent("logical_order_mismatch", "read_duplicate_block")
def two_entries_that_changed_places() -> list[Finding]:
    return entries(3, 2, 1)


@silent("logical_order_mismatch", "read_duplicate_block")
def another_order_before_the_window() -> list[Finding]:
    return windowed(lambda plan: plan.groups[0].tables.__setitem__((0, slice(0, 3)), [3, 3, 3]))


@silent("logical_order_mismatch")
def three_entries_of_which_one_is_a_strangers() -> list[Finding]:
    return entries(3, 1, 50)


@fires(
    "read_duplicate_block", request_id="a", row=0, group_id=0, position=32, block_id=1, expected=3, actual=1,
    also=("read_target_mismatch",),
)  # fmt: skip
def the_first_block_at_the_end_once_more() -> list[Finding]:
    return entries(1, 2, 1)


@fires(
    "read_foreign_block", request_id="a", other_request_id="b", row=0, group_id=0, position=16, block_id=5,
    expected=2, actual=5, also=("read_duplicate_block", "read_target_mismatch"),
)  # fmt: skip
def another_requests_block_twice() -> list[Finding]:
    return entries(1, 5, 5)


@silent("read_duplicate_block")
def the_null_block_or_one_outside_the_pool_twice() -> list[Finding]:
    return entries(1, 0, 0) + entries(1, 64, 64)


@silent("read_duplicate_block")
def a_block_that_was_declared_twice() -> list[Finding]:
    """``bind_duplicate_block`` has it; what is wrong with the plan is another entry."""
    scene = Scene()
    scene.say(new=[("a", ([1, 1, 3],), 0, 40)])
    declaration = scene.say(known=[("a", None, 40, 1)])
    plan = scene.plan(declaration)
    plan.groups[0].tables[0, 2] = 50
    return scene.judge(declaration, plan)


@silent("read_table_short")
def a_row_with_blocks_for_later() -> list[Finding]:
    return changed(lambda plan: plan.groups[0].table_blocks.__setitem__(0, 9))


# Whole rows -----------------------------------------------------------------------------------------------------------


@fires(
    "write_position_mismatch", request_id="a", row=0, token_index=0, position=41, expected=40, actual=41,
)  # fmt: skip
def a_token_at_the_next_position() -> list[Finding]:
    return changed(lambda plan: plan.positions.__setitem__(0, 41))


@fires(
    "write_position_mismatch", request_id="a", row=0, group_id=0, token_index=0, position=41, block_id=3, slot=57,
    expected=40, actual=41, also=("write_target_mismatch",),
)  # fmt: skip
def a_position_with_the_slot_that_follows_from_it() -> list[Finding]:
    def shift(plan: Plan) -> None:
        plan.positions[0] += 1
        plan.groups[0].slots[0] += 1

    return changed(shift)


@fires("write_position_mismatch", request_id="b", row=1, token_index=50, position=3, expected=10, actual=3)
def a_hole_in_a_prompt() -> list[Finding]:
    return prefill(lambda plan: plan.positions.__setitem__(50, 3))


@fires("read_length_exceeds_declared", request_id="a", row=0, expected=41, actual=57)
def a_sequence_that_is_a_block_too_long() -> list[Finding]:
    return changed(lambda plan: plan.seq_lens.__setitem__(0, 57))


@silent("read_length_exceeds_declared")
def a_sequence_that_is_too_short() -> list[Finding]:
    return changed(lambda plan: plan.seq_lens.__setitem__(0, 40))


@fires("write_length_mismatch", request_id="a", row=0, expected=41, actual=40)
def a_sequence_without_its_new_token() -> list[Finding]:
    return changed(lambda plan: plan.seq_lens.__setitem__(0, 40))


@silent("write_length_mismatch")
def a_sequence_that_is_too_long() -> list[Finding]:
    return changed(lambda plan: plan.seq_lens.__setitem__(0, 57))


@fires(
    "write_foreign_block",
    {"reason": "write_position_mismatch", "request_id": "b", "row": 1, "group_id": 0, "token_index": 41, "position": 1,
     "block_id": 4, "slot": 65, "expected": 0, "actual": 1, "also": ("write_target_mismatch", "write_length_mismatch")},
    request_id="a", other_request_id="b", row=0, group_id=0, token_index=40, position=0, block_id=4, slot=64,
    expected=56, actual=64, also=("write_position_mismatch", "write_target_mismatch", "write_length_mismatch"),
)  # fmt: skip
def a_border_between_two_rows_that_is_a_token_off() -> list[Finding]:
    """The first row takes in a token of the second one, which begins a token late."""
    return prefill(lambda plan: plan.query_start.__setitem__(1, 41))


@fires(
    "write_query_offsets_invalid", request_id="b", row=1, expected=80, actual=79, also=("write_length_mismatch",),
)  # fmt: skip
def a_last_row_that_ends_before_its_tokens() -> list[Finding]:
    return prefill(lambda plan: plan.query_start.__setitem__(2, 79))


@fires(
    "write_query_offsets_invalid", request_id="b", row=1, expected=80, actual=81, also=("write_length_mismatch",),
)  # fmt: skip
def a_last_row_that_ends_behind_the_batch() -> list[Finding]:
    return prefill(lambda plan: plan.query_start.__setitem__(2, 81))


@fires(
    "write_query_offsets_invalid", request_id="a", row=0, group_id=0, token_index=0, position=0, block_id=1, slot=16,
    expected=0, actual=1, also=("write_position_mismatch", "write_target_mismatch", "write_length_mismatch"),
)  # fmt: skip
def a_first_row_that_begins_late() -> list[Finding]:
    """Every other row is where it was, and nothing is said about it."""
    return prefill(lambda plan: plan.query_start.__setitem__(0, 1))


@silent("write_query_offsets_invalid")
def a_border_that_moved_between_sound_ends() -> list[Finding]:
    return prefill(lambda plan: plan.query_start.__setitem__(1, 41))


@silent("write_query_offsets_invalid", "write_slot_count_mismatch")
def offsets_of_lengths_that_are_only_estimated() -> list[Finding]:
    def estimated(plan: Plan) -> None:
        plan.exact = False
        plan.query_start[2] = 82

    return prefill(estimated)


def without_group(index: int, topology: Topology) -> list[Finding]:
    return changed(lambda plan: plan.groups.__delitem__(index), topology)


@fires(
    "write_group_missing", group_id=0, expected="slots of 2 tokens", actual="no slots", launch_fatal=True,
)  # fmt: skip
def the_first_of_two_groups_is_missing() -> list[Finding]:
    """The other one is judged as what it is."""
    return without_group(0, pool(group(0), group(1)))


@fires(
    "write_group_missing", group_id=0, expected="slots of 2 tokens", actual="no slots", launch_fatal=True,
)  # fmt: skip
def the_only_group_is_missing() -> list[Finding]:
    return without_group(0, ONE_GROUP)


@silent("write_group_missing")
def a_state_group_that_has_no_plan() -> list[Finding]:
    return without_group(1, WITH_STATE)


@silent("write_group_missing")
def a_mapping_of_no_slots() -> list[Finding]:
    return slots_of(0)


@fires("write_length_mismatch", request_id="a", row=0, expected=2, actual=1)
def one_token_where_two_were_declared() -> list[Finding]:
    """A draft token is missing from a batch that looks like any batch of single tokens."""
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])
    declaration = scene.say(known=[("a", None, 40, 2), ("b", None, 40, 1)])
    plan = scene.plan(declaration)
    plan.query_start[:] = [0, 1, 2]
    plan.positions, plan.num_tokens = plan.positions[[0, 2]], 2
    plan.groups[0].slots = plan.groups[0].slots[[0, 2, 3, 4]]
    return scene.judge(declaration, plan)
