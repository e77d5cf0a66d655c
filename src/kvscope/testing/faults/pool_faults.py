"""Damage to the pool's own books: blocks freed twice or by others, counts, the free queue; blocks that never return.

What a request's end frees is the list of `pop_blocks_for_free`, so that faults which free too much or too little change
that list. `BlockPool.get_new_blocks` asserts that a block which it hands out has no reference left: whatever lets a
count go below zero, or a block with references into the queue, is repaired before the next step.
"""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.story import Call, Moment, Story, Told, waits


def _end(books: Books) -> Generator[Moment, Call, tuple[Any, list[Any]]]:
    """Wait until a request has come to its end, and its blocks are about to be freed: the list of them."""
    while True:
        call = yield "popping"
        request, blocks = books.request(call.args[1]), call.result
        if books.due and _ended(request) and blocks and books.alone(blocks[-1]):
            return request, blocks


def _ended(request: Any) -> bool:
    return request is not None and request.status.name == "FINISHED_LENGTH_CAPPED"


def _going_on(books: Books, ended: Any) -> Iterator[Any]:
    """Running requests with a last block of their own, while the result of a step is being dealt with."""
    for request in books.scheduler.running:
        table = books.table(request)
        if request is ended or not table or request.num_output_tokens + 2 >= request.max_tokens:
            continue
        if books.alone(table[-1]) and table[-1].block_hash is None:
            yield request


def _double_free_batch(books: Books) -> Story:
    request, blocks = yield from _end(books)
    block = blocks[-1]
    books.later(partial(books.settle, block))
    books.fire(request, block, logical_index=len(blocks) - 1)
    blocks.append(block)
    yield "between"
    books.repair()


def _free_null_block(books: Books) -> Story:
    request, blocks = yield from _end(books)
    null, block = books.pool.null_block, blocks[-1]
    books.later(partial(books.settle, null, null.ref_cnt))
    books.later(partial(books.settle, block))
    books.fire(request, block, logical_index=len(blocks) - 1)
    blocks += [null, block]
    yield "between"
    books.repair()


def _double_free_later(books: Books) -> Story:
    while True:
        request, blocks = yield from _end(books)
        # A hashed block is handed out again later than one without a hash.
        block = blocks[0]
        if not books.alone(block) or block.block_hash is None:
            continue
        yield "between"
        yield "between"
        if block.ref_cnt == 0:
            break
    books.later(partial(books.settle, block))
    books.fire(request, block, logical_index=0)
    # A second path that frees has kept a list of its own.
    books.manager.req_to_blocks[request.request_id] = [block]
    books.kv.free(request)
    books.repair()


def _free_unallocated(books: Books) -> Story:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    request, blocks = yield from _end(books)
    # An id of another pool, as a stale map of indices gives it away.
    block = KVCacheBlock(books.pool.num_gpu_blocks + 3)
    books.fire(request, block)
    blocks.append(block)


def _free_foreign_block(books: Books) -> Story:
    while True:
        request, blocks = yield from _end(books)
        owner = next(_going_on(books, request), None)
        if owner is not None:
            break
    block = books.table(owner)[-1]
    books.later(partial(books.pool.touch, [block]))
    books.fire(request, block, other_request_id=owner.request_id)
    blocks.append(block)
    yield "between"
    books.repair()


def _ref_underflow(books: Books) -> Story:
    # While the last step of a request is with the worker, so that no audit comes between.
    while True:
        call = yield "running"
        request = next(books.ending(call.args[1]), None) if books.due else None
        if request is not None:
            break
    block = books.table(request)[-1]
    block.ref_cnt -= 1
    # With its owner gone the count is one too low, and the block has not come back into the queue.
    books.later(lambda: books.settle(block, int(block.ref_cnt == 0)))
    while True:
        call = yield "popping"
        if call.args[1] == request.request_id:
            break
    books.fire(request, block, logical_index=len(call.result) - 1)
    yield "between"
    books.repair()


def _live_block_in_queue(books: Books) -> Story:
    while True:
        owner = yield from waits(books, lambda: next(books.decoding(room=8, steps=4), None))
        if not books.needs_block(owner):
            continue
        block = books.tail(owner)
        # Without a reference, or the host would notice when it hands the block out.
        block.ref_cnt -= 1
        books.queue.prepend_n([block])
        yield "scheduled"
        other = books.holder(block, but=owner)
        if other is not None:
            break
        books.queue.remove(block)
        block.ref_cnt += 1
    books.later(partial(setattr, block, "ref_cnt", 2))
    index = next(index for index, each in enumerate(books.table(other)) if each is block)
    books.fire(other, block, other_request_id=owner.request_id, logical_index=index)
    yield "between"
    books.repair()


def _null_in_queue(books: Books) -> Story:
    null = books.pool.null_block
    while True:
        yield from waits(books, lambda: books.needs_block(None) or None)
        null.ref_cnt = 0
        books.queue.prepend_n([null])
        yield "scheduled"
        request = books.holder(null)
        if request is not None:
            break
        books.queue.remove(null)
    index = next(index for index, each in enumerate(books.table(request)) if each is null)
    books.fire(request, null, logical_index=index)


def _evict_referenced(books: Books) -> Story:
    def hashed() -> Any:
        return next((each for each in books.decoding() if books.table(each)[0].block_hash is not None), None)

    request = yield from waits(books, hashed)
    block = books.table(request)[0]
    books.fire(request, block, logical_index=0)
    books.kv.evict_blocks({block.block_id})


def _ref_count_changed(books: Books) -> Story:
    request = yield from waits(books, lambda: next(books.decoding(), None))
    block = books.tail(request)
    books.later(lambda: books.settle(block, int(block.ref_cnt) - 1))
    block.ref_cnt += 1
    books.fire(request, block, step=None)


def _queue_entry_lost(books: Books) -> Story:
    free = yield from waits(books, lambda: books.queue.get_all_free_blocks() or None)
    block = free[-1]
    books.later(partial(books.settle, block))
    books.queue.remove(block)
    books.fire(None, block, step=None)


def _leak_after_finish(books: Books) -> Story:
    request, blocks = yield from _end(books)
    block = blocks.pop()
    books.later(partial(books.pool.free_blocks, [block]))
    # That the request is over is declared with the next step.
    yield "scheduled"
    books.fire(request, block, logical_index=len(blocks))


def _skip_free(books: Books) -> Story:
    yield from _kept(books, "freeing")


def _endless_hold(books: Books) -> Story:
    # What runs is not allowed to be freed at once, and nobody comes back for it: no step is ever waited for.
    yield from _kept(books, "deferring")


def _kept(books: Books, moment: Moment) -> Story:
    while True:
        call = yield moment
        request = call.args[1]
        if books.due and _ended(request):
            break
    block = books.table(request)[0]
    release: Callable[[], None] = partial(books.kv.free, request)
    if moment == "freeing":
        call.skipped = True
    else:
        call.result = False
        release = books.scheduler._drain_deferred_frees
    books.later(release)
    yield "scheduled"
    # A leak shows with the step that declares the end; a hold only when it lasts too long.
    books.fire(request, block, logical_index=0, **({} if moment == "freeing" else {"step": None}))


POOL_STORIES: dict[str, Told] = {
    "double_free_batch": Told(_double_free_batch, ("popping",)),
    "double_free_later": Told(_double_free_later, ("popping",)),
    "free_null_block": Told(_free_null_block, ("popping",)),
    "free_unallocated": Told(_free_unallocated, ("popping",)),
    "free_foreign_block": Told(_free_foreign_block, ("popping",)),
    "ref_underflow": Told(_ref_underflow, ("running", "popping")),
    "live_block_in_queue": Told(_live_block_in_queue),
    "null_in_queue": Told(_null_in_queue),
    "evict_referenced": Told(_evict_referenced),
    "ref_count_changed": Told(_ref_count_changed),
    "queue_entry_lost": Told(_queue_entry_lost),
    "leak_after_finish": Told(_leak_after_finish, ("popping",)),
    "skip_free": Told(_skip_free, ("freeing",)),
    "endless_hold": Told(_endless_hold, ("deferring",)),
}
