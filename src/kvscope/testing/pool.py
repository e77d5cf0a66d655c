"""The block pool of a built trace, followed as EngineCore and the workers of a live engine follow theirs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_content, judge_held, judge_pool, judge_settled
from kvscope.checks.rule import Part
from kvscope.facts.allocator import ALLOC, CAUSE_ALLOCATE, FREE, HOLD, PoolOperation
from kvscope.facts.requests import Declaration, StepResult
from kvscope.facts.topology import Topology
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.fences import Fences
from kvscope.state.holds import Holds
from kvscope.state.legality import Legality


class BuiltPool:
    """``scheduler`` is what EngineCore knows of the pool, ``workers`` what each rank knows. ``parts`` judge."""

    def __init__(
        self, topology: Topology, bindings: Bindings, worker_bindings: Sequence[Bindings], parts: Collection[Part]
    ) -> None:
        self.scheduler, *self.workers = [
            Legality(topology, BlockLedger(topology.num_blocks, topology.null_block_id), side)
            for side in (bindings, *worker_bindings)
        ]
        self._waiting: list[PoolOperation] = []
        self._before = 0
        self._fences = Fences()
        self._holds = Holds()
        self._last_returned = 0
        self._parts = parts

    def take(self, operation: PoolOperation, trace_id: str, now_ns: int) -> list[Finding]:
        """The pool has done something; what is wrong with it."""
        ledger = self.scheduler.ledger
        findings = judge_pool(operation, ledger, trace_id, self._parts, in_flight=self._fences.blocks)
        self.scheduler.take(operation)
        if operation.kind == ALLOC:
            operation.generations = self.scheduler.ledger.generation_of(operation.block_ids).tolist()
        self._waiting.append(operation)
        self._fences.take(operation)
        if operation.kind in {FREE, HOLD}:
            self._holds.take(operation, ledger, now_ns)
        return findings + judge_settled(operation, ledger, trace_id, self._parts)

    def hand_over(self, declaration: Declaration) -> None:
        """Give a declaration what led to it."""
        declaration.operations, self._waiting = self._waiting, []
        declaration.operations_before = self._before
        self._before += len(declaration.operations)

    def declare(self, declaration: Declaration, now_ns: int) -> list[Finding]:
        """The scheduler's bindings have the declaration; what is wrong with it, or found out with it."""
        legality, findings = self.scheduler, list[Finding]()
        if legality.advance(declaration):
            findings = judge_content(declaration, legality, self._parts)
            legality.end_finished()
        self._fences.declare(declaration)
        overdue = self._holds.overdue(self._last_returned, now_ns)
        if overdue:
            findings += judge_held(overdue, declaration, legality.ledger, self._parts)
        return findings

    def receive(self, rank: int, declaration: Declaration) -> None:
        """A worker has the declaration, and binds it next."""
        for operation in declaration.operations:
            self.workers[rank].take(operation)

    def carry_out(self, rank: int, declaration: Declaration) -> None:
        """The worker's bindings have the declaration."""
        if self.workers[rank].advance(declaration):
            self.workers[rank].end_finished()

    def confirm(self, declaration: Declaration, result: StepResult) -> None:
        """The step's result is there."""
        self._fences.returned(declaration.step)
        self._last_returned = declaration.step
        self.scheduler.confirm(declaration, result)


def allocation(
    request_id: str, group_id: int, first_index: int, block_ids: Sequence[int], *, step: int
) -> PoolOperation:
    """A request that is being scheduled gets free blocks."""
    return PoolOperation(
        kind=ALLOC,
        block_ids=list(block_ids),
        step=step,
        scheduling=True,
        cause=CAUSE_ALLOCATE,
        request_id=request_id,
        group_id=group_id,
        first_index=first_index,
        ref_counts=[1] * len(block_ids),
    )


def release(
    request_id: str, block_ids: Sequence[int], *, step: int, cause: str, scheduling: bool = False
) -> PoolOperation:
    """A request lets go of blocks that nobody else has."""
    return PoolOperation(
        kind=FREE,
        block_ids=list(block_ids),
        step=step,
        scheduling=scheduling,
        cause=cause,
        request_id=request_id,
        ref_counts=[0] * len(block_ids),
    )
