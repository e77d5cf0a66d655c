"""The common case at its lowest price: a plan that is exactly what was declared.

Nothing here judges anew: it is the same comparison that the rules are preceded by, on Python lists and bytes, which at
the size of a batch cost a fraction of as many array operations. Where it says no, the rules look.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import add, gt

from ..facts.plans import AgreedPlan, Plan
from ..facts.requests import Declaration
from ..state.bindings import Bindings, Table
from ..state.followers import Follower


def agreed_plan(
    plan: Plan, declaration: Declaration, computed_of: dict[str, int], bindings: Bindings, followers: Sequence[Follower]
) -> AgreedPlan | None:
    """What is kept of a plan that is exactly what was declared; None for any other.

    ``computed_of`` has the declared computed tokens of every scheduled request. (A batch that has one request twice
    lacks another, but then two rows write in the same block.)
    """
    ids, scheduled = plan.request_ids, declaration.requests.scheduled
    rows = len(ids)
    if (
        not (rows == len(computed_of) == len(scheduled) and plan.exact and followers)
        or plan.context
        or bindings.partial
    ):
        return None
    if len(plan.groups) != len(bindings.topology.groups):
        return None
    tables = bindings.bound(ids)
    if tables is None:
        return None
    try:
        counts = list(map(scheduled.__getitem__, ids))
        computed = list(map(computed_of.__getitem__, ids))
    except KeyError:
        return None
    lengths = None if counts.count(1) == rows else counts
    if lengths is None:
        starts, seq_lens = list(range(rows + 1)), list(map(add, computed, repeat(1)))
        agreed = plan.num_tokens == rows and plan.positions.tolist() == computed
    else:
        starts, seq_lens = [0, *accumulate(lengths)], list(map(add, computed, lengths))
        agreed = plan.num_tokens == starts[-1] and _positions_agree(plan, tables, bindings, computed, lengths)
    if not agreed or plan.seq_lens.tolist() != seq_lens or plan.query_start.tolist() != starts:
        return None
    groups = []
    for follower in followers:
        kept = follower.agree(tables, computed, seq_lens, lengths, plan.groups[follower.group_index])
        if kept is None:
            return None
        groups.append(kept)
    return AgreedPlan(
        step=declaration.step,
        trace_id=declaration.trace_id,
        request_ids=ids,
        computed=computed,
        graph_mode=plan.graph_mode,
        groups=groups,
        query_lens=lengths,
    )


def _positions_agree(
    plan: Plan, tables: list[Table], bindings: Bindings, computed: list[int], lengths: list[int]
) -> bool:
    """Whether every row has at least one token, and consecutive positions from its computed tokens on."""
    ends = list(map(add, computed, lengths))
    if min(lengths) < 1 or min(computed) < 0 or any(map(gt, ends, [table.capacity_tokens for table in tables])):
        return False
    known = bindings.positions(max(ends))
    expected = b"".join([known[8 * start : 8 * end] for start, end in zip(computed, ends, strict=True)])
    return plan.positions.tobytes() == expected
