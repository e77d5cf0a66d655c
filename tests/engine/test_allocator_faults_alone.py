"""Faults of the allocator without kvscope: each happens once, is what it says, and leaves the host's books in order."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing.engine import Runner, environment, running, scheduler
from kvscope.testing.faults import FAULTS, SETTINGS, arm, occasion, workload
from kvscope.testing.faults.hooks import Hook
from kvscope.testing.faults.stories import STORIES

from .test_faults_alone import touched

# The kit by itself; with kvscope beside it every fault is injected again in test_faults.py.
pytestmark = pytest.mark.long


@dataclasses.dataclass
class Books:
    """Copies of what the host's own books say at one moment."""

    references: list[int]
    hashed: list[bool]
    queue: list[int]
    tables: dict[str, list[int]]
    requests: set[str]
    deferred: list[int]

    @classmethod
    def of(cls, scheduler: Any) -> "Books":
        pool = scheduler.kv_cache_manager.block_pool
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        return cls(
            references=[int(block.ref_cnt) for block in pool.blocks],
            hashed=[block.block_hash is not None for block in pool.blocks],
            queue=[block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            tables={name: [block.block_id for block in blocks] for name, blocks in manager.req_to_blocks.items()},
            requests=set(scheduler.requests),
            deferred=[block.block_id for _, blocks in scheduler.deferred_frees for block in blocks],
        )


@dataclasses.dataclass
class Calls:
    """What the pool was asked for since the fault has happened, and its books at both ends of that time."""

    fired: Books
    freed: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)
    allocated: list[list[int]] = dataclasses.field(default_factory=list)
    step_over: Books | None = None


@contextmanager
def watched(llm: Any, name: str) -> Iterator[tuple[Any, list[Calls]]]:
    """Arm a fault, and look at the host from outside: each time that it happens one `Calls` is added."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.core import EngineCore

    seen: list[Calls] = []
    ids = lambda blocks: [int(block.block_id) for block in blocks]  # noqa: E731  # short for this scope alone

    def free(original: Any, pool: Any, blocks: Any) -> None:
        blocks = list(blocks)
        original(pool, blocks)
        if seen and seen[-1].step_over is None:
            seen[-1].freed.append((ids(blocks), [int(block.ref_cnt) for block in blocks]))

    def allocate(original: Any, pool: Any, number: int) -> Any:
        blocks = original(pool, number)
        if seen and seen[-1].step_over is None and blocks:
            seen[-1].allocated.append(ids(blocks))
        return blocks

    def step_over(original: Any, core: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the fault repairs what it has broken.
        if seen and seen[-1].step_over is None:
            seen[-1].step_over = Books.of(core.scheduler)
        return original(core, *args, **kwargs)

    def fired(_: dict[str, Any]) -> None:
        seen.append(Calls(Books.of(scheduler(llm))))

    before = touched()
    with arm(name, after_steps=3, on_fire=fired) as injection:
        hooks = [Hook(BlockPool, "free_blocks", free), Hook(BlockPool, "get_new_blocks", allocate)]
        hooks.append(Hook(EngineCore, "post_step", step_over))
        try:
            yield injection, seen
        finally:
            for hook in reversed(hooks):
                hook.remove()
    after = touched()
    assert all(after[key] is before[key] for key in before)


def _used_after_release(what: dict[str, Any], calls: Calls) -> None:
    """The block stands in the request's table, has no reference of the request, and is free or somebody else's."""
    books, block, other = calls.fired, what["block_id"], what.get("other_request_id")
    assert books.tables[what["request_id"]][what["logical_index"]] == block
    taken = other in books.tables
    assert not taken or block in books.tables[other]
    assert books.references[block] == int(taken)
    assert (block in books.queue) == (not taken)


def _stale_reference_read(what: dict[str, Any], calls: Calls) -> None:
    _used_after_release(what, calls)
    assert what["other_request_id"] not in calls.fired.requests
    assert calls.fired.references[what["block_id"]] == 0


def _free_under_reserved_load(what: dict[str, Any], calls: Calls) -> None:
    block = what["block_id"]
    assert block in calls.fired.tables[what["other_request_id"]]
    assert block in calls.freed[0][0]
    assert calls.allocated == [[block]]
    assert calls.step_over is not None
    assert calls.step_over.tables["load"] == [block]
    assert what["other_request_id"] not in calls.step_over.requests


def _in_table(what: dict[str, Any], calls: Calls) -> None:
    assert calls.fired.tables[what["request_id"]][what["logical_index"]] == what["block_id"]


def _null(what: dict[str, Any], calls: Calls) -> None:
    _in_table(what, calls)
    assert what["block_id"] == 0


def _hashed(what: dict[str, Any], calls: Calls) -> None:
    _in_table(what, calls)
    assert calls.fired.hashed[what["block_id"]]


def _shared(what: dict[str, Any], calls: Calls) -> None:
    _in_table(what, calls)
    assert what["block_id"] in calls.fired.tables[what["other_request_id"]]
    assert calls.fired.references[what["block_id"]] >= 2


def _stale_hit(what: dict[str, Any], calls: Calls) -> None:
    _shared(what, calls)
    assert calls.fired.tables[what["other_request_id"]][-1] == what["block_id"]
    assert not calls.fired.hashed[what["block_id"]]


def _freed_below_zero(what: dict[str, Any], calls: Calls) -> None:
    ids, references = next(freed for freed in calls.freed if what["block_id"] in freed[0])
    assert references[ids.index(what["block_id"])] == -1


def _freed_twice(what: dict[str, Any], calls: Calls) -> None:
    _freed_below_zero(what, calls)
    ids = calls.freed[0][0]
    assert ids.count(what["block_id"]) == 2
    assert (0 in ids) == (what["fault"] == "free_null_block")


def _free_unallocated(what: dict[str, Any], calls: Calls) -> None:
    assert what["block_id"] >= len(calls.fired.references)
    assert what["block_id"] in calls.freed[0][0]


def _free_foreign_block(what: dict[str, Any], calls: Calls) -> None:
    block, books = what["block_id"], calls.step_over
    assert books is not None
    assert block in calls.freed[0][0]
    assert block in books.tables[what["other_request_id"]]
    assert books.references[block] == 0
    assert block in books.queue


def _live_block_in_queue(what: dict[str, Any], calls: Calls) -> None:
    _in_table(what, calls)
    assert what["block_id"] in calls.fired.tables[what["other_request_id"]]
    assert calls.fired.references[what["block_id"]] == 1


def _evict_referenced(what: dict[str, Any], calls: Calls) -> None:
    _hashed(what, calls)
    assert calls.fired.references[what["block_id"]] == 1


def _ref_count_changed(what: dict[str, Any], calls: Calls) -> None:
    block = what["block_id"]
    assert calls.fired.references[block] == 2
    assert sum(table.count(block) for table in calls.fired.tables.values()) == 1


def _queue_entry_lost(what: dict[str, Any], calls: Calls) -> None:
    assert calls.fired.references[what["block_id"]] == 0
    assert what["block_id"] not in calls.fired.queue


def _cached_though_aborted(what: dict[str, Any], calls: Calls) -> None:
    assert calls.fired.hashed[what["block_id"]]
    # Its twin was not in the step that failed.
    assert not any(name.startswith("workload-0-again-0-") and "twin" not in name for name in calls.fired.requests)


def _never_comes_back(what: dict[str, Any], calls: Calls) -> None:
    books = calls.fired
    assert what["request_id"] not in books.requests
    # A prefix may be somebody else's as well.
    assert books.references[what["block_id"]] == 1 + sum(what["block_id"] in t for t in books.tables.values()) - (
        what["request_id"] in books.tables
    )
    assert (what["block_id"] in books.deferred) == (what["fault"] == "endless_hold")
    assert (what["request_id"] in books.tables) == (what["fault"] == "skip_free")


def _written(what: dict[str, Any], calls: Calls) -> None:
    owner = what.get("other_request_id", what["request_id"])
    assert calls.fired.tables[owner][-1] == what["block_id"] == what["slot"] // SETTINGS["block_size"]


WHAT_IT_IS: dict[str, Callable[[dict[str, Any], Calls], None]] = {
    "premature_free": _used_after_release,
    "premature_free_tail": _used_after_release,
    "stale_reference_read": _stale_reference_read,
    "free_under_reserved_load": _free_under_reserved_load,
    "null_block_write": _null,
    "hash_before_write": _hashed,
    "stale_hit": _stale_hit,
    "wiped_cache_hit": _hashed,
    "hit_after_failed_step": _hashed,
    "aborted_step_stays_cached": _cached_though_aborted,
    "computed_claimed": _hashed,
    "write_gap": _in_table,
    "shared_tail_write": _shared,
    "zero_live_block": _in_table,
    "double_free_batch": _freed_twice,
    "double_free_later": _freed_below_zero,
    "free_null_block": _freed_twice,
    "free_unallocated": _free_unallocated,
    "free_foreign_block": _free_foreign_block,
    "ref_underflow": _freed_below_zero,
    "live_block_in_queue": _live_block_in_queue,
    "null_in_queue": _null,
    "evict_referenced": _evict_referenced,
    "ref_count_changed": _ref_count_changed,
    "queue_entry_lost": _queue_entry_lost,
    "leak_after_finish": _never_comes_back,
    "skip_free": _never_comes_back,
    "endless_hold": _never_comes_back,
    "block_not_declared": _written,
    "foreign_owner_write": _written,
}


@pytest.fixture(scope="module")
def llm(runner: Runner) -> Iterator[Any]:
    with running(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def clean_tokens(llm: Any) -> list[list[int]]:
    return workload(llm, max_tokens=4)


@pytest.mark.parametrize("name", STORIES)
def test_a_fault_happens_is_what_it_says_and_leaves_the_books_in_order(
    llm: Any, clean_tokens: list[list[int]], name: str
) -> None:
    fault = FAULTS[name]
    settings, traffic = occasion(fault)
    assert settings == SETTINGS
    with watched(llm, name) as (injection, seen):
        workload(llm, until=lambda: injection.fired, **traffic)
    what = injection.what
    assert what is not None, "the fault found no occasion"
    assert injection.times == len(seen) == 1
    assert what["expected"] in {fault.expected, *fault.alternatives}
    assert what["step"] is None or what["step"] > 3
    assert json.loads(json.dumps(what)) == what
    WHAT_IT_IS[name](what, seen[0])
    assert_in_order(scheduler(llm))
    assert workload(llm, max_tokens=4) == clean_tokens


def assert_in_order(scheduler: Any) -> None:
    """With all requests gone the queue has every block once, and nothing refers to any."""
    books = Books.of(scheduler)
    assert sorted(books.queue) == list(range(1, len(books.references)))
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == len(books.queue)
    assert not any(books.references)
    assert not any(books.tables.values())
    assert not books.requests
    assert not books.deferred


def test_requests_are_aborted_and_preempted_where_the_workload_says_so(llm: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []

    def preempting(original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(scheduler, request, *args, **kwargs)

    hook = Hook(Scheduler, "_preempt_request", preempting)
    try:
        tokens = workload(llm, max_tokens=12, abort={6: 1}, reset_after=8)
    finally:
        hook.remove()
    lengths = [len(each) for each in tokens]
    assert lengths[1] < 12
    assert [length for index, length in enumerate(lengths) if index != 1] == [12] * 7
    assert len(preempted) >= 2
    assert_in_order(scheduler(llm))


REMOTE = """
import sys
from kvscope.testing.engine import apply_environment, running
from kvscope.testing.faults import FAULTS, occasion, workload
runner, report, name = sys.argv[1:]
apply_environment(runner, in_process=False)
if __name__ == "__main__":
    settings, traffic = occasion(FAULTS[name])
    fault = {"name": name, "after_steps": 3, "report": report}
    with running(additional_config={"kvscope_fault": fault}, in_process=False, **settings) as llm:
        before = workload(llm, max_tokens=4)
        workload(llm, **traffic)
        assert workload(llm, max_tokens=4) == before
    print("SURVIVED")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["premature_free", "double_free_batch", "null_block_write"])
def test_the_plugin_carries_a_fault_into_the_schedulers_process(runner: Runner, tmp_path: Path, name: str) -> None:
    script, report = tmp_path / "remote.py", tmp_path / "report.json"
    script.write_text(REMOTE, encoding="utf-8")
    command = [sys.executable, str(script), runner, str(report), name]
    env = dict(os.environ) | environment(runner, in_process=False)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=280)
    assert "SURVIVED" in result.stdout, result.stdout[-2000:] + result.stderr[-4000:]
    what = json.loads(report.read_text(encoding="utf-8"))
    assert (what["fault"], what["rank"]) == (name, None)
    assert what["request_id"].startswith("workload-")
