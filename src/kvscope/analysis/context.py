"""Where a context-parallel rank stood, by its own records, and what follows for its plans."""

from __future__ import annotations

from kvscope.checks.context_parallel import CoordinatesView, LengthsView
from kvscope.checks.finding import Finding
from kvscope.checks.judge import Parts, judge_coordinates, judge_local_lengths
from kvscope.events.context_parallel import context_from
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.context_parallel import ContextParallel, LocalRows
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import Ranks, Topology
from kvscope.state.bindings import Bindings

NO_COORDINATES = "coordinates of the rank missing"
WRONG_COORDINATES = "coordinates of the rank invalid"


class RankContext:
    """The coordinates of one rank as far as the trace has been read; ``ranks`` is where its process says it stands."""

    def __init__(self, topology: Topology, ranks: Ranks) -> None:
        self.current: ContextParallel | None = None
        self._topology, self._ranks = topology, ranks
        self._sound = False
        self._rows: tuple[int, LocalRows] | None = None

    @property
    def unjudged(self) -> str | None:
        """Why plans of this rank cannot be judged, None if they can."""
        if not self._topology.context_parallel:
            return None
        if self.current is None:
            return NO_COORDINATES
        return None if self._sound else WRONG_COORDINATES

    def take(self, record: BoundaryRecord, declaration: Declaration, bindings: Bindings, parts: Parts) -> list[Finding]:
        """Take over a cp_context of a step, and judge what can be judged of it alone."""
        fact = context_from(record)
        if isinstance(fact, LocalRows):
            self._rows = declaration.step, fact
            return []
        if isinstance(fact, ContextParallel):
            self.current = fact
            view = CoordinatesView(
                step=declaration.step,
                trace_id=declaration.trace_id,
                context=fact,
                topology=self._topology,
                ranks=self._ranks,
            )
            findings = judge_coordinates(view)
            self._sound = not findings
            return findings if "kv_trace" in parts else []
        if self.current is None or not self._sound:
            return []
        if any(name not in declaration.requests.scheduled or name not in bindings for name in fact.request_ids):
            return []
        return judge_local_lengths(
            LengthsView(declaration=declaration, context=self.current, lengths=fact, bindings=bindings), parts
        )

    def rows_at(self, step: int) -> LocalRows | None:
        """The rank's own rows of a step, None where they are as they must be and were not written."""
        return self._rows[1] if self._rows is not None and self._rows[0] == step else None
