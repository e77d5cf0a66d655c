"""C5 on what attention is handed: what was never written in this generation, and what a load has brought."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..state.block_columns import Status
from ..state.doubts import Unwritten
from . import past
from . import rule as r
from .finding import Finding
from .generation import first_entries, read_finding, write_finding
from .ownership import shared_writes
from .plan_view import GroupView
from .rule import rule

_WRITTEN = "the tokens declared written since the block was handed out"


def _noted(view: GroupView, noted: list[Unwritten]) -> Iterator[tuple[Unwritten, int]]:
    """What was noted about this group, with its row; a block that was released or waits is told as that."""
    for short in noted:
        row = view.step.row_of.get(short.request_id)
        if row is not None and short.group_index == view.group_index and short.index < view.tables.shape[1]:
            yield short, row


@rule(
    check="C5",
    severity="error",
    rank=r.UNWRITTEN,
    title="attention reads what was never written",
    fires="A request comes in with computed tokens of which a visible block lacks some: no step and no receive was "
    "declared to write them since the block was handed out; or, against the declaration, an entry leads to a block "
    "that was never handed out.",
    silent="Blocks that the same step fills; loads inside the step; entries before the attention window.",
    sources=(r.PLAN_TABLES, _WRITTEN),
    proves_not="What the block holds: it may be left over from whoever had it before.",
)
def read_uninitialized(view: GroupView) -> Iterator[Finding]:
    ledger, legality = view.step.ledger, view.step.legality
    if ledger is None:
        return
    told: set[int] = set()
    for short, row in _noted(view, legality.unwritten if legality is not None else []):
        if row in told or not view.visible[row, short.index] or int(view.tables[row, short.index]) != short.block_id:
            continue
        told.add(row)
        finding = read_finding(view, ledger, row, short.index, "", "")
        finding.position = short.index * view.group.block_size + short.declared
        finding.expected = f"{past.counted(short.needed, 'tokens')} of the block written"
        finding.actual = f"{short.declared}; {past.told(ledger, short.block_id)}"
        yield finding
    flat = view.tables.ravel()
    unused = (ledger.status_of(flat) == Status.FREE) & (ledger.generation_of(flat) == 0)
    for row, index in first_entries(view.entries_differ & unused.reshape(view.tables.shape)):
        if row not in told:
            yield read_finding(view, ledger, row, index, "a block that is written", "never handed out")


@rule(
    check="C5",
    severity="error",
    rank=r.UNWRITTEN,
    title="a request goes on behind what it has written",
    fires="The first token of a row comes after tokens that no step was declared to write: what attention reads in "
    "between is left over.",
    silent="Rejected drafts, which are written again; requests that come in (read_uninitialized).",
    sources=(r.PLAN_SLOTS, _WRITTEN),
    proves_not="What stands in the gap.",
)
def write_uninitialized_gap(view: GroupView) -> Iterator[Finding]:
    ledger, legality = view.step.ledger, view.step.legality
    if ledger is None or legality is None:
        return
    for gap, row in _noted(view, legality.gaps):
        tokens = np.flatnonzero(view.step.token_row == row)
        if not tokens.size:
            continue
        finding = write_finding(view, ledger, row, int(tokens[0]), "", "")
        begins = gap.index * view.group.block_size
        finding.expected = f"token {begins + gap.declared}, the first that is not written"
        finding.actual = f"token {finding.position}; {past.told(ledger, gap.block_id)}"
        yield finding


@rule(
    check="C5",
    severity="error",
    rank=r.SHARED,
    title="a token is written into what a load has brought",
    fires="A request computes tokens again that a receive has filled, and writes them into the same block.",
    silent="The last token of a prompt that was loaded whole, which the host computes again in place; tokens that a "
    "failed load left out; groups with a window, whose last part the host may replay.",
    sources=(r.PLAN_SLOTS, "the receives that have ended"),
    proves_not="That what is written differs from what was loaded.",
)
def write_loaded_prefix(view: GroupView) -> Iterator[Finding]:
    ledger = view.step.ledger
    if ledger is None:
        return
    for shared, row, token in shared_writes(view, loaded=True):
        finding = write_finding(view, ledger, row, token, "tokens behind what was loaded", "")
        finding.actual = (
            f"token {shared.offset} of a block that a receive has filled; {past.told(ledger, shared.block_id)}"
        )
        yield finding


INITIALIZED_RULES = (write_uninitialized_gap, write_loaded_prefix, read_uninitialized)
