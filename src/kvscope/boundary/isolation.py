"""Ends single requests of a running scheduler with finish reason ``error``, and holds blocks back from its pool.

What it leans on (0.32, ``vllm/v1/core/sched/scheduler.py``): ``EngineCore`` takes up aborts right before
``update_from_output``, with the result of the step at hand. A request that ``finish_requests`` has ended by then is
passed over, in this step and in those that are already submitted, so that its tokens go nowhere. That call frees and
says nothing; the front end waits for an ``EngineCoreOutput``, and gets the one that ``update_from_output`` itself makes
of a request that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..facts import allocator as facts
from ..logs import say
from .allocator import READER


class SchedulerControl:
    """The scheduler as ``runtime.isolation`` may act on it. Everything here runs in EngineCore's own thread, where the
    host would take up an abort: before a step is scheduled, and before or after its result takes effect.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        self._pool = manager.block_pool
        self._managers = manager.coordinator.single_type_managers
        self._ended: dict[str, Any] = {}
        self._over: set[str] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self._pool.blocks)

    def live(self) -> list[str]:
        """Requests that have not ended, in the scheduler's order."""
        return [name for name, request in self._scheduler.requests.items() if not request.is_finished()]

    def alone(self, request_id: str) -> bool:
        """Whether the front end understands that this live request ends with an error.

        It takes the end of a session for the end of one of its turns, and for a pooling request it wants a result.
        """
        request = self._scheduler.requests[request_id]
        return request.pooling_params is None and not request.resumable

    def blocks_of(self, request_id: str) -> set[int]:
        """Blocks in the tables of a request, of all groups; those of a finished one that waits for its connector, too.

        Entries that are the null block, or that belong to a pool of a manager's own (HiSparse), are left out.
        """
        return {
            block.block_id
            for manager in self._managers
            for block in manager.req_to_blocks.get(request_id, ())
            if not block.is_null and (block.pool is None or block.pool is self._pool)
        }

    def owners_of(self, block_id: int) -> list[str]:
        """Live requests that have the block in one of their tables."""
        return [name for name in self.live() if block_id in self.blocks_of(name)]

    def is_null(self, block_id: int) -> bool:
        return bool(self._pool.blocks[block_id].is_null)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each, so that nobody gets it, and drop its hashes, so that nobody finds it."""
        blocks = [self._pool.blocks[block_id] for block_id in sorted(block_ids)]
        if blocks:
            self._pool.touch(blocks)
            with self._because(facts.CAUSE_EVICT):
                self._pool.evict_blocks({block.block_id for block in blocks})

    def release(self, block_ids: Iterable[int]) -> None:
        """Take that reference away again."""
        blocks = [self._pool.blocks[block_id] for block_id in sorted(block_ids)]
        if blocks:
            with self._because(facts.CAUSE_UNPIN):
                self._pool.free_blocks(blocks)

    def end(self, request_ids: Iterable[str]) -> None:
        """End the live ones among these now; the answer goes out with the next result that takes effect.

        Whoever has ended in the very step whose result is being taken up has an answer on its way, which is replaced.
        """
        from vllm.v1.request import RequestStatus

        request_ids = list(request_ids)
        ended = self._scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR)
        self._ended.update((request.request_id, request) for request in ended)
        self._over.update(name for name in request_ids if name not in self._ended)

    def answer(self, outputs: Any) -> None:
        """Put the answers to ended requests in place of what ``update_from_output`` has to say of them.

        ``outputs`` is what it returned, ``{client: EngineCoreOutputs}``. Not even a fault here may reach the host.
        """
        if not (self._ended or self._over):
            return
        ended, self._ended = self._ended, {}
        over, self._over = self._over, set()
        try:
            _replace(outputs, ended, over)
        except Exception as error:  # noqa: BLE001 - the requests have ended; at worst their clients wait in vain
            say(logging.ERROR, "kvscope: isolate could not answer %d requests (%s)", len(ended), type(error).__name__)

    @contextmanager
    def _because(self, cause: str) -> Iterator[None]:
        """Say to whoever reads the pool's calls why it is called. Nobody does with guard and monitor off."""
        reader = getattr(self._scheduler, READER, None)
        if reader is None:
            yield
            return
        before, reader.scope = reader.scope, (cause, None)
        try:
            yield
        finally:
            reader.scope = before


def _replace(outputs: Any, ended: dict[str, Any], over: set[str]) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for client in outputs.values():
        if any(output.request_id in ended or output.request_id in over for output in client.outputs):
            client.outputs = [
                output
                if output.request_id not in over
                else EngineCoreOutput(
                    request_id=output.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    events=output.events,
                    trace_headers=output.trace_headers,
                )
                for output in client.outputs
                if output.request_id not in ended
            ]
    for request in ended.values():
        answer = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        if request.client_index not in outputs:
            outputs[request.client_index] = EngineCoreOutputs(outputs=[])
        outputs[request.client_index].outputs.append(answer)


def before_reset(observer: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
    observer.on_reset()
