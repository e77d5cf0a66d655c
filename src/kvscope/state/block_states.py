"""How many blocks of a pool are in which state, at any moment: counted where a block changes it, never by a walk.

The states are those of the metric ``kv_blocks``, and each block but the null block is in one of them: free, cached,
used (by group), or held, with the reason why somebody keeps a reference that no running request has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from .block_columns import GROUP, HASHES, OWNERS, REFERENCES, SHIFT
from .blocks import BlockLedger

HELD_BECAUSE = ("deferred", "connector", "isolated", "other")
FREE, CACHED, HELD = 0, 1, 2
USED = HELD + len(HELD_BECAUSE)
"""Codes of states. ``HELD`` and those behind it are one a reason; ``USED`` is of no known group, ``USED + 1 + g`` of
group ``g``."""
_DEFERRED, _CONNECTOR, _ISOLATED, _OTHER = range(HELD, USED)
COUNTED_ONE_BY_ONE = 64
"""Up to so many blocks single numbers are faster than arrays."""


class CountedLedger(BlockLedger):
    """A ledger that knows how many of its blocks are in which state, and what the pool has done in all.

    Totals, in blocks but where said otherwise: ``allocated`` that got their first reference, handed out or hit;
    ``freed`` that lost their last one, so that ``allocated - freed`` are used or held; ``evicted`` cached ones that
    lost their hash other than by a reset; ``touched`` references added to blocks that had content; ``released``
    references released.
    """

    def __init__(self, num_blocks: int, null_block_id: int, num_groups: int) -> None:
        super().__init__(num_blocks, null_block_id)
        self.has_null = 0 <= null_block_id < num_blocks
        self._num_groups = num_groups
        self._counts = [0] * (USED + 1 + num_groups)
        self._counts[FREE] = num_blocks - self.has_null
        self._reasons: dict[int, int] = {}  # of blocks with a reference that is no live request's
        self._isolated: set[int] = set()
        self._is_applying = False
        self.allocated = self.freed = self.evicted = self.touched = self.released = 0

    @property
    def free(self) -> int:
        """Blocks without reference and hash."""
        return self._counts[FREE]

    @property
    def cached(self) -> int:
        """Blocks without reference to which a hash leads."""
        return self._counts[CACHED]

    @property
    def used(self) -> int:
        """Blocks in the table of a live request, those that a receive still fills among them."""
        return sum(self._counts[USED:])

    def used_of(self, group_id: int) -> int:
        """Used blocks of one group."""
        return self._counts[USED + 1 + group_id] if 0 <= group_id < self._num_groups else self._counts[USED]

    def held(self, because: str) -> int:
        """Blocks with references of which none is a running request's, by reason (``HELD_BECAUSE``)."""
        return self._counts[HELD + HELD_BECAUSE.index(because)]

    def apply(self, operation: PoolOperation, step: int) -> None:
        kind, counts = operation.kind, self._counts
        if kind == facts.RECEIVE or (kind == facts.CACHE and self.all_in_use(operation.block_ids)):
            super().apply(operation, step)  # nobody comes or goes
            return
        if kind == facts.ALLOC and operation.request_id is not None and self.all_unused(operation.block_ids):
            self._count_handed_out(operation)
            super().apply(operation, step)
            return
        if kind == facts.RESET:
            super().apply(operation, step)
            counts[FREE] += counts[CACHED]
            counts[CACHED] = 0
            return
        blocks = self._affected(operation)
        before = self._tally(blocks)
        self._is_applying = True
        try:
            super().apply(operation, step)
        finally:
            self._is_applying = False
        self._note_reason(operation, blocks)
        after = self._tally(blocks)
        self._count(operation, before, after)
        self._move(before, after)

    def _count_handed_out(self, operation: PoolOperation) -> None:
        """Blocks that nobody has come to a request, as in nearly every allocation; the ledger does not know it yet."""
        blocks, counts, group = operation.block_ids, self._counts, operation.group_id
        count = len(blocks)
        if count > COUNTED_ONE_BY_ONE:
            cached = int(np.count_nonzero(self._rows[np.array(blocks, np.intp), HASHES]))
        else:
            cells = self._cells
            cached = sum(cells[(block << SHIFT) + HASHES] > 0 for block in blocks)
        counts[CACHED] -= cached
        counts[FREE] -= count - cached
        counts[USED + 1 + group if group is not None and 0 <= group < self._num_groups else USED] += count
        self.allocated += count
        self.evicted += cached

    def request_ended(self, request_id: str) -> None:
        holder = self._holders.by_id.get(request_id)
        if self._is_applying or holder is None:
            super().request_ended(request_id)
            return
        blocks = sorted(set(holder.live.blocks().tolist()))
        before = self._tally(blocks)
        super().request_ended(request_id)
        self._move(before, self._tally(blocks))

    def isolate(self, block_ids: Iterable[int]) -> None:
        """These are held back: where nobody uses one any more, that is why it has a reference."""
        self._reclassify(block_ids, self._isolated.update)

    def end_isolation(self, block_ids: Iterable[int]) -> None:
        """These are held back no longer."""
        self._reclassify(block_ids, self._isolated.difference_update)

    def _reclassify(self, block_ids: Iterable[int], change: Callable[[list[int]], None]) -> None:
        blocks = [block for block in block_ids if self._has(block)]
        before = self._tally(blocks)
        change(blocks)
        self._move(before, self._tally(blocks))

    def _affected(self, operation: PoolOperation) -> list[int]:
        """The blocks, each once, whose state the operation can change."""
        blocks = operation.block_ids
        if operation.kind == facts.HOLD and operation.cause != facts.CAUSE_COPY and operation.request_id is not None:
            holder = self._holders.by_id.get(operation.request_id)
            if holder is not None:  # it gives up its whole table, whatever the operation names
                blocks = [*blocks, *holder.live.blocks().tolist()]
        if len(blocks) > 1:
            blocks = list(dict.fromkeys(blocks))
        end, null = self.num_blocks, self.null_block_id
        if blocks and (min(blocks) < 0 or max(blocks) >= end or null in blocks):
            blocks = [block for block in blocks if self._has(block)]
        return blocks

    def _tally(self, blocks: list[int]) -> list[int]:
        """How many of these blocks are in each state, by code."""
        if len(blocks) > COUNTED_ONE_BY_ONE:
            return self._tally_at_once(blocks)
        cells, groups, tally = self._cells, self._num_groups, [0] * len(self._counts)
        for block in blocks:
            at = block << SHIFT
            if not cells[at + REFERENCES]:
                state = CACHED if cells[at + HASHES] else FREE
            elif cells[at + OWNERS] > 0:
                group = cells[at + GROUP]
                state = USED + 1 + group if 0 <= group < groups else USED
            else:
                state = self._reason(block)
            tally[state] += 1
        return tally

    def _tally_at_once(self, blocks: list[int]) -> list[int]:
        rows = self._rows[np.array(blocks, np.intp)]
        groups = rows[:, GROUP]
        states = np.where(rows[:, HASHES] > 0, CACHED, FREE)
        referenced, owned = rows[:, REFERENCES] > 0, rows[:, OWNERS] > 0
        of_group = np.where((groups >= 0) & (groups < self._num_groups), USED + 1 + groups, USED)
        states[referenced & owned] = of_group[referenced & owned]
        for at in np.flatnonzero(referenced & ~owned).tolist():
            states[at] = self._reason(blocks[at])
        tally: list[int] = np.bincount(states, minlength=len(self._counts)).tolist()
        return tally

    def _reason(self, block: int) -> int:
        return _ISOLATED if block in self._isolated else self._reasons.get(block, _OTHER)

    def _note_reason(self, operation: PoolOperation, blocks: Collection[int]) -> None:
        """Why the blocks have references that are no live request's, if the operation gives them such."""
        kind, cause, reasons = operation.kind, operation.cause, self._reasons
        if reasons and kind in {facts.ALLOC, facts.FREE}:
            cells = self._cells
            for block in blocks:
                if kind == facts.ALLOC or not cells[(block << SHIFT) + REFERENCES]:
                    reasons.pop(block, None)
        is_nobodys = kind == facts.HOLD or (operation.request_id is None and kind in {facts.ALLOC, facts.TOUCH})
        if is_nobodys and cause in {facts.CAUSE_DEFERRED, facts.CAUSE_COPY}:  # both ends of a copy wait for its step
            reasons.update(dict.fromkeys(blocks, _DEFERRED))
        elif is_nobodys and cause == facts.CAUSE_PIN:
            reasons.update(dict.fromkeys(blocks, _CONNECTOR))

    def _count(self, operation: PoolOperation, before: list[int], after: list[int]) -> None:
        kind = operation.kind
        gone = _without_reference(after) - _without_reference(before)
        if gone > 0:
            self.freed += gone
        else:
            self.allocated -= gone
        if kind == facts.FREE:
            self.released += len(operation.block_ids)
        elif kind == facts.TOUCH:
            self.touched += len(operation.block_ids)
        elif kind in {facts.ALLOC, facts.EVICT}:
            self.evicted += before[CACHED] - after[CACHED]

    def _move(self, before: list[int], after: list[int]) -> None:
        counts = self._counts
        for state, (was, now) in enumerate(zip(before, after, strict=True)):
            if was != now:
                counts[state] += now - was


def _without_reference(tally: list[int]) -> int:
    return tally[FREE] + tally[CACHED]
