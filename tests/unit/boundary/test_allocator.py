"""What the block pool does, as it is told while a real scheduler of vLLM uses it: whose blocks, where, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.v1.request import RequestStatus

from kvscope.boundary.allocator import READER
from kvscope.boundary.ledger import Ledger
from kvscope.facts.allocator import ALLOC, CACHE, EVICT, FREE, RESET, TOUCH
from unit.boundary import schedulers
from unit.boundary.schedulers import Host, causes, full, make_scheduler, sliding, state

ABORTED = RequestStatus.FINISHED_ABORTED


@pytest.fixture(autouse=True)
def wrapped() -> Iterator[Ledger]:
    with schedulers.seams() as ledger:
        yield ledger


def places(host: Host, name: str) -> list[tuple[int | None, int | None, int]]:
    """``(group, index, block)`` of what the ledger says that a request has."""
    shares = host.follower.ledger.owned_by(name)
    return sorted((s.group_id, s.index, s.block_id) for s in shares if s.live)  # type: ignore[type-var]  # none is None


# Blocks come ----------------------------------------------------------------------------------------------------------


def test_blocks_of_a_prompt_are_its_requests_and_stand_where_they_are_in_its_table() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40))
    host.step()
    alloc, cache = host.heard
    assert (alloc.kind, alloc.cause, alloc.request_id) == (ALLOC, "allocate", "a")
    assert (alloc.group_id, alloc.first_index, alloc.block_ids) == (0, 0, host.blocks_of("a"))
    assert (cache.kind, cache.block_ids, cache.hash_tokens) == (CACHE, host.blocks_of("a")[:2], [16, 16])
    assert host.follower.seams == ["allocate_slots", "allocate_slots"]


def test_a_block_that_is_added_while_it_runs_goes_behind_the_others() -> None:
    host = Host(make_scheduler())
    host.add("a", range(31))
    for _ in range(4):
        host.step()
    first, more = host.of(ALLOC)
    assert (first.first_index, len(first.block_ids)) == (0, 2)
    assert (more.first_index, more.block_ids) == (2, host.blocks_of("a")[2:])


def test_a_prefix_that_is_found_again_is_a_hit_of_the_new_request() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40))
    host.step()
    host.add("b", range(40))
    host.step()
    (hit,) = host.of(TOUCH)
    assert (hit.cause, hit.request_id, hit.group_id, hit.first_index) == ("hit", "b", 0, 0)
    assert hit.block_ids == host.blocks_of("a")[:2] == host.blocks_of("b")[:2]
    assert hit.ref_counts == [2, 2]


def test_requests_that_come_in_one_step_share_what_the_first_of_them_is_about_to_write() -> None:
    host = Host(make_scheduler(budget=128))
    host.add("a", range(40))
    host.add("b", range(40))
    host.step()
    assert causes(host.heard) == [
        *[("alloc", "allocate", "a"), ("cache", "allocate", "a")],
        *[("touch", "hit", "b"), ("alloc", "allocate", "b")],
    ]


def test_blocks_of_two_groups_are_told_apart() -> None:
    host = Host(make_scheduler(full(), sliding(32)))
    host.add("a", range(40))
    host.step()
    blocks = [(group, index, block) for group in (0, 1) for index, block in enumerate(host.blocks_of("a", group))]
    assert places(host, "a") == blocks
    assert {o.group_id for o in host.of(CACHE)} == {0, 1}


def test_groups_with_blocks_of_different_sizes_are_told_apart() -> None:
    host = Host(make_scheduler(full(32), sliding(32, 16), hash_block_size=16, num_blocks=40))
    host.add("a", range(60))
    host.step()
    host.add("b", range(60))
    host.step()
    assert next(o.hash_tokens for o in host.of(CACHE) if o.group_id == 0) == [32]
    assert len(host.blocks_of("b", 0)) == 2
    assert len(host.blocks_of("b", 1)) == 4


def test_a_hit_that_begins_behind_the_window_leaves_the_null_block_out() -> None:
    host = Host(make_scheduler(full(), sliding(16), num_blocks=40, budget=128))
    host.add("a", range(100))
    host.step()
    host.step()
    host.add("b", range(100))
    host.step()
    hits = {o.group_id: o for o in host.of(TOUCH)}
    assert hits[0].first_index == 0
    first = hits[1].first_index
    assert first is not None
    assert host.blocks_of("b", 1)[:first] == [0] * first
    assert first > 0


def test_a_part_of_a_block_is_hit_by_a_copy_whose_ends_are_nobodys_until_it_has_run() -> None:
    host = Host(make_scheduler(full(32), state(32), num_blocks=40, hash_block_size=8))
    host.add("a", range(50), hash_block_size=8)
    host.step()
    host.step()
    source = host.blocks_of("a")[1]
    told = len(host.heard)
    host.add("b", range(50), hash_block_size=8)
    output = host.schedule()
    ours = host.heard[told:]
    copy = host.blocks_of("b")[1]
    assert (source, copy) in [(c.src_block_id, c.dst_block_id) for c in output.kv_cache_block_copies]
    assert [(o.kind, o.cause, o.request_id) for o in ours if copy in o.block_ids] == [
        ("alloc", "allocate", "b"),
        ("touch", "copy", None),
        ("cache", "allocate", "b"),
        ("free", "copy", None),
    ]
    assert [(o.kind, o.cause, o.request_id) for o in ours if source in o.block_ids] == [
        ("touch", "hit", "b"),
        ("hold", "copy", "b"),
        ("free", "copy", None),
    ]
    assert (0, 1, copy) in places(host, "b")
    assert not host.follower.ledger.owns("b", source)
    assert host.follower.ledger.hash_tokens_of([copy]).tolist() == [16]
    host.finish_step()


def test_a_state_that_moves_into_a_copy_takes_its_hashes_along() -> None:
    host = Host(make_scheduler(full(32), state(32), num_blocks=40, hash_block_size=8))
    host.add("a", range(50), hash_block_size=8)
    host.step()
    kept = host.of(CACHE)[-1].block_ids
    host.step()
    moved = next(o for o in host.of(CACHE) if o.cause == "copy")
    assert moved.block_ids[:1] == kept
    assert moved.hash_counts == [0, 1]
    assert host.follower.ledger.owners(moved.block_ids[1]) == []


def test_the_end_of_a_prompt_is_told_once_though_it_is_hashed_in_every_step() -> None:
    host = Host(make_scheduler(full(32), state(32), num_blocks=40, hash_block_size=8))
    host.add("a", range(50), hash_block_size=8)
    for _ in range(5):
        host.step()
    assert sum(o.group_id == 0 and o.hash_tokens == [16] for o in host.of(CACHE)) == 1


def test_without_a_prefix_cache_nothing_has_a_hash() -> None:
    host = Host(make_scheduler(caching=False))
    host.add("a", range(40))
    host.step()
    host.add("b", range(40))
    host.step()
    assert {o.kind for o in host.heard} == {ALLOC}


# Hashes go ------------------------------------------------------------------------------------------------------------


def test_a_reset_is_told_when_the_pool_did_it() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40))
    host.step()
    assert not host.scheduler.reset_prefix_cache()
    assert host.of(RESET) == []
    host.scheduler.finish_requests("a", ABORTED)
    assert host.scheduler.reset_prefix_cache()
    assert len(host.of(RESET)) == 1
    host.agrees()


def test_blocks_that_lose_their_hashes_are_told_with_their_references() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40))
    host.step()
    block = host.blocks_of("a")[0]
    host.manager.evict_blocks({block, 9})
    (evict,) = host.of(EVICT)
    assert (evict.block_ids, evict.cause, evict.ref_counts) == ([block, 9], "unknown", [1, 0])
    host.agrees()


# What is no request's -------------------------------------------------------------------------------------------------


def test_a_connectors_reference_is_nobodys_and_goes_as_it_came() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40))
    host.step()
    blocks = [host.pool.blocks[b] for b in host.blocks_of("a")[:2]]
    host.pool.touch(blocks)
    host.agrees()
    host.scheduler.finish_requests("a", ABORTED)
    host.agrees()
    host.pool.free_blocks(ordered_blocks=(block for block in blocks))
    host.agrees()
    pin, released = host.of(TOUCH)[0], host.of(FREE)[-1]
    assert (pin.cause, pin.request_id) == ("pin", None)
    assert (released.cause, released.request_id) == ("unknown", None)
    assert host.follower.ledger.history(blocks[0].block_id).freed_by is None  # type: ignore[union-attr]  # the block is in the pool


def test_unpinned_blocks_lose_a_reference() -> None:
    host = Host(make_scheduler())
    (block,) = host.pool.get_new_blocks(1)
    host.pool.unpin_blocks(iter([block]), lambda _: None)
    assert causes(host.heard) == [("alloc", "unknown", None), ("free", "unpin", None)]
    assert host.heard[1].ref_counts == [0]
    host.agrees()


def test_blocks_of_another_pool_are_not_this_pools_business() -> None:
    host, other = Host(make_scheduler()), make_scheduler().kv_cache_manager.block_pool
    mine, theirs = host.pool.get_new_blocks(1)[0], other.get_new_blocks(2)
    host.pool.free_blocks(iter([theirs[0], mine, theirs[1]]))
    (free,) = host.of(FREE)
    assert free.block_ids == [mine.block_id]
    assert [block.ref_cnt for block in theirs] == [0, 0]
    host.agrees()


def test_a_live_block_in_the_free_queue_is_told_before_vllm_stops_at_it() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40))
    host.step()
    block = host.pool.blocks[host.blocks_of("a")[0]]
    host.pool.free_block_queue.prepend_n([block])
    host.add("b", range(100, 140))
    with pytest.raises(AssertionError):
        host.scheduler.schedule()
    (told,) = host.follower.handed_out
    assert (told.block_ids, told.request_id) == ([block.block_id], "b")
    assert ("pool.alloc", "AssertionError") in host.follower.errors
    assert host.reader.allocating is None


# Reading the pool itself ----------------------------------------------------------------------------------------------


def test_the_free_queue_is_read_from_its_head_even_if_it_runs_in_a_circle_or_breaks_off() -> None:
    host = Host(make_scheduler())
    queue = host.pool.free_block_queue
    assert host.reader.free_ids(100) == [b.block_id for b in queue.get_all_free_blocks()] == list(range(1, 20))
    assert host.reader.num_free == 19
    assert host.reader.free_ids(3) == [1, 2, 3]
    host.pool.blocks[5].next_free_block = host.pool.blocks[3]
    assert host.reader.free_ids(10) == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4]
    host.pool.blocks[5].next_free_block = None
    assert host.reader.free_ids(100) == [1, 2, 3, 4, 5]


def test_counts_and_tables_are_the_hosts() -> None:
    host = Host(make_scheduler(full(), sliding(16), num_blocks=40))
    host.add("a", range(60))
    for _ in range(3):
        host.step()
    tables = host.reader.tables()
    assert tables == {"a": [[b.block_id for b in m.req_to_blocks["a"]] for m in host.reader.managers]}
    assert tables["a"][1][0] == 0
    assert host.reader.counts(1, 4) == [host.pool.blocks[b].ref_cnt for b in (1, 2, 3)]


def test_a_pool_that_nobody_reads_is_passed_through() -> None:
    scheduler = make_scheduler()
    assert not hasattr(scheduler.kv_cache_manager.block_pool, READER)
    scheduler.add_request(schedulers.request("a", range(40)))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 40}


def test_a_fault_of_ours_leaves_the_host_as_it_is_and_ends_the_scope(wrapped: Ledger) -> None:
    host = Host(make_scheduler())

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    host.follower.on_pool = fail  # type: ignore[method-assign]  # a hook that fails is what this is about
    host.add("a", range(40))
    assert host.scheduler.schedule().num_scheduled_tokens == {"a": 40}
    assert host.reader.allocating is None
    assert host.reader.waiting == []
    host.scheduler.finish_requests("a", ABORTED)
    assert host.reader.scope == ("unknown", None)
    assert wrapped.hooks["manager.allocate"].faults == 1
    assert wrapped.hooks["pool.free"].faults == 1
    for hook in wrapped.hooks.values():
        hook.faults = 0
