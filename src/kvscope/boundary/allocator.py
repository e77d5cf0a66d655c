"""The block pool: what each of its calls did, and for whom.

The pool knows neither request nor group. Whose blocks they are stands in the callers, so those are wrapped as well, and
say on whose behalf the pool is called; where in a table the blocks went is read when ``allocate_slots`` returns.

Source (0.32): ``vllm/v1/core/block_pool.py``, ``vllm/v1/core/kv_cache_manager.py``,
``vllm/v1/core/single_type_kv_cache_manager.py`` and ``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation

READER = "_kvscope_pool"
"""Attribute by which pool, free queue, manager and scheduler carry the reader of the pool."""

Scope = tuple[str, str | None]
NOBODY: Scope = (facts.CAUSE_UNKNOWN, None)
_PLACED = frozenset({facts.ALLOC, facts.TOUCH})
MOST_POPPED = 4096
"""So many given up tables are remembered; a table beyond that is released in nobody's name."""


class PoolReader:
    """Makes operations out of the calls of ``KVCacheManager.block_pool``, and tells ``observer`` in their order.

    ``scope`` is why the pool is called and for whom. Inside of ``allocate_slots`` what came to the request waits in
    ``waiting`` until its place in the tables is known; ``starts`` are the lengths of the tables before. ``popped`` has
    the tables that were given up and not released yet, in their order (``Scheduler.deferred_frees``).
    """

    def __init__(self, observer: Any, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self.observer = observer
        self.pool = manager.block_pool
        self.managers: Sequence[Any] = manager.coordinator.single_type_managers
        self.scope: Scope = NOBODY
        self.allocating: Any = None
        self.waiting: list[PoolOperation] = []
        self.starts: list[int] = []
        self.partial: tuple[Any, int] = (None, 0)
        self.popped: deque[tuple[list[int], str]] = deque(maxlen=MOST_POPPED)
        for host in (self.pool, self.pool.free_block_queue, manager, scheduler, *self.managers):
            setattr(host, READER, self)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self.observer.on_native_error(boundary, error_type)

    def has(self, block: Any) -> bool:
        """Whether this pool counts the references of a block: a manager may have blocks of another pool."""
        return not block.is_null and (block.pool is None or block.pool is self.pool)

    # What waits -------------------------------------------------------------------------------------------------------

    def come(self, operation: PoolOperation, boundary: str) -> None:
        """Blocks came to whoever is being served, or got a hash."""
        if self.allocating is None:
            self.observer.on_pool(operation, boundary)
        else:
            self.waiting.append(operation)

    def remember_starts(self) -> None:
        """Before the first block comes: none of the tables has been extended yet."""
        if self.allocating is not None and not self.waiting:
            request_id = self.allocating.request_id
            self.starts = [len(manager.req_to_blocks.get(request_id, ())) for manager in self.managers]

    def settle(self, external_tokens: int = 0, *, delayed: bool = False) -> None:
        """Pass on what waits, now that the tables have it. ``external_tokens``: those up to there come from a load."""
        waiting, self.waiting = self.waiting, []
        starts, self.starts = self.starts, []
        request_id = self.allocating.request_id
        places: dict[int, tuple[int, int]] = {}
        for group_id, (manager, start) in enumerate(zip(self.managers, starts, strict=False)):
            for index, block in enumerate(manager.req_to_blocks.get(request_id, ())[start:], start):
                if self.has(block):
                    places[block.block_id] = (group_id, index)
        for operation in waiting:
            if operation.kind not in _PLACED or operation.request_id is None:
                self.observer.on_pool(operation, "allocate_slots")
                continue
            for part in _placed(operation, places):
                if operation.kind == facts.ALLOC and part.first_index is not None and part.group_id is not None:
                    size = self.managers[part.group_id].block_size
                    if part.first_index * size < external_tokens:
                        part.cause, part.reserved = facts.CAUSE_EXTERNAL, delayed
                elif part.kind == facts.ALLOC:  # the copy that MambaManager takes for the prefix cache
                    part.cause, part.request_id = facts.CAUSE_COPY, None
                self.observer.on_pool(part, "allocate_slots")

    # Reading ----------------------------------------------------------------------------------------------------------

    def hashes_of(self, block: Any) -> int:
        """How many hashes lead to a block."""
        more = self.pool.cached_block_hashes_by_block.get(block.block_id)
        return (block.block_hash is not None) + (len(more) if more else 0)

    def table_operations(self, kind: str, request_id: str, cause: str) -> PoolOperation | None:
        """An operation on everything that a request has in its tables, None if that is nothing."""
        blocks = [b for m in self.managers for b in m.req_to_blocks.get(request_id, ()) if self.has(b)]
        if not blocks:
            return None
        return PoolOperation(
            kind=kind,
            block_ids=[block.block_id for block in blocks],
            cause=cause,
            request_id=request_id,
            ref_counts=[block.ref_cnt for block in blocks],
        )

    def counts(self, first: int, last: int) -> list[int]:
        """``ref_cnt`` of the blocks ``first .. last - 1``; the null block's means nothing."""
        return [block.ref_cnt for block in self.pool.blocks[first:last]]

    @property
    def num_free(self) -> int:
        """How many blocks the queue says that it has."""
        return int(self.pool.free_block_queue.num_free_blocks)

    def free_ids(self, limit: int) -> list[int]:
        """The free queue from its head on: at most ``limit`` blocks, even if it runs in a circle, and those that can be
        reached if it breaks off.
        """
        queue = self.pool.free_block_queue
        ids: list[int] = []
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail and len(ids) < limit:
            ids.append(block.block_id)
            block = block.next_free_block
        return ids

    def tables(self) -> dict[str, list[list[int]]]:
        """Block ids of all requests that the managers know, one list a group, null blocks included."""
        return {r: self.table_of(r) for r in dict.fromkeys(r for m in self.managers for r in m.req_to_blocks)}

    def table_of(self, request_id: str) -> list[list[int]]:
        """The same of one request; empty lists for one that the managers do not know."""
        null = self.pool.null_block.block_id
        return [
            [b.block_id if self.has(b) else null for b in m.req_to_blocks.get(request_id, ())] for m in self.managers
        ]


def _placed(operation: PoolOperation, places: dict[int, tuple[int, int]]) -> Iterator[PoolOperation]:
    """The operation, cut where its blocks do not stand one behind the other in one table."""
    start, ids = 0, operation.block_ids
    before = places.get(ids[0])
    for offset in range(1, len(ids) + 1):
        place = places.get(ids[offset]) if offset < len(ids) else None
        follows = before is not None and place == (before[0], before[1] + 1)
        unplaced = before is None and place is None
        if offset < len(ids) and (follows or unplaced):
            before = place
            continue
        first = places.get(ids[start])
        yield PoolOperation(
            kind=operation.kind,
            block_ids=ids[start:offset],
            cause=operation.cause,
            request_id=operation.request_id,
            group_id=None if first is None else first[0],
            first_index=None if first is None else first[1],
            ref_counts=None if operation.ref_counts is None else operation.ref_counts[start:offset],
        )
        start, before = offset, place


# Blocks come ----------------------------------------------------------------------------------------------------------


def after_get_new_blocks(reader: PoolReader, pool: Any, args: Any, kwargs: Any, blocks: Any) -> None:
    if not blocks:
        return
    reader.remember_starts()
    request_id = reader.scope[1] if reader.allocating is None else reader.allocating.request_id
    operation = PoolOperation(
        kind=facts.ALLOC,
        block_ids=[block.block_id for block in blocks],
        cause=facts.CAUSE_UNKNOWN if request_id is None else facts.CAUSE_ALLOCATE,
        request_id=request_id,
        ref_counts=[block.ref_cnt for block in blocks],
    )
    reader.come(operation, "get_new_blocks")


def after_popleft_n(reader: PoolReader, queue: Any, args: Any, kwargs: Any, blocks: Any) -> None:
    """What ``get_new_blocks`` is about to refuse by an assertion: seen here, its cause can still be told."""
    wrong = [block for block in blocks if block.ref_cnt or block.is_null]
    if wrong:
        request_id = None if reader.allocating is None else reader.allocating.request_id
        operation = PoolOperation(
            kind=facts.ALLOC,
            block_ids=[block.block_id for block in wrong],
            cause=facts.CAUSE_ALLOCATE,
            request_id=request_id,
        )
        reader.observer.on_handing_out(operation, "get_new_blocks")


def after_touch(reader: PoolReader, pool: Any, args: Any, kwargs: Any, result: Any) -> None:
    blocks = [block for block in (args[0] if args else kwargs["blocks"]) if not block.is_null]
    if not blocks:
        return
    reader.remember_starts()
    allocating = reader.allocating is not None
    operation = PoolOperation(
        kind=facts.TOUCH,
        block_ids=[block.block_id for block in blocks],
        cause=facts.CAUSE_HIT if allocating else facts.CAUSE_PIN,
        request_id=reader.allocating.request_id if allocating else None,
        ref_counts=[block.ref_cnt for block in blocks],
    )
    reader.come(operation, "touch")


def after_apply_cow(reader: PoolReader, manager: Any, args: Any, kwargs: Any, result: Any) -> None:
    """``_apply_cow`` adds to ``ref_cnt`` directly: until the copy has run, its two ends belong to nobody."""
    request_id, _, source, copy = _cow_arguments(*args, **kwargs)
    for operation in (
        PoolOperation(kind=facts.TOUCH, block_ids=[copy.block_id], cause=facts.CAUSE_COPY, ref_counts=[copy.ref_cnt]),
        PoolOperation(
            kind=facts.HOLD,
            block_ids=[source.block_id],
            cause=facts.CAUSE_COPY,
            request_id=request_id,
            ref_counts=[source.ref_cnt],
        ),
    ):
        reader.come(operation, "_apply_cow")


def _cow_arguments(request_id: str, block_idx: int, source_block: Any, cow_block: Any) -> tuple[str, int, Any, Any]:
    return request_id, block_idx, source_block, cow_block


# Blocks go ------------------------------------------------------------------------------------------------------------


def after_free_blocks(reader: PoolReader, pool: Any, blocks: list[Any], kwargs: Any) -> None:
    blocks = [block for block in blocks if reader.has(block)]  # blocks of another pool are handed on to it
    if not blocks:
        return
    if reader.waiting:
        reader.settle()
    block_ids = [block.block_id for block in blocks]
    cause, request_id = reader.scope
    if reader.allocating is not None:
        cause, request_id = facts.CAUSE_WINDOW, reader.allocating.request_id
    elif cause == facts.CAUSE_DEFERRED:
        cause, request_id = _deferred(reader, block_ids)
    operation = PoolOperation(
        kind=facts.FREE,
        block_ids=block_ids,
        cause=cause,
        request_id=request_id,
        ref_counts=[block.ref_cnt for block in blocks],
    )
    reader.observer.on_pool(operation, "free_blocks")


def _deferred(reader: PoolReader, block_ids: list[int]) -> Scope:
    """Whose deferred release this is: a table that was given up, from its end, or else both ends of copies."""
    table = block_ids[::-1]
    for position, (popped, request_id) in enumerate(reader.popped):
        if popped == table:
            del reader.popped[position]
            return facts.CAUSE_DEFERRED, request_id
    return facts.CAUSE_COPY, None


def after_unpin_blocks(reader: PoolReader, pool: Any, blocks: list[Any], kwargs: Any) -> None:
    operation = PoolOperation(
        kind=facts.FREE,
        block_ids=[block.block_id for block in blocks],
        cause=facts.CAUSE_UNPIN,
        ref_counts=[block.ref_cnt for block in blocks],
    )
    if blocks:
        reader.observer.on_pool(operation, "unpin_blocks")


# Hashes ---------------------------------------------------------------------------------------------------------------


def after_cache_full_blocks(reader: PoolReader, pool: Any, args: Any, kwargs: Any, result: Any) -> None:
    request, blocks, first, last, block_size, group_id = _cache_arguments(*args, **kwargs)
    hashed = [block for block in blocks[first:last] if not block.is_null and block.block_hash is not None]
    if hashed:
        reader.come(
            _cached(reader, hashed, request.request_id, group_id, [block_size] * len(hashed)), "cache_full_blocks"
        )


def _cache_arguments(
    request: Any,
    blocks: Any,
    num_cached_blocks: int,
    num_full_blocks: int,
    block_size: int,
    kv_cache_group_id: int,
    block_mask: Any = None,
) -> tuple[Any, Any, int, int, int, int]:
    return request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id


def before_cache_partial_block(reader: PoolReader, pool: Any, args: Any, kwargs: Any) -> None:
    _, block, _, _ = _partial_arguments(*args, **kwargs)
    reader.partial = block.block_hash, reader.hashes_of(block)


def after_cache_partial_block(reader: PoolReader, pool: Any, args: Any, kwargs: Any, result: Any) -> None:
    """``FullAttentionManager.cache_blocks`` says the same of the end of a prompt in every step that follows."""
    request, block, block_size, group_id = _partial_arguments(*args, **kwargs)
    if not block.is_null and reader.partial != (block.block_hash, reader.hashes_of(block)):
        tokens = (block.block_hash_num_tokens or 0) % block_size or block_size
        reader.come(_cached(reader, [block], request.request_id, group_id, [tokens]), "cache_partial_block")


def _partial_arguments(
    request: Any,
    block: Any,
    num_tokens: int,
    kv_cache_group_id: int,
    block_size: int,
    replace_existing_hashes: bool = False,
) -> tuple[Any, Any, int, int]:
    return request, block, block_size, kv_cache_group_id


def _cached(reader: PoolReader, blocks: list[Any], request_id: str, group_id: int, tokens: list[int]) -> PoolOperation:
    return PoolOperation(
        kind=facts.CACHE,
        block_ids=[block.block_id for block in blocks],
        cause=facts.CAUSE_ALLOCATE,
        request_id=request_id,
        group_id=group_id,
        ref_counts=[block.ref_cnt for block in blocks],
        hash_counts=[reader.hashes_of(block) for block in blocks],
        hash_tokens=tokens,
    )


def after_move_block_hashes(reader: PoolReader, pool: Any, args: Any, kwargs: Any, result: Any) -> None:
    """The only caller, ``MambaManager.allocate_new_blocks``, goes on to add to the source's ``ref_cnt`` directly."""
    source, copy = _moved(*args, **kwargs)
    moved = PoolOperation(
        kind=facts.CACHE,
        block_ids=[source.block_id, copy.block_id],
        cause=facts.CAUSE_COPY,
        hash_counts=[reader.hashes_of(source), reader.hashes_of(copy)],
    )
    reader.come(moved, "move_block_hashes")
    reader.come(
        PoolOperation(kind=facts.TOUCH, block_ids=[source.block_id], cause=facts.CAUSE_COPY), "move_block_hashes"
    )


def _moved(src_block: Any, dst_block: Any) -> tuple[Any, Any]:
    return src_block, dst_block


def after_evict_blocks(reader: PoolReader, pool: Any, args: Any, kwargs: Any, result: Any) -> None:
    ids = sorted(args[0] if args else kwargs["block_ids"])
    if not ids:
        return
    blocks = [pool.blocks[block_id] for block_id in ids]
    # The host has one reason (Scheduler._handle_invalid_blocks), and kvscope another when it isolates.
    reasons = (facts.CAUSE_LOAD_FAILED, facts.CAUSE_EVICT)
    cause = reader.scope[0] if reader.scope[0] in reasons else facts.CAUSE_UNKNOWN
    operation = PoolOperation(
        kind=facts.EVICT, block_ids=ids, cause=cause, ref_counts=[block.ref_cnt for block in blocks]
    )
    reader.observer.on_pool(operation, "evict_blocks")


def after_reset_prefix_cache(reader: PoolReader, pool: Any, args: Any, kwargs: Any, result: Any) -> None:
    if result:
        operation = PoolOperation(kind=facts.RESET, block_ids=[], cause=facts.CAUSE_RESET)
        reader.observer.on_pool(operation, "reset_prefix_cache")
