"""The declared tables of one batch, as attention must see them; made anew only when something about them changed.

In steady decoding the same requests come back step after step, and now and then one of them crosses into a new block.
What was gathered and validated for them then still holds, and comparing a plan with it is comparing bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..facts.digest import column_weights, table_digest
from ..facts.plans import Int32, Int64
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
        self._rows: Rows | None = None
        self._version = -1
        self._key = b""
        self._mask: Int32 = np.zeros((0, 1), np.int32)
        self._declared_bytes = b""
        self._distinct_blocks = b""

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
        self._rows = None  # until all is gathered
        self.needed, self.first_visible = needed, first_visible
        self._gather(rows)
        self._key, self._rows, self._version = key, rows, self._bindings.version

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

    def _gather(self, rows: Rows) -> None:
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
