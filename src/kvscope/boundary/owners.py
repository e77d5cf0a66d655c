"""On whose behalf the block pool is called: the callers that know the request, or why it loses its blocks.

Source (0.32): ``vllm/v1/core/sched/scheduler.py`` and ``vllm/v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import Any

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from .allocator import NOBODY, READER, PoolReader, Scope
from .ledger import Hook, Original

# Blocks come ----------------------------------------------------------------------------------------------------------

_ALLOCATE_SLOTS = (
    "request",
    "num_new_tokens",
    "num_new_computed_tokens",
    "new_computed_blocks",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "delay_cache_blocks",
)


def serving(original: Original, hook: Hook) -> Original:
    """Wrap ``allocate_slots``, which the scheduler calls for every request of every step: nothing is done for it but to
    note the request, unless blocks came to it; that part alone is timed.
    """

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        reader = getattr(self, READER, None)
        if reader is None or hook.disabled:
            return original(self, *args, **kwargs)
        hook.calls += 1
        reader.allocating = args[0] if args else kwargs.get("request")
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            hook.native_error(reader, error)
            raise
        finally:
            if reader.waiting:
                start = perf_counter_ns()
                try:
                    settle_allocated(reader, args, kwargs)
                except Exception as error:  # noqa: BLE001 - fenced: Hook.caught raises only what is meant to reach vLLM
                    hook.caught(error)
                finally:
                    hook.time_ns += perf_counter_ns() - start
                    reader.allocating = None
            else:
                reader.allocating = None

    return wrapper


def settle_allocated(reader: PoolReader, args: Any, kwargs: Any) -> None:
    """Blocks came to the request; ``args`` and ``kwargs`` are those of ``allocate_slots``."""
    named = dict(zip(_ALLOCATE_SLOTS, args, strict=False)) | kwargs
    external = named.get("num_external_computed_tokens", 0)
    computed = reader.allocating.num_computed_tokens + named.get("num_new_computed_tokens", 0)
    reader.settle(computed + external if external else 0, delayed=bool(named.get("delay_cache_blocks", False)))


# Blocks go ------------------------------------------------------------------------------------------------------------


def after_pop_blocks(reader: PoolReader, manager: Any, args: Any, kwargs: Any, blocks: Any) -> None:
    """The request's table is given up, and its blocks are released by a later step."""
    blocks = [block for block in blocks if reader.has(block)]
    if not blocks:
        return
    request_id = (args[0] if args else kwargs["request"]).request_id
    block_ids = [block.block_id for block in blocks]
    reader.popped.append((block_ids, request_id))
    operation = PoolOperation(
        kind=facts.HOLD,
        block_ids=list(block_ids),
        cause=facts.CAUSE_DEFERRED,
        request_id=request_id,
        ref_counts=[block.ref_cnt for block in blocks],
    )
    reader.observer.on_pool(operation, "pop_blocks_for_free")


def after_free_request(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A finished request that the scheduler still knows waits for its connector."""
    request = args[0] if args else kwargs["request"]
    if request.request_id in scheduler.requests:
        operation = reader.table_operations(facts.HOLD, request.request_id, facts.CAUSE_PIN)
        if operation is not None:
            reader.observer.on_pool(operation, "_free_request")


def leave_scope(reader: PoolReader, before: Scope | None) -> None:
    reader.scope = NOBODY if before is None else before


def _enter(reader: PoolReader, cause: str, request_id: str | None) -> Scope:
    before, reader.scope = reader.scope, (cause, request_id)
    return before


def enter_preempt(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> Scope:
    return _enter(reader, facts.CAUSE_PREEMPT, (args[0] if args else kwargs["request"]).request_id)


def enter_finish_requests(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> Scope:
    return _enter(reader, facts.CAUSE_ABORT, None)


def enter_free_request_blocks(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> Scope:
    """Without a reason from further out it is the end of a request; of one that is not at its end the free is a
    mistake, and nobody says why.
    """
    request, cause = args[0] if args else kwargs["request"], reader.scope[0]
    if cause == facts.CAUSE_UNKNOWN and request.is_finished():
        cause = facts.CAUSE_FINISH
    return _enter(reader, cause, request.request_id)


def enter_remove_skipped(reader: PoolReader, manager: Any, args: Any, kwargs: Any) -> Scope:
    return _enter(reader, facts.CAUSE_WINDOW, args[0] if args else kwargs["request_id"])


def enter_drain(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> Scope:
    return _enter(reader, facts.CAUSE_DEFERRED, None)


def enter_free_copied(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> Scope:
    return _enter(reader, facts.CAUSE_COPY, None)


def enter_invalid_blocks(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> tuple[Scope, list[int]]:
    invalid = sorted(args[0] if args else kwargs["invalid_block_ids"])
    return _enter(reader, facts.CAUSE_LOAD_FAILED, None), invalid


def leave_invalid_blocks(reader: PoolReader, entered: tuple[Scope, list[int]] | None) -> None:
    """Blocks of a load inside the step that failed: nothing in them is valid, whoever has them."""
    before, invalid = entered or (NOBODY, [])
    reader.scope = before
    if invalid:
        operation = PoolOperation(
            kind=facts.RECEIVE, block_ids=invalid, cause=facts.CAUSE_LOAD_FAILED, filled=[0] * len(invalid)
        )
        reader.observer.on_pool(operation, "_handle_invalid_blocks")


def enter_loaded(reader: PoolReader, scheduler: Any, args: Any, kwargs: Any) -> Scope:
    """A load has ended, and the blocks are about to be hashed or, if nothing of it is valid, released."""
    request = args[0] if args else kwargs["request"]
    failed = request.request_id in scheduler.failed_recving_kv_req_ids
    for group_id, manager in enumerate(reader.managers):
        size = manager.block_size
        placed = [
            (block.block_id, min(max(request.num_computed_tokens - index * size, 0), size))
            for index, block in enumerate(manager.req_to_blocks.get(request.request_id, ()))
            if reader.has(block)
        ]
        if placed:
            operation = PoolOperation(
                kind=facts.RECEIVE,
                block_ids=[block_id for block_id, _ in placed],
                cause=facts.CAUSE_LOAD_FAILED if failed else facts.CAUSE_EXTERNAL,
                request_id=request.request_id,
                group_id=group_id,
                filled=[tokens for _, tokens in placed],
            )
            reader.observer.on_pool(operation, "_update_waiting_for_remote_kv")
    return _enter(reader, facts.CAUSE_LOAD_FAILED if failed else facts.CAUSE_EXTERNAL, request.request_id)
