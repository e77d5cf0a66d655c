"""The records about the run itself: errors of the host that were seen, and what was looked at and what was not."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from kvscope.events.envelope import Count, Envelope
from kvscope.events.finding_schema import FindingCount


class ErrorRecord(Envelope, kw_only=True, tag="kv.error"):
    """A native exception crossed a seam, and was raised again unchanged. Its message is never recorded."""

    error_type: str
    native: bool = True


class CoverageRecord(Envelope, kw_only=True, tag="kv.coverage"):
    """Totals since the process started: what was looked at, what was not and why, what it cost.

    ``steps`` had work, ``empty_steps`` none. ``rows`` were audited out of ``rows_scheduled``. ``checks_run`` counts by
    reason, ``checks_skipped`` by check and then by cause, ``checks_stalled`` has the step at which the seam of a check
    that stands still last fired. ``tail_entries`` counts, in a sample of plans, what table entries behind a sequence or
    before its window lead to: the ``null`` block, a block of the row's ``own``, a ``foreign`` one that a live request
    reads, another that is ``nobody``'s to read, or a place ``outside`` the pool. ``records_written`` does not count the
    coverage record itself. ``log_suppressed`` findings were written and not logged, ``incidents_suppressed`` got no
    incident file: a repetition, or too many.
    """

    steps: Count
    empty_steps: Count
    rows_scheduled: Count
    rows: Count
    tokens: Count
    checks_run: dict[str, int]
    checks_skipped: dict[str, dict[str, int]]
    records_written: Count
    records_dropped: dict[str, int]
    hook_calls: dict[str, int]
    hook_faults: dict[str, int]
    hook_time_ns: dict[str, int]
    findings: list[FindingCount]
    checks_stalled: dict[str, int] | UnsetType = UNSET
    tail_entries: dict[str, int] | UnsetType = UNSET
    log_suppressed: Count = 0
    incidents_suppressed: Count = 0
