"""Replays what a worker did beside its plan: blocks that it cleared or copied, drafts that it counted."""

from __future__ import annotations

from kvscope.analysis.reader import step_of
from kvscope.analysis.sides import EngineSide, RankSide
from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_advances, judge_verification, judge_work
from kvscope.events.codec import verification_from, work_from
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.plans import PlanSnapshot
from kvscope.facts.requests import Declaration
from kvscope.state.advances import RunnerAdvances

KINDS = frozenset({"zero", "copy", "spec_post"})


def judge_boundary(engine: EngineSide, rank: RankSide, record: BoundaryRecord) -> list[Finding]:
    """The findings of one kv.boundary of these kinds; none where its step was never declared."""
    known = engine.declared.get(step_of(record))
    if known is None:
        return []
    declaration, parts = known[0], engine.setup.parts
    if record.kind != "spec_post":
        return judge_work(declaration, work_from(record, declaration), rank.bindings, parts)
    counted = verification_from(record)
    if rank.advances is None:
        rank.advances = RunnerAdvances()
    rank.advances.count(declaration, counted)
    return judge_verification(declaration, counted, parts)


def judge_starts(engine: EngineSide, rank: RankSide, declaration: Declaration, plan: PlanSnapshot) -> list[Finding]:
    """Rows of a batch that do not begin where the drafts that were rejected before lead to."""
    advances = rank.advances
    if advances is None:
        if not declaration.spec_tokens:
            return []
        advances = rank.advances = RunnerAdvances()
        advances.step = declaration.step
    if any(advances.step < step < declaration.step and not of.is_empty for step, (of, _) in engine.declared.items()):
        rank.advances = advances = RunnerAdvances()  # a plan between the two is not in the trace
    moved = advances.compute(declaration, plan.request_ids, plan.first_positions.tolist())
    return judge_advances(declaration, moved, engine.setup.parts)
