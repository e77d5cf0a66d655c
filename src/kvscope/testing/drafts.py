"""Speculative decoding in a built trace: what a small runner counts of its drafts, followed as a live process does."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_advances, judge_verification
from kvscope.checks.rule import Part
from kvscope.events.codec import verification_record
from kvscope.events.names import RequestNames
from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration, Verification
from kvscope.state.advances import DeclaredAdvances, RunnerAdvances
from kvscope.testing.trace_file import TraceFile


class BuiltDrafts:
    """Of the scheduler, and of each of ``ranks`` workers. ``parts`` judge."""

    def __init__(self, ranks: int, parts: Collection[Part], names: RequestNames) -> None:
        self._declared = DeclaredAdvances()
        self._computed: list[RunnerAdvances | None] = [None] * ranks
        self._parts = parts
        self._names = names

    def declare(self, declaration: Declaration) -> list[Finding]:
        """What is wrong with where the requests of a declaration begin."""
        return judge_advances(declaration, self._declared.declare(declaration), self._parts)

    def plan(self, rank: int, declaration: Declaration, plan: Plan) -> list[Finding]:
        """What is wrong with where the rows of a batch begin."""
        advances = self._computed[rank]
        if advances is None:
            if not declaration.spec_tokens:
                return []
            advances = self._computed[rank] = RunnerAdvances()
        starts = plan.positions[plan.query_start[: len(plan.request_ids)]].tolist()
        return judge_advances(declaration, advances.compute(declaration, plan.request_ids, starts), self._parts)

    def count(
        self, rank: int, stream: TraceFile, declaration: Declaration, damage: Callable[[Verification], None]
    ) -> list[Finding]:
        """All drafts of the step are accepted; what is wrong with what ``damage`` makes of that. It is recorded."""
        drafts = [declaration.spec_tokens.get(request_id, 0) for request_id in declaration.requests.scheduled]
        counted = Verification(
            request_ids=list(declaration.requests.scheduled),
            drafted=drafts,
            accepted=[*drafts],
            rejected=[0] * len(drafts),
        )
        damage(counted)
        advances = self._computed[rank] or RunnerAdvances()
        self._computed[rank] = advances
        advances.count(declaration, counted)
        stream.write(verification_record(counted, self._names), "runner", "spec_post", step=declaration.step)
        return judge_verification(declaration, counted, self._parts)
