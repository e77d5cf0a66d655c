"""The blocks of one pool, rebuilt from its operations: generation, references, owners, hashes, and what is written.

Two things are counted apart and never adjusted to each other: ``references`` by the operations alone, and *shares*, the
places where a block stands in a request's table. In a healthy pool they belong together; where they do not, the
difference says what happened (a block with fewer references than owners was freed under one of them).
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..facts.allocator import CAUSES
from ..facts.plans import Int32
from . import block_audit as audit
from .block_audit import Counts, Difference, HostTables
from .block_columns import (
    ALLOCATED_FOR,
    ALLOCATED_STEP,
    CONFIRMED,
    DECLARED,
    FREED_BY,
    FREED_CAUSE,
    FREED_STEP,
    GENERATION,
    GROUP,
    HASH_TOKENS,
    HASHES,
    INDEX,
    NONE,
    REFERENCES,
    SHIFT,
    WIDTH,
    WRITTEN_STEP,
    Ids,
    Status,
)
from .block_operations import BlockOperations
from .shares import Share, Shares

_NO_SHARES = Shares()


class BlockHistory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became of a block. Steps are those that :meth:`BlockLedger.apply` was given; None: not yet, or not known.

    ``written_step`` is about this generation. ``freed_*`` are about the last time that no reference was left, in this
    generation or, where ``freed_step`` is before ``allocated_step``, in the one before it.
    """

    block_id: int
    generation: int
    status: Status
    allocated_for: str | None
    allocated_step: int | None
    written_step: int | None
    freed_by: str | None
    freed_step: int | None
    freed_cause: str | None


class LedgerSnapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Own copies of what the ledger says about ``block_ids`` ``int32 [n]``; all lists and arrays are ``[n]``.

    -1 in ``hash_tokens``, ``written_step``, ``allocated_step``, ``freed_step``, ``group`` and ``index`` means none, or
    not known. ``shares`` are those of these blocks.
    """

    block_ids: Int32
    generation: Int32
    references: Int32
    status: npt.NDArray[np.uint8]
    hashes: Int32
    hash_tokens: Int32
    declared: Int32
    confirmed: Int32
    written_step: Int32
    allocated_step: Int32
    allocated_for: list[str | None]
    freed_step: Int32
    freed_by: list[str | None]
    freed_cause: list[str | None]
    group: Int32
    index: Int32
    shares: list[Share]


class BlockLedger(BlockOperations):
    """All blocks of one pool: ids ``0 .. num_blocks - 1``, of which ``null_block_id`` is never counted.

    64 bytes a block in columns, 4 bytes for each place in a request's table. Steps beyond ``2**31 - 1`` are kept as
    that number.
    """

    def owners(self, block_id: int) -> list[Share]:
        """Everybody who has the block in a table, the live first, then who gave it up. Walks all requests."""
        return self._holders.shares_of(block_id) if self._has(block_id) else []

    def owns(self, request_id: str, block_id: int) -> bool:
        """Whether a live request has the block in one of its tables."""
        holder = self._holders.by_id.get(request_id)
        if holder is None or not self._has(block_id):
            return False
        return holder.live.has(block_id, self._cells[(block_id << SHIFT) + INDEX])

    def is_owner(self, request_id: str, block_ids: Ids) -> npt.NDArray[np.bool_]:
        """:meth:`owns` for many blocks, ``bool [n]``."""
        where = self._where(block_ids)
        holder = self._holders.by_id.get(request_id)
        if holder is None:
            return np.zeros(len(where), np.bool_)
        return holder.live.has_all(where, self._rows[where, INDEX])

    def owned_by(self, request_id: str) -> list[Share]:
        """What a request has in its tables, then what it gave up and still refers to."""
        return self._holders.shares_by(request_id)

    def has_live(self, request_id: str) -> bool:
        """Whether a request has a block in one of its tables."""
        holder = self._holders.by_id.get(request_id)
        return holder is not None and holder.live.count > 0

    def has_given_up(self, request_id: str) -> bool:
        """Whether a request gave up a block whose reference is still there."""
        holder = self._holders.by_id.get(request_id)
        return holder is not None and holder.held.count > 0

    def allocated_blocks(self, request_id: str, group_id: int) -> int | None:
        """How far a live request's table of a group reaches, in blocks; None for a request without one."""
        holder = self._holders.by_id.get(request_id)
        table = None if holder is None else holder.live.tables.get(group_id)
        return None if table is None else len(table)

    def history(self, block_id: int) -> BlockHistory | None:
        """What became of one block; None outside the pool."""
        if not 0 <= block_id < self.num_blocks:
            return None
        row = self._rows[block_id].tolist()
        return BlockHistory(
            block_id=block_id,
            generation=row[GENERATION],
            status=Status(int(self.status_of([block_id])[0])),
            allocated_for=self._holders.name(row[ALLOCATED_FOR]),
            allocated_step=_known(row[ALLOCATED_STEP]),
            written_step=_known(row[WRITTEN_STEP]),
            freed_by=self._holders.name(row[FREED_BY]),
            freed_step=_known(row[FREED_STEP]),
            freed_cause=_cause(row[FREED_CAUSE]),
        )

    def snapshot(self, block_ids: Ids | None = None) -> LedgerSnapshot:
        """The state of these blocks, by default of all that have ever been handed out or referred to."""
        if block_ids is None:
            used = (self._rows[:, GENERATION] > 0) | (self._rows[:, REFERENCES] > 0)
            block_ids = np.flatnonzero(used[: self.num_blocks])
        where = self._where(block_ids)
        where = where[where < self.num_blocks]
        rows, asked = self._rows[where], set(where.tolist())
        name = self._holders.name
        return LedgerSnapshot(
            block_ids=where.astype(np.int32),
            generation=rows[:, GENERATION],
            references=rows[:, REFERENCES],
            status=self.status_of(where),
            hashes=rows[:, HASHES],
            hash_tokens=rows[:, HASH_TOKENS],
            declared=rows[:, DECLARED],
            confirmed=rows[:, CONFIRMED],
            written_step=rows[:, WRITTEN_STEP],
            allocated_step=rows[:, ALLOCATED_STEP],
            allocated_for=list(map(name, rows[:, ALLOCATED_FOR].tolist())),
            freed_step=rows[:, FREED_STEP],
            freed_by=list(map(name, rows[:, FREED_BY].tolist())),
            freed_cause=list(map(_cause, rows[:, FREED_CAUSE].tolist())),
            group=rows[:, GROUP],
            index=rows[:, INDEX],
            shares=[
                share for holder in self._holders.by_id for share in self.owned_by(holder) if share.block_id in asked
            ],
        )

    def equals(self, other: BlockLedger) -> bool:
        """Whether both say the same of every block, request and pending step, whatever index a request has."""
        if (self.num_blocks, self.null_block_id) != (other.num_blocks, other.null_block_id):
            return False
        mine, theirs = self._rows, other._rows
        named = [ALLOCATED_FOR, FREED_BY]
        plain = np.delete(np.arange(WIDTH), named)
        if not np.array_equal(mine[:, plain], theirs[:, plain]):
            return False
        pairs = np.unique(np.stack((mine[:, named].ravel(), theirs[:, named].ravel())), axis=1)
        if any(self._holders.name(a) != other._holders.name(b) for a, b in zip(*pairs.tolist(), strict=True)):
            return False
        return self._holdings() == other._holdings() and self.pending() == other.pending()

    def differences(
        self,
        ref_counts: Counts,
        free_ids: Ids | None = None,
        tables: HostTables | None = None,
        hash_counts: Counts | None = None,
        *,
        first_block: int = 0,
        all_requests: bool = True,
    ) -> list[Difference]:
        """Where the ledger and the host's own books disagree, at a moment when no operation is under way.

        ``ref_counts`` ``[n]`` and ``hash_counts`` ``[n]`` are the host's, of the blocks ``first_block ..
        first_block + n - 1``: a pool may be audited piece by piece. ``free_ids`` is its whole free queue
        (``FreeKVCacheBlockQueue.get_all_free_blocks``), judged as far as ``ref_counts`` goes. ``tables`` are those of
        all requests (``req_to_blocks`` of each manager), or with ``all_requests=False`` of some. What is None is not
        compared. [] for a healthy pool.
        """
        first, null = first_block, self.null_block_id
        ours = self._rows[first : first + len(ref_counts)]
        found = list(audit.compare_counts(audit.REFERENCES, ours[:, REFERENCES], ref_counts, first=first, null=null))
        if hash_counts is not None:
            found += audit.compare_counts(audit.HASHES, ours[:, HASHES], hash_counts, first=first, null=null)
        if free_ids is not None:
            found += audit.compare_queue(free_ids, ref_counts, first=first, null=null, num_blocks=self.num_blocks)
        if tables is not None:
            found += audit.compare_aliases(tables, ref_counts, first=first, null=null)
            names = dict.fromkeys((*tables, *self._holders.by_id) if all_requests else tables)
            for name in names:
                holder = self._holders.by_id.get(name)
                live, held = (holder.live, holder.held) if holder is not None else (_NO_SHARES, _NO_SHARES)
                found += audit.compare_table(name, live, held, tables.get(name, ()), null=null)
        return found

    def _holdings(self) -> dict[str, set[Share]]:
        return {name: set(self.owned_by(name)) for name in self._holders.by_id}


def _known(step: int) -> int | None:
    return None if step == NONE else step


def _cause(code: int) -> str | None:
    return None if code == NONE else CAUSES[code]
