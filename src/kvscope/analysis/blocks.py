"""Who was told to use a block, and when: from declarations alone.

This is not the allocator's ledger: it does not know when a block was returned to the pool, only from which step on the
scheduler declared it to be a request's, and with which step that request finished or was preempted.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvscope.facts.requests import BlockIds, StepRequests
from kvscope.state.bindings import Bindings

REMEMBERED_TENURES = 4

FINISHED = "finished"
PREEMPTED = "preempted"
REBOUND = "rebound"


class Tenure(msgspec.Struct, kw_only=True):
    """One request's time with a block, as logical block ``index`` of its table in ``group_index``.

    ``until_step`` is None while it lasts; ``cause`` says why it ended.
    """

    request_id: str
    group_index: int
    index: int
    since_step: int
    until_step: int | None = None
    cause: str = ""


class BlockDiary:
    """The last tenures of every block that was ever declared; memory is bounded by the number of blocks."""

    def __init__(self) -> None:
        self._of: dict[int, deque[Tenure]] = {}

    def note(self, step: int, requests: StepRequests, bindings: Bindings) -> None:
        """Take over one step; call it before ``bindings`` do, since they forget whom they release."""
        for cause, gone in ((FINISHED, requests.finished), (PREEMPTED, requests.preempted)):
            for request_id in gone:
                self._end(step, request_id, cause, bindings)
        for request_id, blocks in zip(requests.new_ids, requests.new_blocks, strict=True):
            self._end(step, request_id, REBOUND, bindings)
            self._begin(step, request_id, blocks, [0] * len(blocks))
        for request_id, delta in zip(requests.cached_ids, requests.cached_blocks, strict=True):
            if delta is None:
                continue
            if request_id in requests.resumed:
                self._end(step, request_id, REBOUND, bindings)
                starts = [0] * len(delta)
            else:
                starts = [len(bindings.table(request_id, group_index)) for group_index in range(len(delta))]
            self._begin(step, request_id, delta, starts)

    def tenures(self, block_id: int, at_step: int) -> list[Tenure]:
        """Who had the block up to a step, the latest first."""
        return [tenure for tenure in reversed(self._of.get(block_id, ())) if tenure.since_step <= at_step]

    def _begin(self, step: int, request_id: str, blocks: BlockIds, starts: list[int]) -> None:
        for group_index, (group, start) in enumerate(zip(blocks, starts, strict=True)):
            for index, block_id in enumerate(group, start):
                tenure = Tenure(request_id=request_id, group_index=group_index, index=index, since_step=step)
                self._of.setdefault(block_id, deque(maxlen=REMEMBERED_TENURES)).append(tenure)

    def _end(self, step: int, request_id: str, cause: str, bindings: Bindings) -> None:
        if request_id not in bindings:
            return
        for group_index in range(len(bindings.topology.groups)):
            for block_id in bindings.table(request_id, group_index).tolist():
                for tenure in self._of.get(block_id, ()):
                    if tenure.request_id == request_id and tenure.until_step is None:
                        tenure.until_step, tenure.cause = step, cause
