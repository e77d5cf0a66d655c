"""The declared tables of one batch, as attention must see them; made anew only when something about them changed.

In steady decoding the same requests come back step after step and rarely cross into a new block. What was gathered
and validated for them then still holds, and comparing a plan with it is comparing bytes.
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


class BatchTable:
    """Declared blocks of the rows of one batch in one group.

    ``needed`` ``int64 [rows]`` is how many blocks each declared sequence spans and ``first_visible`` where its
    attention window begins; ``declared`` ``int32 [rows, width]`` are the tables and ``visible`` ``bool`` of the same
    shape marks what attention reads. ``digests`` ``uint64 [rows]`` is the digest of the visible entries.
    ``sound`` says that every visible entry lies in the pool and is not the null block.
    """

    def __init__(self, bindings: Bindings, group_index: int) -> None:
        self.group: Group = bindings.topology.groups[group_index]
        self.group_index = group_index
        self._bindings = bindings
        self._version = -1
        self._rows: Rows | None = None
        self._needed_bytes = b""
        self._skipped_bytes = b""
        self._flat: dict[int, Rows] = {}
        self._distinct_blocks = b""
        self._weights = column_weights(64)
        self.needed: Int64 = np.zeros(0, np.int64)
        self.first_visible: Int64 = np.zeros(0, np.int64)
        self.width = 1
        self.declared: Int32 = np.zeros((0, 1), np.int32)
        self.visible: Bool = np.zeros((0, 1), bool)
        self.digests: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.sound = True
        self._row_starts: Int64 = np.zeros(0, np.int64)
        self._declared_bytes = b""

    def refresh(self, rows: Rows, computed: Int64, seq_lens: Int64) -> None:
        """Make the table fit this batch. ``rows`` are binding rows in batch order; ``computed`` and ``seq_lens`` the
        declared tokens before and after the step.
        """
        block_size = self.group.block_size
        needed = (seq_lens + (block_size - 1)) // block_size
        needed_bytes = needed.tobytes()
        skipped_bytes = b""
        if self.group.visible_tokens is not None:
            self.first_visible = first_visible_block(self.group, computed)
            skipped_bytes = self.first_visible.tobytes()
        if (
            needed_bytes == self._needed_bytes
            and rows is self._rows
            and self._version == self._bindings.version
            and skipped_bytes == self._skipped_bytes
        ):
            return
        self._needed_bytes, self._skipped_bytes = needed_bytes, skipped_bytes
        self._rows, self._version = rows, self._bindings.version
        self.needed = needed
        if self.group.visible_tokens is None:
            self.first_visible = np.zeros_like(needed)
        self._gather(rows)

    def visible_entries(self, tables: Int32) -> Int32:
        """The entries of ``tables`` (``int32 [rows, at least width]``) that attention reads, flattened row by row."""
        plan_width = tables.shape[1]
        flat = self._flat.get(plan_width)
        if flat is None:
            row, column = np.nonzero(self.visible)
            flat = self._flat[plan_width] = row * plan_width + column
        entries: Int32 = tables.reshape(-1).take(flat)
        return entries

    def equals_declared(self, tables: Int32) -> bool:
        """Whether the visible entries of ``tables`` are the declared ones."""
        return tables.shape[1] >= self.width and self.visible_entries(tables).tobytes() == self._declared_bytes

    def blocks_at(self, logical: Int64, token_row: Rows | None) -> Int64:
        """The declared block at each logical index; ``token_row`` None means one token a row.

        An index behind the table is answered by its last column.
        """
        starts = self._row_starts if token_row is None else self._row_starts[token_row]
        blocks: Int64 = self.declared.reshape(-1).take(starts + np.minimum(logical, self.width - 1)).astype(np.int64)
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

    def _gather(self, rows: Rows) -> None:
        width = self.width = int(self.needed.max(initial=1))
        self._bindings.ensure_width(self.group_index, width)
        self.declared = self._bindings.tables[self.group_index][rows, :width]
        columns = np.arange(width)
        self.visible = columns < self.needed[:, None]
        if self.group.visible_tokens is not None:
            self.visible &= columns >= self.first_visible[:, None]
        self._flat = {}
        entries = self.visible_entries(self.declared)
        self._declared_bytes = entries.tobytes()
        pool = self._bindings.topology
        valid = (entries >= 0) & (entries < pool.num_blocks) & (entries != pool.null_block_id)
        self.sound = bool(valid.all())
        self._row_starts = np.arange(len(rows), dtype=np.int64) * width
        if width > len(self._weights):
            self._weights = column_weights(2 * width)
        self.digests = table_digest(self.declared, self.visible, self._weights[:width])

    def digests_of(self, tables: Int32) -> npt.NDArray[np.uint64]:
        """The digests of other tables of the same shape as ``declared``."""
        return table_digest(tables, self.visible, self._weights[: self.width])
