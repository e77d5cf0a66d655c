"""Why blocks come and go, and for whom: the callers of the pool, in a real scheduler of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.v1.request import RequestStatus

from kvscope.boundary.allocator import PoolReader
from kvscope.boundary.owners import after_pop_blocks
from kvscope.facts.allocator import ALLOC, FREE, HOLD, RECEIVE, PoolOperation
from kvscope.state.block_columns import Status
from unit.boundary import schedulers
from unit.boundary.fakes import Told
from unit.boundary.schedulers import Host, full, make_scheduler, sliding

ABORTED = RequestStatus.FINISHED_ABORTED


@pytest.fixture(scope="module", autouse=True)
def wrapped() -> Iterator[None]:
    with schedulers.seams():
        yield


def why(operations: list[PoolOperation]) -> list[tuple[str, str | None]]:
    return [(operation.cause, operation.request_id) for operation in operations]


def status(host: Host, blocks: list[int]) -> set[int]:
    return set(host.follower.ledger.status_of(blocks).tolist())


def one_request(*specs: Any, tokens: int = 40, **more: Any) -> Host:
    """A request ``a`` after its first step."""
    host = Host(make_scheduler(*specs, **more))
    host.add("a", range(tokens))
    host.step()
    return host


# Blocks go ------------------------------------------------------------------------------------------------------------


def test_a_request_that_is_done_releases_its_blocks_itself_from_the_end() -> None:
    host = Host(make_scheduler())
    host.add("a", range(40), max_tokens=1)
    blocks = host.schedule().scheduled_new_reqs[0].block_ids[0]
    host.finish_step()
    (free,) = host.of(FREE)
    assert (free.cause, free.request_id, free.block_ids) == ("finish", "a", blocks[::-1])
    assert not free.scheduling


def test_an_abort_says_whose_blocks_it_releases() -> None:
    host = one_request()
    host.add("b", range(100, 140))
    host.step()
    host.scheduler.finish_requests(None, ABORTED)
    assert why(host.of(FREE)) == [("abort", "a"), ("abort", "b")]


def test_a_preemption_is_told_as_that_and_the_request_comes_back_with_what_it_left() -> None:
    host = Host(make_scheduler(num_blocks=7))
    host.add("a", range(47))
    host.add("b", range(100, 147))
    host.step()
    for _ in range(3):
        host.step()
    assert why(host.of(FREE)) == [("preempt", "b")]
    assert all(o.scheduling for o in host.of(FREE))
    host.scheduler.finish_requests("a", ABORTED)
    host.step()
    assert host.blocks_of("b")


def test_what_leaves_a_window_is_released_while_its_request_runs() -> None:
    host = one_request(full(), sliding(16), tokens=64, num_blocks=40)
    for _ in range(2):
        host.step()
    window = host.of(FREE)
    assert {o.cause for o in window} == {"window"}
    assert {o.request_id for o in window} == {"a"}
    assert not host.follower.ledger.owns("a", window[0].block_ids[0])


def test_what_has_left_its_window_by_the_end_is_told_apart_from_the_end() -> None:
    host = Host(make_scheduler(full(), sliding(16), num_blocks=40))
    host.connect().keeps.add("a")
    host.add("a", range(60), max_tokens=1)
    host.step()
    assert why(host.of(FREE)) == [("window", "a")]
    assert why(host.of(HOLD)) == [("pin", "a")]


# Blocks that are given up and released later --------------------------------------------------------------------------


def deferring() -> Host:
    """Two steps may be on their way, and a connector writes into free blocks as it pleases."""
    host = Host(make_scheduler(asynchronous=True))
    host.connect()
    host.scheduler.defer_block_free = True
    return host


def test_blocks_that_a_running_step_may_write_are_held_until_it_is_back() -> None:
    host = deferring()
    host.add("a", range(40))
    host.schedule()
    blocks = host.blocks_of("a")
    host.scheduler.finish_requests("a", ABORTED)
    assert host.of(FREE) == []
    (hold,) = host.of(HOLD)
    assert (hold.cause, hold.request_id, hold.block_ids) == ("deferred", "a", blocks)
    assert status(host, blocks) == {Status.HELD}
    host.finish_step()
    (free,) = host.of(FREE)
    assert (free.cause, free.request_id, free.block_ids) == ("deferred", "a", blocks[::-1])
    assert status(host, blocks) == {Status.FREE}


def test_tables_that_share_all_but_one_block_are_released_in_the_name_of_their_own_requests() -> None:
    """``a`` ends where ``b`` goes on: its last block is one of both."""
    host = deferring()
    host.add("a", range(33), max_tokens=9)
    host.schedule()
    host.finish_step()
    host.schedule()
    host.add("b", range(60))
    host.schedule()
    shared = host.blocks_of("a")[:2]
    assert host.blocks_of("b")[:2] == shared
    host.scheduler.finish_requests("a", ABORTED)
    host.scheduler.finish_requests("b", ABORTED)
    host.finish_step()
    host.finish_step()
    host.agrees()
    assert why(host.of(FREE)) == [("deferred", "a"), ("deferred", "b")]
    assert [o.block_ids[-2:] for o in host.of(FREE)] == [shared[::-1]] * 2
    assert host.follower.ledger.owners(shared[0]) == []


def test_a_request_that_is_back_before_its_blocks_are_released_keeps_what_it_found_again() -> None:
    host = deferring()
    host.add("a", range(40))
    host.schedule()
    held = host.blocks_of("a")
    while host.scheduler.running:
        host.scheduler._preempt_request(host.scheduler.running.pop(), 0.0, drop_stale_output=True)
    host.schedule()
    again = host.blocks_of("a")
    assert again[:2] == held[:2]
    host.finish_step()
    assert why(host.of(FREE)) == [("deferred", "a")]
    assert all(host.follower.ledger.owns("a", block) for block in again)
    host.finish_step()


def test_a_release_that_was_deferred_and_is_no_table_is_that_of_a_copy() -> None:
    host = deferring()
    blocks = host.pool.get_new_blocks(2)
    host.scheduler.deferred_frees.append((0, blocks))
    host.scheduler._drain_deferred_frees()
    assert why(host.of(FREE)) == [("copy", None)]


def test_given_up_tables_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.boundary.allocator.MOST_POPPED", 2)
    scheduler = make_scheduler()
    reader = PoolReader(Told(), scheduler)
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    for number in range(1, 5):
        request = SimpleNamespace(request_id=str(number))
        after_pop_blocks(reader, scheduler.kv_cache_manager, (request,), {}, [blocks[number]])
    assert [name for _, name in reader.popped] == ["3", "4"]


def test_a_finished_request_waits_for_its_connector_with_all_that_it_has() -> None:
    host = Host(make_scheduler())
    host.connect().keeps.add("a")
    host.add("a", range(40), max_tokens=1)
    host.step()
    blocks = host.blocks_of("a")
    (hold,) = host.of(HOLD)
    assert (hold.cause, hold.request_id, hold.block_ids) == ("pin", "a", blocks)
    assert status(host, blocks) == {Status.HELD}
    host.schedule()
    host.finish_step(finished_sending={"a"})
    assert why(host.of(FREE)) == [("finish", "a")]
    assert status(host, blocks) == {Status.FREE}


# Loads ----------------------------------------------------------------------------------------------------------------


def loading(tokens: int = 32, *, asynchronous: bool = True, prompt: int = 40, warm: int = 0, **more: Any) -> Host:
    """``a``'s prompt is elsewhere; of its first blocks ``warm`` were computed here before."""
    host = Host(make_scheduler(**more))
    if warm:
        host.add("before", range(warm * 16 + 1), max_tokens=1)
        host.step()
    host.connect().elsewhere["a"] = (tokens, asynchronous)
    host.add("a", range(prompt))
    host.schedule()
    return host


def test_blocks_of_a_load_that_no_step_waits_for_are_reserved_until_it_has_ended() -> None:
    host = loading()
    (alloc,) = host.of(ALLOC)
    assert (alloc.cause, alloc.reserved, len(alloc.block_ids)) == ("external", True, 2)
    assert status(host, alloc.block_ids) == {Status.RESERVED}
    host.finish_step(finished_recving={"a"})
    assert status(host, alloc.block_ids) == {Status.RESERVED}
    host.schedule()
    (receive,) = host.of(RECEIVE)
    assert (receive.cause, receive.request_id, receive.filled) == ("external", "a", [16, 16])
    assert status(host, alloc.block_ids) == {Status.ACTIVE}
    assert host.follower.ledger.written_of(alloc.block_ids)[1].tolist() == [16, 16]
    assert host.heard.index(receive) < host.heard.index(host.of("cache", "a")[0])


def test_a_load_behind_a_hit_reserves_only_what_it_fills() -> None:
    host = loading(48, prompt=60, warm=1)
    blocks = host.blocks_of("a")
    alloc = host.of(ALLOC, "a")
    assert [(o.block_ids, o.first_index, o.reserved) for o in alloc] == [(blocks[1:], 1, True)]
    assert status(host, blocks[:1]) == {Status.ACTIVE}
    host.finish_step(finished_recving={"a"})
    host.schedule()
    assert host.of(RECEIVE)[0].block_ids == blocks
    assert host.follower.ledger.written_of(blocks[:3])[0].tolist() == [16, 16, 16]


def test_a_prompt_that_was_loaded_whole_may_compute_its_last_token_again() -> None:
    host = loading(40, prompt=40)
    host.finish_step(finished_recving={"a"})
    output = host.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert host.of(RECEIVE)[0].filled == [16, 16, 8]
    assert host.follower.legality.shared == []


def test_a_load_inside_the_step_reserves_nothing_and_counts_as_written_with_it() -> None:
    host = loading(asynchronous=False)
    external, own = host.of(ALLOC)
    assert (external.cause, external.reserved) == ("external", False)
    assert (own.cause, own.first_index) == ("allocate", 2)
    assert host.of(RECEIVE) == []
    assert host.follower.ledger.written_of(external.block_ids)[0].tolist() == [16, 16]


def test_a_load_of_which_nothing_is_valid_is_released_and_tried_again() -> None:
    host = loading()
    host.finish_step(finished_recving={"a"}, failed_recving={"a"})
    host.schedule()
    (receive,) = host.of(RECEIVE)
    assert (receive.cause, receive.filled) == ("load_failed", [0, 0])
    assert why(host.of(FREE)) == [("load_failed", "a")]
    assert host.of(ALLOC)[-1].reserved


def test_a_load_of_which_a_part_is_valid_keeps_that_part() -> None:
    host = loading()
    blocks = host.blocks_of("a")
    host.finish_step(finished_recving={"a"}, invalid_block_ids={blocks[1]})
    output = host.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16
    assert host.follower.ledger.written_of(blocks)[1].tolist() == [16, 0]
    assert [o.cause for o in host.of(RECEIVE)] == ["load_failed", "load_failed"]
    host.finish_step()


def test_a_load_inside_a_step_that_failed_is_written_no_more_whoever_has_it() -> None:
    host = loading(asynchronous=False)
    blocks = host.blocks_of("a")
    host.finish_step(invalid_block_ids={blocks[0]})
    (receive,) = host.of(RECEIVE)
    assert (receive.cause, receive.request_id, receive.block_ids, receive.filled) == (
        *("load_failed", None),
        *(blocks[:1], [0]),
    )
    assert host.follower.ledger.written_of(blocks[:1])[0].tolist() == [0]
    output = host.schedule()
    assert output.scheduled_cached_reqs.num_computed_tokens == [0]
    host.finish_step()
    assert host.follower.ledger.written_of(blocks[:1])[1].tolist() == [16]


def test_a_hit_on_a_failed_load_that_nobody_repeated_is_seen() -> None:
    """vLLM leaves the hashes (``kv_load_failure_policy`` recompute), and the request that was to repeat it is gone."""
    host = loading(asynchronous=False)
    blocks = host.blocks_of("a")
    host.finish_step(invalid_block_ids={blocks[0]})
    host.scheduler.finish_requests("a", ABORTED)
    host.add("b", range(40))
    with pytest.raises(AssertionError):
        host.schedule()
    (short,) = host.follower.legality.unwritten
    assert (short.request_id, short.index, short.block_id, short.needed, short.declared) == ("b", 0, blocks[0], 16, 0)


def test_a_load_that_is_aborted_holds_its_blocks_until_it_has_ended() -> None:
    host = loading()
    blocks = host.blocks_of("a")
    host.scheduler.finish_requests("a", ABORTED)
    assert why(host.of(HOLD)) == [("pin", "a")]
    assert status(host, blocks) == {Status.RESERVED}
    host.finish_step(finished_recving={"a"})
    assert why(host.of(FREE)) == [("finish", "a")]
    assert status(host, blocks) == {Status.FREE}
    assert host.of(RECEIVE) == []


# Sessions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_session_goes_on_in_the_block_that_its_last_turn_left_half_full(asynchronous: bool) -> None:
    """A session keeps its table between turns and comes in like a new request, with no call of the pool in between."""
    host = Host(make_scheduler(asynchronous=asynchronous))
    host.add("a", range(4), max_tokens=3, resumable=True)
    blocks = host.schedule().scheduled_new_reqs[0].block_ids[0]
    for _ in range(3):  # with a step on its way that the end of the turn makes stale
        if asynchronous:
            host.schedule()
        host.finish_step()
        if not asynchronous and "a" in {r.request_id for r in host.scheduler.running}:
            host.schedule()
    heard = len(host.heard)
    assert host.scheduler.requests["a"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    host.add("a", range(50, 54), max_tokens=2, resumable=True)
    (come_back,) = host.schedule().scheduled_new_reqs
    assert (come_back.num_computed_tokens, come_back.block_ids[0]) == (6, blocks)
    assert len(host.heard) == heard
    while host.outputs:
        host.finish_step()
