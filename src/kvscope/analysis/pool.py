"""The blocks of a pool as a trace tells of them: what EngineCore knew, and what each worker knew at its step.

Both are rebuilt by the same objects as in a live process. The operations of the pool stand in the file of the process
that schedules, in order, between the declarations that they led to; a worker was told of them with the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from kvscope.analysis.engines import engines_of
from kvscope.analysis.reader import Trace
from kvscope.checks.judge import judge_content
from kvscope.events.codec import declaration_from, operation_from, result_from
from kvscope.events.pool import CONNECTOR_RESULT
from kvscope.events.pool_schema import PoolRecord
from kvscope.events.schema import BindRecord, BoundaryRecord, Record
from kvscope.facts.allocator import ALLOC, FREE, HOLD, PoolOperation
from kvscope.facts.requests import Declaration, StepResult
from kvscope.facts.topology import Topology
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.fences import Fences
from kvscope.state.holds import Held, Holds
from kvscope.state.legality import Legality

MOST_WAITING = 1 << 16
"""Operations kept for the next declaration. Beyond that the trace has lost declarations, and workers cannot follow."""
MOST_UNCONFIRMED = 64
"""Declarations that wait for their result: a ledger remembers no more of them either."""


class FollowedPool:
    """What one process knew of the pool. ``is_lost``: it was not observed, or something is missing, so that nothing is
    known any more.
    """

    def __init__(self, topology: Topology, bindings: Bindings) -> None:
        self._ledger = BlockLedger(topology.num_blocks, topology.null_block_id)
        self._legality = Legality(topology, self._ledger, bindings)
        self._heard = 0
        self.is_lost = False

    @property
    def ledger(self) -> BlockLedger | None:
        """None where the pool is lost."""
        return None if self.is_lost else self._ledger

    @property
    def legality(self) -> Legality | None:
        """None where the pool is lost."""
        return None if self.is_lost else self._legality

    def take(self, declaration: Declaration) -> None:
        """Take over the operations that led to a declaration, before it is bound: as a worker does."""
        if declaration.operations_before != self._heard:
            self.is_lost = True
            return
        for operation in declaration.operations:
            self._take(operation)

    def advance(self, declaration: Declaration) -> bool:
        """The bindings have the declaration. Whether there is something for the rules to look at."""
        return not self.is_lost and self._legality.advance(declaration)

    def end_finished(self) -> None:
        """The rules have looked at what was advanced to."""
        if not self.is_lost:
            self._legality.end_finished()

    def lose(self) -> None:
        """Something that is needed to follow the pool is missing."""
        self.is_lost = True

    def _take(self, operation: PoolOperation) -> None:
        self._legality.take(operation)
        self._heard += 1


class ScheduledPool(FollowedPool):
    """What EngineCore knew. In order: :meth:`hear` each operation, :meth:`hand_over` them to a declaration, bind it,
    :meth:`advance`; :meth:`confirm` when a result stands in the trace. ``was_observed``: there was something to hear.

    Times are ``mono_ns`` of the process that schedules, as its records have them.
    """

    def __init__(self, topology: Topology, bindings: Bindings) -> None:
        super().__init__(topology, bindings)
        self.fences = Fences()
        self.was_observed = False
        self._holds = Holds()
        self._last_returned = 0
        self._waiting: list[PoolOperation] = []
        self._unconfirmed: dict[int, Declaration] = {}

    def hear(self, operation: PoolOperation, now_ns: int) -> None:
        """The pool did something. A generation that is not the one we count says that something is missing."""
        self.was_observed = True
        if self.is_lost:
            return
        self._take(operation)
        self.fences.take(operation)
        if operation.kind in {FREE, HOLD}:
            self._holds.take(operation, self._ledger, now_ns)
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(operation)
        if operation.kind == ALLOC and operation.generations is not None:
            self.is_lost = self._ledger.generation_of(operation.block_ids).tolist() != operation.generations

    def hand_over(self, declaration: Declaration, record: BindRecord) -> None:
        """Give a declaration what led to it, as it had it when it was made. A pool that is lost gives it nothing."""
        declaration.operations, self._waiting = self._waiting, []
        before, count = record.operations_before, record.num_operations
        if not isinstance(before, int) or not isinstance(count, int):
            self.is_lost = True
        else:
            self.was_observed = True
            self.is_lost |= before + count != self._heard
        declaration.operations_before = None if self.is_lost else self._heard - len(declaration.operations)
        if not declaration.is_empty and not self.is_lost:
            self._unconfirmed[declaration.step] = declaration
            if len(self._unconfirmed) > MOST_UNCONFIRMED:
                del self._unconfirmed[next(iter(self._unconfirmed))]

    def advance(self, declaration: Declaration) -> bool:
        is_doubtful = super().advance(declaration)
        self.fences.declare(declaration)
        return is_doubtful

    def overdue(self, now_ns: int) -> list[Held]:
        """What is held for too long when a step is declared; each is named once."""
        return [] if self.is_lost else self._holds.overdue(self._last_returned, now_ns)

    @property
    def open_holds(self) -> Mapping[str, tuple[PoolOperation, int]]:
        """What is held now, by request, each with its time."""
        return self._holds.open

    def confirm(self, step: int, result: StepResult, *, may_lack: bool) -> None:
        """The result of a step. ``may_lack``: records were dropped, so that a step without one says nothing."""
        self.fences.returned(step)
        self._last_returned = step
        declaration = self._unconfirmed.pop(step, None)
        earlier = [number for number in self._unconfirmed if number < step]
        for number in earlier:
            del self._unconfirmed[number]
        if may_lack and earlier:
            self.is_lost = True
        if declaration is not None and not self.is_lost:
            self._legality.confirm(declaration, result)


def pool_operation(record: Record) -> PoolOperation | None:
    """The operation of the pool that a record is about, None where it is about none.

    Raises:
        ValueError: as :func:`~kvscope.events.codec.operation_from`.
    """
    is_load = isinstance(record, BoundaryRecord) and record.kind == CONNECTOR_RESULT and record.block_ids is not UNSET
    if isinstance(record, PoolRecord) or (is_load and isinstance(record, BoundaryRecord)):
        return operation_from(record)
    return None


def rebuild_ledger(trace: Trace, dp_rank: int = 0) -> BlockLedger:
    """The ledger of one engine's pool, as its scheduler had it when the trace ended. It reads the whole trace.

    Raises:
        ValueError: the trace does not have all of it.
    """
    setup = next((s for s in engines_of(trace.logs, whole_run=trace.files.whole_run) if s.dp_rank == dp_rank), None)
    if setup is None or setup.topology is None or setup.declaring is None:
        raise ValueError(f"engine {dp_rank} has no scheduler in this trace, or did not say what its pool is")
    bindings = Bindings(setup.topology)
    pool = ScheduledPool(setup.topology, bindings)
    log = setup.declaring
    for entry in trace.records():
        record = entry.record
        if entry.log is not log:
            continue
        if (operation := pool_operation(record)) is not None:
            pool.hear(operation, record.mono_ns)
        elif isinstance(record, BindRecord):
            declaration = declaration_from(record)
            pool.hand_over(declaration, record)
            bindings.apply(declaration.requests)
            if pool.advance(declaration) and pool.legality is not None:
                judge_content(declaration, pool.legality, setup.parts)  # which may look into a block that is half full
            pool.end_finished()
        elif isinstance(record, BoundaryRecord) and record.kind == "update_input" and isinstance(record.step, int):
            pool.confirm(record.step, result_from(record), may_lack=log.ever_dropped)
    if pool.ledger is None or not pool.was_observed or log.missing or log.missing_first or log.garbage or log.dropped:
        raise ValueError(f"the trace of engine {dp_rank} lacks records of its pool")
    return pool.ledger
