"""The two sides of an engine in a replay: its scheduler, and each of its workers at the step that it has reached."""

from __future__ import annotations

from kvscope.analysis.blocks import BlockDiary
from kvscope.analysis.connector import ConnectorSide
from kvscope.analysis.context import RankContext
from kvscope.analysis.engines import EngineSetup
from kvscope.analysis.pool import FollowedPool, ScheduledPool
from kvscope.analysis.reader import ProcessLog
from kvscope.analysis.scene import Scene
from kvscope.checks.finding import Finding
from kvscope.events.plan_schema import WriteRecord
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import Topology
from kvscope.state.advances import DeclaredAdvances, RunnerAdvances
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from kvscope.state.lifecycle import Lifecycle


class RankSide:
    """A worker: the tables as it was told, and the half of a plan that waits for the other."""

    def __init__(self, log: ProcessLog, topology: Topology) -> None:
        self.log = log
        self.bindings = Bindings(topology)
        self.pool = FollowedPool(topology, self.bindings)
        self.batches = {i: BatchTable(self.bindings, i) for i, group in enumerate(topology.groups) if group.judged}
        self.applied = 0
        self.input_step = 0
        self.write: WriteRecord | None = None
        self.advances: RunnerAdvances | None = None
        self.context = RankContext(topology, log.context_ranks)

    def catch_up(self, declared: dict[int, tuple[Declaration, bool]], step: int) -> None:
        """Apply all declarations up to a step, in order, that the rank has not seen yet."""
        for number in sorted(number for number in declared if self.applied < number <= step):
            declaration, lost = declared[number]
            if lost:
                distrust(self)
            self.pool.take(declaration)
            self.bindings.apply(declaration.requests)
            self.pool.advance(declaration)
            self.pool.end_finished()
            self.applied = number


class EngineSide:
    """The scheduler's side of one engine. ``declared`` maps a step to its declaration and to whether one before it is
    known to be lost, so that no table from before it can be trusted.

    ``unproven`` are findings about operations of the pool since the last declaration: only with the next one it is
    known that none of these is missing.
    """

    def __init__(self, setup: EngineSetup, topology: Topology) -> None:
        self.setup = setup
        self.topology = topology
        self.judged = [index for index, group in enumerate(topology.groups) if group.judged]
        self.bindings = Bindings(topology)
        self.lifecycle = Lifecycle()
        self.pool = ScheduledPool(topology, self.bindings)
        self.connector = ConnectorSide(self.bindings)
        self.diary = BlockDiary()
        self.advances = DeclaredAdvances()
        self.declared: dict[int, tuple[Declaration, bool]] = {}
        self.unproven: list[tuple[Finding, Scene | None]] = []
        self.last_step = 0
        self.damage_seen = 0
        self.undeclared: set[int] = set()
        self.ranks = {log.name: RankSide(log, topology) for log in setup.ranks}


def distrust(side: RankSide | EngineSide) -> None:
    """Something is lost: no table from before it is known to be right, until its request is bound anew, and what the
    pool has done is not known any more.
    """
    side.bindings.partial.update(side.bindings.live)
    side.pool.lose()
    side.advances = DeclaredAdvances() if isinstance(side, EngineSide) else None
    if isinstance(side, EngineSide):
        side.lifecycle.forgive()
