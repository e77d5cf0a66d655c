"""Request -> block table, rebuilt from declarations alone.

The manager nulls and relocates entries of its own tables without telling the worker, so the table that a worker must
have is what the deltas add up to, not what the manager would answer now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

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


class Bindings:
    """The tables of all live requests of one engine: per group ``int32 [capacity, width]``, grown by doubling.

    A request occupies the same row in every group until it finishes or is preempted. ``version`` changes with every
    change of a table or of who has one.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.tables: list[Int32] = [np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32) for _ in topology.groups]
        self.lengths: Int32 = np.zeros((len(topology.groups), _FIRST_ROWS), np.int32)
        self._computed: Int64 = np.zeros(_FIRST_ROWS, np.int64)
        self._seq_lens: Int64 = np.zeros(_FIRST_ROWS, np.int64)
        self._unsettled: StepRequests | None = None
        self.version = 0
        self._holders: dict[int, Int32] = {}
        self.partial: set[str] = set()
        self._row_of: dict[str, int] = {}
        self._counting: dict[int, bytes] = {}
        self._capacity_tokens: dict[str, int] = {}
        self._judged = [(index, group.block_size) for index, group in enumerate(topology.groups) if group.judged]
        self._free_rows: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))
        self._rows_of: dict[tuple[str, ...], npt.NDArray[np.intp]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    @property
    def live(self) -> Iterable[str]:
        """Ids of all requests that have a table."""
        return self._row_of.keys()

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
        if self._unsettled is not None and self._unsettled.scheduled.keys() != requests.scheduled.keys():
            self._settle()
        for request_id in requests.finished:
            self._release(request_id)
        for request_id in requests.preempted:
            self._release(request_id)
        for request_id, blocks in zip(requests.new_ids, requests.new_blocks, strict=True):
            self._bind(request_id, blocks)
        row_of, resumed = self._row_of, requests.resumed
        for request_id, delta in zip(requests.cached_ids, requests.cached_blocks, strict=True):
            if request_id in row_of and request_id not in resumed:
                if delta is not None:
                    self._append(request_id, row_of[request_id], delta)
            else:
                known = request_id in resumed
                self._bind(request_id, delta or ())
                if not known:
                    self.partial.add(request_id)
        self._unsettled = requests

    def is_doubtful(self, requests: StepRequests) -> bool:
        """Whether the rules about declarations have to look at the step that was just taken over.

        False means that nobody's blocks fall short and every new block lies in the pool and stands only once in its
        table.
        """
        capacity, scheduled = self._capacity_tokens, requests.scheduled
        for request_id, computed in requests.computed().items():
            if computed + scheduled.get(request_id, 0) > capacity.get(request_id, 0):
                return True
        for request_id, blocks in zip(requests.new_ids, requests.new_blocks, strict=True):
            if self._doubtful_blocks(request_id, blocks):
                return True
        for request_id, delta in zip(requests.cached_ids, requests.cached_blocks, strict=True):
            if delta is not None and self._doubtful_blocks(request_id, delta):
                return True
        return False

    def _doubtful_blocks(self, request_id: str, blocks: BlockIds) -> bool:
        row, end = self._row_of[request_id], self.topology.num_blocks
        for group_index, block_ids in enumerate(blocks):
            if not block_ids:
                continue
            if min(block_ids) < 0 or max(block_ids) >= end:
                return True
            length = int(self.lengths[group_index, row])
            table = self.tables[group_index][row, :length]
            if len(block_ids) == 1:
                if np.count_nonzero(table == block_ids[0]) > 1:
                    return True
            elif len(set(table.tolist())) != length:
                return True
        return False

    def rows_of(self, request_ids: Sequence[str]) -> npt.NDArray[np.intp]:
        """Row of each request, ``intp [n]``; -1 for one that has no table.

        The same requests in the same order get the same array object as long as nobody is bound or released.
        """
        key = tuple(request_ids)
        rows = self._rows_of.get(key)
        if rows is None:
            if len(self._rows_of) >= _REMEMBERED_BATCHES:
                self._rows_of.clear()
            row_of = self._row_of
            rows = self._rows_of[key] = np.fromiter((row_of.get(r, -1) for r in key), np.intp, len(key))
        return rows

    def counting(self, count: int) -> bytes:
        """The bytes of ``int32 [0, 1, ..., count - 1]``: the query starts of a batch of single tokens."""
        known = self._counting.get(count)
        if known is None:
            known = self._counting[count] = np.arange(count, dtype=np.int32).tobytes()
        return known

    def table(self, request_id: str, group_index: int) -> Int32:
        """The blocks of one request in one group, in logical order; a view, empty for an unknown request."""
        row = self._row_of.get(request_id)
        if row is None:
            return np.zeros(0, np.int32)
        view: Int32 = self.tables[group_index][row, : self.lengths[group_index, row]]
        return view

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
        holders = self._holders.get(group_index)
        if holders is None:
            holders = self._holders[group_index] = np.full(self.topology.num_blocks, -1, np.int32)
            for request_id, blocks in self._held(group_index):
                holders[blocks[(blocks >= 0) & (blocks < holders.size)]] = self._row_of[request_id]
        if not 0 <= block_id < holders.size or block_id == self.topology.null_block_id or holders[block_id] < 0:
            return None
        row = int(holders[block_id])
        return next(request_id for request_id, held in self._row_of.items() if held == row)

    def foreign_holder(self, group_index: int, block_id: int, request_id: str) -> str | None:
        """Another live request that has the block while this one has not, None if there is none."""
        holder = self.a_holder(group_index, block_id)
        if holder is None or holder == request_id or (self.table(request_id, group_index) == block_id).any():
            return None
        return holder

    def _held(self, group_index: int) -> Iterator[tuple[str, Int32]]:
        """Each live request's blocks from its attention window on; one before it may be somebody else's by now."""
        first = first_visible_block(self.topology.groups[group_index], self.computed)
        for request_id, row in self._row_of.items():
            yield request_id, self.tables[group_index][row, first[row] : self.lengths[group_index, row]]

    def ensure_width(self, group_index: int, width: int) -> None:
        """Make the group's table at least ``width`` entries wide, so that ``[:, :width]`` can be gathered."""
        table = self.tables[group_index]
        if table.shape[1] < width:
            wider = np.zeros((table.shape[0], max(width, 2 * table.shape[1])), np.int32)
            wider[:, : table.shape[1]] = table
            self.tables[group_index] = wider

    def _bind(self, request_id: str, blocks: BlockIds) -> None:
        self.partial.discard(request_id)
        self._rows_of.clear()
        row = self._row_of.get(request_id)
        if row is None:
            row = self._row_of[request_id] = self._take_row()
        self.lengths[:, row] = 0
        self._append(request_id, row, blocks)

    def _append(self, request_id: str, row: int, delta: BlockIds) -> None:
        self.version += 1
        for group_index, block_ids in enumerate(delta):
            if not block_ids:
                continue
            start = int(self.lengths[group_index, row])
            end = start + len(block_ids)
            if end > self.tables[group_index].shape[1]:
                self.ensure_width(group_index, end)
            try:
                self.tables[group_index][row, start:end] = block_ids
            except OverflowError:  # an id that no pool can have; it stays one
                self.tables[group_index][row, start:end] = [min(max(block, -1), _LARGEST) for block in block_ids]
            self.lengths[group_index, row] = end
        self._capacity_tokens[request_id] = min(
            (int(self.lengths[index, row]) * size for index, size in self._judged), default=_UNLIMITED
        )

    def _release(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        self._rows_of.clear()
        self.version += 1
        self.partial.discard(request_id)
        self._capacity_tokens.pop(request_id, None)
        self.lengths[:, row] = 0
        self._free_rows.append(row)

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
            self.tables = [np.concatenate((t, np.zeros_like(t))) for t in self.tables]
            self.lengths = np.concatenate((self.lengths, np.zeros_like(self.lengths)), axis=1)
            self._computed = np.concatenate((self._computed, np.zeros_like(self._computed)))
            self._seq_lens = np.concatenate((self._seq_lens, np.zeros_like(self._seq_lens)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()
