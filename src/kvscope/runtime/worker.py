"""Observes one worker: replays what it was told, and judges what its runner hands to attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from ..checks.agreement import Agreement
from ..checks.context_parallel import ContextView
from ..checks.finding import Finding
from ..checks.handed import HandedPlan
from ..checks.judge import judge_batch, judge_dummy, judge_handover, judge_missing, judge_operators, judge_plan
from ..checks.operator import OperatorView
from ..checks.plan_view import StepView
from ..facts.context_parallel import LocalLengths
from ..facts.operators import OperatorArguments
from ..facts.plans import AgreedGroup, AgreedPlan, DummyRun, Plan, PlanSnapshot
from ..facts.requests import Declaration, Drafts, StepRequests, StepResult
from ..facts.topology import Ranks, Topology
from ..logs import say
from ..sinks.kinds import WorkerInput
from ..state.batches import BatchTable
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.followers import Follower
from ..state.tails import TailCensus
from .beside_plans import BesidePlans
from .context import ContextWatch
from .follower import PoolFollower
from .refusal import make_harmless, slots_and_tables
from .run import Run
from .selection import judged_rows
from .snapshots import take_snapshot


class WorkerJudge(BesidePlans):
    """The observer of one worker and its runner.

    ``returns_results`` says whether vLLM takes this rank's result: only there does an exception reach EngineCore. On
    another rank a launch that must not happen is made harmless instead, and the mailbox stops the engine.
    """

    reads_local_lengths = False

    def __init__(
        self, run: Run, *, returns_results: bool, unjudged_cause: str | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(run)
        self._ranks = ranks or Ranks()
        self.reads_host_tensors = True
        self._returns_results = returns_results
        self._unjudged_cause = unjudged_cause
        self._bindings: Bindings | None = None
        self._pool: PoolFollower | None = None
        self._context: ContextWatch | None = None
        self._groups: list[BatchTable] = []
        self._agreement: Agreement | None = None
        self._kept_groups: Sequence[AgreedGroup | None] = []  # what several steps share is queued with the first
        self._judged_groups = 0
        self._unjudged_kinds: list[str] = []
        self.reads_operators = False
        self._handed: HandedPlan | None = None  # what operators are held against; None where nobody asks for it
        self._operators_seen = False
        self.planned_tokens = 0
        self._current: Declaration | None = None
        self._in_step = False  # a message is being carried out, with a declaration or without
        self._accounted = False  # the rows of the current step stand among the judged or the skipped ones
        self._result_of: Declaration | None = None
        self._last_step = 0
        self._next_step: int | None = None  # None: not known, since the message before was not seen as it came
        self._tails = TailCensus()
        self._spell_tables = run.config.output.records == "full"

    def bind_topology(self, topology: Topology) -> None:
        """The pool is known, or known anew: nothing is bound yet."""
        self._bindings, self.awaits_operators = Bindings(topology), False
        self._pool = PoolFollower(self._run, topology, self._bindings) if "kv_guard_config" in self._run.parts else None
        self._context = (
            ContextWatch(self._run, topology, self._bindings, self._ranks) if topology.context_parallel else None
        )
        self.reads_local_lengths = topology.dcp_size > 1
        judged = [i for i, group in enumerate(topology.groups) if group.judged]
        self._unjudged_kinds = [group.kind for group in topology.groups if not group.judged]
        self._judged_groups = len(judged)
        self._groups = [BatchTable(self._bindings, index) for index in judged]
        followers = [Follower(self._bindings, index) for index in judged]
        self._agreement = Agreement(self._bindings, followers) if judged else None
        self._kept_groups = [None] * len(judged)
        self._handed = HandedPlan(topology) if judged and "kv_trace" in self._run.parts else None

    @property
    def is_warming_up(self) -> bool:
        """Whether slots made now are those of requests that the worker has made up, before the first step."""
        return self._bindings is not None and not self._in_step and not self._last_step

    def on_input(self, declaration: Declaration, received: StepRequests, drafts: Drafts | None = None) -> None:
        if self._current is not None:
            self._end_step("no_plan")  # nobody saw the launch of the step before
        self._in_step, bindings = True, self._bindings
        if bindings is None:
            return
        run, declared, pool, step = self._run, declaration.requests, self._pool, declaration.step
        previous = None if self._next_step is None or step == self._next_step else self._next_step - 1
        self._next_step = step + 1 if previous is None else max(step, previous) + 1
        self._current = self._result_of = declaration
        self.due_result, self._last_step = declaration.trace_id, step
        self._accounted = is_empty = declaration.total_num_scheduled_tokens == 0
        self.expects_no_plan = True  # until it is taken over: after a fault the step goes unjudged, and is counted
        try:
            if pool is not None and (declaration.operations or declaration.operations_before != pool.seen):
                pool.take(declaration)
        finally:
            bindings.apply(declared)
        if pool is not None:
            pool.advance(declaration)
        self.expects_no_plan = is_empty
        run.coverage.handovers += len(declared.scheduled)
        as_declared = drafts is None and (received is declared or received == declared)
        is_as_it_should_be = as_declared and previous is None
        if not (is_empty and is_as_it_should_be):
            run.stream.put(
                "worker_input",
                WorkerInput(
                    received=declared if as_declared else received.copy(),
                    declared=declared,
                    drafts=drafts,
                    previous_step=previous,
                ),
                component="worker",
                boundary="worker_input",
                step=step,
                trace_id=declaration.trace_id,
                approx_bytes=512 + (0 if bindings.is_steady else declared.table_bytes),
            )
        if not is_as_it_should_be:
            findings = judge_handover(declaration, received, run.parts, drafts=drafts, previous_step=previous)
            self._report(findings, "worker", "worker_input")

    def on_input_without_declaration(self, received: StepRequests) -> None:
        """A message came through the executor without what the scheduler attaches to every message."""
        self._follow(received, "declaration_missing" if self._last_step else "before_first_declaration")
        if self._last_step:
            self._report(judge_missing(self._last_step + 1, received, self._run.parts), "worker", "worker_input")

    def on_input_unobserved(self, received: StepRequests) -> None:
        """The scheduler's hook missed this step, and said so."""
        self._follow(received, "scheduler_hook_fault")

    def _follow(self, received: StepRequests, cause: str) -> None:
        """A step that cannot be judged: the message itself is replayed, so that the steps after it can be."""
        if self._current is not None:
            self._end_step("no_plan")
        self._in_step = True
        self._current = self._result_of = self._next_step = self.due_result = None
        self.expects_no_plan = True
        self.drafts.lose()
        self._skip(cause, len(received.scheduled))
        if self._bindings is not None:
            self._bindings.apply(received.copy())
        if self._pool is not None:
            self._pool.forgive()

    def _skip(self, cause: str, requests: int) -> None:
        if requests > 0:
            self._run.coverage.skipped["plan", cause] += requests * self._judged_groups

    def _end_step(self, cause: str) -> None:
        """The step has passed; ``cause`` says why its plan was not looked at, if it was not."""
        if self._current is not None and not self._accounted:
            self._skip(cause, len(self._current.requests.scheduled))
            self.drafts.lose()
            self._run.coverage.miss_plan(self._current.step)
        self._current, self.expects_no_plan = None, True
        self._let_go()

    def _let_go(self) -> None:
        """The forward is over, or there was none."""
        if self.awaits_operators and self._handed is not None:
            self.awaits_operators = False
            if not self._operators_seen:
                self._run.coverage.skipped["C1", "no_operator_arguments"] += self._handed.rows

    def on_launched(self) -> None:
        current = self._current
        self._leave()
        if self._accounted:
            self._current, self.expects_no_plan = None, True
            if self._operators_seen:
                self.awaits_operators = False
            else:
                self._let_go()
        else:
            self._end_step("no_plan")
        if current is not None and (current.zero_blocks or current.copies) and self._bindings is not None:
            self._report(self.block_work.end(current, self._bindings), "worker", "block_work")

    def _leave(self) -> None:
        """A step has left the worker. If it was not seen as it came, nobody knows what is to come next."""
        if not self._in_step:
            self._next_step = None
        self._in_step = False

    def on_plan_skipped(self, cause: str) -> None:
        if self._current is not None and not self._accounted:
            self._accounted = True
            self._skip(cause, len(self._current.requests.scheduled))
            self.drafts.lose()

    def on_plan(self, plan: Plan) -> None:
        declaration, bindings, run = self._current, self._bindings, self._run
        if declaration is None or bindings is None or self.expects_no_plan:
            return
        if self._unjudged_cause is not None:
            self.on_plan_skipped(self._unjudged_cause)
            return
        if self._context is not None and not self._knows_where_it_stands(self._context, plan, declaration):
            return
        if declaration.spec_tokens or self.drafts.advances is not None:
            self._report(self.drafts.plan(declaration, plan), "runner", "plan")
        tails = self._tails
        tails.plans_left -= 1
        if not tails.plans_left:
            tails.take(plan, bindings, run.coverage.tail_entries)
        pool, agreement, kept = self._pool, self._agreement, None
        if agreement is not None and not (self._spell_tables or (pool is not None and pool.doubtful)):
            agreed = agreement.of(plan, declaration)
            if agreed is not None:
                self._accounted, kept = True, agreed.groups
                tables_bytes = 0
                for group, before in zip(kept, self._kept_groups, strict=True):
                    if group is not before:
                        tables_bytes += len(group.tables)
                self._kept_groups = kept
                self._record(agreed, len(agreed.request_ids), plan.num_tokens, tables_bytes)
        if kept is None:
            self._judge_in_full(plan, declaration, bindings)
        if self.reads_operators and self._handed is not None:
            self.awaits_operators = self._handed.keep(plan, kept)
            self._operators_seen, self.planned_tokens = False, plan.num_tokens

    def _judge_in_full(self, plan: Plan, declaration: Declaration, bindings: Bindings) -> None:
        findings = judge_batch(declaration, plan, self._run.parts) + self._judge_rows(plan, declaration, bindings)
        if findings:
            self._report(findings, "runner", "plan")
            if any(finding.launch_fatal and self._run.acts_on(finding) for finding in findings):
                self._refuse(findings, plan)

    def on_operators(self, arguments: OperatorArguments) -> None:
        """What the operators of the step's forward get; a second time where more of it is known."""
        handed, run, current = self._handed, self._run, self._current
        if handed is None or current is None or not self.awaits_operators:
            return
        doubtful = handed.doubtful(arguments)
        if not self._operators_seen:
            self._operators_seen = True
            run.coverage.operator_rows += handed.rows * handed.groups_read
            for cause in arguments.unread.values():
                run.coverage.skipped["C1", f"operator_arguments: {cause}"] += handed.rows
        if not doubtful:
            return
        given = OperatorArguments(groups=doubtful)
        view = OperatorView(current.step, current.trace_id, handed.plan(), given, handed.topology)
        findings = judge_operators(view, run.parts)
        if findings:
            self._report(findings, "runner", "operators")
            if any(finding.launch_fatal and run.acts_on(finding) for finding in findings):
                self._refuse(findings, arguments)

    def _knows_where_it_stands(self, context: ContextWatch, plan: Plan, declaration: Declaration) -> bool:
        """Whether a context-parallel rank's plan can be judged; its rows are counted where it cannot."""
        found, cause = context.take(plan, declaration)
        if cause is not None:
            self.on_plan_skipped(cause)
        if found:
            self._report(found, "runner", "plan")
        return cause is None

    def _judge_rows(self, plan: Plan, declaration: Declaration, bindings: Bindings) -> list[Finding]:
        """Judge the rows that are declared and whose tables are known; count the others by cause."""
        findings: list[Finding] = []
        judged = judged_rows(plan, declaration, bindings)
        if judged.request_ids:
            step = StepView(
                judged, declaration, bindings, *(self._pool.sides if self._pool is not None else (None, None))
            )
            groups = step.groups(self._groups)
            if self._context is not None:
                self._context.note_local_rows(ContextView(step, groups), declaration, spell=self._spell_tables)
            findings = judge_plan(step, groups, self._run.parts)
            if not plan.exact:
                self._run.coverage.skipped["C1", "estimated_lengths"] += len(step.rows) * len(groups)
            snapshot = take_snapshot(step, groups, spell_tables=self._spell_tables)
            self._record(snapshot, len(step.rows), judged.num_tokens)
            if len(groups) < self._judged_groups:
                self._run.coverage.skipped["plan", "group_missing"] += len(step.rows) * (
                    self._judged_groups - len(groups)
                )
        self._accounted = True
        scheduled = declaration.requests.scheduled
        left_out = len(scheduled) - len(judged.request_ids)
        if left_out > 0:
            unknown = sum(r in scheduled for r in plan.request_ids) - len(judged.request_ids)
            self._skip("table_unknown", unknown)
            self._skip("not_in_batch", left_out - unknown)
        return findings

    def on_local_lengths(self, lengths: LocalLengths | None) -> None:
        """None: the host has none of the step where they can be read."""
        declaration, context = self._current, self._context
        if declaration is None or declaration.is_empty or context is None:
            return
        if lengths is None:
            self._run.coverage.skipped["L", "local_lengths_unread"] += len(declaration.requests.scheduled)
            return
        findings = context.judge_lengths(lengths, declaration, spell=self._spell_tables)
        if findings:
            self._report(findings, "runner", "cp_context")

    def on_dummy(self, run: DummyRun) -> None:
        if self._bindings is None:
            return
        self._run.stream.put(
            "dummy",
            msgspec.structs.replace(run, slots={group: slots.copy() for group, slots in run.slots.items()}),
            component="runner",
            boundary="dummy",
            after_step=self._last_step,
        )
        self._run.coverage.dummy_runs += 1
        context = self._context.current if self._context is not None else None
        findings = judge_dummy(run, self._last_step, self._bindings, self._run.parts, self._ledger, context)
        if findings:
            self._report(findings, "runner", "dummy")

    def on_result(self, result: StepResult | None) -> None:
        declaration, self._result_of, self.due_result = self._result_of, None, None
        if declaration is None or result is None or not declaration.total_num_scheduled_tokens:
            return
        if declaration.spec_tokens:
            self._report(self.drafts.end(declaration), "runner", "spec_post")
        self._run.stream.put(
            "worker_result",
            result,
            component="worker",
            boundary="worker_result",
            step=declaration.step,
            trace_id=declaration.trace_id,
            approx_bytes=64 * len(result.request_ids),
        )
        if "engine" not in self._run.roles:  # which says it for both
            self._run.cover("worker", "worker_result")

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self._leave()
        self._end_step("native_error")
        self._run.native_error(error_type, component="worker", boundary=boundary, after_step=self._last_step)

    def _record(self, plan: AgreedPlan | PlanSnapshot, rows: int, tokens: int, tables_bytes: int = 0) -> None:
        coverage, groups = self._run.coverage, len(plan.groups)
        coverage.rows += rows * groups
        for kind in self._unjudged_kinds:
            coverage.skipped["plan", f"semantics:{kind}"] += rows
        coverage.tokens += tokens
        self._run.stream.put(
            "plan",
            plan,
            component="runner",
            boundary="plan",
            step=plan.step,
            trace_id=plan.trace_id,
            approx_bytes=(128 * rows + 8 * tokens) * groups + tables_bytes,
        )

    @property
    def _ledger(self) -> BlockLedger | None:
        """This worker's ledger of the pool; None where the pool is not followed, or no longer."""
        return self._pool.sides[0] if self._pool is not None else None

    def _report(self, findings: list[Finding], component: str, boundary: str) -> None:
        """Without a mailbox it is the step's failure that stops the engine, where vLLM takes this rank's word."""
        if not findings:
            return
        self._run.report(findings, component, boundary, ledger=self._ledger)
        if self._run.undelivered and self._returns_results:
            raise self._run.violation(self._run.undelivered[0])

    def _refuse(self, findings: list[Finding], of: Plan | OperatorArguments) -> None:
        """Keep an access outside the cache from being launched: under ``isolate`` the step goes on without it."""
        fatal = next((finding for finding in findings if finding.launch_fatal and self._run.stops(finding)), None)
        if fatal is not None and self._returns_results:
            error = self._run.violation(fatal)
            say(logging.ERROR, "%s", error)
            raise error
        if self._bindings is not None:
            make_harmless(*slots_and_tables(self._bindings.topology, of))
