"""The ledger beside the host's own books, at a moment when both stand still."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ..facts.plans import Int32
from .block_columns import NONE, Ids
from .shares import Shares

REFERENCES = "references"
"""Our count of references and the host's ``ref_cnt``."""
HASHES = "hashes"
"""Our number of hashes and the host's."""
FREE_QUEUE = "free_queue"
"""How often a block must stand in the host's free queue, from the host's own ``ref_cnt``, and how often it does."""
TABLE = "table"
"""The block that a live request has at an index, and the one in the host's table."""
ALIASED = "aliased"
"""How often a block stands in the host's tables, and the fewer references that the host counts."""

HostTables = Mapping[str, Sequence[Sequence[int] | None]]
"""Request -> block ids of each group in logical order, null blocks included. A group that is None is not compared."""
Counts = Sequence[int] | npt.NDArray[np.integer]


class Difference(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One number of a block that two sides have differently, or one place of a table; ``kind`` says which two sides.

    ``ours`` and ``host`` are counts, or for ``table`` the blocks at ``index`` (None: none). ``block_id`` is then the
    host's block, ours where it has none. ``index`` is None where we do not know at which index the request has it.
    """

    kind: str
    block_id: int
    ours: int | None
    host: int | None
    request_id: str | None = None
    group_id: int | None = None
    index: int | None = None


def compare_counts(kind: str, ours: Int32, host: Counts, *, first: int, null: int) -> Iterator[Difference]:
    """``ours`` and ``host`` ``[n]`` are about the blocks ``first .. first + n - 1``; the null block is left out."""
    theirs = np.asarray(host, np.int64)
    for offset in np.flatnonzero(ours != theirs).tolist():
        if first + offset != null:
            yield Difference(kind=kind, block_id=first + offset, ours=int(ours[offset]), host=int(theirs[offset]))


def compare_queue(free_ids: Ids, ref_counts: Counts, *, first: int, null: int, num_blocks: int) -> Iterator[Difference]:
    """The free queue has every block without references once, and nothing else.

    Judged are the blocks that ``ref_counts`` ``[n]`` is about, ``first .. first + n - 1``, and ids outside the pool.
    """
    queued = np.asarray(free_ids, np.int64)
    outside = (queued < 0) | (queued >= num_blocks)
    times = np.bincount(queued[~outside], minlength=num_blocks)
    references = np.asarray(ref_counts, np.int64)
    due = (references == 0).astype(np.int64)
    if first <= null < first + len(due):
        due[null - first] = 0
    for offset in np.flatnonzero(times[first : first + len(due)] != due).tolist():
        block = first + offset
        yield Difference(kind=FREE_QUEUE, block_id=block, ours=int(due[offset]), host=int(times[block]))
    if not outside.any():
        return
    for block, count in zip(*(part.tolist() for part in np.unique(queued[outside], return_counts=True)), strict=True):
        yield Difference(kind=FREE_QUEUE, block_id=block, ours=0, host=count)


def compare_aliases(tables: HostTables, ref_counts: Counts, *, first: int, null: int) -> Iterator[Difference]:
    """No block stands in more places than it has references. Both sides are the host's."""
    blocks = np.array([b for groups in tables.values() for table in groups for b in table or ()], np.int64)
    references = np.asarray(ref_counts, np.int64)
    inside = (blocks >= first) & (blocks < first + len(references)) & (blocks != null)
    owners = np.bincount(blocks[inside] - first, minlength=len(references))
    # A count below zero is another fault, and that of the null block goes there by itself.
    for offset in np.flatnonzero(owners > np.maximum(references, 0)).tolist():
        yield Difference(kind=ALIASED, block_id=first + offset, ours=int(owners[offset]), host=int(references[offset]))


def compare_table(
    request_id: str, live: Shares, held: Shares, groups: Sequence[Sequence[int] | None], *, null: int
) -> Iterator[Difference]:
    """Every place of the host's tables has the block that the request has there, and the other way round.

    What the request has given up may still stand in the host's table, and must not: it depends on why it was given up.
    """
    ours = {group: np.array(table, np.int64) for group, table in live.tables.items()}
    spare = dict(live.loose)
    given_up = set(held.blocks().tolist())
    compared = [(group, table) for group, table in enumerate(groups) if table is not None]
    compared += [(group, ()) for group in sorted(ours) if group >= len(groups) or group < 0]
    for group, table in compared:
        host = np.array([NONE if block == null else block for block in table], np.int64)
        mine = ours.get(group, host[:0])
        length = max(len(host), len(mine))
        host, mine = (np.pad(side, (0, length - len(side)), constant_values=NONE) for side in (host, mine))
        for index in np.flatnonzero(host != mine).tolist():
            theirs, own = int(host[index]), int(mine[index])
            if own == NONE and (_spend(spare, group, theirs) or theirs in given_up):
                continue
            yield Difference(
                kind=TABLE,
                block_id=own if theirs == NONE else theirs,
                ours=None if own == NONE else own,
                host=None if theirs == NONE else theirs,
                request_id=request_id,
                group_id=group,
                index=index,
            )
    skipped = {group for group, table in enumerate(groups) if table is None}
    for (group, block), count in spare.items():
        if group not in skipped:
            for _ in range(count):
                yield Difference(
                    kind=TABLE,
                    block_id=block,
                    ours=block,
                    host=None,
                    request_id=request_id,
                    group_id=None if group == NONE else group,
                )


def _spend(spare: dict[tuple[int, int], int], group: int, block_id: int) -> bool:
    """Whether the request has the block at an index that we do not know; it is then accounted for."""
    for key in ((group, block_id), (NONE, block_id)):
        if spare.get(key):
            spare[key] -= 1
            return True
    return False
