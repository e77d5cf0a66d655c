"""Judges again what was planned with a connector, and what it reported, from the records of EngineCore."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvscope.analysis.pool import FollowedPool
from kvscope.analysis.reader import ProcessLog, step_of
from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_completions, judge_failed_loads, judge_receives
from kvscope.checks.rule import Part
from kvscope.events.connector import (
    CONNECTOR_PLAN,
    connector_plan_from,
    connector_result_from,
    taken_up_from,
)
from kvscope.events.pool import CONNECTOR_RESULT
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.requests import Declaration
from kvscope.state.bindings import Bindings
from kvscope.state.transfers import FailedLoad, Transfers

CONNECTOR_KINDS = (CONNECTOR_PLAN, CONNECTOR_RESULT)


class ConnectorSide:
    """What one EngineCore knew of its transfers."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._transfers = Transfers()
        self._failed: list[FailedLoad] = []

    def take(
        self,
        record: BoundaryRecord,
        log: ProcessLog,
        declared: Callable[[int], Declaration | None],
        pool: FollowedPool,
        parts: Collection[Part],
    ) -> list[Finding]:
        """Take over a record of :data:`CONNECTOR_KINDS`, and judge it. ``pool`` has been told all of it that stands
        before the record.

        Raises:
            ValueError: the trace was written without request ids.
        """
        step, trace_id = step_of(record), record.trace_id if isinstance(record.trace_id, str) else ""
        if record.kind == CONNECTOR_PLAN:
            plan = connector_plan_from(record)
            self._transfers.plan(plan, step)
            return judge_receives(plan.receives, step, trace_id, self._bindings.topology, parts, pool.ledger)
        declaration = declared(step)
        if (taken_up := taken_up_from(record)) is not None:
            failed, self._failed = self._failed, []
            return judge_failed_loads(failed, taken_up, step, trace_id, parts)
        result = connector_result_from(record)
        if result is None:
            return []
        if log.missing or log.missing_first or log.garbage or log.ever_dropped:
            self._transfers.lose()
        self._failed = self._transfers.failed(result, declaration, self._bindings)
        if pool.legality is not None and result.invalid_blocks:
            pool.legality.invalid.report(result.invalid_blocks, step)
        completions = self._transfers.complete(result, step)
        return judge_completions(completions, step, trace_id, parts, is_partial=self._transfers.is_partial)
