"""Request -> block table, rebuilt from declarations alone.

The manager nulls and relocates entries of its own tables without telling the worker, so the table that a worker must
have is what the deltas add up to, not what the manager would answer now.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import add, sub

import numpy as np
import numpy.typing as npt

from ..facts.plans import Int32, Int64
from ..facts.requests import BlockIds, StepRequests
from ..facts.topology import Topology
from .visibility import first_visible_block

_FIRST_ROWS = 16
_FIRST_WIDTH = 16
_REMEMBERED_BATCHES = 32
_UNLIMITED = 1 << 62
_LARGEST = (1 << 31) - 1


class Table:
    """The blocks of one live request as they were declared, one ``int32`` array a group: what the tables are made of.

    ``row`` is where it stands in them, and ``capacity_tokens`` how many tokens it holds in the group with the fewest.
    From ``sound_from[g]`` on there is no block that nothing may touch: outside the pool, or the null block. ``seen``
    has the same blocks as sets, and ``written[g]`` of them stand in the tables already.
    """

    __slots__ = ("blocks", "capacity_tokens", "row", "seen", "sound_from", "written")

    def __init__(self, row: int, groups: int) -> None:
        self.row = row
        self.blocks: list[array[int]] = [array("i") for _ in range(groups)]
        self.sound_from = [0] * groups
        self.seen: list[set[int]] = [set() for _ in range(groups)]
        self.written = [0] * groups
        self.capacity_tokens = _UNLIMITED


class Bindings:
    """The tables of all live requests of one engine: per group ``int32 [capacity, width]``, grown by doubling.

    A request occupies the same row in every group until it finishes or is preempted. ``version`` changes with every
    change of a table or of who has one. The arrays are brought up to date when somebody looks at them: a step takes
    over a few Python numbers, and most steps need no more.

    ``went_on`` says that the step that was taken over last has exactly the requests of the one before, and
    ``is_steady`` that each of them goes on by one token from where that one left it, as a batch that decodes does. Who
    follows declarations then knows all about this one. ``ends`` are the tokens of its requests after it, in the order
    of ``cached_ids`` (a list that does not change); after another step than ``went_on`` they mean nothing. ``ones`` is
    not None after a step that ``went_on`` with one token for each. ``applied`` counts the steps that were taken over.

    ``doubtful`` says, where ``doubts`` were asked for, whether the rules about declarations have to look at the step
    that was taken over last. False means that nobody's blocks fall short, and that every new block lies in the pool, is
    not the null block, and stands only once in its table.
    """

    def __init__(self, topology: Topology, *, doubts: bool = False) -> None:
        self.topology = topology
        self.doubtful = False
        self.went_on = self.is_steady = False
        self.applied = 0
        self.ends: list[int] = []
        self.version = 0
        self.partial: set[str] = set()
        self._doubts = doubts
        self.ones: dict[str, int] | None = None
        self._room_tokens = 0
        self._room_version = -1
        self._live: dict[str, Table] = {}
        self._bound: dict[tuple[str, ...], list[Table] | None] = {}
        self._stale: dict[int, Table] = {}
        self._tables: list[Int32] = [np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32) for _ in topology.groups]
        self._lengths: Int32 = np.zeros((len(topology.groups), _FIRST_ROWS), np.int32)
        self._computed: Int64 = np.zeros(_FIRST_ROWS, np.int64)
        self._seq_lens: Int64 = np.zeros(_FIRST_ROWS, np.int64)
        self._unsettled: StepRequests | None = None
        self._holders: dict[int, Int32] = {}
        self._positions = b""
        self._judged = [(index, group.block_size) for index, group in enumerate(topology.groups) if group.judged]
        self._free_rows: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))
        self._rows_of: dict[tuple[str, ...], npt.NDArray[np.intp]] = {}

    @property
    def num_judged(self) -> int:
        """How many groups there are whose tables mean what the rules take them to mean."""
        return len(self._judged)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def live(self) -> Iterable[str]:
        """Ids of all requests that have a table."""
        return self._live.keys()

    @property
    def tables(self) -> list[Int32]:
        """One array a group; a row means something up to its length."""
        if self._stale:
            self._write()
        return self._tables

    @property
    def lengths(self) -> Int32:
        """``int32 [groups, capacity]``: blocks of each row."""
        if self._stale:
            self._write()
        return self._lengths

    @property
    def computed(self) -> Int64:
        """``int64 [capacity]``: tokens of each row before the last step that scheduled it."""
        self._settle()
        return self._computed

    @property
    def seq_lens(self) -> Int64:
        """``int64 [capacity]``: tokens of each row after the last step that scheduled it."""
        self._settle()
        return self._seq_lens

    def apply(self, requests: StepRequests) -> None:
        """Take over one step: release what finished or was preempted, then bind and append.

        A known-request entry without a table (kvscope was switched on after its admission) gets one that is marked
        ``partial``: its rows are not judged.
        """
        if self._holders:
            self._holders.clear()
        self.applied += 1
        self.went_on = self.is_steady = False
        before = self._unsettled
        if before is not None:
            if not before.new_ids and before.cached_ids == requests.cached_ids and self._go_on(requests):
                return
            self._settle()
        for request_id in requests.finished:
            self._release(request_id)
        for request_id in requests.preempted:
            self._release(request_id)
        live, resumed, scheduled = self._live, requests.resumed, requests.scheduled
        doubtful = False
        for request_id, blocks, computed in zip(
            requests.new_ids, requests.new_blocks, requests.new_computed, strict=True
        ):
            bound = self._bind(request_id)
            doubtful |= self._append(bound, blocks)
            doubtful |= computed + scheduled.get(request_id, 0) > bound.capacity_tokens
        for request_id, delta, computed in zip(
            requests.cached_ids, requests.cached_blocks, requests.cached_computed, strict=True
        ):
            table = live.get(request_id)
            if table is None or request_id in resumed:
                table = self._bind(request_id)
                if request_id not in resumed:
                    self.partial.add(request_id)
            if delta is not None and self._append(table, delta):
                doubtful = True
            if computed + scheduled.get(request_id, 0) > table.capacity_tokens:
                doubtful = True
        self.doubtful = doubtful
        self.ones, self._room_version = None, -1
        self._unsettled = requests

    def _go_on(self, requests: StepRequests) -> bool:
        """:meth:`apply` for a step that has the same requests as the one before; False where it is not that simple."""
        if requests.new_ids or requests.resumed or requests.finished or requests.preempted:
            return False
        ids, computed, deltas, doubtful = requests.cached_ids, requests.cached_computed, requests.cached_blocks, False
        if deltas.count(None) != len(deltas):
            live = self._live
            for request_id, delta in zip(ids, deltas, strict=True):
                if delta is not None and self._append(live[request_id], delta):
                    doubtful = True
        if requests.scheduled == self.ones and computed == self.ends:
            self.is_steady = True
            self.ends = list(map(add, computed, repeat(1)))
            self._room_tokens -= 1
        else:
            scheduled = list(map(requests.scheduled.get, ids, repeat(0)))
            self.ones = requests.scheduled if scheduled.count(1) == len(ids) == len(requests.scheduled) else None
            self.ends = list(map(add, computed, scheduled))
            self._room_version = -1
        if self._doubts:
            if self._room_version != self.version:
                self._room_tokens, self._room_version = self._room(ids), self.version
            doubtful |= self._room_tokens < 0
        self.doubtful = doubtful
        self.went_on = True
        self._unsettled = requests
        return True

    def _room(self, request_ids: Sequence[str]) -> int:
        """How many tokens the request that is closest to the end of its blocks may still go on by."""
        limits = [self._live[request_id].capacity_tokens for request_id in request_ids]
        return min(map(sub, limits, self.ends), default=_UNLIMITED)

    def rows_of(self, request_ids: Sequence[str]) -> npt.NDArray[np.intp]:
        """Row of each request, ``intp [n]``; -1 for one that has no table.

        The same requests in the same order get the same array object as long as nobody is bound or released.
        """
        key = tuple(request_ids)
        rows = self._rows_of.get(key)
        if rows is None:
            if len(self._rows_of) >= _REMEMBERED_BATCHES:
                self._rows_of.clear()
            tables = map(self._live.get, key)
            rows = self._rows_of[key] = np.fromiter((-1 if t is None else t.row for t in tables), np.intp, len(key))
        return rows

    def positions(self, count: int) -> bytes:
        """The bytes of ``int64 [0, 1, ...]``, at least ``count`` of them: what consecutive positions are slices of."""
        if len(self._positions) < 8 * count:
            self._positions = np.arange(2 * count, dtype=np.int64).tobytes()
        return self._positions

    def table(self, request_id: str, group_index: int) -> Int32:
        """The blocks of one request in one group, in logical order; a view, empty for an unknown request."""
        table = self._live.get(request_id)
        if table is None:
            return np.zeros(0, np.int32)
        view: Int32 = self.tables[group_index][table.row, : len(table.blocks[group_index])]
        return view

    def table_of(self, request_id: str) -> Table | None:
        """The table of one request as it was declared, None if it has none."""
        return self._live.get(request_id)

    def bound(self, request_ids: Sequence[str]) -> list[Table] | None:
        """The tables of these requests, None if one of them has none.

        The same requests in the same order get the same list object as long as nobody is bound or released.
        """
        key = tuple(request_ids)
        if key not in self._bound:
            if len(self._bound) >= _REMEMBERED_BATCHES:
                self._bound.clear()
            tables = [self._live[request_id] for request_id in key if request_id in self._live]
            self._bound[key] = tables if len(tables) == len(key) else None
        return self._bound[key]

    def holders(self, group_index: int, block_id: int) -> list[str]:
        """Live requests whose table in this group has the block where attention still looks; nobody has the null block.

        Walks all tables: for findings, not for steps.
        """
        if block_id == self.topology.null_block_id:
            return []
        return [request_id for request_id, blocks in self._held(group_index) if (blocks == block_id).any()]

    def a_holder(self, group_index: int, block_id: int) -> str | None:
        """One of :meth:`holders`, None if there is none.

        Answered from a map of all blocks that is made when something is asked after a declaration: a step in which
        many accesses are wrong must not walk all tables for each of them.
        """
        holders = self.holder_rows(group_index)
        if not 0 <= block_id < holders.size or block_id == self.topology.null_block_id or holders[block_id] < 0:
            return None
        row = int(holders[block_id])
        return next(request_id for request_id, table in self._live.items() if table.row == row)

    def holder_rows(self, group_index: int) -> Int32:
        """``int32 [num_blocks]``: the row of one request that has the block where attention still looks, else -1."""
        holders = self._holders.get(group_index)
        if holders is None:
            holders = self._holders[group_index] = np.full(self.topology.num_blocks, -1, np.int32)
            for request_id, blocks in self._held(group_index):
                holders[blocks[(blocks >= 0) & (blocks < holders.size)]] = self._live[request_id].row
        return holders

    def foreign_holder(self, group_index: int, block_id: int, request_id: str) -> str | None:
        """Another live request that has the block while this one has not, None if there is none."""
        holder = self.a_holder(group_index, block_id)
        if holder is None or holder == request_id or (self.table(request_id, group_index) == block_id).any():
            return None
        return holder

    def _held(self, group_index: int) -> Iterator[tuple[str, Int32]]:
        """Each live request's blocks from its attention window on; one before it may be somebody else's by now."""
        first = first_visible_block(self.topology.groups[group_index], self.computed)
        array = self.tables[group_index]
        for request_id, table in self._live.items():
            yield request_id, array[table.row, first[table.row] : len(table.blocks[group_index])]

    def ensure_width(self, group_index: int, width: int) -> None:
        """Make the group's table at least ``width`` entries wide, so that ``[:, :width]`` can be gathered."""
        table = self._tables[group_index]
        if table.shape[1] < width:
            wider = np.zeros((table.shape[0], max(width, 2 * table.shape[1])), np.int32)
            wider[:, : table.shape[1]] = table
            self._tables[group_index] = wider

    def _bind(self, request_id: str) -> Table:
        """An empty table for a request; what it had is forgotten."""
        self.partial.discard(request_id)
        self._rows_of.clear()
        self._bound.clear()
        before = self._live.get(request_id)
        row = self._take_row() if before is None else before.row
        table = Table(row, len(self._tables))
        self._live[request_id] = self._stale[row] = table
        self._count_capacity(table)
        return table

    def _append(self, table: Table, delta: BlockIds) -> bool:
        """Whether the rules have to look at these blocks."""
        self.version += 1
        end, null = self.topology.num_blocks, self.topology.null_block_id
        doubtful = len(delta) != len(table.blocks)
        for group_index, (blocks, block_ids) in enumerate(zip(table.blocks, delta, strict=not doubtful)):
            if not block_ids:
                continue
            is_outside = min(block_ids) < 0 or max(block_ids) >= end
            if is_outside:  # an id that no pool can have stays one
                blocks.extend(min(max(block, -1), _LARGEST) for block in block_ids)
            else:
                blocks.extend(block_ids)
            has_null = null in block_ids
            if is_outside or has_null:
                table.sound_from[group_index] = len(blocks)
            if self._doubts:
                seen = table.seen[group_index]
                fresh = len(seen) + len(block_ids)
                seen.update(block_ids)
                is_unsound = is_outside or (has_null and self.topology.groups[group_index].judged)
                doubtful |= is_unsound or len(seen) != fresh
        self._stale[table.row] = table
        self._count_capacity(table)
        return doubtful

    def _count_capacity(self, table: Table) -> None:
        capacity = _UNLIMITED
        for group_index, block_size in self._judged:
            capacity = min(capacity, len(table.blocks[group_index]) * block_size)
        table.capacity_tokens = capacity

    def _release(self, request_id: str) -> None:
        table = self._live.pop(request_id, None)
        if table is None:
            return
        self._rows_of.clear()
        self._bound.clear()
        self.version += 1
        self.partial.discard(request_id)
        self._stale.pop(table.row, None)
        self._lengths[:, table.row] = 0
        self._free_rows.append(table.row)

    def _write(self) -> None:
        """Bring the arrays of tables up to what was declared."""
        stale, self._stale = self._stale, {}
        for row, table in stale.items():
            for group_index, blocks in enumerate(table.blocks):
                start, end = table.written[group_index], len(blocks)
                self._lengths[group_index, row] = table.written[group_index] = end
                if not start:  # what the row's request had before is nobody's to be found right
                    self._tables[group_index][row] = 0
                if start == end:
                    continue
                self.ensure_width(group_index, end)
                self._tables[group_index][row, start:end] = blocks[start:]

    def _settle(self) -> None:
        """Bring the arrays of token numbers up to the last step; most steps are judged without them."""
        requests, self._unsettled = self._unsettled, None
        if requests is None:
            return
        for ids, computed in (
            (requests.new_ids, requests.new_computed),
            (requests.cached_ids, requests.cached_computed),
        ):
            if ids:
                rows = self.rows_of(ids)
                before = np.array(computed, np.int64)
                scheduled = np.fromiter(map(requests.scheduled.get, ids, repeat(0)), np.int64, len(rows))
                self._computed[rows] = before
                self._seq_lens[rows] = before + scheduled

    def _take_row(self) -> int:
        if not self._free_rows:
            rows = len(self._computed)
            self._tables = [np.concatenate((t, np.zeros_like(t))) for t in self._tables]
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)), axis=1)
            self._computed = np.concatenate((self._computed, np.zeros_like(self._computed)))
            self._seq_lens = np.concatenate((self._seq_lens, np.zeros_like(self._seq_lens)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()
