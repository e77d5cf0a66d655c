"""Leaves out the rows of a plan that nothing is known about."""

from __future__ import annotations

import numpy as np

from ..facts.plans import GroupPlan, Plan
from ..facts.requests import Declaration
from ..state.bindings import Bindings


def judged_rows(plan: Plan, declaration: Declaration, bindings: Bindings) -> Plan:
    """The plan itself where every row is declared and has a whole table (the common case), else a part of it.

    Row numbers of findings then count within that part. What a rank computes of the batch is not judged by a part.
    """
    scheduled, partial = declaration.requests.scheduled, bindings.partial
    rows = bindings.rows_of(plan.request_ids)
    if not partial and scheduled.keys() == set(plan.request_ids) and int(rows.min(initial=0)) >= 0:
        return plan
    keep = [r in scheduled and r in bindings and r not in partial for r in plan.request_ids]
    if all(keep):
        return plan
    rows = np.flatnonzero(keep)
    starts = plan.query_start
    lengths = np.diff(starts)[rows]
    tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows]) if rows.size else rows
    tokens = tokens[(tokens >= 0) & (tokens < plan.num_tokens)]  # offsets that do not fit: write_query_offsets_invalid
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    return Plan(
        request_ids=[plan.request_ids[row] for row in rows],
        query_start=query_start,
        positions=plan.positions[tokens],
        seq_lens=plan.seq_lens[rows],
        num_tokens=len(tokens),
        groups=[_select(group, rows, tokens, plan.num_tokens) for group in plan.groups],
        graph_mode=plan.graph_mode,
        exact=plan.exact,
        context=plan.context,
    )


def _select(group: GroupPlan, rows: np.ndarray, tokens: np.ndarray, num_tokens: int) -> GroupPlan:
    mapped = tokens[tokens < group.slots.size]  # not all, where the mapping is too short
    return GroupPlan(
        group_id=group.group_id,
        tables=group.tables[rows],
        table_blocks=group.table_blocks[rows],
        slots=np.concatenate((group.slots[mapped], group.slots[num_tokens:])),
    )
