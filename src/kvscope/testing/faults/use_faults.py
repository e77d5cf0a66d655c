"""Blocks that are used while they are not the request's: freed too early, reserved for a load, or somebody else's."""

from functools import partial

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.story import Story, Told, until_scheduled, waits


def _premature_free(books: Books) -> Story:
    # As public reports have it: one path frees what another still runs with. The request's own books stay as they were.
    request = yield from waits(books, lambda: next(books.decoding(room=2), None))
    table = list(books.table(request))
    books.later(partial(books.restart, request, table))
    books.free_but_keep(request)
    yield from until_scheduled(books, request)
    books.fire(request, table[0], logical_index=0)
    yield "between"
    books.repair()


def _premature_free_tail(books: Books) -> Story:
    request = yield from waits(books, lambda: next(books.decoding(room=2), None))
    tail = books.tail(request)
    index = len(books.table(request)) - 1
    books.later(partial(books.restart, request, [tail]))
    books.pool.free_blocks([tail])
    yield from until_scheduled(books, request)
    # The next one to need a block has got this one.
    other = books.holder(tail, but=request)
    fields = {} if other is None else {"other_request_id": other.request_id}
    books.fire(request, tail, logical_index=index, position=int(request.num_computed_tokens), **fields)
    yield "between"
    books.repair()


def _stale_reference_read(books: Books) -> Story:
    # A hit that takes no reference: the blocks go back to the pool with their first owner, under the second one.
    while True:
        call = yield "adopting"
        request, shared = books.request(call.args[1]), list(call.args[2])
        if not books.due or not shared or not all(books.alone(block) for block in shared):
            continue
        owner = books.holder(shared[0])
        # The owner has to be the first to end.
        if owner is not None and request is not None and owner.max_tokens + 2 <= request.max_tokens:
            break
    call.untouched = True
    books.later(partial(books.restart, request, shared))
    yield from until_scheduled(books, request)
    books.announce(
        request, shared[0], other_request_id=owner.request_id, logical_index=0, expected="alias_owner_mismatch"
    )
    while books.request(owner.request_id) is not None:
        yield "between"
    yield from until_scheduled(books, request)
    books.fire(request, shared[0], other_request_id=owner.request_id, logical_index=0)
    yield "between"
    books.repair()


def _free_under_reserved_load(books: Books) -> Story:
    # The step that ends a request is still with the worker when its blocks are freed, and a load gets one of them.
    while True:
        call = yield "running"
        if not books.due:
            continue
        ending = next(books.ending(call.args[1]), None)
        if ending is not None:
            break
    tail = books.table(ending)[-1]
    load = books.stranger("load", books.block_size)
    books.later(partial(books.release, load))
    books.fire(load, tail, other_request_id=ending.request_id)
    books.release(ending)
    books.kv.allocate_slots(load, 0, num_external_computed_tokens=books.block_size, delay_cache_blocks=True)
    assert books.table(load) == [tail]
    yield "between"
    books.repair()


def _null_block_write(books: Books) -> Story:
    # The new block of a request is mistaken for a placeholder, in the allocator's own table as well.
    while True:
        call = yield "allocating"
        manager, request_id = call.args[:2]
        request, new = books.request(request_id), call.result
        if books.due and request is not None and new and manager.req_to_blocks[request_id][-1] is new[-1]:
            break
    null, lost = books.pool.null_block, new[-1]
    index = len(books.table(request)) - 1
    books.table(request)[index] = null
    call.result = [*new[:-1], null]
    books.pool.free_blocks([lost])
    yield from until_scheduled(books, request)
    books.fire(request, null, logical_index=index, expected_block_id=lost.block_id)
    books.later(partial(books.settle, null))


USE_STORIES: dict[str, Told] = {
    "premature_free": Told(_premature_free),
    "premature_free_tail": Told(_premature_free_tail),
    "stale_reference_read": Told(_stale_reference_read, ("adopting",)),
    "free_under_reserved_load": Told(_free_under_reserved_load, ("running",)),
    "null_block_write": Told(_null_block_write, ("allocating",)),
}
