"""L: what comes back for a step is the result of that step, with a row for each of its requests and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..facts.requests import Declaration, StepResult
from . import rule as r
from .finding import Finding
from .rule import rule

RESULT = "the result that EngineCore is given for the step"


class ResultView(msgspec.Struct, frozen=True, kw_only=True):
    """A result as EngineCore is about to take it up, beside the declaration of the step for which it is given."""

    declaration: Declaration
    result: StepResult


def result_agrees(declaration: Declaration, result: StepResult) -> bool:
    """Whether no rule of this family has anything to look at. As cheap as a few comparisons of what is small."""
    ids, scheduled = result.request_ids, declaration.requests.scheduled
    return (
        len(ids) == len(scheduled)
        and scheduled.keys() == set(ids)
        and result.rows is None
        and result.lengths is None
        and not result.trace_id
    )


def _finding(view: ResultView, expected: int | str, actual: int | str, **where: str | int) -> Finding:
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        expected=expected,
        actual=actual,
        **where,  # type: ignore[arg-type]  # request_id and row, as the rules below name them
    )


@rule(
    check="L",
    severity="error",
    rank=r.POSITION,
    title="the result of another step is taken up",
    fires="The step in which the worker made a result is not the step for which EngineCore is given it.",
    silent="Results without requests; results that do not say where they come from, because the worker's hook was not "
    "there to note it (counted as skipped).",
    sources=("the trace id that the worker put on its result", "the trace id of the step that EngineCore takes up"),
    proves_not="Which of the two was exchanged, and that the tokens differ.",
)
def result_trace_mismatch(view: ResultView) -> Iterator[Finding]:
    if view.result.trace_id:
        yield _finding(view, view.declaration.trace_id, view.result.trace_id)


@rule(
    check="L",
    severity="error",
    rank=r.TARGET,
    title="rows of the result belong to other requests than declared",
    fires="A scheduled request has no row in the result, or more than one; a row belongs to a request that was not "
    "scheduled; or the result's map leads a request to a row that is another's.",
    silent="The order of the rows, which the runner chooses; rows of requests that were aborted meanwhile.",
    sources=(RESULT, "the scheduler's declaration"),
    proves_not="That the tokens in a row are wrong; only whose they are said to be is known.",
)
def result_request_mapping(view: ResultView) -> Iterator[Finding]:
    ids, scheduled = view.result.request_ids, view.declaration.requests.scheduled
    for request_id in sorted(scheduled.keys() - set(ids)):
        yield _finding(view, "a row", "none", request_id=request_id)
    first: dict[str, int] = {}
    for row, request_id in enumerate(ids):
        if request_id not in scheduled:
            yield _finding(view, "not scheduled", f"row {row}", request_id=request_id, row=row)
        elif request_id in first:
            yield _finding(view, f"row {first[request_id]} alone", f"row {row} too", request_id=request_id, row=row)
        first.setdefault(request_id, row)
    rows = first if view.result.rows is None else view.result.rows
    for request_id in sorted(first.keys() & scheduled.keys()):
        row, mapped = first[request_id], rows.get(request_id)
        if mapped != row:
            actual = "no row" if mapped is None else f"row {mapped}"
            yield _finding(view, f"row {row}", actual, request_id=request_id, row=row)


@rule(
    check="L",
    severity="error",
    rank=r.LENGTH,
    title="a result has more or fewer rows than requests",
    fires="The sampled tokens, or the pooled outputs, are not as many as the requests of the same result.",
    silent="An empty list, which the host takes for nothing sampled: pooling, and results that are still being copied.",
    sources=("the rows of the result", "the requests that the result names"),
    proves_not="Which row is missing or too many.",
)
def result_row_count(view: ResultView) -> Iterator[Finding]:
    number = len(view.result.request_ids)
    for name, length in (view.result.lengths or {}).items():
        if length != number:
            yield _finding(view, f"{number} rows", f"{name}: {length}")


RESULT_RULES = (result_trace_mismatch, result_request_mapping, result_row_count)
