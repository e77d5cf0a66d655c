"""What was looked at, what was not and why, and which findings there were: the numbers beside every verdict."""

from __future__ import annotations

from collections import Counter

import msgspec

STALLED_STEPS = 100
"""A seam that has not fired for so many steps of work stands still."""


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
    ``(check, cause)``; a check is a family (C1, C3, …), ``plan`` where all of them fell away together, or ``dummy``.
    ``tail_entries`` is a sample of what table entries lead to that nothing reads (``state.tails``).

    ``without_plan`` steps in a row had no plan to look at, the last that had one being ``last_plan_step``;
    ``steps_answered`` is what ``steps`` was when a result came in last, that of ``last_answered_step``.
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
        self.without_plan = 0
        self.last_plan_step = 0
        self.steps_answered = 0
        self.last_answered_step = 0
        self._rows_before = 0
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.tail_entries: Counter[str] = Counter()
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

    def miss_plan(self, step: int) -> None:
        """The step has passed, and no plan was handed over in it."""
        if self.rows != self._rows_before or not self.without_plan:
            self._rows_before, self.without_plan, self.last_plan_step = self.rows, 0, step - 1
        self.without_plan += 1

    def stalled(self) -> tuple[int | None, int | None]:
        """The step at which the plan's seam last fired and that of the results, each if it stands still."""
        no_plan = self.without_plan >= STALLED_STEPS and self.rows == self._rows_before
        no_result = self.steps - self.steps_answered >= STALLED_STEPS
        return self.last_plan_step if no_plan else None, self.last_answered_step if no_result else None

    def skipped_by_check(self) -> dict[str, dict[str, int]]:
        """``{check: {cause: n}}``."""
        nested: dict[str, dict[str, int]] = {}
        for (check, cause), count in self.skipped.items():
            nested.setdefault(check, {})[cause] = count
        return nested
