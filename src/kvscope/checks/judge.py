"""Runs the rules over one fact and keeps, of several reasons for one access, the one that says most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..facts.plans import DummyRun, Plan
from ..facts.requests import Declaration, StepRequests
from ..state.bindings import Bindings
from .bind import BIND_RULES, BindView
from .catalog import RULES
from .dummy import DUMMY_RULES, DummyView
from .finding import Finding
from .handover import HANDOVER_RULES, HandoverView
from .plan_view import GroupView, StepView
from .read import READ_RULES
from .row import ROW_RULES
from .rule import Part, RuleFunction, Subject
from .write import WRITE_RULES

Parts = Collection[Part]

_FILLED_IN = ("group_id", "block_id", "slot", "token_index", "position")
"""What the finding that is reported takes over from the others of the same access, where it does not say itself."""


def judge_bind(declaration: Declaration, bindings: Bindings, parts: Parts) -> list[Finding]:
    """Judge a declaration that ``bindings`` have already taken over."""
    return _merged(_fired(BIND_RULES, BindView(declaration=declaration, bindings=bindings), parts))


def judge_handover(declaration: Declaration, received: StepRequests, parts: Parts) -> list[Finding]:
    """Judge what a worker received. Equal sides (one comparison) cannot fire."""
    if declaration.requests == received:
        return []
    view = HandoverView(
        step=declaration.step, trace_id=declaration.trace_id, declaration=declaration, received=received
    )
    return _merged(_fired(HANDOVER_RULES, view, parts))


def judge_missing(after_step: int, received: StepRequests, parts: Parts) -> list[Finding]:
    """Judge a step that came without a declaration, ``after_step`` being the last one that had it."""
    view = HandoverView(step=after_step, trace_id="", declaration=None, received=received)
    return _merged(_fired(HANDOVER_RULES, view, parts))


def judge_dummy(run: DummyRun, after_step: int, bindings: Bindings, parts: Parts) -> list[Finding]:
    """Judge a run that serves no request."""
    if all(bool((slots == -1).all()) for slots in run.slots.values()):
        return []
    return _merged(_fired(DUMMY_RULES, DummyView(after_step=after_step, run=run, bindings=bindings), parts))


def judge_batch(declaration: Declaration, plan: Plan, parts: Parts) -> list[Finding]:
    """Judge which requests the runner put into its batch."""
    if declaration.requests.scheduled.keys() == set(plan.request_ids):
        return []
    view = HandoverView(
        step=declaration.step,
        trace_id=declaration.trace_id,
        declaration=declaration,
        received=declaration.requests,
        batch=plan.request_ids,
    )
    return _merged(_fired(HANDOVER_RULES, view, parts))


def judge_plan(step: StepView, groups: Sequence[GroupView], parts: Parts) -> list[Finding]:
    """Judge positions, lengths, slots and tables of one step. Rules run only where an array comparison failed."""
    fired: list[Finding] = []
    if not (step.positions_agree and step.lengths_agree):
        fired += _fired(ROW_RULES, step, parts)
    for group in groups:
        if not group.writes_agree:
            fired += _fired(WRITE_RULES, group, parts)
        if not group.reads_agree:
            fired += _fired(READ_RULES, group, parts)
    return _merged(fired) if fired else []


def _fired(rules: Iterable[RuleFunction[Subject]], subject: Subject, parts: Parts) -> list[Finding]:
    findings: list[Finding] = []
    for function in rules:
        if function.rule.part not in parts:
            continue
        for finding in function(subject):
            finding.reason = function.rule.reason
            findings.append(finding)
    return findings


def _side(finding: Finding) -> str:
    """What the access is: reading and writing of one row are two accesses."""
    return "read" if finding.reason.startswith("read_") else "write"


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding an access: a row of a group, read or written; a request, bound or handed over.

    A shifted position or length belongs to the row in every group, and takes in what follows from it in the groups.
    """
    accesses: dict[tuple[object, ...], list[Finding]] = {}
    row_wide = {(f.row, _side(f)) for f in findings if f.row is not None and f.group_id is None}
    for finding in findings:
        group = None if (finding.row, _side(finding)) in row_wide else finding.group_id
        key = (_side(finding), group, finding.row, finding.request_id if finding.row is None else None)
        accesses.setdefault(key, []).append(finding)
    merged: list[Finding] = []
    for same in accesses.values():
        same.sort(key=lambda f: RULES[f.reason].rank)
        first = same[0]
        first.also = tuple(dict.fromkeys(f.reason for f in same if f.reason != first.reason))
        first.launch_fatal = any(f.launch_fatal for f in same)
        for field in _FILLED_IN:
            if getattr(first, field) is None:
                setattr(first, field, next((v for f in same if (v := getattr(f, field)) is not None), None))
        merged.append(first)
    return merged
