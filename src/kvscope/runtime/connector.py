"""The connector's side of an EngineJudge: what is planned with it, what it reports, and what becomes of that."""

from __future__ import annotations

from collections.abc import Sequence

from ..checks.judge import judge_completions, judge_failed_loads, judge_receives
from ..facts.connector import ConnectorPlan, ConnectorResult, TakenUp
from ..facts.requests import Declaration
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.transfers import FailedLoad, Transfers
from .run import Run

HOOK_FAULT = "connector_hook_fault"
"""Cause under which results are counted of which it is not known whether what they report was planned."""
_COMPONENT = "connector"


class ConnectorJudge:
    """One scheduler's. ``failed`` are the loads that the result at hand says to have failed."""

    def __init__(self, run: Run, bindings: Bindings) -> None:
        self.failed: Sequence[FailedLoad] = ()
        self._run = run
        self._bindings = bindings
        self._transfers = Transfers()
        self._faults_before = run.connector_faults

    def plan(
        self, plan: ConnectorPlan, step: int, trace_id: str, *, scheduling: bool, ledger: BlockLedger | None
    ) -> None:
        """Planned while step ``step`` is being made, or after it. ``ledger``: of the pool, where it is followed."""
        self._transfers.plan(plan, step)
        tables = sum(len(group) for receive in plan.receives for group in receive.blocks)
        self._run.stream.put(
            "connector_plan",
            plan,
            component=_COMPONENT,
            boundary="connector_plan",
            step=step if scheduling else None,
            after_step=None if scheduling else step,
            trace_id=trace_id if scheduling else None,
            approx_bytes=512 + 256 * len(plan.receives) + 40 * tables,
        )
        if plan.receives:
            topology, parts = self._bindings.topology, self._run.parts
            findings = judge_receives(plan.receives, step, trace_id, topology, parts, ledger)
            if findings:
                self._run.report(findings, _COMPONENT, "connector_plan", ledger=ledger)

    def result(self, result: ConnectorResult, declaration: Declaration | None, step: int, trace_id: str) -> None:
        """The result of step ``step`` has come, and nothing of it has taken effect."""
        transfers, run = self._transfers, self._run
        if run.connector_faults != self._faults_before:
            transfers.lose()
            run.coverage.skipped["L", HOOK_FAULT] += 1
        self._put("connector_result", result, declaration, step, trace_id, 64 * len(result.invalid_blocks))
        self.failed = transfers.failed(result, declaration, self._bindings)
        completions = transfers.complete(result, step)
        findings = judge_completions(completions, step, trace_id, run.parts, is_partial=transfers.is_partial)
        if findings:
            run.report(findings, _COMPONENT, "connector_result")

    def taken_up(self, taken_up: Sequence[TakenUp], declaration: Declaration | None, step: int, trace_id: str) -> None:
        """It has taken effect, and the requests of :attr:`failed` stand so."""
        failed, self.failed = self.failed, ()
        self._put("connector_taken_up", taken_up, declaration, step, trace_id, 128 * len(taken_up))
        findings = judge_failed_loads(failed, taken_up, step, trace_id, self._run.parts)
        if findings:
            self._run.report(findings, _COMPONENT, "connector_result")

    def _put(
        self, kind: str, fact: object, declaration: Declaration | None, step: int, trace_id: str, nbytes: int
    ) -> None:
        """A step without work has no number of its own in the records."""
        has_work = declaration is not None and not declaration.is_empty
        self._run.stream.put(
            kind,
            fact,
            component=_COMPONENT,
            boundary="connector_result",
            step=step if has_work else None,
            after_step=None if has_work else step,
            trace_id=trace_id if has_work else None,
            approx_bytes=512 + nbytes,
        )
