"""Follows the block pool of one scheduler: a ledger of its blocks, what the rules say of each operation, and an audit
that holds the ledger against the pool itself, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Protocol

import numpy as np

from ..checks.finding import Finding
from ..checks.judge import judge_audit, judge_content, judge_held, judge_pool, judge_settled
from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.requests import Declaration, StepResult
from ..facts.topology import Topology
from ..state.bindings import Bindings
from ..state.block_audit import Difference
from ..state.block_states import CountedLedger
from ..state.blocks import BlockLedger
from ..state.fences import Fences
from ..state.holds import Holds
from ..state.legality import Legality
from .run import Run

AUDIT_EVERY_STEPS = 8
AUDITED_BLOCKS = 128
"""So many blocks are held against the pool every so many steps: about 10 µs, and every block of a pool of 10,000 once
in 640 steps. What goes through the pool's own functions is seen at once; this is for what does not."""
WALKED_BLOCKS = 4096
"""The free queue is walked, when the audit has come around, if it has no more blocks than this."""
WALK_EVERY_STEPS = 64
COUNTED_BLOCKS = 16384
"""With it the counts of the whole pool are read anew if it has no more blocks than this (10,000 take a millisecond); in
a bigger one the queue is held against our own, which the audit has just gone through."""
AUDITED_TABLES = 4
"""With it the tables of so many requests are held against ``req_to_blocks``, in turn."""
MOST_OPERATIONS = 1 << 16
"""So many may wait for the next declaration, some for every request; beyond that it is not going to come."""
_RELEASES = frozenset({facts.FREE, facts.HOLD})
NOT_OBSERVED, HOOK_FAULT, UNSEEN_STEP = "pool_not_observed", "allocator_hook_fault", "scheduler_hook_fault"
"""Causes under which steps are counted that the pool is not followed in."""


class HostPool(Protocol):
    """What the audit reads of the pool itself. Implemented by the boundary's reader."""

    @property
    def num_free(self) -> int: ...

    def counts(self, first: int, last: int) -> list[int]: ...

    def table_of(self, request_id: str) -> list[list[int]]: ...

    def free_ids(self, limit: int) -> list[int]: ...


class PoolJudge:
    """The pool's side of an :class:`~kvscope.runtime.engine.EngineJudge`.

    ``lost`` says why the pool is not followed any more: after a fault of one of its hooks, or a step that was not seen,
    its books would be wrong, and every finding with them. Declarations then say that they do not know what it did.
    """

    def __init__(self, run: Run, topology: Topology, bindings: Bindings) -> None:
        pool = (topology.num_blocks, topology.null_block_id)
        is_counted = run.config.monitor.enabled
        self.ledger = CountedLedger(*pool, len(topology.groups)) if is_counted else BlockLedger(*pool)
        self.legality = Legality(topology, self.ledger, bindings)
        self.host: HostPool | None = None
        self.holds = Holds()
        self.lost: str | None = NOT_OBSERVED
        self._run = run
        self._bindings = bindings
        self._operations: list[PoolOperation] = []
        self._operations_before = 0
        self._fences = Fences()
        self._last_returned = 0
        self._audit_in = AUDIT_EVERY_STEPS
        self._audit_at = 0
        self._walk_at = 0
        self._to_audit: list[str] = []
        self._faults = run.allocator_faults
        self._faults_before = self._faults[0]

    def observe(self, host: HostPool) -> None:
        """From now on every operation is told, and ``host`` answers the audit. The pool has not been used yet."""
        self.host, self.lost = host, None

    def take(self, operation: PoolOperation, boundary: str, trace_id: str) -> None:
        """The pool has done something; nothing of it stands in the ledger yet."""
        run, ledger = self._run, self.ledger
        if self.lost is not None or self._faults[0] != self._faults_before:
            return
        findings = judge_pool(operation, ledger, trace_id, run.parts, in_flight=self._fences.blocks)
        if findings:  # said now, while the ledger still has what the operation is about to change
            self._report(findings, boundary)
        self.legality.take(operation)
        if operation.kind == facts.ALLOC:
            operation.generations = ledger.generations(operation.block_ids)
        findings = judge_settled(operation, ledger, trace_id, run.parts)
        if findings:
            self._report(findings, boundary)
        self._operations.append(operation)
        if len(self._operations) > MOST_OPERATIONS:
            self.lost, self._operations = UNSEEN_STEP, []
        self._fences.take(operation)
        if operation.kind in _RELEASES:
            self.holds.take(operation, ledger, monotonic_ns())
        run.coverage.pool_operations += 1
        step = operation.step if operation.scheduling else None
        run.stream.put(
            "pool",
            operation,
            component="allocator",
            boundary=boundary,
            step=step,
            after_step=None if operation.scheduling else operation.step,
            trace_id=trace_id if operation.scheduling else None,
            approx_bytes=256 + 24 * len(operation.block_ids),
        )

    def about_to_hand_out(self, operation: PoolOperation, boundary: str, trace_id: str) -> None:
        """The pool is going to stop at an assertion, and will not say what it did."""
        if self.why_lost() is None:
            self._report(judge_pool(operation, self.ledger, trace_id, self._run.parts), boundary)

    def hand_over(self, declaration: Declaration) -> None:
        """Give the declaration what happened since the one before."""
        if self.lost is not None or self._faults[0] != self._faults_before:
            lost = self.why_lost() or HOOK_FAULT
            self._run.coverage.skipped["A", lost] += 1
            return
        declaration.operations_before = self._operations_before
        if self._operations:
            declaration.operations, self._operations = self._operations, []
            self._operations_before += len(declaration.operations)

    def why_lost(self) -> str | None:
        """:attr:`lost`, asked anew: after a fault of a hook the very next operation would be misjudged."""
        if self.lost is None and self._faults[0] != self._faults_before:
            self.lost = HOOK_FAULT
        return self.lost

    def declare(self, declaration: Declaration) -> bool:
        """The bindings have the declaration. Whether something is wrong with it, or was found out with it."""
        if self.lost is not None:
            return False
        legality = self.legality
        content: list[Finding] = []
        findings: list[Finding] = []
        if legality.advance(declaration):
            content = judge_content(declaration, legality, self._run.parts)
            if content:
                self._report(content, "schedule")
            legality.end_finished()
        self._fences.declare(declaration)
        self._audit_in -= 1
        if self._audit_in <= 0 and self.host is not None:
            self._audit_in = AUDIT_EVERY_STEPS
            findings += self._audit(self.host, declaration)
        if self.holds.open:
            overdue = self.holds.overdue(self._last_returned, monotonic_ns())
            if overdue:
                findings += judge_held(overdue, declaration, self.ledger, self._run.parts)
        if findings:
            self._report(findings, "schedule")
        return bool(content or findings)

    def confirm(self, declaration: Declaration, result: StepResult | None) -> None:
        """The result of a step is there."""
        if self.lost is not None:
            return
        step = declaration.step
        self._fences.returned(step)
        self._last_returned = step
        self.legality.confirm(declaration, result)

    def report_invalid(self, block_ids: Sequence[int], step: int) -> None:
        """The result of a step says that these blocks could not be loaded."""
        if self.lost is None:
            self.legality.invalid.report(block_ids, step)

    def _audit(self, host: HostPool, declaration: Declaration) -> list[Finding]:
        """Hold the next piece of the ledger against the pool. No operation is under way when a step is declared."""
        first, ledger = self._audit_at, self.ledger
        last = min(first + AUDITED_BLOCKS, ledger.num_blocks)
        self._audit_at = 0 if last == ledger.num_blocks else last
        free: Sequence[int] | None = None
        if not self._audit_at and declaration.step >= self._walk_at and host.num_free <= WALKED_BLOCKS:
            self._walk_at = declaration.step + WALK_EVERY_STEPS
            free = host.free_ids(WALKED_BLOCKS + 1)
            if ledger.num_blocks <= COUNTED_BLOCKS:
                first = 0
        self._run.coverage.audited_blocks += last - first
        tables = {} if free is None else self._next_tables(host)
        counts, ours = host.counts(first, last), ledger.counted(first, last)
        if first <= ledger.null_block_id < last:
            counts[ledger.null_block_id - first] = ours[ledger.null_block_id - first]
        if counts == ours and free is None:
            return []
        differences: list[Difference] = []
        if free is not None and first:
            references = ledger.references_of(np.arange(ledger.num_blocks))
            differences = ledger.differences(references, free, tables or None, all_requests=False)
            free, tables = None, {}
        differences += ledger.differences(counts, free, tables or None, first_block=first, all_requests=False)
        if not differences:
            return []
        return judge_audit(differences, declaration.step, declaration.trace_id, ledger, self._run.parts)

    def _next_tables(self, host: HostPool) -> dict[str, list[list[int]]]:
        """The host's tables of the requests whose turn it is."""
        if not self._to_audit:
            self._to_audit = list(self._bindings.live)
        turn, self._to_audit = self._to_audit[:AUDITED_TABLES], self._to_audit[AUDITED_TABLES:]
        tables = {request_id: host.table_of(request_id) for request_id in turn}
        return {request_id: table for request_id, table in tables.items() if any(table)}

    def _report(self, findings: list[Finding], boundary: str) -> None:
        self._run.report(findings, "allocator", boundary, ledger=self.ledger)
