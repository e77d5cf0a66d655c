"""Makes what is kept of a plan: own copies of what the record needs, nothing that grows with the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..checks.plan_view import GroupView, StepView
from ..facts.plans import PAD_SLOT, GroupSnapshot, Int32, PlanSnapshot


def take_snapshot(step: StepView, groups: Sequence[GroupView], *, spell_tables: bool) -> PlanSnapshot:
    """The snapshot of one plan; the plan's arrays may be reused by the host as soon as this returns.

    ``spell_tables`` keeps the table entries of every row, not only of those that differ from the declaration.
    """
    plan = step.plan
    if step.single:
        query_lens = np.ones(len(step.rows), np.int32)
        first = last = plan.positions.copy()
    else:
        query_lens = step.query_lens
        last_token = plan.num_tokens - 1
        first = plan.positions[np.minimum(plan.query_start[:-1], last_token)]
        last = plan.positions[np.minimum(plan.query_start[1:] - 1, last_token)]
    return PlanSnapshot(
        step=step.declaration.step,
        trace_id=step.declaration.trace_id,
        request_ids=list(plan.request_ids),
        query_lens=query_lens,
        first_positions=first,
        last_positions=last,
        positions=None if step.positions_agree and plan.exact and step.offsets_agree else plan.positions.copy(),
        computed=step.computed.astype(np.int32),
        seq_lens=plan.seq_lens.copy(),
        num_tokens=plan.num_tokens,
        graph_mode=plan.graph_mode,
        exact=plan.exact,
        groups=[_group(group, spell_tables) for group in groups],
        coordinates="local" if any(group.share is not None for group in groups) else "global",
        first_offset=0 if step.single else int(plan.query_start[0]),
    )


def _group(view: GroupView, spell_tables: bool) -> GroupSnapshot:
    batch = view.batch
    return GroupSnapshot(
        group_id=view.group.group_id,
        slots=view.slots[: view.slots.size - view.unmapped].copy(),
        padding_slots=view.padding.size,
        padding_enabled=view.padding[view.padding != PAD_SLOT] if view.padding.size else view.padding.copy(),
        table_blocks=view.plan.table_blocks.copy(),
        blocks_needed=batch.needed.astype(np.int32),
        window_skipped=np.minimum(batch.first_visible, batch.needed).astype(np.int32),
        digests=batch.digests_of(view.tables),
        tables={} if view.reads_agree and not spell_tables else _spelled(view, spell_tables),
    )


def _spelled(view: GroupView, every_row: bool) -> dict[int, Int32]:
    rows = range(len(view.needed)) if every_row else np.flatnonzero(view.entries_differ.any(axis=1)).tolist()
    skipped, needed = view.batch.first_visible, view.needed
    return {row: view.tables[row, skipped[row] : needed[row]].copy() for row in rows}
