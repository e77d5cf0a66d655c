"""Blocks whose contents are not what their hash or the count of computed tokens says."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.story import Call, Moment, Story, Told, until_scheduled, waits


class ForwardFailedError(RuntimeError):
    """What the forward pass raises in place of its result. `workload` aborts `request_ids` and goes on."""

    def __init__(self, request_ids: Iterable[str] = ()) -> None:
        super().__init__("the forward pass failed, as it was told to")
        self.request_ids = list(request_ids)


def _hash_before_write(books: Books) -> Story:
    # Admission gives up half-way: blocks are allocated and hashed for a request, and freed, but no step ever runs. It
    # is then admitted in earnest, and finds its own blocks in the cache.
    while True:
        request = yield from waits(books, lambda: books.waiting(tokens=books.block_size))
        number = min(request.num_tokens - 1, 2 * books.block_size)
        if books.kv.allocate_slots(request, number) is None:
            continue
        first = books.table(request)[0]
        books.release(request)
        output = yield from until_scheduled(books, request)
        if output is not None and books.table(request)[0] is first:
            break
    books.fire(request, first, logical_index=0)


def _stale_hit(books: Books) -> Story:
    # The entry of a hash has outlived its block: the block is by now a running request's, half-full with other tokens.
    while True:
        request = yield from waits(books, lambda: books.waiting(tokens=books.block_size))
        # Four tokens are missing in the block at the time of the hit, and it is not full before the hit is over.
        owner = next(books.decoding(room=4), None)
        if owner is None:
            continue
        stale = books.tail(owner)
        key = _key(books, request)
        books.pool.cached_block_hash_to_block.insert(key, stale)
        output = yield from until_scheduled(books, request)
        books.pool.cached_block_hash_to_block.pop(key, stale.block_id)
        if output is not None and books.table(request)[0] is stale:
            break
    books.fire(request, stale, other_request_id=owner.request_id, logical_index=0)


def _key(books: Books, request: Any) -> Any:
    """What the first block of a request is looked up by."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    return make_block_hash_with_group_id(request.block_hashes[0], books.injection.group_id)


def _wiped_cache_hit(books: Books) -> Story:
    # The cache is reset, as after a change of weights, and the index of hashes is not.
    pool = books.pool
    while True:
        yield "resetting"
        entries, more = pool.cached_block_hash_to_block, dict(pool.cached_block_hashes_by_block)
        hashes = [(block, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks if block.block_hash]
        call = yield "reset"
        if books.due and call.result and hashes:
            break
    pool.cached_block_hash_to_block = entries
    pool.cached_block_hashes_by_block.update(more)
    for block, block_hash, tokens in hashes:
        block.set_block_hash(block_hash, tokens)
    wiped = {id(block) for block, _, _ in hashes}
    while True:
        call = yield "scheduled"
        for new in call.args[1].scheduled_new_reqs:
            first = books.table(books.request(new.req_id))[0]
            if new.num_computed_tokens and id(first) in wiped:
                books.fire(new.req_id, first, logical_index=0)
                return


def _hit_after_failed_step(books: Books) -> Story:
    # The step that fills a new request's first blocks fails, everybody goes on as if it had not, and requests with that
    # beginning hit them. Counted is one that does so when a later result is back, so that the step is known to be lost.
    first, output = yield from _filling(books)
    block = books.table(first)[0]
    call = yield "computing"
    call.result = ForwardFailedError()
    yield from _count_computed(books, output.num_scheduled_tokens)
    yield "between"
    while block.block_hash is not None:
        call = yield "scheduled"
        hit = _hit_by(books, block, call.args[1])
        if hit is not None:
            books.fire(hit, block, other_request_id=first.request_id, logical_index=0)
            return


def _aborted_step_stays_cached(books: Books) -> Story:
    # As above, but the requests of the step are aborted, and nobody takes the hashes of their blocks away.
    first, output = yield from _filling(books)
    block = books.table(first)[0]
    call = yield "computing"
    call.result = ForwardFailedError(output.num_scheduled_tokens)
    yield "between"
    while block.block_hash is not None:
        call = yield "scheduled"
        if _hit_by(books, block, call.args[1]) is None:
            books.fire(None, block)
            return


def _filling(books: Books) -> Generator[Moment, Call, tuple[Any, Any]]:
    """A step that computes the first block of a new request, while another that begins with the same one waits."""
    while True:
        call = yield "scheduled"
        output = call.args[1]
        for new in output.scheduled_new_reqs if books.due else ():
            if _fills(books, new, output) and _twin(books, new.req_id) is not None:
                return books.request(new.req_id), output


def _hit_by(books: Books, block: Any, output: Any) -> str | None:
    """A new request of the step whose first block is this one."""
    for new in output.scheduled_new_reqs:
        if new.num_computed_tokens and books.table(books.request(new.req_id))[0] is block:
            return str(new.req_id)
    return None


def _fills(books: Books, new: Any, output: Any) -> bool:
    """Whether the step computes a new request's first block, and hits nothing."""
    return bool(new.num_computed_tokens == 0 and output.num_scheduled_tokens[new.req_id] >= books.block_size)


def _twin(books: Books, request_id: str) -> Any:
    """A waiting request that begins with the same block."""
    hashes = books.request(request_id).block_hashes
    for request in books.scheduler.waiting:
        fresh = request.status.name == "WAITING" and request.num_tokens > books.block_size
        if fresh and request.block_hashes[:1] == hashes[:1]:
            return request
    return None


def _computed_claimed(books: Books) -> Story:
    # A waiting request that finds nothing in the cache is admitted as if its first block were computed.
    tokens = books.block_size
    while True:
        call = yield "admitting"
        request, (blocks, hit, *rest) = call.args[1], call.result
        if not books.due or hit or any(blocks.blocks) or request.num_tokens <= tokens + 1:
            continue
        call.result = (blocks, tokens, *rest)
        call = yield "scheduled"
        if request.request_id in call.args[1].num_scheduled_tokens:
            books.fire(request, books.table(request)[0], logical_index=0)
            return


def _write_gap(books: Books) -> Story:
    # Between two chunks of a prompt some tokens are counted as computed: the next one begins behind them.
    skipped = 4
    request = yield from waits(books, lambda: next(_between_chunks(books, skipped), None))
    computed = int(request.num_computed_tokens)
    request.num_computed_tokens += skipped
    yield from until_scheduled(books, request)
    index = computed // books.block_size
    position = computed + skipped
    books.fire(request, books.table(request)[index], logical_index=index, position=position)
    yield from _count_computed(books, {request.request_id: skipped})


def _count_computed(books: Books, tokens: Mapping[str, int]) -> Story:
    """Have the worker count tokens as computed that no forward pass has computed: V2 does so itself, on the device."""
    if books.scheduler.use_v2_model_runner:
        states = (yield "counting").args[0].req_states
        for request_id, number in tokens.items():
            states.num_computed_tokens.gpu[states.req_id_to_index[request_id]] += number


def _between_chunks(books: Books, tokens: int) -> Iterator[Any]:
    """Running requests in whose last block there is room for some tokens of their prompt, and more."""
    for request in books.scheduler.running:
        computed = int(request.num_computed_tokens)
        used = computed % books.block_size
        if computed + tokens + 1 < request.num_prompt_tokens and 0 < used < books.block_size - tokens:
            yield request


def _shared_tail_write(books: Books) -> Story:
    # A new request computes the last tokens of its hit once more, in place, under the other owner's eyes.
    again = 4
    while True:
        call = yield "scheduled"
        for new in call.args[1].scheduled_new_reqs if books.due else ():
            hit, request = new.num_computed_tokens, books.request(new.req_id)
            if hit < books.block_size or hit % books.block_size:
                continue
            index = hit // books.block_size - 1
            block = books.table(request)[index]
            other = books.holder(block, but=request)
            if other is not None and block.ref_cnt > 1:
                new.num_computed_tokens -= again
                request.num_computed_tokens -= again
                position = hit - again
                books.fire(request, block, other_request_id=other.request_id, logical_index=index, position=position)
                return


def _zero_live_block(books: Books) -> Story:
    while True:
        call = yield "zeroing"
        request = next(books.decoding(), None) if books.due else None
        if request is not None:
            break
    block = books.table(request)[0]
    call.result = [*(call.result or ()), block.block_id]
    yield "scheduled"
    books.fire(request, block, logical_index=0)


PREFIX_STORIES: dict[str, Told] = {
    "hash_before_write": Told(_hash_before_write),
    "stale_hit": Told(_stale_hit),
    "wiped_cache_hit": Told(_wiped_cache_hit, ("resetting",)),
    "hit_after_failed_step": Told(_hit_after_failed_step, ("computing", "counting")),
    "aborted_step_stays_cached": Told(_aborted_step_stays_cached, ("computing",)),
    "computed_claimed": Told(_computed_claimed, ("admitting",)),
    "write_gap": Told(_write_gap, ("counting",)),
    "shared_tail_write": Told(_shared_tail_write),
    "zero_live_block": Told(_zero_live_block, ("zeroing",)),
}
