"""What stands in table entries that attention does not follow: behind the sequence, and before its window.

Nothing reads them, so that nothing in them is wrong; but a kernel that reads too far meets what stands there, and it
makes a difference whether that is the null block or somebody's. So they are counted, now and then: a few rows of one
plan in many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..facts.plans import Int32, Plan
from .bindings import Bindings, Table
from .visibility import first_visible_block

SAMPLE_INTERVAL_PLANS = 1024
"""One plan in so many is looked at: half a millisecond to one each time, or less than 1 µs a step."""
SAMPLED_ROWS = 8
SAMPLED_ENTRIES = 32
"""So many entries of a row are looked at on each side of what attention reads, those next to it."""

STATES = ("null", "own", "foreign", "nobody", "outside")


class TailCensus:
    """Counts entries by what they lead to, over the lifetime of one worker. ``plans_left`` is counted down with every
    plan, and the one with which it reaches 0 is to be taken.

    ``null`` is the null block, ``own`` a block of the row's own table, such as one that is allocated ahead or has left
    the window, ``foreign`` one that a live request has where attention looks, ``nobody`` any other block of the pool,
    ``outside`` no block at all.
    """

    def __init__(self) -> None:
        self.plans_left = 1
        self._turn = 0

    def take(self, plan: Plan, bindings: Bindings, counts: Counter[str]) -> None:
        """Add some rows of the plan to ``counts``, other ones each time. Rows without a table are passed over."""
        self.plans_left = SAMPLE_INTERVAL_PLANS
        rows = len(plan.request_ids)
        chosen = [(self._turn + number) % rows for number in range(min(rows, SAMPLED_ROWS))]  # none of an empty batch
        self._turn += SAMPLED_ROWS
        for row in chosen:
            table = bindings.table_of(plan.request_ids[row])
            if table is not None:
                self._take_row(plan, row, table, bindings, counts)

    def _take_row(self, plan: Plan, row: int, table: Table, bindings: Bindings, counts: Counter[str]) -> None:
        seq_len = int(plan.seq_lens[row])
        computed = np.array([seq_len - int(plan.query_start[row + 1] - plan.query_start[row])], np.int64)
        for index, group in enumerate(bindings.topology.groups):
            of = plan.group(index, group.group_id) if group.judged else None
            if of is None:
                continue
            end = -(-seq_len // group.block_size)
            start = int(first_visible_block(group, computed)[0])
            entries = of.tables[row]
            unread = np.concatenate((entries[max(start - SAMPLED_ENTRIES, 0) : start], entries[end:][:SAMPLED_ENTRIES]))
            for state, count in _states(unread, table.blocks[index], index, bindings):
                counts[state] += count


def _states(entries: Int32, own: Sequence[int], group_index: int, bindings: Bindings) -> list[tuple[str, int]]:
    pool = bindings.topology
    outside = (entries < 0) | (entries >= pool.num_blocks)
    null = entries == pool.null_block_id
    mine = ~null & ~outside & np.isin(entries, np.array(own, np.int32))
    others = entries[~(outside | null | mine)]
    foreign = int((bindings.holder_rows(group_index)[others] >= 0).sum())
    counts = (int(null.sum()), int(mine.sum()), foreign, others.size - foreign, int(outside.sum()))
    return [(state, count) for state, count in zip(STATES, counts, strict=True) if count]
