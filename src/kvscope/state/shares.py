"""Which request has which blocks, as the operations of the pool say: the other half of a reference count.

A request is an index in the columns. It stays the same as long as the request has a block or a block's history names
it; after that the index is somebody else's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import repeat

import msgspec
import numpy as np
import numpy.typing as npt

from ..facts.plans import Int32
from .block_columns import ALLOCATED_FOR, FREED_BY, NONE, Where

_WIDEST_GAP_BLOCKS = 1 << 18
_FIRST_SWEEP = 1024


class Share(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request has, or had when it ended, a block in its table of one group.

    ``index`` is in blocks of the group, None where it is not known; ``group_id`` likewise. ``live`` is False once the
    request has given up the block while its reference stays. ``count`` is more than 1 only for equal shares.
    """

    block_id: int
    request_id: str
    group_id: int | None
    index: int | None
    live: bool = True
    count: int = 1


class Shares:
    """Blocks of one request. ``tables[group]`` is ``int32``, one entry a logical block and -1 where there is none;
    ``loose`` counts what stands at no known index, by group and block. ``count`` is the number of all of them.
    """

    __slots__ = ("count", "loose", "tables")

    def __init__(self) -> None:
        self.tables: dict[int, array[int]] = {}
        self.loose: dict[tuple[int, int], int] = {}
        self.count = 0

    def put(self, group: int, first_index: int | None, block_ids: list[int]) -> bool:
        """Add blocks one after the other; whether they stand at their index. What stood there gets loose."""
        self.count += len(block_ids)
        table = self.tables.get(group)
        if table is None:
            table = self.tables[group] = array("i")
        if first_index == len(table):  # as in nearly every call
            table.fromlist(block_ids)
            return True
        gap = NONE if first_index is None or first_index < 0 else first_index - len(table)
        if first_index is None or first_index < 0 or gap > _WIDEST_GAP_BLOCKS:
            for block in block_ids:
                self._loosen(group, block)
            return False
        if gap > 0:
            table.extend(repeat(NONE, gap))
        for displaced in table[first_index : first_index + len(block_ids)]:
            if displaced != NONE:
                self._loosen(group, displaced)
        table[first_index : first_index + len(block_ids)] = array("i", block_ids)
        return True

    def take(self, block_id: int, group: int, index: int) -> bool:
        """Remove one share of the block, that at ``index`` if it is there; False if there is none."""
        table = self.tables.get(group)
        if table is not None and 0 <= index < len(table) and table[index] == block_id:
            table[index] = NONE
        elif not self._search(block_id):
            return False
        self.count -= 1
        return True

    def take_all(self, block_ids: Where, group: int, indices: Int32) -> npt.NDArray[np.bool_]:
        """Remove a share of each block that stands at its index, ``bool [n]``: which did. No block is named twice."""
        table = self.tables.get(group)
        if not table:
            return np.zeros(len(block_ids), np.bool_)
        view = np.frombuffer(table, np.int32)
        taken = _stand(block_ids, view, indices)
        view[indices[taken]] = NONE
        self.count -= int(np.count_nonzero(taken))
        return taken

    def has(self, block_id: int, index: int) -> bool:
        """Whether one of the tables has the block, most likely at ``index``."""
        for table in self.tables.values():
            if 0 <= index < len(table) and table[index] == block_id:
                return True
        return any(block_id in table for table in self.tables.values()) or any(b == block_id for _, b in self.loose)

    def has_all(self, block_ids: Where, indices: Int32) -> npt.NDArray[np.bool_]:
        """:meth:`has` of many blocks, ``bool [n]``."""
        found = np.zeros(len(block_ids), np.bool_)
        for table in self.tables.values():
            if table:
                found |= _stand(block_ids, np.frombuffer(table, np.int32), indices)
        if not found.all():
            found[~found] = np.isin(block_ids[~found], self.blocks())
        return found

    def blocks(self) -> Int32:
        """Ids of all blocks, ``int32 [count]``, one for each share."""
        parts = [np.array(table, np.int32) for table in self.tables.values()]
        parts.append(np.array([block for (_, block), count in self.loose.items() for _ in range(count)], np.int32))
        blocks = np.concatenate(parts)
        present: Int32 = blocks[blocks != NONE]
        return present

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """``(block, group, index, count)`` of all shares, by group and index; index -1 where it is not known."""
        for group, table in self.tables.items():
            for index, block in enumerate(table):
                if block != NONE:
                    yield block, group, index, 1
        for (group, block), count in self.loose.items():
            yield block, group, NONE, count

    def each_of(self, block_id: int) -> Iterator[tuple[int, int, int]]:
        """``(group, index, count)`` of the shares of one block."""
        for group, table in self.tables.items():
            for index in np.flatnonzero(np.array(table, np.int32) == block_id).tolist():
                yield group, index, 1
        for (group, block), count in self.loose.items():
            if block == block_id:
                yield group, NONE, count

    def _search(self, block_id: int) -> bool:
        for key in self.loose:
            if key[1] == block_id:
                self.loose[key] -= 1
                if not self.loose[key]:
                    del self.loose[key]
                return True
        for table in self.tables.values():
            if block_id in table:
                table[table.index(block_id)] = NONE
                return True
        return False

    def _loosen(self, group: int, block_id: int) -> None:
        self.loose[group, block_id] = self.loose.get((group, block_id), 0) + 1


class Holder:
    """A request that has blocks: in its tables (``live``), or given up with their references still there (``held``)."""

    __slots__ = ("held", "index", "live", "request_id")

    def __init__(self, request_id: str, index: int) -> None:
        self.request_id = request_id
        self.index = index
        self.live = Shares()
        self.held = Shares()


class Holders:
    """All requests that have blocks of one pool, and the indices of those that its blocks' histories name.

    ``rows`` are the ledger's, ``int32 [blocks, 16]``: an index is free again when neither a holder nor a row has it.
    """

    def __init__(self, rows: Int32) -> None:
        self.by_id: dict[str, Holder] = {}
        self.ended: dict[str, Holder] = {}
        self._rows = rows
        self._names: list[str | None] = []
        self._index_of: dict[str, int] = {}
        self._unused: list[int] = []
        self._sweep_at = _FIRST_SWEEP

    @property
    def named(self) -> int:
        """How many indices there are, used or not."""
        return len(self._names)

    def index_of(self, request_id: str | None) -> int:
        """The index of a request, -1 for none. A new one is safe as soon as a holder or a row has it."""
        if request_id is None:
            return NONE
        index = self._index_of.get(request_id)
        if index is None:
            if not self._unused and len(self._names) >= self._sweep_at:
                self._sweep()
            if self._unused:
                index = self._unused.pop()
                self._names[index] = request_id
            else:
                index = len(self._names)
                self._names.append(request_id)
            self._index_of[request_id] = index
        return index

    def name(self, index: int) -> str | None:
        return self._names[index] if index >= 0 else None

    def holder(self, request_id: str) -> Holder:
        """The holder of this name, a new one if there is none."""
        holder = self.by_id.get(request_id)
        if holder is None:
            holder = self.by_id[request_id] = Holder(request_id, self.index_of(request_id))
        return holder

    def settle(self, holder: Holder) -> None:
        """After shares went: a holder of nothing is none, and one that has given up something is known for it."""
        if holder.held.count:
            self.ended[holder.request_id] = holder
        else:
            self.ended.pop(holder.request_id, None)
            if not holder.live.count:
                self.by_id.pop(holder.request_id, None)

    def ended_with(self, block_id: int, index: int) -> Holder | None:
        """A holder that gave up the block while its reference stayed, the longest ago if there are several."""
        return next((holder for holder in self.ended.values() if holder.held.has(block_id, index)), None)

    def given_up(self, block_id: int) -> int:
        """How many references to the block are of requests that have ended."""
        return sum(count for holder in self.ended.values() for _, _, count in holder.held.each_of(block_id))

    def all_given_up(self, block_ids: Where) -> Where:
        """:meth:`given_up` of many blocks, ``[n]``."""
        if not self.ended:
            return np.zeros(len(block_ids), np.intp)
        held = np.sort(np.concatenate([holder.held.blocks() for holder in self.ended.values()]))
        return np.searchsorted(held, block_ids, "right") - np.searchsorted(held, block_ids, "left")

    def shares_of(self, block_id: int) -> list[Share]:
        """Everybody who has the block, the live first. Walks all holders."""
        shares: list[Share] = []
        for live in (True, False):
            for holder in (self.by_id if live else self.ended).values():
                found = (holder.live if live else holder.held).each_of(block_id)
                shares += [_share(block_id, holder, group, index, count, live) for group, index, count in found]
        return shares

    def shares_by(self, request_id: str) -> list[Share]:
        """Everything that one request has, the live first."""
        holder = self.by_id.get(request_id)
        if holder is None:
            return []
        return [
            _share(block, holder, group, index, count, live)
            for live, shares in ((True, holder.live), (False, holder.held))
            for block, group, index, count in shares.each()
        ]

    def _sweep(self) -> None:
        used = np.zeros(len(self._names) + 1, np.bool_)  # one more, for rows without a request
        used[self._rows[:, ALLOCATED_FOR]] = True
        used[self._rows[:, FREED_BY]] = True
        used[[holder.index for holder in self.by_id.values()]] = True
        self._unused = np.flatnonzero(~used[:-1])[::-1].tolist()
        for index in self._unused:
            name, self._names[index] = self._names[index], None
            if name is not None:
                del self._index_of[name]
        self._sweep_at = max(_FIRST_SWEEP, 2 * (len(self._names) - len(self._unused)))


def _stand(block_ids: Where, table: Int32, indices: Int32) -> npt.NDArray[np.bool_]:
    """Which blocks ``[n]`` stand in the table at their index, ``bool [n]``."""
    found: npt.NDArray[np.bool_] = table.take(indices, mode="clip") == block_ids
    found &= indices >= 0
    found &= indices < len(table)
    return found


def _share(block_id: int, holder: Holder, group: int, index: int, count: int, live: bool) -> Share:
    return Share(
        block_id=block_id,
        request_id=holder.request_id,
        group_id=None if group == NONE else group,
        index=None if index == NONE else index,
        live=live,
        count=count,
    )
