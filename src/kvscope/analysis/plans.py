"""Makes a plan of what is recorded of it, without guessing a table entry.

A trace in ``compact`` spells out a row of a block table only where it differs from the declaration; of every other row
it has a digest. Such a row is taken to be the declared one exactly if the digest of the declared row is the recorded
one. Otherwise the row stays unknown, and what attention read through it is not judged.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvscope.checks.finding import Finding
from kvscope.events.ranges import MOST_VALUES
from kvscope.facts.context_parallel import ContextParallel, LocalRows
from kvscope.facts.digest import column_weights, table_digest
from kvscope.facts.plans import PAD_SLOT, GroupPlan, GroupSnapshot, Int32, Int64, Plan, PlanSnapshot
from kvscope.state.bindings import Bindings

Bool = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

MOST_ENTRIES = 1 << 28
"""Table entries of one step: a damaged number must not ask for all of the reader's memory."""


class RebuiltPlan(msgspec.Struct, kw_only=True):
    """A plan of the rows that can be judged. ``rows`` ``intp [n]`` are their numbers in the recorded batch, ``tokens``
    ``intp [num_tokens]`` those of their tokens. ``unknown`` ``bool [n]`` marks rows with a table that is not known in
    some group; it stands in the plan as declared, so that it cannot fire.
    """

    plan: Plan
    rows: Rows
    tokens: Rows
    unknown: Bool

    def renumber(self, finding: Finding) -> None:
        """Rows and tokens as the batch counted them, not as the rows that could be judged do."""
        if finding.row is not None:
            finding.row = int(self.rows[finding.row])
        if finding.token_index is not None and finding.token_index < len(self.tokens):
            finding.token_index = int(self.tokens[finding.token_index])


def rebuild(
    snapshot: PlanSnapshot,
    bindings: Bindings,
    keep: Bool,
    context: ContextParallel | None = None,
    local: LocalRows | None = None,
) -> RebuiltPlan:
    """The plan of the rows in ``keep`` (``bool [rows]``), every one of which has a table in ``bindings``.

    ``context`` is where the rank stands, ``local`` what it computes of the batch, which is judged of a whole one only.

    Raises:
        ValueError: the record contradicts itself (lengths that do not add up), so that no plan can be made of it.
    """
    _require_consistent(snapshot, whole=bool(keep.all()))
    rows = np.flatnonzero(keep)
    token_row = np.repeat(np.arange(len(keep)), np.maximum(snapshot.query_lens, 0))[: snapshot.num_tokens]
    tokens = np.arange(snapshot.num_tokens) if keep.all() else np.flatnonzero(keep[token_row])
    unknown = np.zeros(len(rows), np.bool_)
    by_id = {group.group_id: group for group in snapshot.groups}
    table_rows = bindings.rows_of([snapshot.request_ids[row] for row in rows])
    groups: list[GroupPlan] = []
    for group_index, group in enumerate(bindings.topology.groups):
        recorded = by_id.get(group.group_id)
        if recorded is None:
            continue
        declared_lens = bindings.seq_lens[table_rows]
        lengths = declared_lens if snapshot.exact else snapshot.seq_lens[rows].astype(np.int64)
        tables, missing = _tables(recorded, rows, table_rows, lengths, group_index, bindings)
        unknown |= missing
        groups.append(
            GroupPlan(
                group_id=group.group_id,
                tables=tables,
                table_blocks=recorded.table_blocks[rows],
                slots=np.concatenate((recorded.slots[tokens[tokens < len(recorded.slots)]], _padding(recorded))),
            )
        )
    lens = snapshot.query_lens[rows]
    plan = Plan(
        request_ids=[snapshot.request_ids[row] for row in rows],
        query_start=(np.append(0, np.cumsum(lens)) + (snapshot.first_offset if keep.all() else 0)).astype(np.int32),
        positions=_positions(snapshot, token_row)[tokens],
        seq_lens=snapshot.seq_lens[rows],
        num_tokens=len(tokens),
        groups=groups,
        graph_mode=snapshot.graph_mode,
        exact=snapshot.exact,
        context=context,
        local=local if keep.all() else None,
    )
    return RebuiltPlan(plan=plan, rows=rows, tokens=tokens, unknown=unknown)


def _require_consistent(snapshot: PlanSnapshot, *, whole: bool) -> None:
    rows = len(snapshot.request_ids)
    columns = (snapshot.query_lens, snapshot.first_positions, snapshot.computed, snapshot.seq_lens)
    if any(len(column) != rows for column in columns):
        raise ValueError("its columns have different lengths")
    covered = int(np.maximum(snapshot.query_lens, 0).sum())
    if covered != snapshot.num_tokens and (snapshot.positions is None or not whole):
        raise ValueError("its rows do not add up to its tokens")
    if snapshot.positions is not None and len(snapshot.positions) != snapshot.num_tokens:
        raise ValueError("it has not as many positions as tokens")
    for group in snapshot.groups:
        if len(group.slots) > snapshot.num_tokens or (len(group.slots) < snapshot.num_tokens and group.padding_slots):
            raise ValueError("it has more slots than tokens, or padding in spite of too few")
        if any(len(c) != rows for c in (group.table_blocks, group.blocks_needed, group.window_skipped, group.digests)):
            raise ValueError("its tables have another number of rows")
        if (group.window_skipped < 0).any() or (group.blocks_needed < group.window_skipped).any():
            raise ValueError("a sequence has fewer blocks than none")
        if not len(group.padding_enabled) <= group.padding_slots <= MOST_VALUES:
            raise ValueError("it has more enabled padding slots than padding, or more padding than any batch")


def _positions(snapshot: PlanSnapshot, token_row: Rows) -> Int64:
    if snapshot.positions is not None:
        return snapshot.positions
    starts = np.cumsum(snapshot.query_lens) - snapshot.query_lens
    positions: Int64 = snapshot.first_positions[token_row] + np.arange(snapshot.num_tokens) - starts[token_row]
    return positions


def _padding(recorded: GroupSnapshot) -> Int64:
    """The slots behind the tokens. Where the enabled ones stood among them is not recorded: they come first."""
    off = np.full(recorded.padding_slots - len(recorded.padding_enabled), PAD_SLOT, np.int64)
    return np.concatenate((recorded.padding_enabled, off))


def _tables(
    recorded: GroupSnapshot, rows: Rows, table_rows: Rows, lengths: Int64, group_index: int, bindings: Bindings
) -> tuple[Int32, Bool]:
    """``int32 [rows, width]`` and which rows are not known."""
    needed, skipped = recorded.blocks_needed[rows], recorded.window_skipped[rows]
    width = max(int(needed.max(initial=1)), 1)
    if len(rows) * width > MOST_ENTRIES:
        raise ValueError("its tables are larger than any host's")
    bindings.ensure_width(group_index, width)
    declared = bindings.tables[group_index][table_rows, :width]
    tables = declared.copy()
    for index, row in enumerate(rows.tolist()):
        spelled = recorded.tables.get(row)
        if spelled is not None:
            end = min(int(skipped[index]) + len(spelled), width)
            tables[index, skipped[index] : end] = spelled[: end - int(skipped[index])]
    columns = np.arange(width)
    judged = (columns < needed[:, None]) & (columns >= skipped[:, None])
    agrees = table_digest(tables, judged, column_weights(width)) == recorded.digests[rows]
    tables[~agrees] = declared[~agrees]
    block_size = bindings.topology.groups[group_index].block_size
    # A row that covers fewer blocks than were declared says nothing about the others, and no row covers more.
    return tables, ~agrees | (needed != -(-lengths // block_size))
