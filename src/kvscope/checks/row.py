"""C1 and C4 on whole rows: positions and lengths, the same for every group."""

from __future__ import annotations

from collections.abc import Iterator

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


ROW_RULES = (write_position_mismatch, read_length_exceeds_declared, write_length_mismatch)
