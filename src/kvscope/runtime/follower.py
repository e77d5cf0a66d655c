"""A worker's own ledger of the block pool: the scheduler's operations, replayed in the order of the declarations."""

from __future__ import annotations

from ..facts.requests import Declaration
from ..facts.topology import Topology
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.legality import Legality
from .run import Run

LOST = "allocator_gap"
"""Cause under which rows are counted whose blocks are not followed, because operations of the pool never arrived."""


class PoolFollower:
    """What a worker knows of the pool. Once an operation is missing it knows nothing: ``sides`` is then two times None,
    the checks that need the pool are counted as skipped, and all others go on. ``doubtful``: the rules have to look at
    the step, however well its plan agrees with its declaration. ``seen`` counts the operations, None: one is missing.
    """

    def __init__(self, run: Run, topology: Topology, bindings: Bindings) -> None:
        self._run = run
        self._ledger = BlockLedger(topology.num_blocks, topology.null_block_id)
        self._legality = Legality(topology, self._ledger, bindings)
        self.doubtful = False
        self.seen: int | None = 0

    @property
    def sides(self) -> tuple[BlockLedger, Legality] | tuple[None, None]:
        """The ledger and what is illegal by it."""
        return (None, None) if self.seen is None else (self._ledger, self._legality)

    def take(self, declaration: Declaration) -> None:
        """Take over the operations that led to a declaration, before it is bound."""
        if self.seen is None or declaration.operations_before != self.seen:
            self.seen, self.doubtful = None, False
            return
        operations = declaration.operations
        if operations:
            for operation in operations:
                self._legality.take(operation)
            self.seen += len(operations)

    def advance(self, declaration: Declaration) -> None:
        """The declaration is bound."""
        if self.seen is not None:
            legality, seen, self.seen = self._legality, self.seen, None  # after a fault nothing is known any more
            if legality.advance(declaration):
                legality.end_finished()
            self.doubtful, self.seen = legality.doubtful, seen
        elif declaration.requests.scheduled:
            self._run.coverage.skipped["C2", LOST] += len(declaration.requests.scheduled)

    def forgive(self) -> None:
        """A step passed that nobody declared."""
        self._legality.forgive()
