"""Follows one group of a running batch from step to step, and says whether a plan is exactly what was declared.

A batch is compared row by row when its requests or their order change. While the same requests decode, one token each,
only what follows from that is compared: bytes with the bytes of the step before, in which a row that crosses into a new
block has one more entry. All this is lists and bytes, since at the size of a batch every array operation costs more
than the few numbers it is about.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from operator import add, floordiv, ge, mul, sub
from struct import Struct
from typing import NamedTuple

import numpy as np

from ..facts.plans import PAD_SLOT, AgreedGroup, GroupPlan, Int32
from .bindings import Bindings, Table
from .visibility import first_visible_block

_ROOM_BLOCKS = 8
_INT32 = Struct("=i")
_PADDING = PAD_SLOT.to_bytes(8, "little", signed=True)


class _Batch(NamedTuple):
    """The rows of a step as declared, all lists ``[rows]``: blocks from ``skipped`` up to ``needed`` are read, and
    ``lengths`` are the tokens in the step (None: one a row).
    """

    tables: list[Table]
    computed: list[int]
    needed: list[int]
    skipped: list[int]
    lengths: list[int] | None


class Follower:
    """One group of the batch of one runner."""

    def __init__(self, bindings: Bindings, group_index: int) -> None:
        self.group = bindings.topology.groups[group_index]
        self._topology = bindings.topology
        self.group_index = group_index
        self._offsets = np.arange(self.group.block_size)
        # The batch that was agreed to last, and what its rows were found to have; without tables there is none.
        self._tables: list[Table] | None = None
        self._room_tokens = 0
        self._needed: list[int] = []
        self._skipped: list[int] = []
        self._counted: list[int] = []
        self._tails: list[int] = []
        self._tail_starts: list[int] = []
        self._tails_apart = False
        self._viewed: Int32 | None = None
        self._view: Int32 = np.zeros((0, 0), np.int32)
        self._held: bytes | bytearray = b""
        self._agreed: AgreedGroup | None = None

    def agree(
        self,
        tables: list[Table],
        computed: list[int],
        seq_lens: list[int],
        lengths: list[int] | None,
        group: GroupPlan,
    ) -> AgreedGroup | None:
        """What is kept of a plan's group that is exactly what was declared; None where the rules have to look.

        All lists are ``[rows]``: the declared tables, the declared tokens before and after the step, and those in it,
        which are at least 1 (None: exactly 1). The caller has compared positions and lengths.
        """
        size = self.group.block_size
        needed = list(map(floordiv, map(add, seq_lens, repeat(size - 1)), repeat(size)))
        if self.group.visible_tokens is None:
            skipped = [0] * len(needed)
        else:
            skipped = first_visible_block(self.group, np.array(computed, np.int64)).tolist()
        # Until one of its rows needs another block nothing of a batch changes but its slots; a window moves, too.
        windowed = self.group.visible_tokens is not None
        self._room_tokens = 0 if windowed else min(map(sub, map(mul, needed, repeat(size)), seq_lens), default=0)
        same_rows = lengths is None and tables is self._tables and skipped == self._skipped
        if same_rows and (needed == self._needed or self._grow(needed)):
            agreed = self._compare(computed, group)
            if agreed is not None:
                return agreed
        self._tables = None  # until everything is agreed to
        return self._begin(_Batch(tables, computed, needed, skipped, lengths), group)

    def go_on(self, computed: list[int], seq_lens: list[int], group: GroupPlan) -> AgreedGroup | None:
        """:meth:`agree` for the rows that were agreed to last, each with one token more."""
        if self._tables is None:
            return None
        agreed = self._agreed
        if self._room_tokens > 0 and agreed is not None and group.tables is self._viewed:
            self._room_tokens -= 1
            slots = list(map(add, self._tail_starts, computed))
            if agreed.padding_slots:
                slots += repeat(PAD_SLOT, agreed.padding_slots)
            if (
                self._tails_apart
                and group.slots.tolist() == slots
                and group.table_blocks.tolist() == self._counted
                and self._view.tobytes() == self._held
            ):
                return agreed
        return self.agree(self._tables, computed, seq_lens, None, group)

    # A batch that is looked at row by row -----------------------------------------------------------------------------

    def _begin(self, batch: _Batch, group: GroupPlan) -> AgreedGroup | None:
        tables, _, needed, skipped, lengths = batch
        size, index = self.group.block_size, self.group_index
        slots = self._slots(batch)
        if slots is None or not self._holds(batch, group):
            return None
        padding = group.slots.size - len(slots)
        if group.slots.tobytes() != slots.tobytes() + _PADDING * padding:
            return None
        self._tables, self._needed, self._skipped = tables, needed, skipped
        self._tails = [table.blocks[index][end - 1] for table, end in zip(tables, needed, strict=True)]
        self._tail_starts = [(block - end + 1) * size for block, end in zip(self._tails, needed, strict=True)]
        self._tails_apart = len(set(self._tails)) == len(needed)
        agreed = self._keep(padding, None if lengths is None else slots.tobytes())
        self._agreed = agreed if lengths is None else None
        return agreed

    def _holds(self, batch: _Batch, group: GroupPlan) -> bool:
        """Whether the plan's tables are the declared ones wherever attention reads."""
        tables, needed, skipped = batch.tables, batch.needed, batch.skipped
        counted: list[int] = group.table_blocks.tolist()
        widest = max(needed, default=1)
        if widest > group.tables.shape[1] or not all(map(ge, counted, needed)):
            return False
        self._counted = counted
        self._viewed, self._view = group.tables, group.tables[:, : (widest // _ROOM_BLOCKS + 1) * _ROOM_BLOCKS]
        self._held = held = self._view.tobytes()
        width_bytes = self._view.shape[1] * _INT32.size
        for row, (table, first, end) in enumerate(zip(tables, skipped, needed, strict=True)):
            declared = table.blocks[self.group_index][first:end].tobytes()
            start = row * width_bytes + first * _INT32.size
            if held[start : start + len(declared)] != declared:
                return False
        return True

    def _slots(self, batch: _Batch) -> array[int] | None:
        """The declared slots of all tokens; None where a table falls short, has a block that nothing may touch, or
        shares one in which it is written with another row.
        """
        tables, computed, needed, skipped, lengths = batch
        size, index = self.group.block_size, self.group_index
        slots, written = array("q"), array("i")
        for row, (table, start, end) in enumerate(zip(tables, computed, needed, strict=True)):
            blocks = table.blocks[index]
            if (
                start < 0
                or end > len(blocks)
                or (table.sound_from[index] > skipped[row] and self._unsound(blocks[skipped[row] : end]))
            ):
                return None
            first = start // size
            written += blocks[first:end]
            if lengths is None or lengths[row] == 1:
                slots.append(blocks[first] * size + start % size)
            else:
                of_blocks = np.array(blocks[first:end], np.int64)[:, None] * size + self._offsets
                skip = start - first * size
                slots.frombytes(of_blocks.reshape(-1)[skip : skip + lengths[row]].tobytes())
        return slots if len(set(written)) == len(written) else None

    def _unsound(self, blocks: Sequence[int]) -> bool:
        pool = self._topology
        return len(blocks) > 0 and (min(blocks) < 0 or max(blocks) >= pool.num_blocks or pool.null_block_id in blocks)

    # The same requests, one token further -----------------------------------------------------------------------------

    def _grow(self, needed: list[int]) -> bool:
        """Take in rows that need one block more than before; False where that is not all that changed."""
        assert self._tables is not None
        width, index = self._view.shape[1], self.group_index
        held, starts = bytearray(self._held), self._tail_starts.copy()
        for row, (before, now) in enumerate(zip(self._needed, needed, strict=True)):
            if now == before:
                continue
            table = self._tables[row]
            blocks = table.blocks[index]
            if now != before + 1 or now > width or now > len(blocks) or table.sound_from[index] > before:
                return False
            block = self._tails[row] = blocks[before]
            _INT32.pack_into(held, (row * width + before) * _INT32.size, block)
            starts[row] = (block - before) * self.group.block_size
        self._tails_apart = len(set(self._tails)) == len(needed)
        self._held, self._tail_starts = held, starts
        self._needed, self._counted, self._agreed = needed, [], None
        return True

    def _compare(self, computed: list[int], group: GroupPlan) -> AgreedGroup | None:
        slots, agreed = list(map(add, self._tail_starts, computed)), self._agreed
        padding = group.slots.size - len(slots)
        if not self._tails_apart or group.slots.tolist() != (slots + [PAD_SLOT] * padding if padding else slots):
            return None
        counted: list[int] = group.table_blocks.tolist()
        if counted != self._counted:
            if not all(map(ge, counted, self._needed)):
                return None
            self._counted, agreed = counted, None
        if group.tables is not self._viewed:
            self._viewed, self._view = group.tables, group.tables[:, : self._view.shape[1]]
        held = self._view.tobytes()
        if held != self._held:  # perhaps only what follows the visible entries
            return None
        self._held = held
        if agreed is None or agreed.padding_slots != padding:
            agreed = self._agreed = self._keep(padding, None)
        return agreed

    # What is kept -----------------------------------------------------------------------------------------------------

    def _keep(self, padding: int, slots: bytes | None) -> AgreedGroup:
        return AgreedGroup(
            group_id=self.group.group_id,
            tail_starts=self._tail_starts,
            padding_slots=padding,
            table_blocks=self._counted,
            needed=self._needed,
            first_visible=self._skipped,
            tables=bytes(self._held),
            width=self._view.shape[1],
            slots=slots,
        )
