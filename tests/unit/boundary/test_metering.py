"""What KV Monitor says of a real scheduler of vLLM, beside the scheduler's own books."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from hypothesis import given, settings
from tests.budget import examples
from vllm.v1.request import RequestStatus

from kvscope.boundary.ledger import Ledger
from kvscope.testing.metering import blocks_by_state
from unit.boundary import schedulers
from unit.boundary.metered import Meter, agrees, hits_of, metered_seams
from unit.boundary.schedulers import Host, full, make_scheduler, sliding, state
from unit.boundary.test_pool_lives import ACTS, MAKERS
from unit.boundary.test_pool_lives import SETTINGS as EVERYTHING

ABORTED = RequestStatus.FINISHED_ABORTED
SETTINGS = settings(EVERYTHING, max_examples=examples(12))


@pytest.fixture(autouse=True)
def wrapped() -> Iterator[Ledger]:
    with schedulers.seams(), metered_seams() as ledger:
        yield ledger


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_said_is_what_is_there_whatever_happens(kind: str) -> None:
    @SETTINGS
    @given(ACTS)
    def live(acts: list[tuple[str, int, int]]) -> None:
        life = MAKERS[kind]()
        meter = Meter(life.host)
        for act in acts:
            life.act(*act)
            agrees(meter)
        life.end()
        agrees(meter)
        assert meter.states()["used"] == meter.states()["held"] == 0

    live()


def metered(*specs: Any, **settings: Any) -> tuple[Host, Meter]:
    host = Host(make_scheduler(*specs, **settings))
    return host, Meter(host)


# States ---------------------------------------------------------------------------------------------------------------


def test_a_request_uses_blocks_and_leaves_them_cached() -> None:
    host, meter = metered()
    host.add("a", range(40), max_tokens=1)
    host.schedule()
    assert meter.states() == {"free": 16, "cached": 0, "used": 3, "held": 0, "null": 1}
    assert meter.value("kv_cache_usage_percent") == pytest.approx(100 * 3 / 19)
    host.finish_step()
    assert meter.states() == {"free": 17, "cached": 2, "used": 0, "held": 0, "null": 1}
    assert meter.value("kv_cache_usage_percent") == 0


def test_after_everything_was_cancelled_the_usage_falls_without_another_step() -> None:
    host, meter = metered()
    for name in "abc":
        host.add(name, range(ord(name), ord(name) + 40))
    host.step()
    host.step()
    meter.publish()
    assert meter.states()["used"] == 9
    host.scheduler.finish_requests(["a", "b", "c"], ABORTED)
    assert meter.states()["used"] == 0
    assert meter.value("kv_cache_usage_percent") == 0


def test_blocks_that_wait_for_a_step_are_held_and_released_with_its_result() -> None:
    host, meter = metered(asynchronous=True)
    host.connect()
    host.scheduler.defer_block_free = True
    host.add("a", range(40))
    host.schedule()
    host.scheduler.finish_requests("a", ABORTED)
    assert meter.value("kv_deferred_free_blocks") == meter.value("kv_blocks", "held", "deferred") == 3
    assert len(host.scheduler.deferred_frees[0][1]) == 3
    assert meter.states()["used"] == 0
    host.finish_step()
    assert meter.value("kv_deferred_free_blocks") == meter.states()["held"] == 0


def test_what_a_connector_still_sends_is_held_because_of_it() -> None:
    host, meter = metered()
    host.connect().keeps.add("a")
    host.add("a", range(40), max_tokens=1)
    host.step()
    assert meter.value("kv_blocks", "held", "connector") == 3
    host.schedule()
    host.finish_step(finished_sending={"a"})
    assert meter.value("kv_blocks", "held", "connector") == 0


def test_what_is_received_is_used() -> None:
    host, meter = metered()
    host.connect().elsewhere["a"] = (32, True)
    host.add("a", range(40))
    host.schedule()
    assert meter.states() == blocks_by_state(host.scheduler)
    assert meter.states()["used"] == 2
    assert meter.value("kv_token_fill_ratio", "0") == 0


def test_a_reset_is_published_at_once_and_no_counter_goes_back() -> None:
    host, meter = metered()
    host.add("a", range(40), max_tokens=1)
    host.step()
    names = ("kv_block_alloc_total", "kv_block_free_total", "kv_block_evict_total", "kv_refs_released_total")
    before = [meter.value(name) for name in names]
    assert host.scheduler.reset_prefix_cache()
    assert meter.states()["cached"] == 0
    assert [meter.value(name) for name in names] == before
    host.add("b", range(40), max_tokens=1)
    host.step()
    assert (meter.value("prefix_cache_hits_total", "token"), meter.value("kv_block_alloc_total")) == (0, 6)


def test_once_its_books_are_lost_states_are_absent_and_the_usage_goes_on() -> None:
    host, meter = metered()
    host.add("a", range(40))
    host.step()
    meter.lost = True
    host.add("b", range(100, 160))
    host.step()
    meter.publish()
    assert meter.states() == {"held": 0}
    assert meter.value("kv_token_fill_ratio", "0") is None
    assert meter.value("kv_cache_usage_percent") == host.scheduler.get_kv_cache_usage() * 100
    assert meter.value("kv_block_alloc_total") == 3


# How full the blocks are ----------------------------------------------------------------------------------------------


def test_the_fill_ratio_is_tokens_by_slots() -> None:
    host, meter = metered()
    host.add("a", range(40))
    host.step()
    assert meter.value("kv_token_fill_ratio", "0") == pytest.approx(40 / 48)


def test_a_shared_block_counts_once() -> None:
    host, meter = metered()
    host.add("a", range(40))
    host.step()
    host.add("b", range(40))
    host.step()
    meter.meter._fill_at = 0
    meter.publish()
    assert meter.states()["used"] == 4
    tokens = 32 + 9 + 8  # a has one more by now
    assert meter.value("kv_token_fill_ratio", "0") == pytest.approx(tokens / 64)


def test_blocks_that_left_a_window_do_not_count_and_states_have_no_ratio() -> None:
    host, meter = metered(full(), sliding(16), num_blocks=40)
    host.add("a", range(64))
    for _ in range(4):
        host.step()
    meter.meter._fill_at = 0
    meter.publish()
    for group in (0, 1):
        blocks = [block for block in host.blocks_of("a", group) if block]
        table = len(host.blocks_of("a", group))
        empty = table * 16 - host.scheduler.requests["a"].num_computed_tokens
        assert meter.value("kv_token_fill_ratio", str(group)) == pytest.approx(1 - empty / (16 * len(blocks)))
    host, meter = metered(full(), state(), num_blocks=40)
    host.add("a", range(40))
    host.step()
    assert meter.value("kv_token_fill_ratio", "0") is not None
    assert meter.value("kv_token_fill_ratio", "1") is None


# Hits -----------------------------------------------------------------------------------------------------------------


def run_to_the_end(host: Host) -> dict[str, int]:
    """``num_cached_tokens`` of every request that ran."""
    found: dict[str, int] = {}
    update = host.scheduler.update_from_output

    def noted(*given: Any) -> Any:
        outputs = update(*given)
        found.update(hits_of(outputs))
        return outputs

    host.scheduler.update_from_output = noted
    while host.scheduler.has_unfinished_requests():
        host.step()
    return found


def test_hits_are_those_of_the_answers() -> None:
    host, meter = metered(num_blocks=60)
    host.add("first", range(50), max_tokens=4)
    answered = run_to_the_end(host)
    for name, tokens in {"again": range(50), "half": [*range(20), *range(200, 230)], "new": range(300, 340)}.items():
        host.add(name, tokens, max_tokens=4)
    answered |= run_to_the_end(host)
    assert answered == {"first": 0, "again": 48, "half": 16, "new": 0}
    assert meter.value("prefix_cache_hits_total", "token") == sum(answered.values())
    assert meter.value("prefix_cache_queries_total", "token") == 50 + 50 + 50 + 40
    assert meter.value("prefix_cache_hits_total", "block") == 3 + 1
    assert meter.value("prefix_cache_queries_total", "block") == 4 + 4 + 4 + 3
    assert meter.meter.reuse.hit_tokens == 64


def test_a_request_that_comes_back_after_a_preemption_is_not_counted_again() -> None:
    host, meter = metered(num_blocks=9)
    for name in "abc":
        host.add(name, range(ord(name), ord(name) + 40), max_tokens=30)
    answered = run_to_the_end(host)
    assert host.follower.errors == []
    assert any(operation.cause == "preempt" for operation in host.heard)
    assert meter.value("prefix_cache_queries_total", "token") == 3 * 40
    assert meter.value("prefix_cache_hits_total", "token") == sum(answered.values()) == 0
    assert meter.value("kv_block_touch_total") == sum(len(o.block_ids) for o in host.of("touch"))


def test_what_is_not_looked_up_is_no_query() -> None:
    host, meter = metered()
    host.add("a", range(40))
    host.scheduler.requests["a"].skip_reading_prefix_cache = True
    host.step()
    meter.publish()
    assert meter.value("prefix_cache_queries_total", "token") == 0
    host, meter = metered(caching=False)
    host.add("a", range(40))
    host.step()
    meter.publish()
    assert meter.value("prefix_cache_queries_total", "token") is None


def test_a_load_that_fails_is_looked_up_again_and_counted_once(wrapped: Ledger) -> None:
    host, meter = metered()
    host.connect().elsewhere["a"] = (32, True)
    host.add("a", range(40))
    host.schedule()
    host.finish_step(failed_recving={"a"}, finished_recving={"a"})
    for _ in range(3):
        host.step()
    meter.publish()
    assert wrapped.hooks["monitor.lookup"].calls == 2
    assert meter.value("prefix_cache_queries_total", "token") == 40


# When it is said ------------------------------------------------------------------------------------------------------


def test_steps_in_a_row_are_published_now_and_then_and_the_last_one_at_once() -> None:
    host, meter = metered()
    host.add("a", range(16), max_tokens=60)
    host.step()
    meter.meter.published = 0
    meter.meter._publish_at = 1 << 62
    for _ in range(20):
        host.step()
    assert meter.meter.published == 0
    while host.scheduler.has_unfinished_requests():
        host.step()
    assert meter.meter.published == 1
    assert meter.states()["used"] == 0
    host.step()
    assert meter.meter.published == 1


def test_an_interval_that_has_passed_is_enough() -> None:
    host, meter = metered()
    host.add("a", range(16), max_tokens=60)
    host.step()
    for _ in range(3):
        meter.meter.published, meter.meter._publish_at = 0, 0
        host.step()
        assert meter.meter.published == 1


def test_what_the_host_raises_is_told_and_goes_on() -> None:
    host, meter = metered()

    with pytest.raises(TypeError):
        host.manager.record_prefix_cache_stats()
    assert meter.errors == [("monitor.lookup", "TypeError")]
