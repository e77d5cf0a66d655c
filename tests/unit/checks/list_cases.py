"""The lists of blocks to clear and to copy: what fires each rule about them, and what it must let pass."""

from __future__ import annotations

from typing import Any

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_bind
from kvscope.facts.allocator import ALLOC, FREE
from kvscope.facts.topology import SLIDING_WINDOW
from unit.checks.cases import fires, silent
from unit.checks.guarded import Guarded, two_decode
from unit.checks.scenes import ONE_GROUP, PARTS, Scene
from unit.checks.worlds import group, pool

IN_STEP = "a destination that was handed out in the step"
NEW = {"new": [("c", ([7, 8],), 16, 4)]}
"""``c`` hits what somebody computed of block 7's contents before, and goes on in it."""
WINDOW = pool(group(0, SLIDING_WINDOW, 16, 8))


def listed(scene: Scene, *, zero: list[int] | None = None, copies: Any = None, **said: Any) -> list[Finding]:
    """What is found about a declaration with these lists; where the scene has a pool, it is followed."""
    if isinstance(scene, Guarded):
        return judge_bind(scene.say(zero=zero, copies=copies, **said), scene.bindings, PARTS, scene.ledger)
    declaration = scene.say(**said)
    declaration.zero_blocks, declaration.copies = zero, copies
    return judge_bind(declaration, scene.bindings, PARTS)


def running(topology: Any = ONE_GROUP) -> Scene:
    """``a`` has computed 40 tokens in blocks 1, 2, 3, and has block 9 for tokens to come."""
    scene = Scene(topology)
    scene.say(new=[("a", ([1, 2, 3, 9],), 0, 40)])
    return scene


def on(**lists: Any) -> list[Finding]:
    """``a`` goes on and ``c`` comes in, with these lists."""
    return listed(running(), known=[("a", None, 40, 1)], **NEW, **lists)


def followed(**lists: Any) -> list[Finding]:
    """The same with a pool, in which ``b`` has blocks 4, 5, 6."""
    scene = two_decode()
    scene.allocate("c", [7, 8])
    return listed(scene, known=[("a", None, 40, 1)], **NEW, **lists)


# Copies ---------------------------------------------------------------------------------------------------------------


@fires(
    "bind_copy_conflict", block_id=64, expected="0 to 63", actual="destination of a copy: 64", launch_fatal=True,
)  # fmt: skip
def a_copy_to_behind_the_pool() -> list[Finding]:
    return on(copies=[(1, 64)])


@fires("bind_copy_conflict", block_id=-1, expected="0 to 63", actual="source of a copy: -1", launch_fatal=True)
def a_copy_from_before_the_pool() -> list[Finding]:
    return on(copies=[(-1, 7)])


@fires("bind_copy_conflict", block_id=0, expected="a block that somebody owns", actual="source of a copy: 0")
def a_copy_of_the_null_block() -> list[Finding]:
    return on(copies=[(0, 7)])


@fires(
    "bind_copy_conflict", request_id="c", group_id=0, position=0, block_id=7, expected="one copy to a destination",
    actual="2",
)  # fmt: skip
def two_copies_to_one_block() -> list[Finding]:
    return on(copies=[(1, 7), (2, 7)])


@fires(
    "bind_copy_conflict", request_id="c", group_id=0, position=0, block_id=7,
    expected="a destination that is no source", actual="source of a copy of the same step",
)  # fmt: skip
def a_copy_of_what_is_copied_to() -> list[Finding]:
    return on(copies=[(1, 7), (7, 8)])


@fires(
    "bind_copy_conflict", request_id="a", group_id=0, position=16, block_id=2, expected=IN_STEP,
    actual="in use before it",
)  # fmt: skip
def a_copy_to_a_block_that_a_request_has() -> list[Finding]:
    return on(copies=[(1, 2)])


@fires(
    "bind_copy_conflict", block_id=30, generation=0, expected=IN_STEP, actual="never handed out",
)  # fmt: skip
def a_copy_to_a_block_that_nobody_has() -> list[Finding]:
    return followed(copies=[(1, 30)])


@fires(
    "bind_copy_conflict", request_id="a", group_id=0, position=0, block_id=1, generation=1, expected=IN_STEP,
    actual="in use before it",
)  # fmt: skip
def a_copy_to_a_block_that_is_followed() -> list[Finding]:
    return followed(copies=[(4, 1)])


@silent("bind_copy_conflict", "bind_zero_conflict")
def a_copy_to_a_block_of_the_step() -> list[Finding]:
    return on(copies=[(1, 7)]) + followed(copies=[(1, 7)])


@silent("bind_copy_conflict", "bind_zero_conflict")
def a_destination_that_is_cleared_first() -> list[Finding]:
    return on(copies=[(1, 7)], zero=[7, 8]) + followed(copies=[(1, 7)], zero=[7, 8])


@silent("bind_copy_conflict")
def a_destination_that_the_cache_keeps_and_nobody_has_any_more() -> list[Finding]:
    """The reference that the copy took is given back in the step that declares it (``_free_cow_retained_blocks``)."""
    scene = two_decode()
    scene.pool(ALLOC, [30])
    scene.pool(FREE, [30], cause="copy")
    return listed(scene, known=[("a", None, 40, 1)], copies=[(3, 30)])


@silent("bind_copy_conflict")
def one_block_to_two_others() -> list[Finding]:
    return on(copies=[(1, 7), (1, 8)])


@silent("bind_copy_conflict")
def a_copy_that_is_nobodys_in_any_table() -> list[Finding]:
    """What was computed is kept for the cache, before its request goes on in the source."""
    return on(copies=[(3, 30)])


@silent("bind_copy_conflict", "bind_zero_conflict")
def a_destination_that_a_request_had_before_its_window() -> list[Finding]:
    """Block 1 is behind the window of ``a``, was freed, and is ``c``'s by now."""
    said = {"known": [("a", None, 40, 1)], "new": [("c", ([1, 8],), 16, 4)]}
    return listed(running(WINDOW), **said, copies=[(4, 1)], zero=[1, 8])


@silent("bind_copy_conflict", "bind_zero_conflict")
def a_state_group_in_whose_tables_old_blocks_stand() -> list[Finding]:
    scene = Scene(pool(group(0, "mamba"), group(1)))
    scene.say(new=[("a", ([1], [2]), 0, 16)])
    return listed(scene, known=[("a", ([], [3]), 16, 1)], zero=[1, 3], copies=[(5, 1)])


# Clearing -------------------------------------------------------------------------------------------------------------


@fires("bind_zero_conflict", block_id=64, expected="0 to 63", actual="to be cleared: 64", launch_fatal=True)
def a_block_to_clear_behind_the_pool() -> list[Finding]:
    return on(zero=[8, 64])


@fires("bind_zero_conflict", block_id=0, expected="a block that somebody owns", actual="to be cleared: 0")
def the_null_block_to_clear() -> list[Finding]:
    return on(zero=[0, 8])


@fires(
    "bind_zero_conflict", request_id="a", group_id=0, position=0, block_id=1,
    expected="a source that keeps its contents", actual="cleared before it is copied",
)  # fmt: skip
def a_source_that_is_cleared_before_it_is_copied() -> list[Finding]:
    return on(zero=[1], copies=[(1, 7)])


@fires(
    "bind_zero_conflict", request_id="a", group_id=0, position=32, block_id=3,
    expected="a block that nobody has computed in", actual="to be cleared",
)  # fmt: skip
def a_block_to_clear_that_a_request_has_computed_in() -> list[Finding]:
    return on(zero=[3])


@silent("bind_zero_conflict")
def blocks_of_the_step_several_times() -> list[Finding]:
    return on(zero=[7, 8, 7]) + followed(zero=[7, 8, 7])


@silent("bind_zero_conflict")
def a_block_that_a_request_has_and_did_not_compute_in() -> list[Finding]:
    return on(zero=[9])


@silent("bind_zero_conflict")
def the_blocks_that_a_failed_load_left() -> list[Finding]:
    """They are in nobody's table yet; where they are in one it is declared anew."""
    scene = running()
    findings = listed(scene, zero=[40, 41], known=[("a", None, 40, 1)])
    return findings + listed(scene, zero=[40], new=[("d", ([38, 39, 40],), 32, 1)])


@silent("bind_zero_conflict")
def a_written_block_where_the_pool_is_followed() -> list[Finding]:
    """That is zero_live_block's to say."""
    return followed(zero=[1])
