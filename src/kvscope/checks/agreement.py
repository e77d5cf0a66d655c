"""The common case at its lowest price: a plan that is exactly what was declared.

Nothing here judges anew: it is the same comparison that the rules are preceded by, on Python lists and bytes, which at
the size of a batch cost a fraction of as many array operations. Where it says no, the rules look.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import add, gt

from ..facts.plans import AgreedGroup, AgreedPlan, Plan
from ..facts.requests import Declaration
from ..state.bindings import Bindings, Table
from ..state.followers import Follower


class Agreement:
    """The plans of one worker, from step to step. ``followers`` are those of the judged groups."""

    def __init__(self, bindings: Bindings, followers: Sequence[Follower]) -> None:
        self._bindings, self._followers = bindings, followers
        self._num_groups = len(bindings.topology.groups)
        # The plan that was agreed to last, of the step that was then the last one, and what the next begins with.
        self._last: AgreedPlan | None = None
        self._applied = 0
        self._ends: list[int] = []
        self._starts: list[int] = []

    def of(self, plan: Plan, declaration: Declaration) -> AgreedPlan | None:
        """What is kept of a plan that is exactly what was declared; None for any other. The bindings have just taken
        the declaration over.
        """
        bindings, last = self._bindings, self._last
        if not plan.exact or plan.context or bindings.partial or len(plan.groups) != self._num_groups:
            return None
        # Without a last one until this one has been seen to its end: what follows a fault begins anew.
        applied, self._applied, self._last = self._applied, bindings.applied, None
        if (
            bindings.is_steady
            and last is not None
            and applied == bindings.applied - 1
            and plan.request_ids == last.request_ids
        ):
            # The rows of the step before, in their order, one token further.
            computed = self._ends
            ends, groups = list(map(add, computed, repeat(1))), list[AgreedGroup]()
            if (
                plan.num_tokens == len(ends)
                and plan.positions.tolist() == computed
                and plan.seq_lens.tolist() == ends
                and plan.query_start.tolist() == self._starts
            ):
                for follower in self._followers:
                    kept = follower.go_on(computed, ends, plan.groups[follower.group_index])
                    if kept is None:
                        break
                    groups.append(kept)
                else:
                    self._ends = ends
                    self._last = AgreedPlan(
                        step=declaration.step,
                        trace_id=declaration.trace_id,
                        request_ids=plan.request_ids,
                        computed=computed,
                        graph_mode=plan.graph_mode,
                        groups=groups,
                    )
                    return self._last
        self._last = self._begin(plan, declaration)
        return self._last

    def _begin(self, plan: Plan, declaration: Declaration) -> AgreedPlan | None:
        """Any rows, in any order. (A batch that has one request twice lacks another, but then two rows write in the
        same block.)
        """
        ids, scheduled, bindings = plan.request_ids, declaration.requests.scheduled, self._bindings
        rows, computed_of = len(ids), declaration.requests.computed()
        tables = bindings.bound(ids)
        if not (rows == len(computed_of) == len(scheduled) and self._followers) or tables is None:
            return None
        try:
            counts = list(map(scheduled.__getitem__, ids))
            computed = list(map(computed_of.__getitem__, ids))
        except KeyError:
            return None
        lengths = None if counts.count(1) == rows else counts
        if lengths is None:
            starts, ends = list(range(rows + 1)), list(map(add, computed, repeat(1)))
            agreed = plan.num_tokens == rows and plan.positions.tolist() == computed
        else:
            starts, ends = [0, *accumulate(lengths)], list(map(add, computed, lengths))
            agreed = plan.num_tokens == starts[-1] and _positions_agree(plan, tables, bindings, computed, lengths)
        if not agreed or plan.seq_lens.tolist() != ends or plan.query_start.tolist() != starts:
            return None
        groups = []
        for follower in self._followers:
            kept = follower.agree(tables, computed, ends, lengths, plan.groups[follower.group_index])
            if kept is None:
                return None
            groups.append(kept)
        self._ends, self._starts = ends, starts
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
