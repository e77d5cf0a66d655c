"""What a declaration may do with blocks: each thing that is noted, and what looks like it and is right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.facts.allocator import ALLOC, HOLD, RECEIVE, TOUCH
from kvscope.facts.topology import SLIDING_WINDOW
from kvscope.state.legality import Exceeded, SharedWrite, Unwritten
from unit.checks.worlds import group, pool
from unit.state.story import Story

WINDOW = pool(group(0, SLIDING_WINDOW, visible=32))


def running(tokens: int = 40, topology: object = None) -> Story:
    """``a`` has ``tokens`` in the blocks 1, 2, 3 (and 4); the first step is back."""
    story = Story() if topology is None else Story(WINDOW)
    blocks = list(range(1, -(-tokens // 16) + 1))
    story.get("a", blocks)
    story.whole(new=[("a", (blocks,), 0, tokens)])
    return story


def unwritten(name: str, index: int, block: int, needed: int, declared: int) -> Unwritten:
    return Unwritten(request_id=name, group_index=0, index=index, block_id=block, needed=needed, declared=declared)


# What is written ------------------------------------------------------------------------------------------------------


def test_blocks_that_a_step_fills_are_declared_and_confirmed_with_its_result() -> None:
    story = Story()
    story.get("a", [1, 2, 3])
    story.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    assert (story.declared([1, 2, 3]), story.confirmed([1, 2, 3])) == ([16, 16, 0], [0, 0, 0])
    story.back()
    assert story.confirmed([1, 2, 3]) == [16, 16, 0]
    assert story.same()


@pytest.mark.parametrize("is_back", [True, False])
def test_the_part_of_the_last_block_is_put_in_when_the_block_changes_hands(is_back: bool) -> None:
    story = running()
    story.declare(known=[("a", None, 40, 1)])
    if is_back:
        story.back()
    story.free("a", [3, 2, 1])
    assert story.declared([3]) == [9]
    assert story.confirmed([3]) == [9 if is_back else 0]
    if not is_back:
        story.back()
        assert story.confirmed([3]) == [9]


def test_a_step_without_work_writes_nothing_and_takes_nothing_away() -> None:
    """No result comes for it; what was put in after it is not lost with it."""
    story = running()
    story.declare()
    story.cache("a", [3], tokens=8)
    story.declare(known=[("a", None, 40, 1)])
    story.back()
    story.fine()
    assert story.confirmed([3]) == [8]


def test_what_is_put_in_belongs_to_the_last_step_that_the_request_was_in() -> None:
    """The step on its way is another request's, and may fail."""
    story = running()
    story.get("b", [5])
    story.declare(new=[("b", ([5],), 0, 9)])
    story.cache("a", [3], tokens=8)
    assert (story.declared([3]), story.confirmed([3])) == ([8], [8])
    story.declare(known=[("a", None, 40, 1), ("b", None, 9, 1)])
    story.back()
    assert story.legality.aborted == {}
    assert story.confirmed([3]) == [8]


def test_blocks_of_a_step_whose_result_never_came_are_remembered_until_somebody_writes_them() -> None:
    story = Story()
    story.get("a", [1, 2])
    story.declare(new=[("a", ([1, 2],), 0, 20)])
    story.declare(known=[("a", None, 20, 1)])
    story.back()
    assert story.legality.aborted == {1: 1}
    assert story.declared([1]) == [0]
    story.declare(known=[("a", None, 0, 21)])
    assert story.declared([1]) == [16]


# Batches that go on ---------------------------------------------------------------------------------------------------


def test_a_batch_that_goes_on_by_one_token_needs_no_look_and_fills_its_blocks_all_the_same() -> None:
    story = Story()
    story.get("a", [1, 2])
    story.get("b", [3, 4])
    story.whole(new=[("a", ([1, 2],), 0, 10), ("b", ([3, 4],), 0, 14)])
    looked = []
    for more in range(8):
        looked.append(story.declare(known=[("a", None, 10 + more, 1), ("b", None, 14 + more, 1)]))
        story.fine()
        assert story.declared([3]) == [16 if more >= 1 else 0]
        assert story.declared([1]) == [16 if more >= 5 else 0]
        story.back()
    assert looked == [True] + [False] * 7
    assert story.confirmed([1, 2, 3, 4]) == [16, 0, 16, 0]
    assert story.same()


def test_a_batch_that_goes_on_is_looked_at_when_the_pool_did_more_than_give_it_blocks() -> None:
    story = running(tokens=46)
    assert story.declare(known=[("a", None, 46, 1)])
    assert not story.declare(known=[("a", None, 47, 1)])
    story.get("a", [4], 3)
    assert not story.declare(known=[("a", ([4],), 48, 1)])
    assert [operation.kind for operation in story.legality.interval] == [ALLOC]
    assert not story.declare(known=[("a", None, 49, 1)])
    assert list(story.legality.interval) == []
    story.hit("b", [5])
    assert story.declare(known=[("a", None, 50, 1)])


def test_what_was_wrong_in_one_step_is_not_said_of_the_steps_after_it() -> None:
    story = Story()
    story.get("a", [1, 2])
    story.declare(new=[("a", ([1, 2],), 8, 1)])
    assert len(story.legality.unwritten) == 1
    for more in range(3):
        story.declare(known=[("a", None, 9 + more, 1)])
        story.fine()


def test_the_part_of_a_last_block_is_known_in_a_batch_that_goes_on() -> None:
    story = running()
    for more in range(4):
        story.declare(known=[("a", None, 40 + more, 1)])
    story.cache("a", [3], tokens=12)
    assert story.declared([3]) == [12]
    story.declare(known=[("a", None, 44, 2)])
    story.fine()


@settings(max_examples=examples(60), deadline=None)
@given(
    starts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=60),
)
def test_however_a_batch_goes_on_the_same_is_written(starts: list[int], counts: list[int]) -> None:
    """``counts`` are tokens a step for everybody: 1 is the short way."""
    story = Story(pool(group(0), num_blocks=120))
    names = [f"r{number}" for number in range(len(starts))]
    tables = {name: list(range(1 + 20 * number, 21 + 20 * number)) for number, name in enumerate(names)}
    for name in names:
        story.get(name, tables[name])
    ends = dict(zip(names, starts, strict=True))
    story.whole(new=[(name, (tables[name],), 0, ends[name]) for name in names])
    for count in counts:
        story.whole(known=[(name, None, ends[name], count) for name in names])
        ends = {name: end + count for name, end in ends.items()}
        for name, table in tables.items():
            full = ends[name] // 16
            assert story.confirmed(table) == [16] * full + [0] * (20 - full)
    assert story.same()


# Who comes in ---------------------------------------------------------------------------------------------------------


def test_a_hit_on_what_is_written_is_right() -> None:
    story = running()
    story.cache("a", [1, 2])
    story.hit("b", [1, 2])
    story.get("b", [5], 2)
    story.whole(new=[("b", ([1, 2, 5],), 32, 8)], known=[("a", None, 40, 1)])


def test_a_hit_on_what_the_same_step_writes_is_right() -> None:
    story = Story()
    story.get("a", [1, 2, 3])
    story.cache("a", [1, 2])
    story.hit("b", [1, 2])
    story.get("b", [5], 2)
    story.whole(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([1, 2, 5],), 32, 8)])


def test_a_request_that_comes_in_with_what_nobody_wrote_is_noted() -> None:
    story = running()
    story.get("b", [5, 6])
    story.declare(new=[("b", ([1, 5, 6],), 32, 8)], known=[("a", None, 40, 1)])
    assert story.legality.unwritten == [unwritten("b", 1, 5, 16, 0)]
    assert story.legality.doubtful


def test_its_own_writes_of_the_step_do_not_make_up_for_what_it_relies_on() -> None:
    story = Story()
    story.get("a", [1, 2])
    story.declare(new=[("a", ([1, 2],), 12, 8)])
    assert story.declared([1]) == [16]
    assert story.legality.unwritten == [unwritten("a", 0, 1, 12, 0)]


def test_a_hit_on_a_block_that_was_handed_out_again_relies_on_what_nobody_wrote() -> None:
    story = running()
    story.cache("a", [1, 2])
    story.free("a", [3, 2, 1])
    story.get("c", [2])
    story.declare(new=[("b", ([1, 2],), 32, 1), ("c", ([2],), 0, 9)], finished=["a"])
    assert story.legality.unwritten == [unwritten("b", 1, 2, 16, 0)]


def test_what_is_before_the_window_need_not_be_written() -> None:
    story = Story(WINDOW)
    story.get("a", [1, 2, 3, 4])
    story.get("c", [7])
    story.whole(new=[("a", ([1, 2, 3, 4],), 0, 64), ("c", ([7],), 0, 9)])
    story.hit("b", [3, 4], 2)
    story.get("b", [5], 4)
    story.declare(new=[("b", ([6, 7, 3, 4, 5],), 64, 1)])
    story.fine()


@pytest.mark.parametrize("as_new", [True, False], ids=["as a new request", "as a known one"])
def test_a_request_that_is_back_is_looked_at_like_a_new_one(as_new: bool) -> None:
    """Model Runner V2 is told of it as of a new request, V1 as of one that it knows."""
    story = running()
    story.cache("a", [1, 2])
    story.free("a", [3, 2, 1], "preempt")
    story.declare(preempted=["a"])
    story.fine()
    story.hit("a", [1, 2])
    story.get("a", [6], 2)
    back = ("a", ([1, 2, 6],), 32, 8)
    story.declare(new=[back]) if as_new else story.declare(known=[back], resumed=["a"])
    story.fine()
    story.free("a", [6, 2, 1], "preempt")
    story.declare(preempted=["a"])
    story.get("a", [7, 8])
    back = ("a", ([7, 8],), 16, 8)
    story.declare(new=[back]) if as_new else story.declare(known=[back], resumed=["a"])
    assert story.legality.unwritten == [unwritten("a", 0, 7, 16, 0)]


def test_a_request_that_was_preempted_and_is_back_in_one_step_may_use_what_it_released() -> None:
    """A reset of the prefix cache preempts everybody between two steps."""
    story = running()
    story.free("a", [3, 2, 1], "preempt")
    story.get("a", [3, 2, 4])
    story.declare(known=[("a", ([3, 2, 4],), 0, 41)], resumed=["a"], preempted=["a"])
    story.fine()


# Gaps -----------------------------------------------------------------------------------------------------------------


def test_a_request_that_goes_on_behind_what_it_has_written_is_noted() -> None:
    story = running()
    story.declare(known=[("a", None, 43, 1)])
    assert story.legality.gaps == [unwritten("a", 2, 3, 11, 8)]
    story.declare(known=[("a", None, 44, 1)])
    story.fine()


def test_a_batch_that_goes_on_with_one_token_for_each_in_the_sum_alone_is_followed_row_by_row() -> None:
    """Two for one, none for the other: as many as there are requests."""
    story = Story()
    story.get("a", [1])
    story.get("b", [3])
    story.whole(new=[("a", ([1],), 0, 8), ("b", ([3],), 0, 8)])
    story.whole(known=[("a", None, 8, 1), ("b", None, 8, 1)])
    story.whole(known=[("a", None, 9, 2), ("b", None, 9, 0)])
    story.declare(known=[("a", None, 11, 1), ("b", None, 10, 1)])
    assert story.legality.gaps == [unwritten("b", 0, 3, 10, 9)]


def test_a_gap_over_the_end_of_a_block_is_noted_where_it_begins() -> None:
    story = running(tokens=20)
    story.get("a", [3], 2)
    story.declare(known=[("a", ([3],), 36, 1)])
    assert story.legality.gaps == [unwritten("a", 1, 2, 16, 4)]


def test_a_request_that_goes_back_writes_again() -> None:
    story = running()
    story.whole(known=[("a", None, 36, 2)])


def test_rejected_drafts_are_written_no_more() -> None:
    story = running(tokens=44)
    story.get("a", [4], 3)
    story.declare(known=[("a", ([4],), 44, 5)], drafts={"a": 4})
    assert story.declared([3]) == [16]
    story.back(sampled={"a": 2})
    assert (story.declared([3]), story.confirmed([3])) == ([14], [14])
    story.declare(known=[("a", None, 46, 1)])
    story.fine()


def test_drafts_inside_of_a_block_are_rejected_as_well() -> None:
    story = running()
    story.declare(known=[("a", None, 40, 4)], drafts={"a": 3})
    story.back(sampled={"a": 1})
    story.cache("a", [3], tokens=9)
    assert story.declared([3]) == [9]
    story.declare(known=[("a", None, 43, 1)])
    assert story.legality.gaps == [unwritten("a", 2, 3, 11, 9)]


def test_drafts_that_were_accepted_or_that_a_later_step_goes_on_from_stay() -> None:
    story = running(tokens=44)
    story.get("a", [4], 3)
    story.declare(known=[("a", ([4],), 44, 5)], drafts={"a": 4})
    story.back(sampled={"a": 5})
    assert story.declared([3]) == [16]
    story.declare(known=[("a", None, 49, 5)], drafts={"a": 4})
    story.declare(known=[("a", None, 54, 1)])
    story.back(story.step - 1, sampled={"a": 2})
    story.cache("a", [4], tokens=7)
    assert story.declared([4]) == [7]


# Who lets go ----------------------------------------------------------------------------------------------------------


def test_a_request_that_goes_on_with_what_it_released_is_stale_until_it_is_bound_anew() -> None:
    story = running()
    story.free("a", [2], "unknown")
    story.declare(known=[("a", None, 40, 1)])
    assert story.legality.stale == {"a": {2: 1}}
    story.declare(known=[("a", None, 41, 1)])
    assert story.legality.stale == {"a": {2: 1}}
    story.declare(preempted=["a"])
    story.fine()


def test_the_generation_that_it_knew_is_that_before_the_block_was_handed_out_again() -> None:
    story = running()
    story.free("a", [2], "unknown")
    story.get("b", [2])
    story.free("b", [2])
    story.get("c", [2])
    story.declare(known=[("a", None, 40, 1)], new=[("c", ([2],), 0, 9)], finished=["b"])
    assert story.legality.stale == {"a": {2: 1}}
    assert story.ledger.generation_of([2]).tolist() == [3]


@pytest.mark.parametrize("gone", [{"finished": ["a"]}, {"preempted": ["a"]}])
def test_a_request_that_is_over_or_preempted_may_release_everything(gone: dict[str, list[str]]) -> None:
    story = running()
    story.free("a", [3, 2, 1])
    story.declare(**gone)
    story.fine()


def test_what_has_left_the_window_may_be_released_and_what_has_not_may_not() -> None:
    story = running(tokens=60, topology=WINDOW)
    story.free("a", [1], "window")
    story.declare(known=[("a", None, 60, 1)])
    story.fine()
    story.free("a", [3], "window")
    story.declare(known=[("a", None, 61, 1)])
    assert story.legality.stale == {"a": {3: 1}}


def test_what_has_left_the_window_of_a_request_that_could_not_be_scheduled_may_be_released() -> None:
    story = running(tokens=60, topology=WINDOW)
    story.get("b", [7])
    story.free("a", [1], "window")
    story.declare(new=[("b", ([7],), 0, 4)])
    story.fine()
    story.free("a", [2, 3], "window")
    story.declare(known=[("b", None, 4, 1)])
    assert story.legality.stale == {"a": {2: 1, 3: 1}}


def test_a_shared_block_stays_with_whoever_has_not_released_it() -> None:
    story = running()
    story.cache("a", [1, 2])
    story.hit("b", [1, 2])
    story.get("b", [5], 2)
    story.whole(new=[("b", ([1, 2, 5],), 32, 8)], known=[("a", None, 40, 1)])
    story.free("a", [3, 2, 1])
    story.whole(known=[("b", None, 40, 1)], finished=["a"])


def test_a_block_that_is_released_in_nobodys_name_is_missed_by_its_only_owner() -> None:
    story = running()
    story.get("b", [5])
    story.whole(new=[("b", ([5],), 0, 8)], known=[("a", None, 40, 1)])
    story.free(None, [2], "unknown")
    story.declare(known=[("a", None, 41, 1), ("b", None, 8, 1)])
    assert story.legality.stale == {"a": {2: 1}}


def test_a_reference_that_is_given_back_in_nobodys_name_takes_no_block_from_anybody() -> None:
    story = running()
    story.say(TOUCH, [1, 2, 3], cause="pin")
    story.free(None, [1, 2], "unknown")
    story.declare(known=[("a", None, 40, 1)])
    story.fine()
    story.free(None, [3], "unpin")
    story.declare(known=[("a", None, 41, 1)])
    story.fine()


def test_a_deferred_release_of_a_request_that_is_back_takes_nothing_from_it() -> None:
    story = running()
    story.cache("a", [1, 2])
    story.say(HOLD, [1, 2, 3], "a", cause="deferred")
    story.hit("a", [1, 2])
    story.get("a", [6], 2)
    story.declare(known=[("a", ([1, 2, 6],), 32, 9)], resumed=["a"], preempted=["a"])
    story.free("a", [3, 2, 1], "deferred")
    story.declare(known=[("a", None, 41, 1)])
    story.fine()
    assert story.ledger.is_owner("a", [1, 2, 6]).all()


def test_both_ends_of_a_copy_may_be_released_while_it_is_used() -> None:
    story = running(tokens=24)
    story.cache("a", [2], tokens=8)
    story.hit("b", [1])
    story.hit("b", [2], group_id=None, first_index=None)
    story.get("b", [5], 1)
    story.say(TOUCH, [5], cause="copy")
    story.say(HOLD, [2], "b", cause="copy")
    story.free(None, [2, 5], "copy")
    story.whole(new=[("b", ([1, 5],), 24, 4)], known=[("a", None, 24, 1)], copies=[(2, 5)])
    assert story.declared([5]) == [8]


def test_a_copy_of_what_nobody_wrote_is_worth_nothing() -> None:
    story = running(tokens=24)
    story.hit("b", [1])
    story.get("b", [5], 1)
    story.get("c", [7])
    story.declare(new=[("b", ([1, 5],), 24, 4), ("c", ([7],), 0, 9)], known=[("a", None, 24, 1)], copies=[(7, 5)])
    assert story.legality.unwritten == [unwritten("b", 1, 5, 8, 0)]


def test_a_copy_in_a_step_without_work_is_there_although_no_result_comes_for_that() -> None:
    """A request that waits for its load has hit part of a block (``Scheduler._free_cow_retained_blocks``)."""
    story = running(48)
    story.get("b", [5])
    story.declare(copies=[(3, 5)])
    story.declare(known=[("a", None, 48, 1)])
    story.back()
    story.fine()
    assert (story.declared([5]), story.confirmed([5])) == ([16], [16])


# Shared and loaded ----------------------------------------------------------------------------------------------------


def test_a_write_into_what_was_hit_is_noted() -> None:
    story = running()
    story.cache("a", [1, 2])
    story.hit("b", [1, 2])
    story.declare(new=[("b", ([1, 2],), 24, 8)], known=[("a", None, 40, 1)])
    assert story.legality.shared == [
        SharedWrite(request_id="b", group_index=0, index=1, block_id=2, offset=8, owners=2, hashed_tokens=16)
    ]


def load(story: Story, tokens: int, *, reserved: bool = True) -> list[int]:
    blocks = list(range(1, -(-tokens // 16) + 1))
    story.get("a", blocks, cause="external", reserved=reserved)
    return blocks


def receive(story: Story, blocks: list[int], tokens: int, cause: str = "external") -> None:
    filled = [min(max(tokens - 16 * index, 0), 16) for index in range(len(blocks))]
    story.say(RECEIVE, blocks, "a", cause=cause, filled=filled)


def test_what_a_load_brought_is_written_and_its_last_token_may_be_computed_again() -> None:
    story = Story()
    blocks = load(story, 40)
    story.declare()
    receive(story, blocks, 40)
    story.whole(new=[("a", (blocks,), 39, 1)])


def test_what_was_loaded_goes_with_the_request_though_its_id_comes_again_in_the_same_step() -> None:
    story = Story()
    blocks = load(story, 40)
    story.declare()
    receive(story, blocks, 40)
    story.whole(new=[("a", (blocks,), 39, 1)])
    story.cache("a", blocks[:1])
    story.free("a", blocks[::-1])
    story.hit("a", blocks[:1])
    story.get("a", [7], 1)
    story.whole(finished=["a"], new=[("a", ([blocks[0], 7],), 16, 4)])
    assert story.legality.loaded_tokens("a") == 0


def test_a_request_that_computes_more_of_what_was_loaded_again_is_noted() -> None:
    story = Story()
    blocks = load(story, 40)
    receive(story, blocks, 40)
    story.declare(new=[("a", (blocks,), 32, 8)])
    (shared,) = story.legality.shared
    assert (shared.index, shared.offset, shared.loaded) == (2, 0, True)


def test_a_load_that_has_not_ended_is_not_written() -> None:
    story = Story()
    blocks = load(story, 40)
    story.declare(new=[("a", (blocks,), 39, 1)])
    assert story.legality.unwritten == [unwritten("a", 0, 1, 16, 0)]


def test_a_load_of_which_a_part_failed_is_computed_from_there() -> None:
    story = Story()
    blocks = load(story, 40)
    receive(story, blocks, 16, "load_failed")
    story.whole(new=[("a", (blocks,), 16, 24)])


def test_a_request_that_relies_on_a_load_that_failed_is_noted() -> None:
    story = Story()
    blocks = load(story, 40)
    receive(story, blocks, 16, "load_failed")
    story.declare(new=[("a", (blocks,), 39, 1)])
    assert story.legality.unwritten == [unwritten("a", 1, 2, 16, 0)]


def test_a_load_inside_of_the_step_is_there_before_attention_looks() -> None:
    story = Story()
    blocks = load(story, 40, reserved=False)
    story.whole(new=[("a", (blocks,), 36, 4)])
    assert story.confirmed(blocks) == [16, 16, 4]


def test_what_was_loaded_once_is_forgotten_with_a_preemption() -> None:
    story = Story()
    blocks = load(story, 40)
    receive(story, blocks, 40)
    story.whole(new=[("a", (blocks,), 39, 1)])
    story.cache("a", [1])
    story.free("a", [3, 2, 1], "preempt")
    story.declare(preempted=["a"])
    story.hit("a", [1])
    story.get("a", [2, 3], 1)
    story.declare(known=[("a", ([1, 2, 3],), 16, 24)], resumed=["a"])
    story.fine()


# Beyond what was handed out -------------------------------------------------------------------------------------------


def test_tokens_beyond_what_the_pool_handed_out_are_noted() -> None:
    story = running(tokens=46)
    story.declare(known=[("a", None, 46, 4)])
    assert story.legality.exceeded == [Exceeded(request_id="a", group_index=0, tokens=50, allocated=48)]
    story.declare(known=[("a", None, 50, 1)])
    story.fine()


def test_a_batch_that_goes_on_beyond_what_it_has_is_noted_with_the_block_that_it_lacks() -> None:
    story = Story()
    story.get("a", [1])
    story.declare(new=[("a", ([1, 2],), 0, 14)])
    seen = []
    for more in range(20):
        story.declare(known=[("a", None, 14 + more, 1)])
        seen += story.legality.exceeded
    assert seen == [Exceeded(request_id="a", group_index=0, tokens=32, allocated=16)]


# The end --------------------------------------------------------------------------------------------------------------


def test_who_finished_and_released_nothing_is_named_once() -> None:
    story = running()
    story.declare(finished=["a"])
    assert story.end() == ["a"]
    story.declare()
    assert story.end() == []
    assert [share.live for share in story.ledger.owned_by("a")] == [False] * 3


@pytest.mark.parametrize("cause", ["deferred", "pin"])
def test_who_finished_and_waits_to_release_is_not_named(cause: str) -> None:
    story = running()
    story.say(HOLD, [1, 2, 3], "a", cause=cause)
    story.declare(finished=["a"])
    assert story.end() == []
    story.fine()


def test_a_name_that_is_used_again_at_once_is_another_request() -> None:
    story = running()
    story.free("a", [3, 2, 1])
    story.get("a", [4])
    story.declare(finished=["a"], new=[("a", ([4],), 0, 9)])
    assert story.end() == []
    assert [share.live for share in story.ledger.owned_by("a")] == [True]


# Steps that passed unseen ---------------------------------------------------------------------------------------------


def test_after_a_step_that_nobody_saw_what_is_in_use_counts_as_written() -> None:
    """A worker hears what the pool did in it only with the next declaration."""
    story = running()
    for side in (story.engine, story.worker):
        side.legality.forgive()
    story.get("b", [5, 6])
    story.declare(known=[("a", None, 45, 1)], new=[("c", ([5],), 15, 1)])
    story.fine()
    assert story.declared([4, 5]) == [0, (1 << 31) - 1]
    story.get("d", [7])
    story.declare(known=[("a", None, 48, 1)], new=[("d", ([7],), 9, 1)])
    assert story.legality.gaps == [unwritten("a", 2, 3, 16, 14)]
    assert story.legality.unwritten == [unwritten("d", 0, 7, 9, 0)]


def test_who_finished_in_a_step_that_nobody_saw_has_not_lost_what_it_uses() -> None:
    """Nobody said that it finished: its table still stands."""
    story = running()
    story.legality.forgive()
    story.worker.legality.forgive()
    story.free("a", [3, 2, 1])
    story.get("b", [3])
    story.declare(new=[("b", ([3],), 0, 9)])
    story.fine()
    story.free("b", [3])
    story.declare(known=[("b", None, 9, 1)])
    assert story.legality.stale == {"b": {3: 2}}
