"""Hits to which no hash led, and hits without a reference."""

from __future__ import annotations

from kvscope.checks.finding import Finding
from kvscope.facts.allocator import RESET
from unit.checks.cases import fires, silent
from unit.checks.guarded import Guarded, two_decode
from unit.checks.guarded_cases import planned

X = {"request_id": "x", "group_id": 0}
GO_ON = {"known": [("a", None, 40, 1), ("b", None, 40, 1)]}


def comes_in(scene: Guarded, blocks: list[int]) -> list[Finding]:
    """``x`` computes 3 tokens behind these blocks, in a block of its own."""
    scene.allocate("x", [20], len(blocks))
    return scene.content(new=[("x", ([*blocks, 20],), 16 * len(blocks), 3)], **GO_ON)


@fires(
    "hit_uninitialized", **X, position=0, block_id=1, generation=1, other_request_id="a",
    expected="a block to which a hash leads", actual="none when it was hit; generation 1, handed out in step 1",
)  # fmt: skip
def a_hit_on_a_block_from_before_a_reset() -> list[Finding]:
    """The contents are there, but nobody is to find them any more."""
    scene = two_decode()
    scene.pool(RESET, [])
    scene.hit("x", [1])
    return comes_in(scene, [1])


@fires(
    "hit_uninitialized", **X, position=0, block_id=9, generation=2, other_request_id="c",
    expected="16 tokens of the block written",
    actual="0; generation 2, handed out in step 2; freed in step 2 (finish)",
)  # fmt: skip
def a_hit_by_a_hash_that_has_outlived_its_block() -> list[Finding]:
    scene = two_decode()
    scene.allocate("p", [9])
    scene.cache("p", [9])
    scene.free("p", [9])
    scene.allocate("c", [9])
    scene.hit("x", [9])
    return comes_in(scene, [9])


@silent("hit_uninitialized")
def a_hit_on_a_block_that_is_hashed_in_the_same_step() -> list[Finding]:
    scene = two_decode()
    scene.cache("a", [3], 9)
    scene.hit("x", [1, 2])
    return comes_in(scene, [1, 2])


@silent("hit_uninitialized", "alias_owner_mismatch")
def a_hit_whose_block_loses_its_hash_afterwards() -> list[Finding]:
    scene = two_decode()
    scene.hit("x", [1])
    scene.pool("evict", [1], cause="load_failed")
    return comes_in(scene, [1])


@fires(
    "alias_owner_mismatch", **X, block_id=1, generation=1, other_request_id="a",
    expected="2 references, one for each place in a table", actual="1; generation 1, handed out in step 1",
)  # fmt: skip
def a_request_comes_in_with_a_block_that_it_has_no_reference_to() -> list[Finding]:
    return comes_in(two_decode(), [1])


@silent("alias_owner_mismatch")
def a_request_comes_in_with_what_it_hit_and_what_it_was_given() -> list[Finding]:
    scene = two_decode()
    scene.hit("x", [1])
    return comes_in(scene, [1])


@silent("alias_owner_mismatch", "read_after_release")
def a_request_comes_in_with_blocks_that_the_pool_never_handed_out() -> list[Finding]:
    """What is declared past the pool has reasons of its own."""
    return comes_in(two_decode(), [0, 12])


KNEW = {"generation": 1, "expected": "generation 1, in which it had the block"}


def borrowed() -> Guarded:
    """``x`` reads block 1 of ``a`` without a reference."""
    scene = two_decode()
    comes_in(scene, [1])
    return scene


@fires(
    "read_after_release", **X, row=1, **KNEW, position=0, block_id=1, other_request_id="a",
    actual="released since: generation 1, freed in step 3 (finish)",
)  # fmt: skip
def the_only_owner_of_a_block_ends_under_whoever_has_no_reference() -> list[Finding]:
    scene = borrowed()
    scene.free("a", [3, 2, 1])
    return planned(scene, finished=["a"], known=[("b", None, 41, 1), ("x", None, 19, 1)])


@silent("read_after_release")
def the_owner_ends_and_another_still_has_the_block() -> list[Finding]:
    scene = borrowed()
    scene.hit("b", [1], 3)
    scene.free("a", [3, 2, 1])
    return planned(scene, finished=["a"], known=[("b", None, 41, 1), ("x", None, 19, 1)])


@silent("read_after_release")
def whoever_had_no_reference_comes_in_anew_with_one() -> list[Finding]:
    scene = borrowed()
    scene.free("x", [20], "preempt")
    scene.say(preempted=["x"], known=[("a", None, 41, 1), ("b", None, 41, 1)])
    scene.hit("x", [1])
    scene.allocate("x", [20], 1)
    scene.say(known=[("x", ([1, 20],), 16, 3), ("a", None, 42, 1), ("b", None, 42, 1)], resumed=["x"])
    scene.free("a", [3, 2, 1])
    return planned(scene, finished=["a"], known=[("b", None, 43, 1), ("x", None, 19, 1)])
