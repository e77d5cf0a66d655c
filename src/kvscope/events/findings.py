"""kv.violation: a finding and its rule to the record, and back."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from kvscope.checks.finding import Finding
from kvscope.checks.rule import Rule
from kvscope.events.envelope import given, or_absent
from kvscope.events.finding_schema import BlockHistory, ViolationRecord
from kvscope.events.names import PLAIN, RequestNames, known


def violation_record(
    finding: Finding,
    rule: Rule,
    action: str,
    repeats: int,
    names: RequestNames = PLAIN,
    history: BlockHistory | UnsetType = UNSET,
) -> ViolationRecord:
    """The kv.violation of a finding; :func:`finding_from` gives the finding back.

    ``history`` names requests that ``names`` has already been applied to.
    """
    return ViolationRecord(
        trace_id=finding.trace_id,
        step=finding.step,
        reason=finding.reason,
        check=rule.check,
        severity=rule.severity,
        evidence=rule.evidence,
        action=action,
        repeats=repeats,
        also=list(finding.also),
        request_id=UNSET if finding.request_id is None else names(finding.request_id),
        other_request_id=UNSET if finding.other_request_id is None else names(finding.other_request_id),
        row=or_absent(finding.row),
        group_id=or_absent(finding.group_id),
        token_index=or_absent(finding.token_index),
        position=or_absent(finding.position),
        block_id=or_absent(finding.block_id),
        slot=or_absent(finding.slot),
        generation=or_absent(finding.generation),
        expected=_told(finding.expected, finding, names),
        actual=_told(finding.actual, finding, names),
        seen_by_tp_rank=or_absent(finding.tp_rank),
        seen_by_pp_rank=or_absent(finding.pp_rank),
        launch_fatal=finding.launch_fatal or UNSET,
        history=history,
    )


def finding_from(record: ViolationRecord) -> Finding:
    """The finding that a kv.violation was made of.

    Raises:
        ValueError: it names a request, and the trace was written without request ids.
    """
    return Finding(
        reason=record.reason,
        step=given(record.step, 0),
        trace_id=given(record.trace_id, ""),
        request_id=None if isinstance(record.request_id, UnsetType) else known(record.request_id),
        other_request_id=None if isinstance(record.other_request_id, UnsetType) else known(record.other_request_id),
        row=given(record.row, None),
        group_id=given(record.group_id, None),
        token_index=given(record.token_index, None),
        position=given(record.position, None),
        block_id=given(record.block_id, None),
        slot=given(record.slot, None),
        generation=given(record.generation, None),
        expected=None if isinstance(record.expected, UnsetType) else record.expected,
        actual=None if isinstance(record.actual, UnsetType) else record.actual,
        also=tuple(record.also),
        tp_rank=given(record.seen_by_tp_rank, None),
        pp_rank=given(record.seen_by_pp_rank, None),
        launch_fatal=given(record.launch_fatal, False),
    )


def _told(value: int | str | None, finding: Finding, names: RequestNames) -> int | str | UnsetType:
    """``expected`` and ``actual``, where a rule about rows may have put one of the finding's two requests."""
    if value is None:
        return UNSET
    if isinstance(value, str) and value in {finding.request_id, finding.other_request_id}:
        return or_absent(names(value))
    return value
