"""Which checks do not run in a process, and why: what kv.enabled announces."""

from __future__ import annotations

from typing import Protocol

from ..checks.catalog import RULES
from ..checks.rule import CHECKS, PART_OF_CHECK, Part
from ..events.codec import NOT_DELIVERED
from ..events.schema import InactiveCheck
from ..facts.topology import Topology


class Announced(Protocol):
    """What a run knows of what it cannot judge: ``unjudged_cause`` of any plan, ``unread_operators`` by group."""

    parts: frozenset[Part]
    topology: Topology | None
    unjudged_cause: str | None
    unread_operators: dict[int, str]


def inactive_checks(run: Announced) -> list[InactiveCheck]:
    """In the order of the catalog, then of the groups."""
    delivered = {rule.check for rule in RULES.values()}
    inactive = [InactiveCheck(check=check, cause=NOT_DELIVERED) for check in CHECKS if check not in delivered]
    inactive += [
        InactiveCheck(check=check, cause=f"{PART_OF_CHECK[check]} is off")
        for check in sorted(delivered)
        if PART_OF_CHECK[check] not in run.parts
    ]
    if run.unjudged_cause is not None:
        inactive.append(InactiveCheck(check="plan", cause=run.unjudged_cause))
    if run.topology is not None:
        inactive += [
            InactiveCheck(check="plan", cause=f"semantics:{group.kind}", group_id=group.group_id)
            for group in run.topology.groups
            if not group.judged
        ]
    if "kv_trace" in run.parts:
        inactive += [
            InactiveCheck(check="C1", reason="operator_argument_mismatch", cause=cause, group_id=group_id)
            for group_id, cause in sorted(run.unread_operators.items())
        ]
    return inactive
