"""The lists of blocks to clear and to copy, as the scheduler declares them: blocks in them that must not be there."""

from typing import Any

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.story import Story, Told


def _zero_null_block(books: Books) -> Story:
    while True:
        call = yield "zeroing"
        if books.due:
            break
    call.result = [*(call.result or ()), books.pool.null_block.block_id]
    yield "scheduled"
    books.fire(None, books.pool.null_block)


def _zero_copy_source(books: Books) -> Story:
    # The first two blocks of a new request are to be cleared, as they may be, and one to be copied over the other.
    while True:
        call = yield "scheduled"
        output = call.args[1]
        for new in output.scheduled_new_reqs if books.due else ():
            first, *others = books.table(books.request(new.req_id))
            if not new.num_computed_tokens and others and books.alone(first) and books.alone(others[0]):
                output.new_block_ids_to_zero = [first.block_id, others[0].block_id]
                output.kv_cache_block_copies = [_copy(first, others[0])]
                books.fire(new.req_id, first, logical_index=0)
                return


def _copy_onto_live_block(books: Books) -> Story:
    # Two requests have both had their blocks for some steps; one's first is copied over the other's.
    while True:
        call = yield "scheduled"
        fresh = {new.req_id for new in call.args[1].scheduled_new_reqs}
        ready = [r for r in books.decoding() if r.request_id not in fresh] if books.due else []
        if len(ready) > 1:
            break
    source, target = books.table(ready[0])[0], books.table(ready[1])[0]
    call.args[1].kv_cache_block_copies = [_copy(source, target)]
    books.fire(ready[1], target, logical_index=0)


def _copy(source: Any, target: Any) -> Any:
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    return KVCacheBlockCopy(source.block_id, target.block_id)


LIST_STORIES: dict[str, Told] = {
    "zero_null_block": Told(_zero_null_block, ("zeroing",)),
    "zero_copy_source": Told(_zero_copy_source, ("zeroing",)),
    "copy_onto_live_block": Told(_copy_onto_live_block),
}
