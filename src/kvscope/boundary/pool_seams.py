"""The seams of the block pool, and of the callers that say on whose behalf it acts. All in EngineCore."""

from __future__ import annotations

from . import allocator, owners
from .allocator import READER
from .ledger import Seam, Wrap
from .wrapping import around, listing, scoped

_POOL = "vllm.v1.core.block_pool:BlockPool"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def pool_seams() -> tuple[Seam, ...]:
    """What the pool does, then who it does it for."""
    return (*_calls(), *_callers())


def _calls() -> tuple[Seam, ...]:
    ledger = "no block is followed: neither generations nor owners are known"
    return (
        _seam(
            "pool.alloc",
            f"{_POOL}.get_new_blocks",
            _after(allocator.after_get_new_blocks),
            "blocks are handed out",
            ledger,
        ),
        _seam(
            "pool.queue",
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n",
            _after(allocator.after_popleft_n),
            "what the free queue hands out, before vLLM's own assertion",
            "a live block in the free queue is vLLM's assertion alone",
        ),
        _seam("pool.touch", f"{_POOL}.touch", _after(allocator.after_touch), "prefix hits", ledger),
        _seam(
            "pool.free",
            f"{_POOL}.free_blocks",
            listing(allocator.after_free_blocks, carrier=READER),
            "released references",
            ledger,
        ),
        _seam(
            "pool.unpin",
            f"{_POOL}.unpin_blocks",
            listing(allocator.after_unpin_blocks, carrier=READER),
            "released references to blocks that are still read",
            "references of HiSparse pins",
        ),
        _seam(
            "pool.cache",
            f"{_POOL}.cache_full_blocks",
            _after(allocator.after_cache_full_blocks),
            "hashes of full blocks",
            "hits are not judged",
            needs=("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"),
        ),
        _seam(
            "pool.cache_partial",
            f"{_POOL}.cache_partial_block",
            around(
                before=allocator.before_cache_partial_block, after=allocator.after_cache_partial_block, carrier=READER
            ),
            "hashes of parts of blocks",
            "hits of parts of blocks are not judged",
            needs=("request", "block", "kv_cache_group_id", "block_size"),
        ),
        _seam(
            "pool.move_hashes",
            f"{_POOL}.move_block_hashes",
            _after(allocator.after_move_block_hashes),
            "hashes that go over to a copy",
            "hits of copies are not judged",
            needs=("src_block", "dst_block"),
        ),
        _seam(
            "pool.evict", f"{_POOL}.evict_blocks", _after(allocator.after_evict_blocks), "dropped hashes", "evictions"
        ),
        _seam(
            "pool.reset",
            f"{_POOL}.reset_prefix_cache",
            _after(allocator.after_reset_prefix_cache),
            "the end of all hashes",
            "hits after a reset are not judged",
        ),
        _seam(
            "pool.copy_on_write",
            "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager._apply_cow",
            _after(allocator.after_apply_cow),
            "references that a copy on write adds directly",
            "references of copies",
            needs=("request_id", "block_idx", "source_block", "cow_block"),
        ),
    )


def _callers() -> tuple[Seam, ...]:
    owner = "blocks have no owner"
    cause = "why blocks were released"
    return (
        _seam(
            "manager.allocate",
            f"{_MANAGER}.allocate_slots",
            owners.serving,
            "whose blocks, of which group, at which index",
            owner,
            needs=("request", "num_new_computed_tokens", "num_external_computed_tokens", "delay_cache_blocks"),
        ),
        _seam(
            "manager.pop",
            f"{_MANAGER}.pop_blocks_for_free",
            _after(owners.after_pop_blocks),
            "blocks given up, to be released by a later step",
            "deferred frees look like leaks",
            needs=("request",),
        ),
        _seam(
            "manager.window",
            f"{_MANAGER}.remove_skipped_blocks",
            _scope(owners.enter_remove_skipped),
            "blocks that left the attention window at the end of a request",
            cause,
            needs=("request_id",),
        ),
        _seam(
            "scheduler.preempt",
            f"{_SCHEDULER}._preempt_request",
            _scope(owners.enter_preempt),
            "preemptions",
            cause,
            needs=("request",),
        ),
        _seam(
            "scheduler.finish", f"{_SCHEDULER}.finish_requests", _scope(owners.enter_finish_requests), "aborts", cause
        ),
        _seam(
            "scheduler.free",
            f"{_SCHEDULER}._free_request_blocks",
            _scope(owners.enter_free_request_blocks),
            "whose blocks are released",
            owner,
            needs=("request",),
        ),
        _seam(
            "scheduler.finished",
            f"{_SCHEDULER}._free_request",
            _after(owners.after_free_request),
            "finished requests that wait for their connector",
            "connector holds look like leaks",
            needs=("request",),
        ),
        _seam(
            "scheduler.drain",
            f"{_SCHEDULER}._drain_deferred_frees",
            _scope(owners.enter_drain),
            "deferred frees",
            cause,
        ),
        _seam(
            "scheduler.free_copied",
            f"{_SCHEDULER}._free_cow_retained_blocks",
            _scope(owners.enter_free_copied),
            "both ends of a copy, when it has run",
            cause,
        ),
        _seam(
            "scheduler.invalid",
            f"{_SCHEDULER}._handle_invalid_blocks",
            scoped(owners.enter_invalid_blocks, owners.leave_invalid_blocks, carrier=READER),
            "loads that failed inside a step",
            "failed loads count as written",
            needs=("invalid_block_ids",),
        ),
        _seam(
            "scheduler.loaded",
            f"{_SCHEDULER}._update_waiting_for_remote_kv",
            _scope(owners.enter_loaded),
            "asynchronous loads that have ended",
            "received blocks count as unwritten",
            needs=("request",),
        ),
    )


def _after(hook: object) -> Wrap:
    return around(after=hook, carrier=READER)  # type: ignore[arg-type]  # hooks name what they get by its kind


def _scope(enter: object) -> Wrap:
    return scoped(enter, owners.leave_scope, carrier=READER)  # type: ignore[arg-type]  # hooks name what they get by its kind


def _seam(name: str, target: str, wrap: Wrap, fact: str, lost: str, *, needs: tuple[str, ...] = ()) -> Seam:
    return Seam(name, target, "allocator", wrap, fact=fact, lost=lost, needs=needs)
