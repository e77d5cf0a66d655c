"""C1 at the last point that the host sees: what the attention operators get, beside the plan as it was judged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ..facts.operators import OperatorArguments, OperatorGroup, OperatorRows, OperatorSlots
from ..facts.plans import PAD_SLOT, GroupPlan, Int32, Int64, Plan
from ..facts.topology import Group, Topology
from ..state.visibility import first_visible_block
from . import rule as r
from .finding import Finding
from .handed import kernel_tables
from .rule import rule


class OperatorView:
    """The arguments of one forward beside the plan (:meth:`HandedPlan.plan`). A plan that was found to be as declared
    makes this a comparison with the declaration as well.
    """

    def __init__(self, step: int, trace_id: str, plan: Plan, arguments: OperatorArguments, topology: Topology) -> None:
        self.step = step
        self.trace_id = trace_id
        self.plan = plan
        self.arguments = arguments
        self.topology = topology

    @cached_property
    def query_lens(self) -> Int32:
        """``int32 [rows]``."""
        return np.diff(self.plan.query_start)

    def groups(self) -> Iterator[OperatorGroupView]:
        plans = {group.group_id: group for group in self.plan.groups}
        of_id = {group.group_id: group for group in self.topology.groups}
        for group in self.arguments.groups:
            if group.group_id in plans:
                yield OperatorGroupView(self, group, plans[group.group_id], of_id[group.group_id])


class OperatorGroupView:
    """The arguments of one group; ``group`` is what the manager says of it, ``arguments`` what its layers get."""

    def __init__(self, view: OperatorView, arguments: OperatorGroup, plan: GroupPlan, group: Group) -> None:
        self.view = view
        self.arguments = arguments
        self.plan = plan
        self.group = group

    @property
    def end_slot(self) -> int:
        return self.view.topology.num_blocks * self.group.block_size

    def finding(self, row: int | None, *, expected: int | str, actual: int | str) -> Finding:
        return Finding(
            reason="",
            step=self.view.step,
            trace_id=self.view.trace_id,
            request_id=None if row is None else self.view.plan.request_ids[row],
            row=row,
            group_id=self.group.group_id,
            expected=expected,
            actual=actual,
        )

    # Slots ------------------------------------------------------------------------------------------------------------

    def slots(self, mapping: OperatorSlots) -> Iterator[Finding]:
        """The first token of each row that would be written elsewhere, and padding that is switched on."""
        plan, first = self.view.plan, mapping.first_token
        planned = self.plan.slots[first : first + mapping.slots.size]
        given = mapping.slots[: planned.size].astype(np.int64, copy=False)
        if given.size < mapping.tokens:
            short = self._row_of(first + given.size)
            yield self.finding(short, expected=f"{mapping.tokens} slots", actual=f"{given.size} slots")
        told: set[int | None] = set()
        behind = mapping.slots[planned.size :]
        for index in np.flatnonzero(given != planned).tolist():
            token = first + index
            real = token < plan.num_tokens
            row = self._row_of(token) if real else None
            if row not in told:
                told.add(row)
                yield self._slot(row, token, int(planned[index]), int(given[index]))
        enabled = np.flatnonzero(behind != PAD_SLOT)
        if enabled.size and None not in told:
            index = planned.size + int(enabled[0])
            yield self._slot(None, first + index, PAD_SLOT, int(mapping.slots[index]))

    def _slot(self, row: int | None, token: int, expected: int, actual: int) -> Finding:
        finding = self.finding(row, expected=expected, actual=actual)
        finding.token_index, finding.slot, finding.block_id = token, actual, actual // self.group.block_size
        if row is not None:
            finding.position = int(self.view.plan.positions[token])
        finding.launch_fatal = actual >= self.end_slot or actual < PAD_SLOT
        return finding

    def _row_of(self, token: int) -> int:
        row = np.searchsorted(self.view.plan.query_start[1:], token, side="right")
        return min(int(row), len(self.view.plan.request_ids) - 1)

    # Rows -------------------------------------------------------------------------------------------------------------

    def rows(self, part: OperatorRows) -> Iterator[Finding]:
        """Lengths, query offsets and tables of one part."""
        if part.chunk_tokens is not None:
            yield from self._pieces(part, part.chunk_tokens)
            return
        yield from self._lengths(part)
        yield from self._offsets(part)
        yield from self._tables(part)

    def _ends(self, part: OperatorRows) -> tuple[Int64, Int64]:
        """``int64 [rows]``: the declared ends of the part's rows within the batch, and their lengths up to there."""
        rows = slice(part.first_row, part.first_row + part.rows)
        ends = self.view.plan.query_start[1:][rows].astype(np.int64)
        cut = np.maximum(ends - part.end_token, 0)
        return ends, self.view.plan.seq_lens[rows] - cut

    def _lengths(self, part: OperatorRows) -> Iterator[Finding]:
        if part.seq_lens is None:
            return
        _, expected = self._ends(part)
        given = _padded(part.seq_lens, part.rows)
        for row in np.flatnonzero(given != expected).tolist():
            longer = int(given[row]) > int(expected[row])
            finding = self.finding(part.first_row + row, expected=int(expected[row]), actual=int(given[row]))
            if longer:
                finding.launch_fatal = int(given[row]) > part.tables.shape[1] * self._kernel_block_size
            yield finding

    @property
    def _kernel_block_size(self) -> int:
        return self.group.block_size // self.arguments.kernel_blocks

    def _offsets(self, part: OperatorRows) -> Iterator[Finding]:
        if part.query_start is None:
            return
        starts = self.view.plan.query_start[part.first_row : part.first_row + part.rows + 1].astype(np.int64)
        expected = np.clip(starts - part.first_token, 0, part.end_token - part.first_token)
        given = _padded(part.query_start, part.rows + 1)
        wrong = np.flatnonzero(given != expected)
        if wrong.size:
            # Offset i ends row i - 1 and begins row i: the row whose end is wrong is the first that is hurt.
            row = max(int(wrong[0]) - 1, 0)
            want, have = np.diff(expected)[row], np.diff(given)[row]
            yield self.finding(
                part.first_row + row, expected=f"{int(want)} query tokens", actual=f"{int(have)} query tokens"
            )

    def _tables(self, part: OperatorRows) -> Iterator[Finding]:
        size, ratio = self.group.block_size, self.arguments.kernel_blocks
        rows = slice(part.first_row, part.first_row + part.rows)
        _, lengths = self._ends(part)
        computed = self.view.plan.seq_lens[rows].astype(np.int64) - self.view.query_lens[rows]
        needed = (lengths + size - 1) // size
        first = np.zeros_like(needed)
        if self.group.visible_tokens is not None:
            first = np.minimum(first_visible_block(self.group, computed), needed)
        planned = self.plan.tables[rows]
        width = planned.shape[1]
        columns = np.arange(width)
        visible = (columns >= first[:, None]) & (columns < needed[:, None])
        expected = kernel_tables(planned, self.arguments).reshape(part.rows, width, ratio)
        given = self._handed(part, part.rows, width * ratio).reshape(part.rows, width, ratio)
        differ = (given != expected) & visible[:, :, None]
        for row in np.flatnonzero(differ.any(axis=(1, 2))).tolist():
            index, kernel = divmod(int(differ[row].reshape(-1).argmax()), ratio)
            yield self._entry(
                part.first_row + row, index, kernel, int(planned[row, index]), int(given[row, index, kernel])
            )

    def _pieces(self, part: OperatorRows, chunk_tokens: int) -> Iterator[Finding]:
        """All rows, cut where a chunk begins. A piece follows from its tokens alone: they belong to the chunk of their
        positions, and see it from its first block on up to themselves.
        """
        plan, ratio, size = self.view.plan, self.arguments.kernel_blocks, self._kernel_block_size
        row_of = np.searchsorted(plan.query_start[1:], np.arange(plan.num_tokens), side="right").clip(max=part.rows - 1)
        begins = plan.positions % chunk_tokens == 0
        begins[plan.query_start[:-1]] = True
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], plan.num_tokens)
        rows, last = row_of[starts], plan.positions[ends - 1]
        lengths = last % chunk_tokens + 1
        told: set[int] = set()
        offsets = np.append(starts, plan.num_tokens)
        for array, expected in ((part.seq_lens, lengths), (part.query_start, offsets)):
            given = expected if array is None else _padded(array, len(expected))
            for piece in np.flatnonzero(given != expected)[:1].tolist():
                row = int(rows[max(piece - (array is part.query_start), 0)])
                told.add(row)
                yield self.finding(row, expected=int(expected[piece]), actual=int(given[piece]))
        first = last // chunk_tokens * chunk_tokens // size
        columns = first[:, None] + np.arange(chunk_tokens // size)
        planned = kernel_tables(self.plan.tables, self.arguments)
        blocks = planned[rows[:, None], np.minimum(columns, planned.shape[1] - 1)]
        handed = self._handed(part, *blocks.shape)
        differ = (handed != blocks) & (np.arange(blocks.shape[1]) * size < lengths[:, None])
        for piece in np.flatnonzero(differ.any(axis=1)).tolist():
            row, column = int(rows[piece]), int(differ[piece].argmax())
            if row not in told:
                told.add(row)
                index, kernel = divmod(int(columns[piece, column]), ratio)
                yield self._entry(row, index, kernel, int(self.plan.tables[row, index]), int(handed[piece, column]))

    def _handed(self, part: OperatorRows, rows: int, width: int) -> Int64:
        """The part's tables in this shape; what is not there reads as a block that nothing has."""
        handed = np.full((rows, width), -1, np.int64)
        tables = part.tables[:rows, :width]
        handed[: tables.shape[0], : tables.shape[1]] = tables
        return handed

    def _entry(self, row: int, index: int, kernel: int, planned: int, given: int) -> Finding:
        """``given`` is in blocks of the kernel, ``planned`` in those of the manager."""
        ratio, stride = self.arguments.kernel_blocks, self.arguments.kernel_stride
        block, offset = divmod(given, stride)
        finding = self.finding(row, expected=planned, actual=block)
        if offset != kernel:
            finding.expected = f"kernel block {planned * stride + kernel}"
            finding.actual = f"kernel block {given}"
        finding.block_id = block
        finding.position = index * self.group.block_size + kernel * (self.group.block_size // ratio)
        finding.launch_fatal = not 0 <= block < self.view.topology.num_blocks or offset >= ratio
        return finding


def _padded(given: Int32, rows: int) -> Int64:
    """The first ``rows`` entries; one that is missing reads as -1."""
    padded = np.full(rows, -1, np.int64)
    padded[: min(rows, given.size)] = given[:rows]
    return padded


@rule(
    check="C1",
    severity="error",
    rank=r.TARGET,
    title="an attention operator gets other arguments than the plan that was judged",
    fires="A slot, a visible table entry (kernel blocks put back together), a length or a query offset that a layer's "
    "metadata or the forward's slot mapping holds is not the plan's.",
    silent="What nobody reads; padding that is off; a plan that is wrong itself, which the other rules say; groups "
    "whose metadata is of a kind that is not known, which are announced and counted.",
    sources=("the arguments of the attention operators", "the plan as it was judged"),
    proves_not="what an operator does with its arguments; draft models, whose forwards have metadata of their own",
)
def operator_argument_mismatch(view: OperatorView) -> Iterator[Finding]:
    for group in view.groups():
        for mapping in group.arguments.slots:
            yield from group.slots(mapping)
        for part in group.arguments.parts:
            yield from group.rows(part)


OPERATOR_RULES = (operator_argument_mismatch,)
