"""Blocks with which a request comes in: whether a hash led to them, and whether it has references to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from .blocks import BlockLedger
from .doubts import Unowned
from .releases import Releases


class Hits:
    """What is wrong with the hits that led to the last declaration. ``unindexed`` are those on blocks to which no hash
    led, with these blocks alone; ``unowned`` the blocks of which a request has no share.
    """

    def __init__(self, ledger: BlockLedger, releases: Releases) -> None:
        self.unowned: list[Unowned] = []
        self.unindexed: list[PoolOperation] = []
        self._ledger = ledger
        self._releases = releases
        self._taken: list[PoolOperation] = []

    def take(self, operation: PoolOperation) -> None:
        """An operation that the ledger does not have yet."""
        if operation.kind != facts.TOUCH or operation.cause != facts.CAUSE_HIT:
            return
        unindexed = self._ledger.hashes_of(operation.block_ids) == 0
        if unindexed.any():
            self._taken.append(
                PoolOperation(
                    kind=facts.TOUCH,
                    block_ids=np.array(operation.block_ids)[unindexed].tolist(),
                    step=operation.step,
                    cause=facts.CAUSE_HIT,
                    request_id=operation.request_id,
                    group_id=operation.group_id,
                )
            )

    def advance(self) -> None:
        """The next declaration is there."""
        if self._taken or self.unindexed or self.unowned:
            self.unowned, self.unindexed, self._taken = [], self._taken, []

    def arrive(self, request_id: str, group_id: int, block_ids: Sequence[int]) -> None:
        """A request comes in with these blocks. A hit takes a reference, and what is allocated has one; whoever has
        none uses blocks that may be released under it.
        """
        ids, ledger = np.array(block_ids, np.int64), self._ledger
        unowned = ~ledger.is_owner(request_id, ids) & (ledger.generation_of(ids) > 0) & (ids != ledger.null_block_id)
        if unowned.any():
            self._releases.borrow(request_id, ids[unowned].tolist())
            self.unowned += [
                Unowned(request_id=request_id, group_id=group_id, index=index, block_id=int(ids[index]))
                for index in np.flatnonzero(unowned).tolist()
            ]
