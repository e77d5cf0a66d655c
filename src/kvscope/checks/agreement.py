"""The common case at its lowest price: a decoding batch whose plan is exactly what was declared.

Nothing here judges anew: it is the same comparison that the rules are preceded by, for rows of one token, on Python
lists, which at the size of a batch cost a fraction of as many array operations. Where it says no, the rules look.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import add
from typing import cast

from ..facts.plans import PAD_SLOT, AgreedPlan, Plan
from ..facts.requests import Declaration
from ..state.batches import BatchTable
from ..state.bindings import Bindings


def agreed_decode(
    plan: Plan, declaration: Declaration, computed_of: dict[str, int], bindings: Bindings, batches: Sequence[BatchTable]
) -> AgreedPlan | None:
    """What is kept of a plan in which every row decodes one token exactly as declared; None for any other plan.

    ``computed_of`` has the declared computed tokens of every scheduled request. (A batch that has one request twice
    lacks another, but then two rows write in the same block.)
    """
    ids, scheduled = plan.request_ids, declaration.requests.scheduled
    rows = len(ids)
    if not (rows == plan.num_tokens == len(computed_of) == len(scheduled) and plan.exact):
        return None
    if bindings.partial or not batches or list(map(scheduled.get, ids)).count(1) != rows:
        return None
    computed = list(map(computed_of.get, ids))
    if None in computed:
        return None
    positions = cast("list[int]", computed)
    seq_lens = list(map(add, positions, repeat(1)))
    if (
        plan.positions.tolist() != positions
        or plan.seq_lens.tolist() != seq_lens
        or plan.query_start.tobytes() != bindings.counting(rows + 1)
    ):
        return None
    table_rows = bindings.rows_of(ids)
    groups = []
    for batch in batches:
        group = plan.groups[batch.group_index]
        batch.follow(table_rows, positions, seq_lens)
        padding = group.slots.size - rows
        slots = list(map(add, batch.tail_starts, positions))
        if not (
            batch.sound
            and batch.tails_apart
            and group.slots.tolist() == (slots + [PAD_SLOT] * padding if padding else slots)
            and batch.follows_counts(group.table_blocks)
            and batch.follows_tables(group.tables)
        ):
            return None
        groups.append(batch.agreed(padding))
    return AgreedPlan(
        step=declaration.step,
        trace_id=declaration.trace_id,
        request_ids=ids,
        computed=positions,
        graph_mode=plan.graph_mode,
        groups=groups,
    )
