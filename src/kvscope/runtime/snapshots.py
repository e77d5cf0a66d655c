"""Makes what is kept of a plan: own copies of what the record needs, nothing that grows with the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..checks.plan_view import GroupView, StepView
from ..facts.digest import column_weights, table_digest
from ..facts.plans import PAD_SLOT, GroupSnapshot, Int32, PlanSnapshot


class Snapshots:
    """Makes snapshots; keeps the digest weights of the widest table so far."""

    def __init__(self, *, spell_tables: bool) -> None:
        self._spell_tables = spell_tables
        self._weights: npt.NDArray[np.uint64] = column_weights(64)

    def take(self, step: StepView, groups: Sequence[GroupView]) -> PlanSnapshot:
        """The snapshot of one plan; the plan's arrays may be reused by the host as soon as this returns."""
        plan = step.plan
        starts = plan.query_start[: len(step.rows)]
        ends = plan.query_start[1 : len(step.rows) + 1] - 1
        last_token = plan.num_tokens - 1
        return PlanSnapshot(
            step=step.declaration.step,
            trace_id=step.declaration.trace_id,
            request_ids=list(plan.request_ids),
            query_lens=step.query_lens.astype(np.int32),
            first_positions=plan.positions[np.minimum(starts, last_token)],
            last_positions=plan.positions[np.minimum(ends, last_token)],
            positions=None if step.positions_agree and plan.exact else plan.positions.copy(),
            computed=step.computed.astype(np.int32),
            seq_lens=plan.seq_lens.copy(),
            num_tokens=plan.num_tokens,
            graph_mode=plan.graph_mode,
            exact=plan.exact,
            groups=[self._group(group) for group in groups],
        )

    def _group(self, view: GroupView) -> GroupSnapshot:
        if view.width > len(self._weights):
            self._weights = column_weights(2 * view.width)
        needed = view.needed.astype(np.int32)
        skipped = np.minimum(view.first_visible, view.needed).astype(np.int32)
        return GroupSnapshot(
            group_id=view.group.group_id,
            slots=view.slots.copy(),
            padding_slots=view.padding.size,
            padding_enabled=view.padding[view.padding != PAD_SLOT] if view.padding.size else view.padding.copy(),
            table_blocks=view.plan.table_blocks.astype(np.int32),
            blocks_needed=needed,
            window_skipped=skipped,
            digests=table_digest(view.tables, view.visible, self._weights[: view.width]),
            tables=self._spelled(view, needed, skipped),
        )

    def _spelled(self, view: GroupView, needed: Int32, skipped: Int32) -> dict[int, Int32]:
        if self._spell_tables:
            rows = range(len(needed))
        elif view.reads_agree:
            return {}
        else:
            rows = np.flatnonzero(view.entries_differ.any(axis=1)).tolist()
        return {row: view.tables[row, skipped[row] : needed[row]].copy() for row in rows}
