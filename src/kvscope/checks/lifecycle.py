"""L: who is scheduled may be, goes on where it was, and the numbers of a declaration add up. Judged in EngineCore."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..facts.requests import Declaration
from ..state.lifecycle import FINISHED, PREEMPTED, UNKNOWN, Lifecycle
from . import rule as r
from .finding import Finding
from .rule import rule

THIS_STEP = "the scheduler's declaration of this step"
EARLIER_STEPS = "the scheduler's declarations of earlier steps"


class LifecycleView(msgspec.Struct, frozen=True, kw_only=True):
    """One declaration, and what was known of its requests before (``lifecycle`` has already taken it)."""

    declaration: Declaration
    lifecycle: Lifecycle


def _finding(view: LifecycleView, request_id: str | None, expected: int | str, actual: int | str) -> Finding:
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        request_id=request_id,
        expected=expected,
        actual=actual,
    )


def _strangers(view: LifecycleView, cause: str, expected: str) -> Iterator[Finding]:
    requests = view.declaration.requests
    for stranger in view.lifecycle.strangers:
        if stranger.cause == cause:
            listed = stranger.request_id in requests.cached_ids
            yield _finding(view, stranger.request_id, expected, "known" if listed else "scheduled and not listed")


@rule(
    check="L",
    severity="error",
    rank=r.TARGET,
    title="the scheduler schedules a request that it never admitted",
    fires="A request is listed as known or as resumed and never was listed as new, or has tokens in this step without "
    "being listed at all.",
    silent="Requests that may have been admitted in a step that was not observed (counted as skipped).",
    sources=(THIS_STEP, EARLIER_STEPS),
    proves_not="That the worker has no state for it; the declarations alone are compared.",
)
def bind_unknown_request(view: LifecycleView) -> Iterator[Finding]:
    yield from _strangers(view, UNKNOWN, "new")


@rule(
    check="L",
    severity="error",
    rank=r.TARGET,
    title="the scheduler schedules a request that has finished",
    fires="A request is listed as known, or has tokens, in the step that names it as finished or in a later one.",
    silent="A request that is listed as new: its id may be used again.",
    sources=(THIS_STEP, EARLIER_STEPS),
    proves_not="That the worker has dropped its state by then.",
)
def bind_finished_scheduled(view: LifecycleView) -> Iterator[Finding]:
    yield from _strangers(view, FINISHED, "not scheduled after it finished")


@rule(
    check="L",
    severity="error",
    rank=r.TARGET,
    title="the scheduler schedules a preempted request as if it were running",
    fires="A request is listed as known, or has tokens, after it was named as preempted, and was not resumed.",
    silent="A request that comes back as resumed (runner V1) or as new (V2), in the step of its preemption as well.",
    sources=(THIS_STEP, EARLIER_STEPS),
    proves_not="That the blocks which it had before are used.",
)
def bind_preempted_scheduled(view: LifecycleView) -> Iterator[Finding]:
    yield from _strangers(view, PREEMPTED, "resumed or new")


@rule(
    check="L",
    severity="error",
    rank=r.POSITION,
    title="a request goes back behind what it has computed",
    fires="A known request is declared with fewer computed tokens than it had after its last step, by more than the "
    "drafts of the steps whose results came in between.",
    silent="Requests that are listed as new or resumed: preemption, a session's next turn, a replay of what a hit "
    "skipped; the first step of each request after a load has failed.",
    sources=(THIS_STEP, EARLIER_STEPS),
    proves_not="How many of the drafts were rejected; that what is computed again is wrong.",
)
def bind_computed_regressed(view: LifecycleView) -> Iterator[Finding]:
    for regressed in view.lifecycle.regressed:
        yield _finding(view, regressed.request_id, f"{regressed.tokens} tokens computed", regressed.computed)


@rule(
    check="L",
    severity="error",
    rank=r.LENGTH,
    title="the token numbers of a declaration do not add up",
    fires="The total is not the sum of the requests' tokens or exceeds the scheduler's token budget, or a request is "
    "listed and has no tokens.",
    silent="Requests with tokens that are not listed (bind_unknown_request).",
    sources=("the scheduler's declaration", "the rule that the total is the sum of its parts and within the budget"),
    invariant=True,
    proves_not="Which of the numbers is wrong.",
)
def bind_token_total_mismatch(view: LifecycleView) -> Iterator[Finding]:
    declaration, requests = view.declaration, view.declaration.requests
    total, parts, budget = (
        declaration.total_num_scheduled_tokens,
        sum(requests.scheduled.values()),
        declaration.token_budget,
    )
    if parts != total:
        yield _finding(view, None, f"{total} tokens in total", parts)
    if budget is not None and total > budget:
        yield _finding(view, None, f"at most {budget} tokens", total)
    for request_id in [*requests.new_ids, *requests.cached_ids]:
        if request_id not in requests.scheduled:
            yield _finding(view, request_id, "tokens", "none")


LIFECYCLE_RULES = (
    bind_unknown_request,
    bind_finished_scheduled,
    bind_preempted_scheduled,
    bind_computed_regressed,
    bind_token_total_mismatch,
)
