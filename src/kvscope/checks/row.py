"""C1 and C4 on whole rows: offsets, positions and lengths, the same for every group; and groups without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from . import rule as r
from .finding import Finding
from .plan_view import StepView
from .rule import rule


def _row_finding(view: StepView, row: int, expected: int, actual: int) -> Finding:
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        request_id=view.plan.request_ids[row],
        row=row,
        expected=expected,
        actual=actual,
    )


@rule(
    check="C1",
    severity="fatal",
    rank=r.TARGET,
    title="a group has no plan",
    fires="A group whose tables and slots are judged has none in what is handed to attention, though tokens are "
    "scheduled: its layers store nothing, or the host fails.",
    silent="Groups with other semantics, which need not have slots.",
    sources=("the groups handed to attention", "the groups of the cache"),
)
def write_group_missing(view: StepView) -> Iterator[Finding]:
    handed = {of.group_id for of in view.plan.groups}
    for group in view.bindings.topology.groups:
        if group.judged and group.group_id not in handed:
            yield Finding(
                reason="",
                step=view.declaration.step,
                trace_id=view.declaration.trace_id,
                group_id=group.group_id,
                expected=f"slots of {view.declaration.total_num_scheduled_tokens} tokens",
                actual="no slots",
                launch_fatal=True,
            )


@rule(
    check="C1",
    severity="error",
    rank=r.OFFSETS,
    title="the offsets of the rows do not divide the batch",
    fires="The query offsets do not begin at 0, go back from one row to the next, or do not end at the number of "
    "tokens, so that a token belongs to no row or to another one.",
    silent="A row of another length than declared between sound offsets (write_length_mismatch); estimated lengths.",
    sources=(r.PLAN_OFFSETS, "the rule that they run from 0 to the number of tokens and never back"),
    invariant=True,
)
def write_query_offsets_invalid(view: StepView) -> Iterator[Finding]:
    starts, tokens = view.plan.query_start.tolist(), view.plan.num_tokens
    for row, (start, end) in enumerate(pairwise(starts)):
        if row == 0 and start != 0:
            yield _row_finding(view, row, 0, start)
        elif end < start:
            yield _row_finding(view, row, start, end)
        elif row == len(view.rows) - 1 and end != tokens:
            yield _row_finding(view, row, tokens, end)


@rule(
    check="C1",
    severity="error",
    rank=r.POSITION,
    title="a token is computed at another position than declared",
    fires="Positions of a row are not the run that starts at the declared number of computed tokens.",
    silent="Multi-dimensional rotary positions (slots use the one-dimensional ones); estimated lengths.",
    sources=(r.PLAN_POSITIONS, r.DECLARATION),
)
def write_position_mismatch(view: StepView) -> Iterator[Finding]:
    wrong = np.flatnonzero(view.plan.positions != view.expected_positions)
    rows, first = np.unique(view.token_row[wrong], return_index=True)
    for row, index in zip(rows.tolist(), first.tolist(), strict=True):
        token = int(wrong[index])
        actual = int(view.plan.positions[token])
        finding = _row_finding(view, row, int(view.expected_positions[token]), actual)
        finding.token_index, finding.position = token, actual
        yield finding


@rule(
    check="C4",
    severity="error",
    rank=r.LENGTH,
    title="attention reads beyond the declared sequence",
    fires="seq_len of a row is larger than declared computed + scheduled tokens: it would read what nobody wrote.",
    silent="Rows of padding; estimated lengths of asynchronous speculative decoding.",
    sources=(r.PLAN_LENGTHS, r.DECLARATION),
)
def read_length_exceeds_declared(view: StepView) -> Iterator[Finding]:
    for row in np.flatnonzero(view.plan.seq_lens > view.seq_lens).tolist():
        yield _row_finding(view, row, int(view.seq_lens[row]), int(view.plan.seq_lens[row]))


@rule(
    check="C1",
    severity="error",
    rank=r.SHORT,
    title="a row computes another number of tokens than declared",
    fires="The query length differs from the scheduled tokens, or seq_len is shorter than computed + scheduled.",
    silent="A seq_len that is too long (read_length_exceeds_declared); rows of padding; estimated lengths.",
    sources=(r.PLAN_LENGTHS, r.DECLARATION),
)
def write_length_mismatch(view: StepView) -> Iterator[Finding]:
    query = view.query_lens != view.scheduled
    for row in np.flatnonzero(query | (view.plan.seq_lens < view.seq_lens)).tolist():
        if query[row]:
            yield _row_finding(view, row, int(view.scheduled[row]), int(view.query_lens[row]))
        else:
            yield _row_finding(view, row, int(view.seq_lens[row]), int(view.plan.seq_lens[row]))


ROW_RULES = (
    write_query_offsets_invalid,
    write_position_mismatch,
    read_length_exceeds_declared,
    write_length_mismatch,
)
GROUP_RULES = (write_group_missing,)
