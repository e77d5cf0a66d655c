"""What a worker knows of its rank's place in context parallelism, and what can be judged by it."""

from __future__ import annotations

import numpy as np

from ..checks.context_parallel import ContextView, CoordinatesView, LengthsView
from ..checks.finding import Finding
from ..checks.judge import judge_coordinates, judge_local_lengths
from ..facts.context_parallel import ContextParallel, LocalLengths, LocalRows
from ..facts.plans import Plan
from ..facts.requests import Declaration
from ..facts.topology import Ranks, Topology
from ..state.bindings import Bindings
from .run import Run

MISSING = "cp_coordinates_missing"
"""Cause under which rows are counted whose rank does not say where it stands: nothing is guessed in its place."""
INVALID = "cp_rank_invalid"
"""Cause under which rows are counted whose rank works with coordinates that cannot be its own."""


class ContextWatch:
    """The coordinates of one rank. ``current`` is None until a plan has brought them."""

    def __init__(self, run: Run, topology: Topology, bindings: Bindings, ranks: Ranks) -> None:
        self._run, self._topology, self._bindings, self._ranks = run, topology, bindings, ranks
        self.current: ContextParallel | None = None
        self._sound = False
        self._exact = True

    def take(self, plan: Plan, declaration: Declaration) -> tuple[list[Finding], str | None]:
        """Findings about the coordinates of a plan where they are new, and why it cannot be judged, None if it can."""
        context = plan.context
        if context is None:
            return [], MISSING
        self._exact = plan.exact
        if context is self.current or context == self.current:
            return [], None if self._sound else INVALID
        self.current = context
        self._put(context, declaration)
        view = CoordinatesView(
            step=declaration.step,
            trace_id=declaration.trace_id,
            context=context,
            topology=self._topology,
            ranks=self._ranks,
        )
        findings = judge_coordinates(view)
        self._sound = not findings
        return [f for f in findings if "kv_trace" in self._run.parts], None if self._sound else INVALID

    def note_local_rows(self, view: ContextView, declaration: Declaration, *, spell: bool) -> None:
        """Record the rank's own rows where they are not as they must be; before the plan, which is judged with them."""
        local = view.step.plan.local
        if local is None:
            return
        if view.local is None:
            self._run.coverage.skipped["C4", "estimated_lengths"] += len(view.step.rows)
        elif spell or not view.local.agrees:
            self._put(_kept(local), declaration)

    def judge_lengths(self, lengths: LocalLengths, declaration: Declaration, *, spell: bool) -> list[Finding]:
        """Judge the local lengths of the step that was launched; they are recorded where they are not as declared."""
        context, bindings, coverage = self.current, self._bindings, self._run.coverage
        rows = len(lengths.request_ids)
        if context is None or not self._sound:
            coverage.skipped["L", MISSING if context is None else INVALID] += rows
            return []
        if not self._exact:
            coverage.skipped["L", "estimated_lengths"] += rows
            return []
        scheduled, partial = declaration.requests.scheduled, bindings.partial
        if any(name not in scheduled or name in partial or name not in bindings for name in lengths.request_ids):
            coverage.skipped["L", "table_unknown"] += rows
            return []
        view = LengthsView(declaration=declaration, context=context, lengths=lengths, bindings=bindings)
        findings = judge_local_lengths(view, self._run.parts)
        if findings or spell:
            self._put(lengths, declaration)
        return findings

    def _put(self, fact: ContextParallel | LocalRows | LocalLengths, declaration: Declaration) -> None:
        self._run.stream.put(
            "cp_context",
            fact,
            component="runner",
            boundary="cp_context",
            step=declaration.step,
            trace_id=declaration.trace_id,
            approx_bytes=256 if isinstance(fact, ContextParallel) else 64 * len(fact.request_ids) + 512,
        )


def _kept(local: LocalRows) -> LocalRows:
    """An own copy: the arrays are views of the host's buffers."""
    return LocalRows(
        request_ids=list(local.request_ids),
        query_start=np.array(local.query_start),
        positions=np.array(local.positions),
        seq_lens=np.array(local.seq_lens),
        writers=np.array(local.writers),
    )
