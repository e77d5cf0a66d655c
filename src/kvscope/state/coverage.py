"""What was looked at, what was not and why, and which findings there were: the numbers beside every verdict."""

from __future__ import annotations

from collections import Counter

import msgspec


class Tally(msgspec.Struct, kw_only=True):
    """All findings of one reason in one group: how many, and the first and last step. Never a ring that fills up."""

    count: int
    first_step: int
    last_step: int


class Coverage:
    """Totals of one process. Plain attributes, since the step path adds to them.

    A row is one request in one step, one group and one rank; ``rows`` are those whose plan was judged. ``handovers``
    counts requests in messages, ``operator_rows`` rows of which the arguments of the operators were compared with the
    plan, ``dummy_runs`` runs, ``pool_operations`` calls of the block pool, and
    ``audited_blocks`` how often a block was held against the pool itself. ``skipped`` is what was not judged, by
    ``(check, cause)``; a check is a family (C1, C3, …) or ``plan`` where all of them fell away together.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.empty_steps = 0
        self.rows_scheduled = 0
        self.rows = 0
        self.tokens = 0
        self.operator_rows = 0
        self.handovers = 0
        self.dummy_runs = 0
        self.pool_operations = 0
        self.audited_blocks = 0
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.findings: dict[tuple[str, int | None], Tally] = {}

    def count_finding(self, reason: str, group_id: int | None, step: int) -> int:
        """Count a finding; the number of earlier ones of the same reason and group."""
        tally = self.findings.get((reason, group_id))
        if tally is None:
            self.findings[reason, group_id] = Tally(count=1, first_step=step, last_step=step)
            return 0
        tally.count += 1
        tally.last_step = step
        return tally.count - 1

    def skipped_by_check(self) -> dict[str, dict[str, int]]:
        """``{check: {cause: n}}``."""
        nested: dict[str, dict[str, int]] = {}
        for (check, cause), count in self.skipped.items():
            nested.setdefault(check, {})[cause] = count
        return nested
