"""One row of 16 ``int32`` a block, which is one cache line: all that a ledger keeps of a block.

The same memory is seen twice: as NumPy rows for many blocks, and as an ``array`` for one, where reading a number costs
a fifth of what it costs in NumPy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from ..facts.plans import Int32

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Block ids ``[n]``. Ids that the pool does not have are allowed everywhere."""
Where = npt.NDArray[np.intp]

# What a release changes comes first, what a handing out changes last, so that each is one slice.
(
    FREED_STEP,  # when the last reference went
    FREED_CAUSE,  # index in facts.allocator.CAUSES
    FREED_BY,  # index of a request
    RESERVED,  # 1: waits for a receive
    REFERENCES,  # counted from the operations, never below 0
    OWNERS,  # how often it stands in a table of a live request
    GENERATION,  # how often the block has been handed out
    HASHES,  # how many hashes lead to it
    HASH_TOKENS,  # tokens that its primary hash covers, NONE: not known
    DECLARED,  # tokens that are written in this generation once all submitted steps have run
    CONFIRMED,  # tokens that completed steps and receives have written in this generation
    WRITTEN_STEP,  # the last step that was declared to write into this generation
    ALLOCATED_STEP,
    ALLOCATED_FOR,  # index of a request
    GROUP,  # where it stands in the table of the request that it was handed to, or that hit it when nobody had it
    INDEX,
) = range(16)

WIDTH = 16
SHIFT = 4
"""Block ``b`` begins at cell ``b << SHIFT``."""
NONE = -1
LARGEST = (1 << 31) - 1

COUNTED_ONE_BY_ONE = 40
"""Up to so many blocks single numbers are faster than arrays."""

_UNSET = (WRITTEN_STEP, ALLOCATED_STEP, ALLOCATED_FOR, GROUP, INDEX, FREED_STEP, FREED_CAUSE, FREED_BY)


class Status(IntEnum):
    """What a block is at the moment; the first that fits counts, from the bottom up."""

    FREE = 0
    """No references. It may still have a hash and be hit."""
    HELD = 1
    """References, but in no table of a live request: a deferred free, a connector, an isolated block."""
    ACTIVE = 2
    """In the table of a live request."""
    RESERVED = 3
    """References, and a receive that has not completed may still write into it, whoever owns it."""
    NULL = 4
    OUTSIDE = 5
    """The pool has no such block."""


class BlockColumns:
    """The rows of one pool, and one more that stands for all ids that the pool does not have."""

    def __init__(self, num_blocks: int, null_block_id: int) -> None:
        self.num_blocks = num_blocks
        self.null_block_id = null_block_id
        unused = array("i", (NONE if column in _UNSET else 0 for column in range(WIDTH)))
        self._cells = unused * (num_blocks + 1)
        self._rows: Int32 = np.frombuffer(self._cells, np.int32).reshape(num_blocks + 1, WIDTH)
        self._rows[num_blocks] = NONE

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self._rows.nbytes

    def generation_of(self, block_ids: Ids) -> Int32:
        """How often each block has been handed out, ``int32 [n]``; -1 outside the pool."""
        return self._column(block_ids, GENERATION)

    def generations(self, block_ids: Sequence[int]) -> list[int]:
        """:meth:`generation_of` as a list ``[n]``."""
        if len(block_ids) > COUNTED_ONE_BY_ONE:
            generations: list[int] = self._column(block_ids, GENERATION).tolist()
            return generations
        cells, end = self._cells, self.num_blocks
        return [cells[(block << SHIFT) + GENERATION] if 0 <= block < end else NONE for block in block_ids]

    def references_of(self, block_ids: Ids) -> Int32:
        """References of each block as the operations add up, ``int32 [n]``; -1 outside the pool."""
        return self._column(block_ids, REFERENCES)

    def places_of(self, block_ids: Ids) -> Int32:
        """How often each block stands in a table of a live request, ``int32 [n]``; -1 outside the pool."""
        return self._column(block_ids, OWNERS)

    def counted(self, first: int, last: int) -> list[int]:
        """References of the blocks ``first .. last - 1``: as a list, which is what the host's counts come as."""
        return self._cells[(first << SHIFT) + REFERENCES : last << SHIFT : WIDTH].tolist()

    def hashes_of(self, block_ids: Ids) -> Int32:
        """How many hashes lead to each block, ``int32 [n]``; -1 outside the pool."""
        return self._column(block_ids, HASHES)

    def hash_tokens_of(self, block_ids: Ids) -> Int32:
        """Tokens of each block that its primary hash covers, ``int32 [n]``; -1 where that is not known."""
        return self._column(block_ids, HASH_TOKENS)

    def allocated_step_of(self, block_ids: Ids) -> Int32:
        """The step in or after which each block was last handed out, ``int32 [n]``; -1 for never, or outside."""
        return self._column(block_ids, ALLOCATED_STEP)

    def written_of(self, block_ids: Ids) -> tuple[Int32, Int32]:
        """Tokens of each block written in this generation, from its first one on: ``(declared, confirmed)``,
        ``int32 [n]`` each. ``declared`` counts what submitted steps will have written, ``confirmed`` what completed
        ones have. -1 outside the pool.
        """
        rows = self._rows[self._where(block_ids)]
        return rows[:, DECLARED], rows[:, CONFIRMED]

    def all_unused(self, block_ids: Sequence[int]) -> bool:
        """Whether these are blocks of the pool that are counted, each named once, and none has a reference."""
        if len(block_ids) > COUNTED_ONE_BY_ONE:
            return self._each_once(block_ids) and not self._column(block_ids, REFERENCES).any()
        cells, end, null = self._cells, self.num_blocks, self.null_block_id
        for block in block_ids:
            if not 0 <= block < end or cells[(block << SHIFT) + REFERENCES] or block == null:
                return False
        return len(set(block_ids)) == len(block_ids)

    def all_in_use(self, block_ids: Sequence[int]) -> bool:
        """Whether these are blocks of the pool that are counted, each named once, and each has a reference."""
        if len(block_ids) > COUNTED_ONE_BY_ONE:
            return self._each_once(block_ids) and bool(self._column(block_ids, REFERENCES).all())
        cells, end, null = self._cells, self.num_blocks, self.null_block_id
        for block in block_ids:
            if not 0 <= block < end or not cells[(block << SHIFT) + REFERENCES] or block == null:
                return False
        return len(set(block_ids)) == len(block_ids)

    def balanced(self, block_ids: Sequence[int], references: Sequence[int] | None = None) -> bool:
        """Whether these are blocks of the pool that are counted, with as many references as ``references`` ``[n]``
        says (None: any number), and with no more places in tables than that.
        """
        if len(block_ids) > COUNTED_ONE_BY_ONE:
            counts = self._column(block_ids, REFERENCES)
            said = counts.tolist() if references is None else references
            return (
                self._has_all(block_ids)
                and counts.tolist() == said
                and not (self._column(block_ids, OWNERS) > counts).any()
            )
        cells, end, null = self._cells, self.num_blocks, self.null_block_id
        for block, count in zip(block_ids, repeat(None) if references is None else references, strict=False):
            if not 0 <= block < end or block == null:
                return False
            at = block << SHIFT
            here = cells[at + REFERENCES]
            if cells[at + OWNERS] > here or (count is not None and count != here):
                return False
        return references is None or len(references) == len(block_ids)

    def status_of(self, block_ids: Ids) -> npt.NDArray[np.uint8]:
        """:class:`Status` of each block, ``uint8 [n]``."""
        where = self._where(block_ids)
        status = self._statuses(self._rows[where])
        status[where == self.null_block_id] = Status.NULL
        status[where == self.num_blocks] = Status.OUTSIDE
        return status

    @staticmethod
    def _statuses(rows: Int32) -> npt.NDArray[np.uint8]:
        status = np.full(len(rows), Status.HELD, np.uint8)
        status[rows[:, OWNERS] > 0] = Status.ACTIVE
        status[rows[:, RESERVED] > 0] = Status.RESERVED
        status[rows[:, REFERENCES] == 0] = Status.FREE
        return status

    def _column(self, block_ids: Ids, column: int) -> Int32:
        values: Int32 = self._rows[self._where(block_ids), column]
        return values

    def _each_once(self, block_ids: Sequence[int]) -> bool:
        return len(set(block_ids)) == len(block_ids) and self._has_all(block_ids)

    def _where(self, block_ids: Ids) -> Where:
        """The row of each id, ``intp [n]``."""
        try:
            ids = np.asarray(block_ids, np.int64)
        except OverflowError:  # an id that does not fit into 64 bits is in no pool
            ids = np.array([b if 0 <= b < self.num_blocks else NONE for b in block_ids], np.int64)
        # As unsigned numbers the negative ids are too large as well.
        rows: Where = np.minimum(ids.view(np.uint64), np.uint64(self.num_blocks)).astype(np.intp)
        return rows

    def _has(self, block_id: int) -> bool:
        """Whether it is a block of the pool that is counted: any but the null block."""
        return 0 <= block_id < self.num_blocks and block_id != self.null_block_id

    def _has_all(self, block_ids: Sequence[int]) -> bool:
        if self.null_block_id == 0:  # as in every vLLM
            in_order = sorted(block_ids)  # faster than min and max of a few
            return in_order[0] > 0 and in_order[-1] < self.num_blocks
        return all(map(self._has, block_ids))
