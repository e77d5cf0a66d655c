"""Writes that only the allocator's books show to be wrong: one part in the scheduler, and one in the worker's plan."""

from functools import partial
from typing import Any

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.plan import Plan, Row
from kvscope.testing.faults.plan_faults import redirect_write
from kvscope.testing.faults.plan_sites import rank_of
from kvscope.testing.faults.story import Story, Told, waits


def _block_not_declared(books: Books) -> Story:
    # A block more than the tokens need, which the request has in the allocator's table, and no message names.
    while True:
        call = yield "allocating"
        request = books.request(call.args[1])
        decodes = request is not None and request.num_computed_tokens == request.num_tokens - 1
        if books.due and decodes and not call.result:
            break
    extra = books.pool.get_new_blocks(1)[0]
    books.table(request).append(extra)
    books.later(partial(_take_back, books, request, extra))
    plan = (yield "planned").args[0]
    row = next(row for row in plan.rows if row.request_id == request.request_id)
    _fire(books, plan, row, extra)
    yield "between"
    books.repair()


def _take_back(books: Books, request: Any, extra: Any) -> None:
    table = books.table(request)
    if any(block is extra for block in table):
        table[:] = [block for block in table if block is not extra]
        books.pool.free_blocks([extra])


def _foreign_owner_write(books: Books) -> Story:
    yield from waits(books, lambda: next(books.decoding(), None))
    owner = books.stranger("stranger", books.block_size)
    books.later(partial(books.kv.free, owner))
    books.kv.allocate_slots(owner, books.block_size // 2)
    plan = (yield "planned").args[0]
    _fire(books, plan, plan.decoding()[0], books.table(owner)[0], other_request_id=owner.request_id)
    yield "between"
    books.repair()


def _fire(books: Books, plan: Plan, row: Row, block: Any, **fields: Any) -> None:
    """Send a decoding row's token into the block, at the offset that it has in its own."""
    slot = int(block.block_id) * plan.block_size + row.num_computed % plan.block_size
    what = redirect_write(plan, row, slot, **fields)
    books.injection.fire(what, rank=rank_of(plan.runner), runner=plan.name)


ACCESS_STORIES: dict[str, Told] = {
    "block_not_declared": Told(_block_not_declared, ("allocating", "planned")),
    "foreign_owner_write": Told(_foreign_owner_write, ("planned",)),
}
