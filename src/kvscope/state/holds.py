"""Blocks whose request is over and whose references stay: since when, and how long that may last."""

from __future__ import annotations

import msgspec

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from .blocks import BlockLedger

DEFERRED_LIMIT_STEPS = 16
"""A deferred free waits for a step that was on its way (``Scheduler.deferred_frees``): so many results later it is due,
however deep the pipeline."""
CONNECTOR_LIMIT_SECONDS = 900
"""A connector may keep a finished request's blocks until they are fetched or their lease ends. NIXL gives up after 480
seconds by default (``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``)."""


class Held(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one request has given up and nobody has released. ``limit`` says in words how long it might have lasted."""

    request_id: str
    block_ids: list[int]
    cause: str
    since_step: int
    limit: str


class Holds:
    """The holds of one pool. ``open`` has each by its request, with its time; it is named as overdue once."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[PoolOperation, int]] = {}

    def take(self, operation: PoolOperation, ledger: BlockLedger, now_ns: int) -> None:
        """Take over a hold, or a release that may end one; the ledger has it already."""
        request_id = operation.request_id
        if operation.kind == facts.HOLD:
            if request_id is not None and operation.cause != facts.CAUSE_COPY:
                self.open[request_id] = (operation, now_ns)
        elif self.open:
            ended = [request_id] if request_id is not None else list(self.open)
            for name in ended:
                if name in self.open and not ledger.has_given_up(name):
                    del self.open[name]

    def overdue(self, last_returned: int, now_ns: int) -> list[Held]:
        """The holds that have lasted longer than they may, which are forgotten with that."""
        late: list[Held] = []
        for request_id, (operation, since_ns) in list(self.open.items()):
            if operation.cause == facts.CAUSE_DEFERRED:
                is_late, limit = last_returned - operation.step > DEFERRED_LIMIT_STEPS, f"{DEFERRED_LIMIT_STEPS} steps"
            else:
                is_late = now_ns - since_ns > CONNECTOR_LIMIT_SECONDS * 10**9
                limit = f"{CONNECTOR_LIMIT_SECONDS} s"
            if is_late:
                del self.open[request_id]
                late.append(
                    Held(
                        request_id=request_id,
                        block_ids=operation.block_ids,
                        cause=operation.cause,
                        since_step=operation.step,
                        limit=limit,
                    )
                )
        return late
