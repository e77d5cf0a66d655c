"""Runs the rules over one fact and keeps, of several reasons for one access, the one that says most."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..facts.allocator import PoolOperation
from ..facts.connector import PlannedReceive, TakenUp
from ..facts.context_parallel import ContextParallel
from ..facts.plans import PAD_SLOT, DummyRun, Plan
from ..facts.requests import BlockWork, Declaration, Drafts, StepRequests, StepResult, Verification
from ..facts.topology import Topology
from ..state.advances import Advance
from ..state.bindings import Bindings
from ..state.block_audit import Difference
from ..state.blocks import BlockLedger
from ..state.holds import Held
from ..state.legality import Legality
from ..state.lifecycle import Lifecycle
from ..state.transfers import Completion, FailedLoad
from . import past
from .audit import BOOKS_RULES, BooksView, aliases
from .bind import BIND_RULES, BindView
from .catalog import RULES
from .connector import COMPLETION_RULES, FAILED_LOAD_RULES, INVALID_RULES, RECEIVE_RULES, ConnectorView, ReceiveView
from .content import CONTENT_RULES, ContentView, content_agrees
from .context_parallel import (
    CONTEXT_RULES,
    COORDINATE_RULES,
    LENGTH_RULES,
    ContextView,
    CoordinatesView,
    LengthsView,
)
from .drafts import DRAFT_RULES, DraftsView, verification_agrees
from .dummy import DUMMY_RULES, DummyView
from .finding import Finding
from .generation import GENERATION_RULES
from .handover import HANDOVER_RULES, HandoverView
from .initialized import INITIALIZED_RULES
from .lifecycle import LIFECYCLE_RULES, LifecycleView
from .lifetime import LIFETIME_RULES, LifetimeView
from .lists import LIST_RULES, lists_agree
from .operator import OPERATOR_RULES, OperatorView
from .ownership import OWNERSHIP_RULES
from .plan_view import GroupView, StepView
from .pool import POOL_RULES, PoolView, pool_agrees
from .read import READ_RULES
from .results import RESULT_RULES, ResultView, result_agrees
from .row import GROUP_RULES, ROW_RULES
from .rule import Part, RuleFunction, Subject, is_read
from .settled import differences_after, settled_agrees
from .write import WRITE_RULES

POOL_PLAN_RULES = (*GENERATION_RULES, *OWNERSHIP_RULES, *INITIALIZED_RULES)
Parts = Collection[Part]
Key = tuple[object, ...]

_FILLED_IN = ("group_id", "block_id", "slot", "token_index", "position", "generation")
"""What the finding that is reported takes over from the others of the same access, where it does not say itself."""


def judge_bind(
    declaration: Declaration, bindings: Bindings, parts: Parts, ledger: BlockLedger | None = None
) -> list[Finding]:
    """Judge a declaration that ``bindings``, and ``ledger`` if the pool is followed, have already taken over."""
    view = BindView(declaration=declaration, bindings=bindings, ledger=ledger)
    findings = _merged(_fired(BIND_RULES, view, parts))
    if not lists_agree(declaration, bindings, ledger):
        findings += _by_block(_fired(LIST_RULES, view, parts))
    return findings


def judge_lifecycle(declaration: Declaration, lifecycle: Lifecycle, parts: Parts) -> list[Finding]:
    """Judge a declaration that ``lifecycle`` has just taken."""
    return _merged(_fired(LIFECYCLE_RULES, LifecycleView(declaration=declaration, lifecycle=lifecycle), parts))


def judge_handover(
    declaration: Declaration,
    received: StepRequests,
    parts: Parts,
    drafts: Drafts | None = None,
    previous_step: int | None = None,
) -> list[Finding]:
    """Judge what a worker received, and when (see :class:`HandoverView`). Equal sides cannot fire."""
    if drafts is None and previous_step is None and declaration.requests == received:
        return []
    view = HandoverView(
        step=declaration.step,
        trace_id=declaration.trace_id,
        declaration=declaration,
        received=received,
        drafts=drafts,
        previous_step=previous_step,
    )
    return _merged(_fired(HANDOVER_RULES, view, parts))


def judge_work(declaration: Declaration, work: BlockWork, bindings: Bindings, parts: Parts) -> list[Finding]:
    """Judge which blocks a worker cleared or copied; ``bindings`` have taken over the declaration."""
    if work.as_declared:
        return []
    view = HandoverView(
        step=declaration.step,
        trace_id=declaration.trace_id,
        declaration=declaration,
        received=declaration.requests,
        work=work,
        bindings=bindings,
    )
    return _by_block(_fired(HANDOVER_RULES, view, parts))


def judge_verification(declaration: Declaration, counted: Verification, parts: Parts) -> list[Finding]:
    """Judge what a runner counted of the drafts of a step; no rows: it has counted nothing."""
    if verification_agrees(declaration, counted):
        return []
    return _merged(_fired(DRAFT_RULES, DraftsView(declaration=declaration, verification=counted), parts))


def judge_advances(declaration: Declaration, advances: Sequence[Advance], parts: Parts) -> list[Finding]:
    """Judge requests that do not begin this step where the steps before lead to."""
    if not advances:
        return []
    return _merged(_fired(DRAFT_RULES, DraftsView(declaration=declaration, advances=advances), parts))


def judge_missing(after_step: int, received: StepRequests, parts: Parts) -> list[Finding]:
    """Judge a step that came without a declaration, ``after_step`` being the last one that had it."""
    view = HandoverView(step=after_step, trace_id="", declaration=None, received=received)
    return _merged(_fired(HANDOVER_RULES, view, parts))


def judge_dummy(
    run: DummyRun,
    after_step: int,
    bindings: Bindings,
    parts: Parts,
    ledger: BlockLedger | None = None,
    context: ContextParallel | None = None,
) -> list[Finding]:
    """Judge a run that serves no request; ``ledger`` None: the blocks of the pool are not followed."""
    is_off = all(bool((slots == PAD_SLOT).all()) for slots in run.slots.values())
    if is_off and not any(rest.indexes.size for rest in run.persistent.values()):
        return []
    view = DummyView(after_step=after_step, run=run, bindings=bindings, ledger=ledger, context=context)
    return _merged(_fired(DUMMY_RULES, view, parts))


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


def judge_result(declaration: Declaration, result: StepResult, parts: Parts) -> list[Finding]:
    """Judge what EngineCore is given for a step with work, before it takes effect."""
    if result_agrees(declaration, result):
        return []
    return _merged(_fired(RESULT_RULES, ResultView(declaration=declaration, result=result), parts))


def judge_plan(step: StepView, groups: Sequence[GroupView], parts: Parts) -> list[Finding]:
    """Judge positions, lengths, slots and tables of one step. Rules run only where an array comparison failed, those
    that know the pool also where what is declared cannot be right.
    """
    fired: list[Finding] = []
    is_doubtful = step.legality is not None and step.legality.doubtful
    if len(groups) < step.bindings.num_judged:
        fired += _fired(GROUP_RULES, step, parts)
    if not (step.positions_agree and step.lengths_agree):
        fired += _fired(ROW_RULES, step, parts)
    for group in groups:
        if not group.writes_agree:
            fired += _fired(WRITE_RULES, group, parts)
        if not group.reads_agree:
            fired += _fired(READ_RULES, group, parts)
        if step.ledger is not None and (is_doubtful or not (group.writes_agree and group.reads_agree)):
            fired += _fired(POOL_PLAN_RULES, group, parts)
    if step.plan.context is not None:
        context = ContextView(step, groups)
        if not context.agrees:
            fired += _fired(CONTEXT_RULES, context, parts)
    findings = _merged(fired) if fired else []
    for finding in findings:
        if step.ledger is not None and finding.generation is None and finding.block_id is not None:
            finding.generation = past.generation(step.ledger, finding.block_id)
    return findings


def judge_operators(view: OperatorView, parts: Parts) -> list[Finding]:
    """Judge what the attention operators get, in the groups that are in doubt (:meth:`HandedPlan.doubtful`)."""
    return _merged(_fired(OPERATOR_RULES, view, parts))


def judge_coordinates(view: CoordinatesView) -> list[Finding]:
    """Judge the coordinates of a context-parallel rank, for all parts: where they are wrong, no plan can be judged."""
    return _merged(_fired(COORDINATE_RULES, view, [function.rule.part for function in COORDINATE_RULES]))


def judge_local_lengths(view: LengthsView, parts: Parts) -> list[Finding]:
    """Judge how many tokens of each row a context-parallel rank is told to have."""
    if view.expected.tolist() == view.lengths.lengths.tolist():
        return []
    return _merged(_fired(LENGTH_RULES, view, parts))


def judge_pool(
    operation: PoolOperation,
    ledger: BlockLedger,
    trace_id: str,
    parts: Parts,
    in_flight: Mapping[int, int] | None = None,
) -> list[Finding]:
    """Judge a call of the pool that ``ledger`` has not yet taken over.

    ``in_flight``: block -> the last step that may still touch it and whose result has not come back.
    """
    in_flight = in_flight or {}
    if pool_agrees(operation, ledger, in_flight):
        return []
    view = PoolView(operation=operation, ledger=ledger, trace_id=trace_id, in_flight=in_flight)
    return _by_block(_fired(POOL_RULES, view, parts))


def judge_settled(operation: PoolOperation, ledger: BlockLedger, trace_id: str, parts: Parts) -> list[Finding]:
    """Judge the books about the blocks of a call of the pool that ``ledger`` has just taken over."""
    if settled_agrees(operation, ledger):
        return []
    view = BooksView(
        differences=list(differences_after(operation, ledger)),
        ledger=ledger,
        step=operation.step,
        trace_id=trace_id,
        request_id=operation.request_id,
        group_id=operation.group_id,
    )
    return _by_block(_fired(BOOKS_RULES, view, parts))


def judge_audit(
    differences: Sequence[Difference], step: int, trace_id: str, ledger: BlockLedger, parts: Parts
) -> list[Finding]:
    """Judge what an audit of the pool found (:meth:`BlockLedger.differences`)."""
    if not differences:
        return []
    view = BooksView(differences=differences, ledger=ledger, step=step, trace_id=trace_id)
    return _by_block(_fired(BOOKS_RULES, view, parts))


def judge_content(declaration: Declaration, legality: Legality, parts: Parts) -> list[Finding]:
    """Judge what a declaration does with contents, and what is due with it; ``legality`` has been advanced to it and
    has not yet ended who finished.
    """
    findings: list[Finding] = []
    view = ContentView(declaration=declaration, legality=legality)
    if legality.invalid.reused or not content_agrees(view):
        findings += _by_block(_fired((*INVALID_RULES, *CONTENT_RULES), view, parts))
    if legality.hits.unowned:
        findings += judge_audit(list(aliases(legality)), declaration.step, declaration.trace_id, legality.ledger, parts)
    ended = legality.unreleased()
    if ended or legality.exceeded:
        due = LifetimeView(
            step=declaration.step,
            trace_id=declaration.trace_id,
            ledger=legality.ledger,
            ended=ended,
            exceeded=legality.exceeded,
        )
        findings += _merged(_fired(LIFETIME_RULES, due, parts))
    return findings


def judge_held(held: Sequence[Held], declaration: Declaration, ledger: BlockLedger, parts: Parts) -> list[Finding]:
    """Judge what has been held too long (:meth:`Holds.overdue`) when a step is declared."""
    view = LifetimeView(step=declaration.step, trace_id=declaration.trace_id, ledger=ledger, held=held)
    return _merged(_fired(LIFETIME_RULES, view, parts))


def judge_receives(
    receives: Sequence[PlannedReceive],
    step: int,
    trace_id: str,
    topology: Topology,
    parts: Parts,
    ledger: BlockLedger | None = None,
) -> list[Finding]:
    """Judge where a connector is told to load; ``ledger`` has the operations of the pool up to there."""
    view = ReceiveView(step=step, trace_id=trace_id, receives=receives, topology=topology, ledger=ledger)
    return _fired(RECEIVE_RULES, view, parts)


def judge_completions(
    completions: Sequence[Completion], step: int, trace_id: str, parts: Parts, *, is_partial: bool
) -> list[Finding]:
    """Judge the transfers that the result of a step says to be finished (:meth:`Transfers.complete`)."""
    if all(c.planned_step is not None and c.is_known for c in completions):
        return []
    view = ConnectorView(step=step, trace_id=trace_id, completions=completions, is_partial=is_partial)
    return _fired(COMPLETION_RULES, view, parts)


def judge_failed_loads(
    failed: Sequence[FailedLoad], taken_up: Sequence[TakenUp], step: int, trace_id: str, parts: Parts
) -> list[Finding]:
    """Judge what has become of the loads that the result of a step said to have failed (:meth:`Transfers.failed`)."""
    known = {request.request_id: request for request in taken_up}
    view = ConnectorView(step=step, trace_id=trace_id, failed=failed, taken_up=known)
    return _fired(FAILED_LOAD_RULES, view, parts)


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
    return "read" if is_read(finding.reason) else "write"


def _access_of(findings: list[Finding]) -> Callable[[Finding], Key]:
    """Tells accesses apart: a row of a group, read or written; a request, bound or handed over.

    A shifted position or length belongs to the row in every group, and takes in what follows from it in the groups.
    """
    row_wide = {(f.row, _side(f)) for f in findings if f.row is not None and f.group_id is None}

    def access(finding: Finding) -> Key:
        group = None if (finding.row, _side(finding)) in row_wide else finding.group_id
        return _side(finding), group, finding.row, finding.request_id if finding.row is None else None

    return access


def _by_block(findings: list[Finding]) -> list[Finding]:
    """One finding a block; a request that only one of its reasons knows is that of the finding."""
    return _merged(findings, lambda finding: (finding.block_id,), (*_FILLED_IN, "request_id"))


def _merged(
    findings: list[Finding], key: Callable[[Finding], Key] | None = None, filled: tuple[str, ...] = _FILLED_IN
) -> list[Finding]:
    """One finding of those that have the same key, by default one an access."""
    accesses: dict[Key, list[Finding]] = {}
    key = key or _access_of(findings)
    for finding in findings:
        accesses.setdefault(key(finding), []).append(finding)
    merged: list[Finding] = []
    for same in accesses.values():
        same.sort(key=lambda f: RULES[f.reason].rank)
        first = same[0]
        first.also = tuple(dict.fromkeys(f.reason for f in same if f.reason != first.reason))
        first.launch_fatal = any(f.launch_fatal for f in same)
        for field in filled:
            if getattr(first, field) is None:
                setattr(first, field, next((v for f in same if (v := getattr(f, field)) is not None), None))
        merged.append(first)
    return merged
