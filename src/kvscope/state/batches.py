"""The declared tables of one batch, as attention must see them; made anew only when something about them changed.

In steady decoding the same requests come back step after step, and now and then one of them crosses into a new block.
What was gathered and validated for them then still holds, and comparing a plan with it is comparing bytes.
"""

from __future__ import annotations

from itertools import repeat
from operator import add, floordiv, ge
from struct import Struct

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
_INT32 = Struct("=i")


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
        self._distinct_blocks = b""
        # What is followed step by step; lists and bytes, since an array operation costs more than these few numbers.
        self._needed_list: list[int] | None = None
        self._skipped_list: list[int] = []
        self._tails: list[int] = []
        self._counted: list[int] = []
        self._viewed: Int32 | None = None
        self._view: Int32 = self._mask
        self._accepted: bytes | bytearray | None = None
        self._has_grown = False
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
        needed = list(map(floordiv, map(add, seq_lens, repeat(size - 1)), repeat(size)))
        if self.group.visible_tokens is None:
            skipped = self._skipped_list
        else:
            skipped = first_visible_block(self.group, np.array(computed, np.int64)).tolist()
        known = self._needed_list
        same_rows = rows is self._rows and known is not None and skipped == self._skipped_list
        if same_rows and (needed == known or self._grow(rows, needed)):
            return
        if self._has_grown:  # and what the rows grew by is not in the arrays
            self._key = b""
        self.refresh(rows, np.array(computed, np.int64), np.array(seq_lens, np.int64))
        last = self.needed - 1
        tails = self.declared[np.arange(len(rows)), last].astype(np.int64)
        self.tail_starts = ((tails - last) * size).tolist()
        self._tails = tails.tolist()
        self.tails_apart = len(set(self._tails)) == len(rows)
        self._needed_list, self._skipped_list = needed, self.first_visible.tolist()

    def follows_counts(self, table_blocks: Int32) -> bool:
        """:meth:`long_enough` for the batch that was followed."""
        counted: list[int] = table_blocks.tolist()
        if counted == self._counted:
            return True
        if self._needed_list is None or not all(map(ge, counted, self._needed_list)):
            return False
        self._counted, self._agreed = counted, None
        return True

    def follows_tables(self, tables: Int32) -> bool:
        """:meth:`equals_declared` for the batch that was followed."""
        held = self._look_at(tables)
        if held != self._accepted:  # what follows the visible entries has changed, if it is not these
            if self._has_grown:
                self._gather_anew()
                held = self._look_at(tables)
            if not self.equals_declared(tables):
                return False
            self._agreed = None
        self._accepted = held
        return True

    def agreed(self, padding_slots: int) -> AgreedGroup:
        """What is kept of a plan that was found equal to this table; the same object as long as nothing changes."""
        agreed = self._agreed
        if agreed is None or agreed.padding_slots != padding_slots:
            assert self._needed_list is not None
            assert isinstance(self._accepted, bytes)
            agreed = self._agreed = AgreedGroup(
                group_id=self.group.group_id,
                tail_starts=self.tail_starts,
                padding_slots=padding_slots,
                table_blocks=self._counted,
                needed=self._needed_list,
                first_visible=self._skipped_list,
                tables=self._accepted,
                width=self._view.shape[1],
            )
        return agreed

    def long_enough(self, table_blocks: Int32) -> bool:
        """Whether every row of a plan counts at least as many blocks as are needed."""
        return bool((table_blocks >= self.needed).all())

    def equals_declared(self, tables: Int32) -> bool:
        """Whether the visible entries of ``tables`` (``int32 [rows, any width]``) are the declared ones."""
        width = min(self.width, tables.shape[1])
        if width == self.width:
            return (tables[:, :width] * self._mask).tobytes() == self._declared_bytes
        return not self.visible[:, width:].any() and bool(
            (tables * self._mask[:, :width] == self.declared[:, :width]).all()
        )

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

    def _look_at(self, tables: Int32) -> bytes:
        if tables is not self._viewed:
            self._viewed, self._view = tables, tables[:, : self.width]
        return self._view.tobytes()

    def _grow(self, rows: Rows, needed: list[int]) -> bool:
        """Take in rows that need one block more than before; False where that is not all that changed."""
        known, pool, accepted = self._needed_list, self._bindings.topology, self._accepted
        width = self._view.shape[1]
        if known is None or accepted is None:
            return False
        crossed = []
        for index, (before, now) in enumerate(zip(known, needed, strict=True)):
            if now == before:
                continue
            blocks = self._bindings.declared_blocks(int(rows[index]), self.group_index)
            if now != before + 1 or now > width or now > len(blocks):
                return False
            block = blocks[before]
            if not 0 <= block < pool.num_blocks or block == pool.null_block_id:
                return False
            crossed.append((index, before, block))
        expected, self.tail_starts = bytearray(accepted), self.tail_starts.copy()
        for index, column, block in crossed:
            _INT32.pack_into(expected, (index * width + column) * _INT32.size, block)
            self.tail_starts[index] = (block - column) * self.group.block_size
            self._tails[index] = block
        self.tails_apart = len(set(self._tails)) == len(needed)
        self._accepted, self._has_grown = expected, True
        self._needed_list, self._agreed, self._counted = needed, None, []
        return True

    def _gather_anew(self) -> None:
        """Bring the arrays up to what the lists have followed."""
        needed, skipped, counted, rows = self._needed_list, self._skipped_list, self._counted, self._rows
        assert needed is not None
        assert rows is not None
        self.needed, self.first_visible = np.array(needed, np.int64), np.array(skipped, np.int64)
        self._gather(rows)
        self._needed_list, self._counted = needed, counted

    def _gather(self, rows: Rows) -> None:
        self._needed_list = self._agreed = self._viewed = self._accepted = None
        self._counted, self._has_grown = [], False
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
