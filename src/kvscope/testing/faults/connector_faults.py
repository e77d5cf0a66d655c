"""What a connector is told or reports that is not so, and reports of its that the scheduler does not take up.

The host stops at an assertion where a report cannot be true (`Scheduler._update_from_kv_xfer_finished`); it is spared
what it would stop at once the report has arrived.
"""

from collections.abc import Callable, Generator
from typing import Any

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.story import Call, Moment, Story, Told

NOBODY = "nobody"


def _told(books: Books, find: Callable[[], Any], *, blocks: int) -> Story:
    """A request is about to have at least so many blocks loaded, and the connector is told another last one than the
    request has: what `find` finds.
    """
    while True:
        call = yield "matching"
        request, (tokens, is_asynchronous) = call.args[1], call.result
        if not books.due or not is_asynchronous or tokens < blocks * books.block_size:
            continue
        call = yield "telling"
        wrong = find()
        if call.args[1] == request.request_id and wrong is not None:
            break
    table = list(call.result.blocks[0])
    own, table[-1] = table[-1], wrong
    call.result = type(call.result)((table,))
    yield "scheduled"
    position = (len(table) - 1) * books.block_size
    books.fire(request, wrong, position=position, expected_block_id=own.block_id)


def _load_into_null_block(books: Books) -> Story:
    # The offload leaves out null blocks ahead of the first that it is to fill.
    yield from _told(books, lambda: books.pool.null_block, blocks=2)


def _load_into_foreign_block(books: Books) -> Story:
    yield from _told(books, lambda: next((books.tail(other) for other in books.decoding()), None), blocks=1)


def _reports() -> Generator[Moment, Call, Any]:
    """What the connector says with the next step with work."""
    yield "scheduled"
    return (yield "reporting").result


def _received(books: Books) -> Generator[Moment, Call, tuple[Any, Any]]:
    """The next report with which a load has ended that a request waits for, and the request."""
    while True:
        transfers = yield from _reports()
        for request_id in sorted(transfers.finished_recving):
            request = books.request(request_id)
            if books.due and request is not None and not request.is_finished():
                return transfers, request


def _report(books: Books, transfers: Any, request: Any) -> Story:
    request_id = request if isinstance(request, str) else request.request_id
    transfers.finished_recving.add(request_id)
    books.fire(request)
    call = yield "completing"
    call.args[1].finished_recving.discard(request_id)


def _unknown_request_received(books: Books) -> Story:
    while True:
        transfers = yield from _reports()
        if books.due:
            yield from _report(books, transfers, NOBODY)
            return


def _received_twice(books: Books) -> Story:
    _, request = yield from _received(books)
    transfers = yield from _reports()
    yield from _report(books, transfers, request)


def _received_unplanned(books: Books) -> Story:
    loaded: set[str] = set()
    while True:
        transfers = yield from _reports()
        loaded |= transfers.finished_recving
        # Too short to have been stored, so that nothing of it was ever loaded.
        short = [r for r in books.scheduler.running if r.num_prompt_tokens < books.block_size]
        request = next((r for r in short if r.request_id not in loaded), None)
        if books.due and request is not None:
            yield from _report(books, transfers, request)
            return


def _failed_receive_lost(books: Books) -> Story:
    transfers, request = yield from _received(books)
    transfers.failed_recving.add(request.request_id)
    books.fire(request)
    call = yield "failing"
    call.skipped = True


def _invalid_block_lost(books: Books) -> Story:
    _, request = yield from _received(books)
    block = books.table(request)[0]
    call = yield "lacking"
    call.result = {block.block_id}
    books.fire(request, block, position=0)
    for _ in ("requests that wait for loads", "requests that run"):
        call = yield "invalidating"
        call.skipped = True


def _invalid_block_stays_cached(books: Books) -> Story:
    # The request ends by its failed load, but its block can still be hit by the next one with the same prompt.
    while True:
        yield from _reports()
        found = next(_followed(books), None) if books.due else None
        if found is not None:
            break
    request, twin = found
    block = books.table(request)[0]
    call = yield "lacking"
    call.result = {block.block_id}
    call = yield "evicting"
    call.skipped = True
    while block not in books.table(twin):
        yield "scheduled"
        if books.request(twin.request_id) is None:
            return
    books.fire(twin, block, logical_index=0)


def _followed(books: Books) -> Generator[tuple[Any, Any], None, None]:
    """Running requests whose first block is theirs alone and cached, and a waiting one that will find it."""
    for request in books.scheduler.running:
        table = books.table(request)
        # What the step itself computes is nothing that was loaded.
        if not request.num_output_tokens or not books.alone(table[0]) or table[0].block_hash is None:
            continue
        for twin in books.scheduler.waiting:
            if twin.status.name == "WAITING" and twin.block_hashes[:1] == request.block_hashes[:1]:
                yield request, twin


CONNECTOR_STORIES: dict[str, Told] = {
    "load_into_null_block": Told(_load_into_null_block, ("matching", "telling")),
    "load_into_foreign_block": Told(_load_into_foreign_block, ("matching", "telling")),
    "unknown_request_received": Told(_unknown_request_received, ("reporting", "completing")),
    "received_twice": Told(_received_twice, ("reporting", "completing")),
    "received_unplanned": Told(_received_unplanned, ("reporting", "completing")),
    "failed_receive_lost": Told(_failed_receive_lost, ("reporting", "failing")),
    "invalid_block_lost": Told(_invalid_block_lost, ("reporting", "invalidating")),
    "invalid_block_stays_cached": Told(_invalid_block_stays_cached, ("reporting", "evicting")),
}
