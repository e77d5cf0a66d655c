"""Which released blocks a step that is still on its way may touch.

Reusing them for a later step is legal, since steps run one after the other; filling them by a load that no step is
ordered with is not.
"""

from __future__ import annotations

from collections import deque

from ..facts.allocator import CAUSE_DEFERRED, CAUSE_WINDOW, FREE, HOLD, PoolOperation
from ..facts.requests import Declaration

MOST_STEPS = 64
"""So many steps may be on their way; where results are not told at all, those before count as over."""


class Fences:
    """``blocks`` maps a block to the last step that may touch it; it is empty when no step is on its way."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self._in_flight: deque[Declaration] = deque()

    def declare(self, declaration: Declaration) -> None:
        """A step was declared."""
        if declaration.total_num_scheduled_tokens:
            self._in_flight.append(declaration)
            if len(self._in_flight) > MOST_STEPS:
                self.returned(self._in_flight[0].step)

    def take(self, operation: PoolOperation) -> None:
        """The pool has done something.

        What leaves an attention window is released when no step on its way can see it any more
        (``KVCacheManager.allocate_slots``, which counts processed tokens). A table that is given up and released later
        counts from when it was given up: until then its request may have come back with another one.
        """
        if operation.cause == CAUSE_DEFERRED:
            if operation.kind != HOLD:
                return
        elif operation.kind != FREE or operation.cause == CAUSE_WINDOW:
            return
        request_id = operation.request_id
        if request_id is None:
            return
        last = next((d.step for d in reversed(self._in_flight) if request_id in d.requests.scheduled), None)
        if last is not None:
            self.blocks.update(dict.fromkeys(operation.block_ids, last))

    def returned(self, step: int) -> None:
        """The result of a step is there, and with it all before it are over."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].step <= step:
            in_flight.popleft()
        if self.blocks and min(self.blocks.values()) <= step:
            self.blocks = {block: last for block, last in self.blocks.items() if last > step}
