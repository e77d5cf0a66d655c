"""How many rows of a trace were judged again, and why the others were not."""

from __future__ import annotations

from collections import Counter

import msgspec

NO_PLAN = "no plan recorded"
NO_DECLARATION = "declaration missing"
NO_INPUT = "worker_input missing"
HALF_PLAN = "kv.write or kv.read missing"
DAMAGED = "record contradicts itself"
LATE = "written after a later step"
PARTIAL = "table not known from its start"
NO_TABLE = "table neither recorded nor as declared"
NOT_IN_BATCH = "not in the batch"
GROUP_MISSING = "its group has no plan"


class RowCoverage(msgspec.Struct, kw_only=True):
    """Rows (request x step x group x rank) of groups whose semantics are judged. ``other_rows`` are those of groups
    that no rule of this version can judge, by ``group (kind)``.
    """

    steps: int = 0
    scheduled: int = 0
    audited: int = 0
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    other_rows: Counter[str] = msgspec.field(default_factory=Counter)
    dummy_runs: int = 0
    first_step: int | None = None
    last_step: int | None = None

    @property
    def share(self) -> float:
        """Audited rows of the scheduled ones, 0 where nothing was scheduled."""
        return self.audited / self.scheduled if self.scheduled else 0.0
