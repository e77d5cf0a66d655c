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


class Bindings:
    """The tables of all live requests of one engine: per group ``int32 [capacity, width]``, grown by doubling.

    A request occupies the same row in every group until it finishes or is preempted. ``computed`` and ``seq_lens`` are
    its tokens before and after the step of the last declaration that scheduled it. ``version`` changes with every
    change of a table or of who has one.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.tables: list[Int32] = [np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32) for _ in topology.groups]
        self.lengths: Int32 = np.zeros((len(topology.groups), _FIRST_ROWS), np.int32)
        self.computed: Int64 = np.zeros(_FIRST_ROWS, np.int64)
        self.seq_lens: Int64 = np.zeros(_FIRST_ROWS, np.int64)
        self.version = 0
        self._holders: dict[int, Int32] = {}
        self.partial: set[str] = set()
        self._row_of: dict[str, int] = {}
        self._free_rows: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))
        self._rows_of: dict[tuple[str, ...], npt.NDArray[np.intp]] = {}
        self._counting: dict[int, bytes] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    @property
    def live(self) -> Iterable[str]:
        """Ids of all requests that have a table."""
        return self._row_of.keys()

    def apply(self, requests: StepRequests) -> None:
        """Take over one step: release what finished or was preempted, then bind and append.

        A known-request entry without a table (kvscope was switched on after its admission) gets one that is marked
        ``partial``: its rows are not judged.
        """
        self._holders = {}
        for request_id in requests.finished:
            self._release(request_id)
        for request_id in requests.preempted:
            self._release(request_id)
        if requests.new_ids:
            for request_id, blocks in zip(requests.new_ids, requests.new_blocks, strict=True):
                self._bind(request_id, blocks)
        resumed = requests.resumed
        for request_id, delta in zip(requests.cached_ids, requests.cached_blocks, strict=True):
            if request_id in resumed:
                self._bind(request_id, delta or ())
            elif request_id not in self._row_of:
                self._bind(request_id, delta or ())
                self.partial.add(request_id)
            elif delta is not None:
                self._append(self._row_of[request_id], delta)
        self._note(requests.new_ids, requests.new_computed, requests.scheduled)
        self._note(requests.cached_ids, requests.cached_computed, requests.scheduled)

    def rows_of(self, request_ids: Sequence[str]) -> npt.NDArray[np.intp]:
        """Row of each request, ``intp [n]``; -1 for one that has no table.

        The same requests in the same order get the same array object as long as nobody's row changes.
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
        row = self._row_of.get(request_id)
        if row is None:
            row = self._row_of[request_id] = self._take_row()
            self._rows_of.clear()
        self.lengths[:, row] = 0
        self._append(row, blocks)

    def _append(self, row: int, delta: BlockIds) -> None:
        self.version += 1
        for group_index, block_ids in enumerate(delta):
            if not block_ids:
                continue
            start = int(self.lengths[group_index, row])
            end = start + len(block_ids)
            if end > self.tables[group_index].shape[1]:
                self.ensure_width(group_index, end)
            self.tables[group_index][row, start:end] = block_ids
            self.lengths[group_index, row] = end

    def _release(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        self._rows_of.clear()
        self.version += 1
        self.partial.discard(request_id)
        self.lengths[:, row] = 0
        self._free_rows.append(row)

    def _note(self, request_ids: list[str], computed: list[int], scheduled: dict[str, int]) -> None:
        if not request_ids:
            return
        rows = self.rows_of(request_ids)
        before = np.array(computed, np.int64)
        self.computed[rows] = before
        self.seq_lens[rows] = before + np.fromiter(map(scheduled.get, request_ids, repeat(0)), np.int64, len(rows))

    def _take_row(self) -> int:
        if not self._free_rows:
            rows = len(self.computed)
            self.tables = [np.concatenate((t, np.zeros_like(t))) for t in self.tables]
            self.lengths = np.concatenate((self.lengths, np.zeros_like(self.lengths)), axis=1)
            self.computed = np.concatenate((self.computed, np.zeros_like(self.computed)))
            self.seq_lens = np.concatenate((self.seq_lens, np.zeros_like(self.seq_lens)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()
