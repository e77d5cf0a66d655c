"""Observes the scheduler: numbers the steps, judges declarations, and stops the engine when a finding says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from ..checks.finding import Finding
from ..checks.judge import judge_advances, judge_bind, judge_lifecycle, judge_result
from ..checks.results import result_agrees
from ..errors import ViolationError
from ..events.names import PLAIN, RequestNames
from ..facts.allocator import PoolOperation
from ..facts.connector import ConnectorPlan, ConnectorResult, TakenUp
from ..facts.requests import Declaration, StepResult
from ..facts.topology import Topology
from ..logs import say
from ..state.advances import DeclaredAdvances
from ..state.bindings import Bindings
from ..state.lifecycle import Lifecycle
from .connector import ConnectorJudge
from .isolation import Isolation, take_due
from .pool import UNSEEN_STEP, PoolJudge
from .run import Run

_NOTHING = StepResult(request_ids=(), sampled_tokens=())
"""A result that carries no requests still ends its step."""


class EngineJudge:
    """One scheduler's observer.

    Findings of workers arrive before the result of their step does: a worker posts them ahead of its forward, which
    every other rank needs in order to finish, or, where the plan is on a device, before it gives the result. They are
    taken up before the result takes effect.
    """

    answers: Callable[[object], None] | None = None

    def __init__(self, run: Run, topology: Topology) -> None:
        self._run = run
        self._bindings = Bindings(topology, doubts=True)
        self._lifecycle = Lifecycle()
        self.pool = PoolJudge(run, topology, self._bindings) if "kv_guard_config" in run.parts else None
        self.connector: ConnectorJudge | None = None
        self.isolation: Isolation | None = None
        self._advances = DeclaredAdvances()
        self.answers: Callable[[object], None] | None = None
        self._scheduling = False
        self._is_seen = True  # the last step, to its end
        self._after_unseen = False
        self._told_before = 0
        self._judged_groups = sum(group.judged for group in topology.groups)
        self._step = 0
        self._trace_prefix = f"{run.engine_id}."
        self._latched: ViolationError | None = None
        self._mailboxes = run.mailboxes()
        self._posted: list[Finding] = []

    def isolate_with(self, isolation: Isolation) -> None:
        """Findings may end requests from now on; what the scheduler says of those gets another answer."""
        self.isolation, self.answers = isolation, isolation.control.answer

    def next_step(self) -> tuple[int, str]:
        self._step = step = self._step + 1
        return step, self._trace_prefix + str(step)

    def on_schedule_begin(self) -> None:
        if self._latched is not None or self._mailboxes or self._run.pending or self._posted:
            self._act_if_due(self._step)
        if not self._is_seen:
            self._after_unseen = True
            if self.pool is not None and self.pool.lost is None:
                self.pool.lost = UNSEEN_STEP
        self._is_seen, self._scheduling = False, True

    def on_pool(self, operation: PoolOperation, boundary: str) -> None:
        """The pool has done something, in a step or between two."""
        if self.pool is not None:
            self.pool.take(operation, boundary, self._date(operation))

    def on_handing_out(self, operation: PoolOperation, boundary: str) -> None:
        """The pool is about to refuse what its own free queue gave it."""
        if self.pool is not None:
            self.pool.about_to_hand_out(operation, boundary, self._date(operation))

    def _date(self, operation: PoolOperation) -> str:
        """Say in which step it happened, or after which; the step's trace id."""
        operation.scheduling = self._scheduling
        operation.step = self._step + self._scheduling
        return self._trace_prefix + str(operation.step)

    def on_schedule(self, declaration: Declaration) -> None:
        """What the scheduler declares for a step. It counts as seen if nothing is raised."""
        run, requests, pool, bindings = self._run, declaration.requests, self.pool, self._bindings
        self._scheduling = False
        if self._after_unseen:
            declaration.after_unseen = True
            self._advances = DeclaredAdvances()
            self._bindings.partial.update(self._bindings.live)
            self._lifecycle.forgive()
        if pool is not None:
            pool.hand_over(declaration)
        lifecycle, ends_before = self._lifecycle, bindings.ends if bindings.is_steady else None
        bindings.apply(requests)
        total, budget = declaration.total_num_scheduled_tokens, declaration.token_budget
        if bindings.is_steady and lifecycle.is_settled:
            is_doubtful = total != len(bindings.ends) or (budget is not None and total > budget)
        else:
            is_doubtful = lifecycle.take(declaration, ends_before)
        if total == 0:
            run.coverage.empty_steps += 1
            # Its word on who finished or was preempted, and on what the pool did until then, is needed to replay
            # the steps that follow.
            if not (requests.finished or requests.preempted or declaration.operations or is_doubtful):
                if pool is not None and pool.declare(declaration):
                    self._record(declaration)
                self._is_seen = True
                return
        else:
            run.coverage.steps += 1
            run.coverage.rows_scheduled += len(requests.scheduled) * self._judged_groups
        self._record(declaration)
        if pool is not None:
            pool.declare(declaration)
        if declaration.spec_tokens or self._advances.is_following:
            wrong = self._advances.declare(declaration)
            if wrong:
                run.report(judge_advances(declaration, wrong, run.parts), "scheduler", "schedule")
        if is_doubtful or bindings.doubtful or declaration.zero_blocks or declaration.copies:
            self._look_at(declaration, is_doubtful)
        self._is_seen = True

    def _look_at(self, declaration: Declaration, is_doubtful: bool) -> None:
        run, pool = self._run, self.pool
        ledger = pool.ledger if pool is not None and pool.lost is None else None
        findings = judge_bind(declaration, self._bindings, run.parts, ledger)
        if is_doubtful:
            findings += judge_lifecycle(declaration, self._lifecycle, run.parts)
        if findings:
            run.report(findings, "scheduler", "schedule", ledger=ledger)
            self._refuse_fatal(findings)

    def _record(self, declaration: Declaration) -> None:
        requests, self._after_unseen = declaration.requests, False
        self._run.stream.put(
            "bind",
            declaration,
            component="scheduler",
            boundary="schedule",
            step=declaration.step,
            trace_id=declaration.trace_id,
            approx_bytes=256 * len(requests.scheduled) + (0 if self._bindings.is_steady else requests.table_bytes),
        )

    def observe_connector(self) -> None:
        """From now on it is told what is planned with the connector, of which nothing has been used yet."""
        self.connector = ConnectorJudge(self._run, self._bindings)

    def on_connector_plan(self, plan: ConnectorPlan) -> None:
        """Loads of the step that is being made, or sends of requests that have just finished."""
        if self.connector is not None:
            step = self._step + self._scheduling
            ledger = self.pool.ledger if self.pool is not None and self.pool.lost is None else None
            trace_id = self._trace_prefix + str(step)
            self.connector.plan(plan, step, trace_id, scheduling=self._scheduling, ledger=ledger)

    def on_connector_result(self, declaration: Declaration | None, result: ConnectorResult) -> None:
        """The result of a step, which is about to take effect, says something about transfers."""
        step = declaration.step if declaration is not None else self._step
        if self.connector is not None:
            self.connector.result(result, declaration, step, self._trace_prefix + str(step))
        if result.invalid_blocks and self.pool is not None:
            self.pool.report_invalid(result.invalid_blocks, step)

    @property
    def failed_loads(self) -> list[str]:
        """Requests whose loads the result at hand says to have failed: :meth:`on_taken_up` wants to know of them."""
        return [load.request_id for load in self.connector.failed] if self.connector is not None else []

    def on_taken_up(self, declaration: Declaration | None, taken_up: list[TakenUp]) -> None:
        """The result has taken effect."""
        step = declaration.step if declaration is not None else self._step
        if self.connector is not None:
            self.connector.taken_up(taken_up, declaration, step, self._trace_prefix + str(step))

    def on_update(self, declaration: Declaration | None, result: StepResult | None) -> None:
        run = self._run
        step = declaration.step if declaration is not None else self._step
        result = result or _NOTHING
        try:
            if declaration is not None and (declaration.total_num_scheduled_tokens or result.load_failed):
                run.stream.put(
                    "update_input",
                    result,
                    component="scheduler",
                    boundary="update_input",
                    step=step,
                    trace_id=declaration.trace_id,
                    approx_bytes=64 * len(result.request_ids),
                )
                if declaration.spec_tokens or result.load_failed:
                    self._lifecycle.confirm(declaration, result)
                if declaration.total_num_scheduled_tokens:
                    coverage = run.coverage
                    coverage.steps_answered, coverage.last_answered_step = coverage.steps, step
                    if result.trace_id is not None or not result_agrees(declaration, result):
                        self._judge_result(declaration, result)
                    if self.pool is not None:
                        self.pool.confirm(declaration, result)
                    if declaration.spec_tokens:
                        self._advances.returned(declaration, result)
        except Exception:
            self._lose_track()
            raise
        if self._latched is not None or self._mailboxes or run.pending or self._posted:
            self._act_if_due(step)
        self._told_before = len(run.pending)
        if monotonic() >= run.coverage_due:
            run.cover("scheduler", "update_from_output")

    def _lose_track(self) -> None:
        """What a result said was not taken over to its end: what the steps to come must look like is not known."""
        self._lifecycle.forgive()
        self._advances = DeclaredAdvances()
        if self.pool is not None and self.pool.lost is None:
            self.pool.lost = UNSEEN_STEP

    def _judge_result(self, declaration: Declaration, result: StepResult) -> None:
        if result.trace_id == "":
            self._run.coverage.skipped["L", "result_without_trace"] += 1
        findings = judge_result(declaration, result, self._run.parts)
        if findings:
            self._run.report(findings, "scheduler", "update_input")

    def on_updated(self) -> None:
        """The result has taken effect; what that did to the pool may be a reason not to let it out."""
        pending, before = self._run.pending, self._told_before
        if len(pending) > before:
            told = pending[before:]
            del pending[before:]
            self._act(told, [])

    def on_reset(self) -> None:
        """The host is about to drop all hashes, for which it wants all blocks back."""
        if self.isolation is not None:
            self.isolation.release()

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self._run.native_error(error_type, component="scheduler", boundary=boundary, after_step=self._step)

    def on_shutdown(self) -> None:
        if self._lifecycle.adopted:
            self._run.coverage.skipped["L", "admission_unseen"] = self._lifecycle.adopted
        self._run.close()

    def _refuse_fatal(self, findings: list[Finding]) -> None:
        """An access outside the cache is refused before anything is launched; under ``log`` it goes on."""
        for finding in findings:
            if finding.launch_fatal and self._run.stops(finding):
                self._stop(finding)

    def _act_if_due(self, step: int) -> None:
        """Act on findings up to this step; those of later steps, already running, wait for their own result."""
        if self._latched is not None:
            raise self._latched
        for mailbox in self._mailboxes:
            self._posted += mailbox.poll()
        if not (self._run.pending or self._posted):
            return
        self._act(take_due(self._run.pending, step), take_due(self._posted, step))

    def _act(self, own: list[Finding], posted: list[Finding]) -> None:
        """Stop, if one of the findings says so, else end what they name. ``posted`` are of other processes."""
        for finding in own:
            if self._run.stops(finding):
                self._stop(finding)
        for finding in posted:
            if self._run.stops(finding):
                self._stop(finding, names=PLAIN)  # a mailbox has the ids as they may be written
        for finding in own:
            self._isolate(finding)
        for finding in posted:
            self._isolate(finding, names=PLAIN)

    def _isolate(self, finding: Finding, names: RequestNames | None = None) -> None:
        """End what the finding names, or stop where that is not possible."""
        if self.isolation is None:
            reason: str | None = "this scheduler cannot be acted on"
        else:
            try:
                reason = self.isolation.act(finding, posted=names is PLAIN)
            except Exception as error:  # noqa: BLE001 - a pool in disorder may refuse what is asked of it; that is no way on
                reason = f"it failed ({type(error).__name__})"
        if reason is not None:
            say(logging.ERROR, "kvscope: isolate stops the engine: %s", reason)
            self._stop(finding, names)

    def _stop(self, finding: Finding, names: RequestNames | None = None) -> None:
        """Latch: this engine runs no further step until its process is started anew."""
        self._latched = self._run.violation(finding, names)
        say(logging.ERROR, "%s", self._latched)
        raise self._latched
