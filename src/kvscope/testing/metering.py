"""Counts a scheduler's blocks by state from its own books, block by block: what KV Monitor must have said."""

from __future__ import annotations

from typing import Any

STATES = ("free", "cached", "used", "held", "null")


def blocks_by_state(scheduler: Any) -> dict[str, int]:
    """Blocks of `KVCacheManager.block_pool` by state, as the metric `kv_blocks` has them, `held` for any cause."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    owned = {
        block.block_id
        for single in manager.coordinator.single_type_managers
        for name, table in single.req_to_blocks.items()
        if name in scheduler.requests and not scheduler.requests[name].is_finished()
        for block in table
    }
    found = dict.fromkeys(STATES, 0)
    for block in pool.blocks:
        if block.is_null:
            state = "null"
        elif block.ref_cnt:
            state = "used" if block.block_id in owned else "held"
        else:
            is_hashed = block.block_hash is not None or pool.cached_block_hashes_by_block.get(block.block_id)
            state = "cached" if is_hashed else "free"
        found[state] += 1
    return found


def referenced_blocks(scheduler: Any) -> int:
    """Blocks that have a reference, the null block left out."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return sum(block.ref_cnt > 0 for block in blocks if not block.is_null)
