"""Judges a trace again, through the same bindings and rules as the live processes.

The scheduler's declarations rebuild the tables; every recorded plan is rebuilt and held against them. A step of which
something is missing is counted with the cause, never completed by a guess.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from kvscope.analysis import row_coverage as causes
from kvscope.analysis.connector import CONNECTOR_KINDS
from kvscope.analysis.engines import engines_of
from kvscope.analysis.plans import Bool, rebuild
from kvscope.analysis.pool import pool_operation
from kvscope.analysis.reader import Entry, ProcessLog, Trace, step_of
from kvscope.analysis.row_coverage import RowCoverage
from kvscope.analysis.scene import Scene, scene_of
from kvscope.analysis.sides import EngineSide, RankSide, distrust
from kvscope.analysis.tally import LIVE, REPLAY, FindingTally
from kvscope.analysis.work import KINDS, judge_boundary, judge_starts
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.checks.judge import (
    judge_advances,
    judge_batch,
    judge_bind,
    judge_content,
    judge_dummy,
    judge_handover,
    judge_held,
    judge_lifecycle,
    judge_missing,
    judge_plan,
    judge_pool,
    judge_result,
    judge_settled,
)
from kvscope.checks.plan_view import StepView
from kvscope.events.codec import (
    declaration_from,
    drafts_from,
    dummy_from,
    finding_from,
    received_from,
    result_from,
    snapshot_from,
)
from kvscope.events.context_parallel import KIND as CP_CONTEXT
from kvscope.events.envelope import given
from kvscope.events.finding_schema import ViolationRecord
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.events.schema import BindRecord, BoundaryRecord, Record
from kvscope.facts.allocator import PoolOperation
from kvscope.facts.plans import PlanSnapshot
from kvscope.facts.requests import Declaration
from kvscope.state.advances import DeclaredAdvances

DECLARATION_WINDOW = 64
"""Steps for which a declaration is kept: a process may still be writing about one while the next are declared."""

DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)
"""What a record that contradicts itself can cause. The trace is foreign data: nothing in it may end the replay."""


class Replay:
    """The result, complete after :meth:`run`. ``ids_omitted``: requests cannot be told apart in this trace.

    ``pools_lost`` has, by data-parallel rank, the step from which on records of the pool are known to be missing, and
    ``pools_unobserved`` the ranks whose guard was on and of whose pool nothing is recorded at all.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.setups = engines_of(trace.logs, whole_run=trace.files.whole_run)
        self.coverage = RowCoverage()
        self.findings = FindingTally()
        self.undeclared_steps = 0
        self.damaged_records = 0
        self.pools_lost: dict[int, int] = {}
        self.pools_unobserved: list[int] = []
        self.ids_omitted = False
        self._by_log: dict[str, EngineSide] = {}
        for setup in self.setups:
            if setup.topology is not None:
                engine = EngineSide(setup, setup.topology)
                self._by_log.update({log.name: engine for log in [setup.declaring, *setup.ranks] if log})

    def run(self, entries: Iterable[Entry] | None = None) -> Replay:
        """Judge everything; ``entries`` are the trace's records unless something watches them on their way."""
        for entry in self.trace.records() if entries is None else entries:
            if isinstance(entry.record, ViolationRecord):
                self._recorded_finding(entry, entry.record)
            engine = self._by_log.get(entry.log.name)
            if engine is None:
                continue
            try:
                self._one(engine, entry)
            except DAMAGE as error:
                self._damaged(error)
        for engine in {id(engine): engine for engine in self._by_log.values()}.values():
            if engine.setup.declaring is not None and not engine.setup.declaring.ever_dropped:
                self._prove(engine, engine.setup.declaring)
            if engine.declared and not engine.pool.was_observed and "kv_guard_config" in engine.setup.parts:
                self.pools_unobserved.append(engine.setup.dp_rank)
            for rank in engine.ranks.values():
                self._drop_half_plan(engine, rank)
        for log in self.trace.logs:
            for count in log.coverage.findings if log.coverage else ():
                self.findings.told(count, log.name)
        rest = self.coverage.scheduled - self.coverage.audited - self.coverage.skipped.total()
        if rest > 0:
            self.coverage.skipped[causes.NO_PLAN] += rest
        return self

    def _one(self, engine: EngineSide, entry: Entry) -> None:
        record = entry.record
        if entry.log is engine.setup.declaring:
            if isinstance(record, BindRecord):
                self._declare(engine, entry.log, record)
            elif (operation := pool_operation(record)) is not None:
                self._operation(engine, record, operation)
            elif isinstance(record, BoundaryRecord) and record.kind in CONNECTOR_KINDS:
                self._connector(engine, entry.log, record)
            elif isinstance(record, BoundaryRecord) and record.kind == "update_input":
                self._result(engine, entry.log, record)
        rank = engine.ranks.get(entry.log.name)
        if rank is not None:
            self._of_rank(engine, rank, record)

    def _of_rank(self, engine: EngineSide, rank: RankSide, record: Record) -> None:
        if isinstance(record, BoundaryRecord) and record.kind == "worker_input":
            self._input(engine, rank, record)
        elif isinstance(record, BoundaryRecord) and record.kind == CP_CONTEXT:
            self._context(engine, rank, record)
        elif isinstance(record, BoundaryRecord) and record.kind == "dummy":
            self.coverage.dummy_runs += 1
            run, step = dummy_from(record), step_of(record)
            rank.catch_up(engine.declared, step)  # the worker was told of empty steps, too
            ledger = rank.pool.ledger
            parts, context = engine.setup.parts, rank.context.current
            self._found(engine, rank, judge_dummy(run, step, rank.bindings, parts, ledger, context))
        elif isinstance(record, BoundaryRecord) and record.kind in KINDS:
            self._found(engine, rank, judge_boundary(engine, rank, record))
        elif isinstance(record, (WriteRecord, ReadRecord)):
            self._half_plan(engine, rank, record)

    def _half_plan(self, engine: EngineSide, rank: RankSide, record: WriteRecord | ReadRecord) -> None:
        """A plan is two records, of which the second one completes it."""
        if isinstance(record, WriteRecord):
            self._drop_half_plan(engine, rank)
            rank.write = record
            return
        write, rank.write = rank.write, None
        if write is not None and write.step == record.step:
            self._plan(engine, rank, write, record)
        else:
            self._skip_recorded(engine, record.requests, causes.HALF_PLAN, step_of(record))

    def _connector(self, engine: EngineSide, log: ProcessLog, record: BoundaryRecord) -> None:
        def declared(step: int) -> Declaration | None:
            known = engine.declared.get(step)
            return None if known is None else known[0]

        self._found(engine, None, engine.connector.take(record, log, declared, engine.pool, engine.setup.parts))

    def _operation(self, engine: EngineSide, record: Record, operation: PoolOperation) -> None:
        """Judge what the pool did. Whether the trace has all of it before that is known with the next declaration."""
        pool, parts = engine.pool, engine.setup.parts
        last = engine.declared.get(operation.step)
        trace_id = record.trace_id if isinstance(record.trace_id, str) else last[0].trace_id if last else ""
        if pool.ledger is not None:
            self._suspect(engine, judge_pool(operation, pool.ledger, trace_id, parts, in_flight=pool.fences.blocks))
        pool.hear(operation, record.mono_ns)
        if pool.ledger is not None:
            self._suspect(engine, judge_settled(operation, pool.ledger, trace_id, parts))

    def _suspect(self, engine: EngineSide, findings: list[Finding]) -> None:
        engine.unproven += [(finding, self._scene(engine, engine, finding)) for finding in findings]

    def _prove(self, engine: EngineSide, log: ProcessLog) -> None:
        unproven, engine.unproven = engine.unproven, []
        if engine.pool.ledger is not None and log.missing + log.garbage <= engine.damage_seen:
            for finding, scene in unproven:
                self._add(engine, log, finding, scene)

    def _declare(self, engine: EngineSide, log: ProcessLog, record: BindRecord) -> None:
        declaration = declaration_from(record)
        damage = log.missing + log.garbage
        skipped_step = declaration.step != engine.last_step + 1 and engine.last_step > 0
        lost = damage > engine.damage_seen or (log.ever_dropped and skipped_step) or declaration.after_unseen
        engine.damage_seen, engine.last_step = damage, max(declaration.step, engine.last_step)
        engine.declared[declaration.step] = (declaration, lost)
        self._count_scheduled(engine, declaration, max(len(engine.ranks) + len(engine.setup.absent_ranks), 1))
        if lost:
            distrust(engine)
        elif log.ever_dropped or log.missing_first or not record.seq:
            engine.lifecycle.forgive()  # an admission or a result may be among what is not there
        engine.pool.hand_over(declaration, record)
        self._prove(engine, log)
        if engine.pool.is_lost and engine.pool.was_observed and not self.ids_omitted:
            self.pools_lost.setdefault(engine.setup.dp_rank, declaration.step)
        engine.diary.note(declaration.step, declaration.requests, engine.bindings)
        engine.bindings.apply(declaration.requests)
        self._judge_pool_at(engine, declaration, record.mono_ns)
        if log.ever_dropped:  # among what is missing may be results
            engine.advances = DeclaredAdvances()
        moved = engine.advances.declare(declaration)
        self._found(engine, None, judge_advances(declaration, moved, engine.setup.parts))
        findings = [
            finding
            for finding in judge_bind(declaration, engine.bindings, engine.setup.parts, engine.pool.ledger)
            if finding.request_id not in engine.bindings.partial
        ]
        if engine.lifecycle.take(declaration):
            findings += judge_lifecycle(declaration, engine.lifecycle, engine.setup.parts)
        self._found(engine, None, findings)
        for step in [step for step in engine.declared if step < declaration.step - DECLARATION_WINDOW]:
            for rank in engine.ranks.values():
                rank.catch_up(engine.declared, step)
            del engine.declared[step]

    def _judge_pool_at(self, engine: EngineSide, declaration: Declaration, now_ns: int) -> None:
        """What the pool's blocks say about a declaration that was just bound."""
        pool, parts = engine.pool, engine.setup.parts
        if pool.advance(declaration) and pool.legality is not None:
            self._found(engine, None, judge_content(declaration, pool.legality, parts))
        pool.end_finished()
        overdue = pool.overdue(now_ns)
        if overdue and pool.ledger is not None:
            self._found(engine, None, judge_held(overdue, declaration, pool.ledger, parts))

    def _input(self, engine: EngineSide, rank: RankSide, record: BoundaryRecord) -> None:
        step = step_of(record)
        known = engine.declared.get(step) if record.step is not UNSET else None
        if record.as_declared is UNSET:
            # Nothing was attached: what the worker was told is here, but not what it should have been told.
            self._found(engine, rank, judge_missing(step, received_from(record, None), engine.setup.parts))
            distrust(rank)
            return
        rank.input_step = step
        rank.catch_up(engine.declared, step)
        if known is not None:
            received, drafts = received_from(record, known[0].requests), drafts_from(record)
            previous = given(record.previous_step, None)
            self._found(engine, rank, judge_handover(known[0], received, engine.setup.parts, drafts, previous))

    def _result(self, engine: EngineSide, log: ProcessLog, record: BoundaryRecord) -> None:
        step, result = step_of(record), result_from(record)
        known = engine.declared.get(step)
        declaration = known[0] if known is not None and known[0].trace_id == record.trace_id else None
        engine.lifecycle.confirm(declaration, result)
        if declaration is not None and not declaration.is_empty:
            self._found(engine, None, judge_result(declaration, result, engine.setup.parts))
        engine.pool.confirm(step, result, may_lack=log.ever_dropped)
        if known is not None:
            engine.advances.returned(known[0], result)

    def _context(self, engine: EngineSide, rank: RankSide, record: BoundaryRecord) -> None:
        """Where a context-parallel rank stands, or what it computed or counted in a step."""
        step = step_of(record)
        known = engine.declared.get(step)
        if known is None:
            self._undeclared(engine, step)
            return
        self._found(engine, rank, rank.context.take(record, known[0], rank.bindings, engine.setup.parts))

    def _plan(self, engine: EngineSide, rank: RankSide, write: WriteRecord, read: ReadRecord) -> None:
        step = step_of(write)
        known = engine.declared.get(step)
        if known is None:
            self._undeclared(engine, step)
            self._skip_recorded(engine, write.requests, causes.NO_DECLARATION, step)
            return
        declaration, rows = known[0], len(known[0].requests.scheduled) * len(engine.judged)
        if rank.input_step < step:
            self._skip(rows, causes.NO_INPUT)
            return
        if rank.applied != step:
            self._skip(rows, causes.LATE)
            return
        unjudged = rank.context.unjudged
        if unjudged is not None:
            self._skip(rows, unjudged)
            return
        try:
            snapshot = snapshot_from(write, read)
            if snapshot.trace_id != declaration.trace_id:
                raise ValueError("another step than the declared one has this number")
            self._judge(engine, rank, declaration, snapshot)
        except DAMAGE as error:
            self._damaged(error)
            self._skip(rows, causes.DAMAGED)

    def _judge(self, engine: EngineSide, rank: RankSide, declaration: Declaration, snapshot: PlanSnapshot) -> None:
        scheduled, partial = declaration.requests.scheduled, rank.bindings.partial
        in_batch = np.array([r in scheduled and r in rank.bindings for r in snapshot.request_ids], np.bool_)
        keep: Bool = in_batch & np.array([r not in partial for r in snapshot.request_ids], np.bool_)
        rebuilt = rebuild(snapshot, rank.bindings, keep, rank.context.current, rank.context.rows_at(declaration.step))
        recorded = {group.group_id for group in snapshot.groups}
        indexes = [i for i in engine.judged if engine.topology.groups[i].group_id in recorded]
        # The live process leaves rows out of the record whose table it does not know: they were in the batch.
        left_out = [r for r in scheduled if r in partial and r not in snapshot.request_ids]
        whole = msgspec.structs.replace(rebuilt.plan, request_ids=[*snapshot.request_ids, *left_out])
        findings = judge_starts(engine, rank, declaration, snapshot)
        findings += judge_batch(declaration, whole, engine.setup.parts)
        if keep.any():
            view = StepView(rebuilt.plan, declaration, rank.bindings, rank.pool.ledger, rank.pool.legality)
            found = judge_plan(view, view.groups(rank.batches[i] for i in indexes), engine.setup.parts)
            for finding in found:
                rebuilt.renumber(finding)
            findings += found
        unknown, kept, in_rows = int(rebuilt.unknown.sum()), int(keep.sum()), int(in_batch.sum())
        self.coverage.audited += (kept - unknown) * len(indexes)
        self._skip(unknown * len(indexes), causes.NO_TABLE)
        self._skip(kept * (len(engine.judged) - len(indexes)), causes.GROUP_MISSING)
        self._skip((in_rows - kept + len(left_out)) * len(indexes), causes.PARTIAL)
        self._skip((len(scheduled) - in_rows - len(left_out)) * len(indexes), causes.NOT_IN_BATCH)
        self._found(engine, rank, findings)

    def _found(self, engine: EngineSide, rank: RankSide | None, findings: list[Finding]) -> None:
        for finding in findings:
            log = rank.log if rank else engine.setup.declaring
            self._add(engine, log, finding, self._scene(engine, rank or engine, finding))

    def _scene(self, engine: EngineSide, side: EngineSide | RankSide, finding: Finding) -> Scene | None:
        if self.findings.has_scene(finding):
            return None
        return scene_of(finding, side.bindings, engine.diary, side.pool.ledger)

    def _add(self, engine: EngineSide, log: ProcessLog | None, finding: Finding, scene: Scene | None) -> None:
        self.findings.add(
            REPLAY,
            finding,
            process=log.name if log else "?",
            runner=engine.setup.runner,
            action=engine.setup.actions.get(RULES[finding.reason].part, "log"),
            scene=scene,
        )

    def _recorded_finding(self, entry: Entry, record: ViolationRecord) -> None:
        try:
            finding = finding_from(record)
        except ValueError:
            self.ids_omitted = True
            finding = finding_from(msgspec.structs.replace(record, request_id=UNSET, other_request_id=UNSET))
        runner = next((s.runner for s in self.setups if s.dp_rank == entry.log.dp_rank), None)
        history = None if isinstance(record.history, UnsetType) else record.history
        self.findings.add(LIVE, finding, process=entry.log.name, runner=runner, action=record.action, history=history)

    def _count_scheduled(self, engine: EngineSide, declaration: Declaration, ranks: int) -> None:
        coverage, requests = self.coverage, len(declaration.requests.scheduled)
        if not requests:
            return
        coverage.steps += 1
        coverage.first_step = min(coverage.first_step or declaration.step, declaration.step)
        coverage.last_step = max(coverage.last_step or 0, declaration.step)
        coverage.scheduled += requests * len(engine.judged) * ranks
        for group in engine.topology.groups:
            if not group.judged:
                coverage.other_rows[f"group {group.group_id} ({group.kind})"] += requests * ranks

    def _damaged(self, error: Exception) -> None:
        if "omitted" in str(error):
            self.ids_omitted = True
        else:
            self.damaged_records += 1

    def _undeclared(self, engine: EngineSide, step: int) -> None:
        if step in engine.undeclared:
            return
        engine.undeclared.add(step)
        self.undeclared_steps += 1
        sides: list[EngineSide | RankSide] = [engine, *engine.ranks.values()]
        for side in sides:
            distrust(side)

    def _skip(self, rows: int, cause: str) -> None:
        if rows > 0:
            self.coverage.skipped[cause] += rows

    def _skip_recorded(self, engine: EngineSide, requests: list[str | None], cause: str, step: int) -> None:
        """Rows that a worker recorded; if their step was never declared they were not counted as scheduled yet."""
        rows = len(requests) * len(engine.judged)
        if step not in engine.declared:
            self.coverage.scheduled += rows
        self._skip(rows, cause)

    def _drop_half_plan(self, engine: EngineSide, rank: RankSide) -> None:
        if rank.write is not None:
            self._skip_recorded(engine, rank.write.requests, causes.HALF_PLAN, step_of(rank.write))
            rank.write = None
