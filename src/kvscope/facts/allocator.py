"""What the host's block pool did: one record for each call that changed a reference, a hash or who a block is for.

Source: ``vllm/v1/core/block_pool.py``, ``BlockPool``; who it was for stands in the callers,
``vllm/v1/core/single_type_kv_cache_manager.py`` and ``vllm/v1/core/sched/scheduler.py`` (0.32). Replayed in order,
these records rebuild what the pool knows of its blocks, but for the order of its free queue.
"""

from __future__ import annotations

import msgspec

ALLOC = "alloc"
"""``BlockPool.get_new_blocks``: free blocks are handed out with one reference and without a hash."""
TOUCH = "touch"
"""``BlockPool.touch``: one more reference each; also the direct ``ref_cnt += 1`` of ``_apply_cow`` and of Mamba."""
FREE = "free"
"""``BlockPool.free_blocks`` and ``unpin_blocks``: one reference less for each item."""
HOLD = "hold"
"""No reference changes, but the request no longer uses the blocks. Its whole table is given up: a
``pop_blocks_for_free`` whose blocks are freed by a later step, a finished request that waits for its connector. Or,
with cause ``copy``, single blocks: the source of ``_apply_cow``, whose reference is nobody's until the copy has run."""
CACHE = "cache"
"""Hashes were set or moved: ``cache_full_blocks``, ``cache_partial_block``, ``move_block_hashes``."""
EVICT = "evict"
"""All hashes of the blocks were dropped outside of an allocation: ``evict_blocks``, ``_maybe_evict_cached_block``."""
RESET = "reset"
"""``BlockPool.reset_prefix_cache`` that returned True: no block of the pool has a hash any more."""
RECEIVE = "receive"
"""A load into blocks of a request has ended, outside of any step (``Scheduler._update_waiting_for_remote_kv``): the
first ``filled`` tokens of each are valid, and nothing that is not ordered with the steps writes into them any more."""

KINDS = (ALLOC, TOUCH, FREE, HOLD, CACHE, EVICT, RESET, RECEIVE)

CAUSE_UNKNOWN = "unknown"
CAUSE_ALLOCATE = "allocate"
CAUSE_HIT = "hit"
CAUSE_EXTERNAL = "external"
CAUSE_FINISH = "finish"
CAUSE_PREEMPT = "preempt"
CAUSE_WINDOW = "window"
CAUSE_COPY = "copy"
CAUSE_EVICT = "evict"
CAUSE_RESET = "reset"
CAUSE_ABORT = "abort"
CAUSE_LOAD_FAILED = "load_failed"
CAUSE_DEFERRED = "deferred"
CAUSE_PIN = "pin"
CAUSE_UNPIN = "unpin"

CAUSES = (
    CAUSE_UNKNOWN,
    CAUSE_ALLOCATE,
    CAUSE_HIT,
    CAUSE_EXTERNAL,
    CAUSE_FINISH,
    CAUSE_PREEMPT,
    CAUSE_WINDOW,
    CAUSE_COPY,
    CAUSE_EVICT,
    CAUSE_RESET,
    CAUSE_ABORT,
    CAUSE_LOAD_FAILED,
    CAUSE_DEFERRED,
    CAUSE_PIN,
    CAUSE_UNPIN,
)
"""Why, from the function that called the pool. The order is that of the codes in a ledger: new ones go to the end.

``allocate`` / ``external``: ``SingleTypeKVCacheManager.allocate_new_blocks`` / ``allocate_external_computed_blocks``.
``hit``: ``add_local_computed_blocks``. ``copy``: ``_apply_cow``, ``move_block_hashes``, ``_free_cow_retained_blocks``.
``window``: ``remove_skipped_blocks``. ``finish``, ``abort``, ``preempt``: ``Scheduler._free_request_blocks`` under
``update_from_output``, ``finish_requests``, ``_preempt_request``. ``deferred``: ``Scheduler._drain_deferred_frees``.
``load_failed``: ``_handle_invalid_blocks``, ``_update_waiting_for_remote_kv``. ``evict``: the transient checkpoint of a
Mamba group. ``reset``: ``reset_prefix_cache``. ``pin`` / ``unpin``: a connector keeps blocks for a transfer and lets
them go; ``unpin_blocks`` of HiSparse, whose blocks go on being read until they are handed out again.
"""


class PoolOperation(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """One call of one pool, as it was when the call returned. Lists are the record's own, nothing aliases the host.

    ``step`` numbers the ``Scheduler.schedule()`` result that was being made (``scheduling`` True) or that was the last
    one made (False).

    ``pool`` is an ordinal; 0 is ``KVCacheManager.block_pool``, which attention uses. HiSparse and CPU offload have
    more. One call of ``free_blocks`` may be about several (it hands blocks of other pools on to them): one record a
    pool.

    ``block_ids`` ``[n]`` in the host's order; ``KVCacheBlock.block_id``. In ``free`` each item is one released
    reference (``free_blocks``), so an id may stand there twice. The null block is left out of ``touch``, ``free`` and
    ``hold``, since its count means nothing (``BlockPool.__init__``); in ``alloc`` it is a fact like any other.
    ``reset`` has none.

    ``request_id``, ``group_id``: whose table of which group got, lost or hashed the blocks
    (``SingleTypeKVCacheManager.req_to_blocks``, ``kv_cache_group_id``). None: nobody's (both ends of a copy, a
    connector's pin), or not known.

    ``first_index``: where ``block_ids[0]`` stands in that table, in blocks of the group; the others follow one by one,
    so a table with null blocks in between takes several records. Known for ``alloc`` and ``touch`` from the length of
    ``req_to_blocks[request_id]`` (and from ``_partial_hit_reqs`` for a copy on write); the others do not need it.

    ``reserved``: the blocks of this ``alloc`` wait for a receive that no step is ordered with
    (``KVCacheManager.allocate_slots``, ``delay_cache_blocks``). A load inside the step does not reserve.

    ``ref_counts`` ``[n]``: ``KVCacheBlock.ref_cnt`` of each block after the call: the host's word beside the count that
    follows from the operations.

    ``hash_counts`` ``[n]``: how many hashes lead to each block after the call (``KVCacheBlock.block_hash`` and
    ``BlockPool.cached_block_hashes_by_block``). None: one or more after ``cache``, none after ``alloc``. A
    ``move_block_hashes`` is one ``cache`` of source and destination.

    ``hash_tokens`` ``[n]``: tokens of each block, from its first one on, that its primary hash covers
    (``KVCacheBlock.block_hash_num_tokens`` less the tokens of the blocks before it). None: not known.

    ``filled`` ``[n]``: for ``receive`` alone, the valid tokens of each block from its first one on.

    ``generations`` ``[n]``: for ``alloc`` alone, how often each block has now been handed out. It is the one number
    here that is not the host's: whoever replays the operations holds its own count against it.
    """

    kind: str
    block_ids: list[int]
    step: int = 0
    scheduling: bool = False
    pool: int = 0
    cause: str = CAUSE_UNKNOWN
    request_id: str | None = None
    group_id: int | None = None
    first_index: int | None = None
    reserved: bool = False
    ref_counts: list[int] | None = None
    hash_counts: list[int] | None = None
    hash_tokens: list[int] | None = None
    filled: list[int] | None = None
    generations: list[int] | None = None
