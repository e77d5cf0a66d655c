"""The plan that a runner makes of a declaration when nothing goes wrong."""

from __future__ import annotations

import numpy as np

from kvscope.facts.plans import PAD_SLOT, GroupPlan, Plan
from kvscope.facts.requests import Declaration
from kvscope.state.bindings import Bindings


def sound_plan(declaration: Declaration, bindings: Bindings) -> Plan:
    """Rows in the order of the declaration, tables as they are bound, and a little padding."""
    ids = list(declaration.requests.scheduled)
    rows = bindings.rows_of(ids)
    lens = np.array([declaration.requests.scheduled[r] for r in ids], np.int32)
    positions = np.concatenate([np.arange(n) + c for n, c in zip(lens, bindings.computed[rows], strict=True)])
    token_row = np.repeat(np.arange(len(ids)), lens)
    groups = []
    for index, group in enumerate(bindings.topology.groups):
        width = -(-int(positions.max() + 1) // group.block_size) + 1
        bindings.ensure_width(index, width)
        tables = bindings.tables[index][rows, :width].copy()
        block = tables[token_row, positions // group.block_size].astype(np.int64)
        slots = block * group.block_size + positions % group.block_size
        groups.append(
            GroupPlan(
                group_id=group.group_id,
                tables=tables,
                table_blocks=bindings.lengths[index, rows].copy(),
                slots=np.append(slots, np.full(3, PAD_SLOT, np.int64)),
            )
        )
    return Plan(
        request_ids=ids,
        query_start=np.append(0, np.cumsum(lens)).astype(np.int32),
        positions=positions.astype(np.int64),
        seq_lens=(bindings.computed[rows] + lens).astype(np.int32),
        num_tokens=int(lens.sum()),
        groups=groups,
    )
