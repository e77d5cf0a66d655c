"""Declarations, messages to workers and dummy runs: what fires each rule about them, and what it must let pass."""

from __future__ import annotations

import numpy as np

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_batch, judge_dummy, judge_handover, judge_missing
from kvscope.facts.plans import DummyRun, PersistentSlots, Plan
from kvscope.facts.requests import StepRequests
from kvscope.facts.topology import CHUNKED_LOCAL, SLIDING_WINDOW
from unit.checks.cases import fires, silent
from unit.checks.scenes import PARTS, Scene, declare, decoding
from unit.checks.worlds import group, pool

# The declaration itself -----------------------------------------------------------------------------------------------


@fires(
    "bind_block_out_of_range", request_id="a", group_id=0, position=16, block_id=64, expected=63, actual=64,
    launch_fatal=True,
)  # fmt: skip
def a_declared_block_one_past_the_pool() -> list[Finding]:
    return Scene().bound(new=[("a", ([1, 64, 3],), 0, 40)])


@fires(
    "bind_block_out_of_range", request_id="a", group_id=1, position=48, block_id=-1, expected=63, actual=-1,
    launch_fatal=True,
)  # fmt: skip
def a_negative_block_that_is_appended() -> list[Finding]:
    scene = Scene(pool(group(0), group(1)))
    scene.say(new=[("a", ([1, 2, 3], [4, 5, 6]), 0, 48)])
    return scene.bound(known=[("a", ([7], [-1]), 48, 1)])


@silent("bind_block_out_of_range")
def the_first_and_the_last_block_of_the_pool() -> list[Finding]:
    return Scene().bound(new=[("a", ([0, 63, 1],), 0, 40)])


@fires(
    "bind_duplicate_block", request_id="a", group_id=0, position=32, block_id=1, expected="each block once",
    actual="also at logical block 0",
)  # fmt: skip
def a_block_twice_in_a_new_table() -> list[Finding]:
    return Scene().bound(new=[("a", ([1, 2, 1],), 0, 40)])


@fires(
    "bind_duplicate_block", request_id="a", group_id=0, position=48, block_id=2, expected="each block once",
    actual="also at logical block 1",
)  # fmt: skip
def one_block_that_the_request_has_already() -> list[Finding]:
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 48)])
    return scene.bound(known=[("a", ([2],), 48, 1)])


@fires(
    "bind_duplicate_block", request_id="a", group_id=0, position=64, block_id=2, expected="each block once",
    actual="also at logical block 1",
)  # fmt: skip
def a_block_among_several_that_the_request_has_already() -> list[Finding]:
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 3],), 0, 48)])
    return scene.bound(known=[("a", ([9, 2],), 48, 20)])


@fires(
    "bind_duplicate_block", request_id="a", group_id=0, position=64, block_id=4, expected="each block once",
    actual="also at logical block 3",
)  # fmt: skip
def a_block_twice_inside_the_window() -> list[Finding]:
    scene = Scene(pool(group(0, SLIDING_WINDOW, 16, 20)))
    scene.say(new=[("a", ([1, 2, 3, 4],), 0, 64)])
    return scene.bound(known=[("a", ([4],), 64, 1)])


@silent("bind_duplicate_block")
def a_block_that_comes_back_from_before_a_sliding_window() -> list[Finding]:
    scene = Scene(pool(group(0, SLIDING_WINDOW, 16, 20)))
    scene.say(new=[("a", ([1, 2, 3, 4],), 0, 64)])
    return scene.bound(known=[("a", ([1],), 64, 1)]) + scene.bound(known=[("a", ([2, 3],), 80, 20)])


@silent("bind_duplicate_block")
def a_block_that_comes_back_from_an_earlier_chunk() -> list[Finding]:
    scene = Scene(pool(group(0, CHUNKED_LOCAL, 16, 32)))
    scene.say(new=[("a", ([1, 2],), 0, 32)])
    return scene.bound(known=[("a", ([2, 1],), 32, 20)])


@silent("bind_duplicate_block")
def null_blocks_in_a_new_windowed_table() -> list[Finding]:
    scene = Scene(pool(group(0, SLIDING_WINDOW, 16, 20)))
    return scene.bound(new=[("a", ([0, 0, 0, 7, 8],), 64, 16)])


@silent("bind_duplicate_block")
def the_null_block_twice_inside_the_table() -> list[Finding]:
    scene = Scene()
    findings = scene.bound(new=[("a", ([0, 0, 1],), 0, 40)])
    return findings + scene.bound(known=[("a", ([0],), 48, 1)])


@silent("bind_duplicate_block", "bind_block_shortfall")
def a_group_with_other_semantics() -> list[Finding]:
    """One state slot, however long the sequence is."""
    return Scene(pool(group(0), group(1, "mamba"))).bound(new=[("a", ([1, 2, 3], [9, 9]), 0, 40)])


@silent("bind_duplicate_block", "bind_block_shortfall")
def a_request_from_before_the_first_declaration() -> list[Finding]:
    """Its table begins with what was appended last; where that stands is not known."""
    scene = Scene(pool(group(0), group(1, SLIDING_WINDOW, 16, 20)))
    findings = scene.bound(known=[("a", ([9], [10]), 160, 1)])
    return findings + scene.bound(known=[("a", ([9, 9], [10, 10]), 176, 20)])


@silent("bind_duplicate_block")
def a_block_twice_that_was_reported_when_it_was_given() -> list[Finding]:
    scene = Scene()
    scene.say(new=[("a", ([1, 2, 1],), 0, 48)])
    return scene.bound(known=[("a", ([4],), 48, 1)]) + scene.bound(known=[("a", ([5, 6],), 64, 20)])


@silent("bind_duplicate_block")
def a_table_that_ends_before_its_window_begins() -> list[Finding]:
    return Scene(pool(group(0, SLIDING_WINDOW, 16, 20))).bound(new=[("a", ([1],), 160, 1)])


@fires("bind_block_shortfall", request_id="a", group_id=0, position=32, expected=3, actual=2)
def a_table_that_is_a_block_short() -> list[Finding]:
    return Scene().bound(new=[("a", ([1, 2],), 0, 40)])


@fires("bind_block_shortfall", request_id="b", group_id=1, position=16, expected=2, actual=1)
def a_table_of_the_second_group_that_does_not_grow() -> list[Finding]:
    scene = Scene(pool(group(0), group(1)))
    scene.say(new=[("a", ([1, 2], [3, 4]), 0, 20), ("b", ([5], [6]), 0, 16)])
    return scene.bound(known=[("a", None, 20, 1), ("b", ([7], []), 16, 1)])


@silent("bind_block_shortfall")
def blocks_for_tokens_to_come() -> list[Finding]:
    return Scene().bound(new=[("a", ([1, 2, 3, 4],), 0, 48), ("b", ([5],), 0, 16)])


# The message to the worker --------------------------------------------------------------------------------------------

DECLARED = declare(
    7,
    new=[("n", ([1, 2], [3]), 0, 20)],
    known=[("c", ([4], []), 32, 1), ("k", None, 10, 1), ("r", ([5], [6]), 0, 16)],
    resumed=["r"],
    finished=["f"],
    preempted=["p"],
)


def received() -> StepRequests:
    return DECLARED.requests.copy()


@fires("handover_missing", expected="a declaration", actual="none")
def a_message_without_a_declaration() -> list[Finding]:
    return judge_missing(7, received(), PARTS)


@silent("handover_missing", "handover_request_mismatch", "handover_delta_mismatch")
def a_message_as_it_was_declared() -> list[Finding]:
    return judge_handover(DECLARED, received(), PARTS)


@fires("handover_request_mismatch", request_id="c", expected="scheduled tokens 1", actual="scheduled tokens 2")
def another_number_of_tokens() -> list[Finding]:
    message = received()
    message.scheduled["c"] = 2
    return judge_handover(DECLARED, message, PARTS)


@fires("handover_request_mismatch", request_id="c", expected="computed tokens 32", actual="computed tokens 31")
def another_number_of_computed_tokens() -> list[Finding]:
    message = received()
    message.cached_computed[0] = 31
    return judge_handover(DECLARED, message, PARTS)


@fires("handover_request_mismatch", request_id="f", expected="role ['finished']", actual="role []")
def a_request_that_is_not_said_to_be_finished() -> list[Finding]:
    message = received()
    message.finished.clear()
    return judge_handover(DECLARED, message, PARTS)


@fires(
    "handover_request_mismatch", request_id="r", expected="role ['cached', 'resumed', 'scheduled']",
    actual="role ['cached', 'scheduled']",
)  # fmt: skip
def a_request_that_is_not_said_to_resume() -> list[Finding]:
    message = received()
    message.resumed.clear()
    return judge_handover(DECLARED, message, PARTS)


@fires(
    "handover_request_mismatch",
    {"reason": "handover_request_mismatch", "request_id": "x", "expected": "role []",
     "actual": "role ['new', 'scheduled']"},
    request_id="n", expected="role ['new', 'scheduled']", actual="role []",
)  # fmt: skip
def a_request_under_another_name() -> list[Finding]:
    message = received()
    message.new_ids[0] = "x"
    message.scheduled["x"] = message.scheduled.pop("n")
    return judge_handover(DECLARED, message, PARTS)


@silent("handover_request_mismatch")
def other_blocks() -> list[Finding]:
    message = received()
    message.new_blocks[0][0][0] = 60
    return judge_handover(DECLARED, message, PARTS)


def batch_of(*names: str) -> Plan:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    plan.request_ids = list(names)
    return plan


@fires("handover_request_mismatch", request_id="b", expected="in the batch", actual="absent")
def a_request_that_is_missing_from_the_batch() -> list[Finding]:
    return judge_batch(decoding()[1], batch_of("a"), PARTS)


@fires("handover_request_mismatch", request_id="x", expected="not scheduled", actual="in the batch")
def a_request_in_the_batch_that_was_not_scheduled() -> list[Finding]:
    return judge_batch(decoding()[1], batch_of("a", "x", "b"), PARTS)


@silent("handover_request_mismatch")
def a_batch_in_another_order() -> list[Finding]:
    return judge_batch(decoding()[1], batch_of("b", "a"), PARTS)


@fires(
    "handover_delta_mismatch", request_id="n", group_id=0, block_id=2, expected="blocks a group: 2 1",
    actual="blocks a group: 2 1",
)  # fmt: skip
def a_new_request_with_another_block() -> list[Finding]:
    message = received()
    message.new_blocks[0][0][1] = 60
    return judge_handover(DECLARED, message, PARTS)


@fires(
    "handover_delta_mismatch", request_id="r", group_id=1, block_id=6, expected="blocks a group: 1 1",
    actual="blocks a group: 1 0",
)  # fmt: skip
def a_resumed_request_that_lost_a_block() -> list[Finding]:
    message = received()
    message.cached_blocks[2][1].clear()  # type: ignore[index]  # declared above: not None
    return judge_handover(DECLARED, message, PARTS)


@fires(
    "handover_delta_mismatch", request_id="c", group_id=0, block_id=4, expected="blocks a group: 1 0",
    actual="no blocks",
)  # fmt: skip
def a_known_request_that_lost_all_its_blocks() -> list[Finding]:
    message = received()
    message.cached_blocks[0] = None
    return judge_handover(DECLARED, message, PARTS)


@fires("handover_delta_mismatch", request_id="k", expected="no blocks", actual="blocks a group: 1 0")
def a_known_request_with_blocks_that_were_not_declared() -> list[Finding]:
    message = received()
    message.cached_blocks[1] = ([9], [])
    return judge_handover(DECLARED, message, PARTS)


@fires(
    "handover_delta_mismatch", request_id="n", group_id=0, expected="blocks a group: 2 1",
    actual="blocks a group: 3 1",
)  # fmt: skip
def a_new_request_with_a_block_too_many() -> list[Finding]:
    message = received()
    message.new_blocks[0][0].append(60)
    return judge_handover(DECLARED, message, PARTS)


@silent("handover_delta_mismatch")
def a_request_that_is_missing_altogether() -> list[Finding]:
    message = received()
    del message.cached_ids[0], message.cached_blocks[0], message.cached_computed[0], message.scheduled["c"]
    return judge_handover(DECLARED, message, PARTS)


# Dummy runs -----------------------------------------------------------------------------------------------------------


def dummy(
    scene: Scene, slots: dict[int, list[int]], behind: dict[int, dict[int, int]] | None = None, *, warm_up: bool = False
) -> list[Finding]:
    """``behind`` has the slots that are on in the rest of each group's buffer, by their places."""
    run = DummyRun(
        slots={index: np.array(values, np.int64) for index, values in slots.items()},
        num_tokens=3,
        persistent={
            index: PersistentSlots(
                checked=61, indexes=np.array(list(on), np.int64), slots=np.array(list(on.values()), np.int64)
            )
            for index, on in (behind or {}).items()
        },
        warm_up=warm_up,
    )
    return judge_dummy(run, 5, scene.bindings, PARTS)


@fires("dummy_slot_enabled", group_id=0, token_index=2, block_id=50, slot=800, expected=-1, actual=800)
def a_dummy_run_that_writes_into_a_free_block() -> list[Finding]:
    return dummy(decoding()[0], {0: [-1, -1, 800]})


@fires(
    "dummy_slot_enabled", other_request_id="b", group_id=0, token_index=0, block_id=5, slot=80, expected=-1, actual=80
)
def a_dummy_run_that_writes_into_a_live_block() -> list[Finding]:
    return dummy(decoding()[0], {0: [80, 81, -1]})


@fires("dummy_slot_enabled", group_id=0, token_index=1, block_id=0, slot=3, expected=-1, actual=3)
def a_dummy_run_that_writes_into_the_null_block() -> list[Finding]:
    return dummy(decoding()[0], {0: [-1, 3, -1]})


@silent("dummy_slot_enabled")
def a_dummy_run_whose_slots_are_all_off() -> list[Finding]:
    return dummy(decoding()[0], {0: [-1, -1, -1]})


@silent("dummy_slot_enabled", "dummy_persistent_slot_enabled", "dummy_table_live")
def a_warm_up_that_stores_its_tokens() -> list[Finding]:
    return dummy(Scene(), {0: [16, 17, 18]}, warm_up=True)


@fires("dummy_persistent_slot_enabled", group_id=0, token_index=40, block_id=50, slot=800, expected=-1, actual=800)
def a_buffer_that_leads_to_a_free_block_behind_a_dummy_run() -> list[Finding]:
    return dummy(decoding()[0], {0: [-1, -1, -1]}, {0: {40: 800, 41: 80}})


@fires(
    "dummy_persistent_slot_enabled", other_request_id="b", group_id=1, token_index=63, block_id=15, slot=240,
    expected=-1, actual=240,
)  # fmt: skip
def a_buffer_that_leads_to_a_live_block_behind_a_dummy_run() -> list[Finding]:
    scene = decoding(pool(group(0), group(1)))[0]
    return dummy(scene, {0: [-1, -1, -1], 1: [-1, -1, -1]}, {0: {}, 1: {63: 240}})


@silent("dummy_persistent_slot_enabled")
def a_buffer_that_is_off_behind_a_dummy_run() -> list[Finding]:
    return dummy(decoding()[0], {0: [-1, -1, 800]}, {0: {}})


@silent("dummy_persistent_slot_enabled")
def the_buffer_of_a_state_group() -> list[Finding]:
    return dummy(Scene(pool(group(0), group(1, "mamba"))), {0: [-1] * 3, 1: [-1] * 3}, {0: {}, 1: {9: 0}})


@silent("dummy_slot_enabled")
def a_dummy_run_without_slots() -> list[Finding]:
    return dummy(decoding()[0], {})


@silent("dummy_slot_enabled")
def a_dummy_run_that_uses_a_state_slot() -> list[Finding]:
    return dummy(Scene(pool(group(0), group(1, "mamba"))), {0: [-1, -1, -1], 1: [0, 0, 0]})
