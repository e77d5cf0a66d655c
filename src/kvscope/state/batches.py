"""The declared tables of one batch, as attention must see them; made anew only when something about them changed.

In steady decoding the same requests come back step after step, and now and then one of them crosses into a new block.
What was gathered and validated for them then still holds, and comparing a plan with it is comparing bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..facts.digest import column_weights, table_digest
from ..facts.plans import AgreedGroup, Int32, Int64
from ..facts.topology import Group
from .bindings import Bindings
from .visibility import first_visible_block

Rows = npt.NDArray[np.intp]
Bool = npt.NDArray[np.bool_]

_ROOM_BLOCKS = 8


class BatchTable:
    """Declared blocks of the rows of one batch in one group.

    ``needed`` ``int64 [rows]`` is how many blocks each declared sequence spans and ``first_visible`` where its
    attention window begins. ``visible`` ``bool [rows, width]`` marks what attention reads, ``declared`` ``int32`` of
    the same shape are the blocks there, 0 elsewhere; ``width`` leaves some room to grow. ``sound`` says that every
    visible entry lies in the pool, is not the null block, and was really declared.

    ``tail_starts[i] + position`` is the slot of a position in row ``i``'s last needed block, where a single decoded
    token is written; ``tails_apart`` says that no two rows share that block. Public arrays are replaced, never
    changed in place: facts that were made of them are still queued.
    """

    def __init__(self, bindings: Bindings, group_index: int) -> None:
        self.group: Group = bindings.topology.groups[group_index]
        self.group_index = group_index
        self._bindings = bindings
        self.needed: Int64 = np.zeros(0, np.int64)
        self.first_visible: Int64 = np.zeros(0, np.int64)
        self.width = 1
        self.declared: Int32 = np.zeros((0, 1), np.int32)
        self.visible: Bool = np.zeros((0, 1), bool)
        self.sound = True
        self.tail_starts: list[int] = []
        self.tails_apart = False
        self._rows: Rows | None = None
        self._version = -1
        self._key = b""
        self._mask: Int32 = np.zeros((0, 1), np.int32)
        self._declared_bytes = b""
        self._needed_list: list[int] | None = None
        self._skipped_list: list[int] = []
        self._long_enough = b""
        self._distinct_blocks = b""
        self._agreed: AgreedGroup | None = None

    def refresh(self, rows: Rows, computed: Int64, seq_lens: Int64) -> None:
        """Make the table fit this batch. ``rows`` are binding rows in batch order; ``computed`` and ``seq_lens`` the
        declared tokens before and after the step.
        """
        block_size = self.group.block_size
        needed = (seq_lens + (block_size - 1)) // block_size
        first_visible = first_visible_block(self.group, computed)
        key = needed.tobytes() + first_visible.tobytes()
        if key == self._key and rows is self._rows and self._version == self._bindings.version:
            return
        self._key, self._rows, self._version = key, rows, self._bindings.version
        self.needed, self.first_visible = needed, first_visible
        self._gather(rows)

    def follow(self, rows: Rows, computed: list[int], seq_lens: list[int]) -> None:
        """:meth:`refresh` for a batch in which every row has one token; nearly free while nothing changes.

        Tables of the same rows only ever grow at their end (``Bindings.rows_of`` gives another array when one is bound
        anew), so that what was gathered stays true.
        """
        size = self.group.block_size
        needed = [(tokens + size - 1) // size for tokens in seq_lens]
        if self.group.visible_tokens is None:
            skipped = self._skipped_list
        else:
            skipped = first_visible_block(self.group, np.array(computed, np.int64)).tolist()
        known = self._needed_list
        same_rows = rows is self._rows and known is not None and skipped == self._skipped_list
        if same_rows and (needed == known or self._grow(rows, needed)):
            return
        self.refresh(rows, np.array(computed, np.int64), np.array(seq_lens, np.int64))
        last = self.needed - 1
        tails = self.declared[np.arange(len(rows)), last].astype(np.int64)
        self.tail_starts = ((tails - last) * size).tolist()
        self.tails_apart = len(set(tails.tolist())) == len(rows)
        self._needed_list, self._skipped_list = needed, skipped

    def long_enough(self, table_blocks: Int32) -> bool:
        """Whether every row of a plan counts at least as many blocks as are needed."""
        counted = table_blocks.tobytes()
        if counted == self._long_enough:
            return True
        if not (table_blocks >= self.needed).all():
            return False
        self._long_enough = counted
        return True

    def equals_declared(self, tables: Int32) -> bool:
        """Whether the visible entries of ``tables`` (``int32 [rows, any width]``) are the declared ones."""
        width = min(self.width, tables.shape[1])
        if width == self.width:
            return (tables[:, :width] * self._mask).tobytes() == self._declared_bytes
        return not self.visible[:, width:].any() and bool(
            (tables * self._mask[:, :width] == self.declared[:, :width]).all()
        )

    def agreed(self, padding_slots: int) -> AgreedGroup:
        """What is kept of a plan that was found equal to this table; the same object as long as nothing changes."""
        agreed = self._agreed
        if agreed is None or agreed.padding_slots != padding_slots or agreed.table_blocks is not self._long_enough:
            agreed = self._agreed = AgreedGroup(
                group_id=self.group.group_id,
                tail_starts=self.tail_starts,
                padding_slots=padding_slots,
                table_blocks=self._long_enough,
                needed=self.needed,
                first_visible=self.first_visible,
                declared=self.declared,
                visible=self.visible,
            )
        return agreed

    def blocks_at(self, logical: Int64, token_row: Rows | None) -> Int64:
        """The declared block at each logical index; ``token_row`` None means one token a row.

        An index behind the table is answered by its last column.
        """
        rows = np.arange(len(self.declared)) if token_row is None else token_row
        blocks: Int64 = self.declared[rows, np.minimum(logical, self.width - 1)].astype(np.int64)
        return blocks

    def rows_write_apart(self, blocks: Int64, token_row: Rows | None) -> bool:
        """Whether no two rows write in the same block, ``blocks`` being the block of every token."""
        if token_row is not None:
            first = np.ones(blocks.size, bool)
            first[1:] = (blocks[1:] != blocks[:-1]) | (token_row[1:] != token_row[:-1])
            blocks = blocks[first]
        written = blocks.tobytes()
        if written == self._distinct_blocks:
            return True
        if len(set(blocks.tolist())) != blocks.size:
            return False
        self._distinct_blocks = written
        return True

    def digests_of(self, tables: Int32) -> npt.NDArray[np.uint64]:
        """The digests of the visible entries of tables of the same shape as ``declared``, ``uint64 [rows]``."""
        return table_digest(tables, self.visible, column_weights(self.width))

    def _grow(self, rows: Rows, needed: list[int]) -> bool:
        """Take in rows that need one block more than before; False where that is not all that changed."""
        known, size, pool = self._needed_list, self.group.block_size, self._bindings.topology
        assert known is not None
        table, lengths = self._bindings.tables[self.group_index], self._bindings.lengths[self.group_index]
        crossed = []
        for index, (before, now) in enumerate(zip(known, needed, strict=True)):
            if now == before:
                continue
            row = int(rows[index])
            if now != before + 1 or now > self.width or now > lengths[row]:
                return False
            block = int(table[row, before])
            if not 0 <= block < pool.num_blocks or block == pool.null_block_id:
                return False
            crossed.append((index, before, block))
        declared, visible, mask, starts = self.declared.copy(), self.visible.copy(), self._mask, list(self.tail_starts)
        for index, column, block in crossed:
            declared[index, column] = block
            visible[index, column] = True
            mask[index, column] = 1
            starts[index] = (block - column) * size
        self.declared, self.visible, self.tail_starts = declared, visible, starts
        self._declared_bytes = declared.tobytes()
        self.needed = np.array(needed, np.int64)
        tails = {(start // size) + column for start, column in zip(starts, needed, strict=True)}
        self.tails_apart = len(tails) == len(starts)
        self._needed_list, self._agreed, self._long_enough, self._key = needed, None, b"", b""
        return True

    def _gather(self, rows: Rows) -> None:
        self._needed_list = self._agreed = None
        self._long_enough = b""
        self.width = (int(self.needed.max(initial=1)) // _ROOM_BLOCKS + 1) * _ROOM_BLOCKS
        self._bindings.ensure_width(self.group_index, self.width)
        columns = np.arange(self.width)
        self.visible = columns < self.needed[:, None]
        if self.group.visible_tokens is not None:
            self.visible &= columns >= self.first_visible[:, None]
        self._mask = self.visible.astype(np.int32)
        self.declared = self._bindings.tables[self.group_index][rows, : self.width] * self._mask
        self._declared_bytes = self.declared.tobytes()
        entries = self.declared[self.visible]
        pool = self._bindings.topology
        self.sound = bool(
            (entries.size == 0 or 0 <= int(entries.min()) <= int(entries.max()) < pool.num_blocks)
            and not (entries == pool.null_block_id).any()
            and (self._bindings.lengths[self.group_index].take(rows) >= self.needed).all()
        )
