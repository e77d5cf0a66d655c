"""The allocator's books as a fault sees them, in the scheduler's process: requests, tables, references, the free queue.

Host: `v1/core/sched/scheduler.py` (`Scheduler`), `v1/core/kv_cache_manager.py`, `v1/core/block_pool.py` (`BlockPool`),
`v1/core/single_type_kv_cache_manager.py` (`req_to_blocks`, `num_cached_block`) of vLLM 0.32. Numbers of tokens are
those between two steps: all that was scheduled is computed, and the newest token is still to come.
"""

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from kvscope.testing.faults.injection import Injection


class Books:
    """One group of one scheduler. Blocks and requests are the host's own objects."""

    def __init__(self, injection: Injection, scheduler: Any) -> None:
        self.injection, self.scheduler = injection, scheduler
        self.kv = scheduler.kv_cache_manager
        self.pool = self.kv.block_pool
        self.queue = self.pool.free_block_queue
        self.manager = self.kv.coordinator.single_type_managers[injection.group_id]
        self.block_size = int(self.manager.block_size)

    # What happens to the fault ---------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        return self.injection.due

    def fire(self, request: Any = None, block: Any = None, **fields: Any) -> None:
        """Take note that it has happened. `step` is the step in which it must be found, by default the last one that
        was scheduled; None where only an audit can find it, at a time of its own.
        """
        self.injection.fire(_what(request, block) | fields)

    def announce(self, request: Any = None, block: Any = None, **fields: Any) -> None:
        """Say what may be found before it happens."""
        self.injection.announce(_what(request, block) | fields)

    def later(self, action: Callable[[], None]) -> None:
        """How to repair what the fault is about to break: with `repair`, or when the fault is taken out."""
        self.injection.undo.later(action)

    def repair(self) -> None:
        self.injection.undo.run()

    # Requests and their tables ---------------------------------------------------------------------------------------

    def table(self, request: Any) -> list[Any]:
        """The blocks of a request in logical order, the list that the host itself changes."""
        blocks: list[Any] = self.manager.req_to_blocks.get(request.request_id, [])
        return blocks

    def tail(self, request: Any) -> Any:
        """The block that gets the request's next token."""
        return self.table(request)[request.num_computed_tokens // self.block_size]

    def decoding(self, *, room: int = 1, steps: int = 2) -> Iterator[Any]:
        """Running requests that have computed all but their newest token, and that go on for at least `steps` steps.

        The next `room` tokens go into a block that the request has begun to fill and has for itself, and the first of
        its blocks is nobody else's either.
        """
        for request in self.scheduler.running:
            computed, table = int(request.num_computed_tokens), self.table(request)
            used = computed % self.block_size
            if (
                computed == request.num_tokens + request.num_output_placeholders - 1
                and request.num_output_tokens + steps <= request.max_tokens
                and 0 < used <= self.block_size - room
                and len(table) == computed // self.block_size + 1
                and self.alone(table[0])
                and self.alone(table[-1])
                and table[-1].block_hash is None
            ):
                yield request

    def ending(self, output: Any) -> Iterator[Any]:
        """Requests whose last token a step computes that is with the worker, and whose last block is theirs alone."""
        for request_id in output.num_scheduled_tokens:
            request = self.request(request_id)
            whole = request is not None and request.num_computed_tokens == request.num_tokens
            if whole and request.num_output_tokens + 1 == request.max_tokens:
                last = self.table(request)[-1]
                if self.alone(last) and last.block_hash is None:
                    yield request

    def waiting(self, *, tokens: int) -> Any:
        """The next request to be admitted, if it is new, longer than `tokens`, and finds nothing in the cache."""
        if self.scheduler.kv_holding_waiting or not self.scheduler.waiting:
            return None
        request = self.scheduler.waiting.peek_request()
        fresh = request.status.name == "WAITING" and request.num_computed_tokens == 0
        if not fresh or request.num_tokens <= tokens or self.manager.req_to_blocks.get(request.request_id):
            return None
        return None if self.pool.get_cached_block(request.block_hashes[0], [self.injection.group_id]) else request

    def needs_block(self, but: Any) -> bool:
        """Whether the next step will hand out a block to somebody else than `but`, as far as can be seen."""
        for request in self.scheduler.running:
            capacity = len(self.table(request)) * self.block_size
            if request is not but and request.num_tokens > capacity:
                return True
        return self.waiting(tokens=0) is not None and len(self.scheduler.running) < self.scheduler.max_num_running_reqs

    def holder(self, block: Any, *, but: Any = None) -> Any:
        """A running request that has the block in its table."""
        for request in self.scheduler.running:
            if request is not but and any(block is each for each in self.table(request)):
                return request
        return None

    def request(self, request_id: str) -> Any:
        """The request if the scheduler still knows it."""
        return self.scheduler.requests.get(request_id)

    def stranger(self, name: str, tokens: int) -> Any:
        """A request that no worker has heard of, as one that waits for a load."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=1)
        return Request(name, [7] * tokens, parameters, None)

    # Blocks ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def alone(block: Any) -> bool:
        """Whether exactly one reference leads to the block."""
        return bool(block.ref_cnt == 1 and not block.is_null)

    def release(self, request: Any) -> None:
        """Free what a request has, as the scheduler does at a request's end."""
        self.scheduler._free_request_blocks(request)

    def free_but_keep(self, request: Any) -> None:
        """Free a request's blocks through the host, and put the request's own books back as if nothing had been."""
        name = request.request_id
        managers = self.kv.coordinator.single_type_managers
        kept = [(each, each.req_to_blocks[name], each.num_cached_block.get(name)) for each in managers]
        self.release(request)
        for manager, blocks, cached in kept:
            manager.req_to_blocks[name] = blocks
            if cached is not None:
                manager.num_cached_block[name] = cached

    # Repairs ---------------------------------------------------------------------------------------------------------

    def restart(self, request: Any, lost: Collection[Any]) -> None:
        """Take the blocks that are no longer a running request's out of its table, and have the host preempt it.

        As `Scheduler.reset_prefix_cache` preempts what is running. The request computes everything anew, in blocks that
        are its own.
        """
        if request.status.name != "RUNNING" or request not in self.scheduler.running:
            return
        gone = {id(block) for block in lost}
        for manager in self.kv.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id)
            if blocks is not None:
                blocks[:] = [block for block in blocks if id(block) not in gone]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def settle(self, block: Any, references: int = 0) -> None:
        """Write the number of references that is right, and queue the block if it is free and in no queue."""
        block.ref_cnt = references
        if references == 0 and block.next_free_block is None and not block.is_null:
            self.queue.append(block)


def _what(request: Any, block: Any) -> dict[str, Any]:
    what: dict[str, Any] = {}
    if request is not None:
        what["request_id"] = request if isinstance(request, str) else request.request_id
    if block is not None:
        what["block_id"] = int(block.block_id)
    return what
