"""C2 on what attention is handed: blocks that were released, and blocks that wait for a receive.

A block comes in question in two ways. The declaration itself goes on with a block that its request has released
(``Legality.stale``), so that plan and declaration agree on the error; or the plan has another block than declared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..facts.plans import Int64
from ..state.block_columns import Status
from ..state.blocks import BlockLedger
from . import past
from . import rule as r
from .finding import Finding
from .plan_view import Bool, GroupView
from .rule import rule

_CALLS = "the calls of the pool, added up"


def first_entries(entries: Bool) -> Iterator[tuple[int, int]]:
    """``(row, logical block)`` of the first marked entry of each row that has one."""
    for row in np.flatnonzero(entries.any(axis=1)).tolist():
        yield row, int(entries[row].argmax())


def first_tokens(view: GroupView, tokens: Bool) -> Iterator[tuple[int, int]]:
    """``(row, token)`` of the first marked token of each row that has one."""
    marked = np.flatnonzero(tokens)
    rows, first = np.unique(view.step.token_row[marked], return_index=True)
    for row, index in zip(rows.tolist(), first.tolist(), strict=True):
        yield row, int(marked[index])


def read_finding(view: GroupView, ledger: BlockLedger, row: int, index: int, expected: str, actual: str) -> Finding:
    """About logical block ``index`` of a row's table."""
    own, block = view.step.plan.request_ids[row], int(view.tables[row, index])
    return Finding(
        reason="",
        step=view.step.declaration.step,
        trace_id=view.step.declaration.trace_id,
        request_id=own,
        other_request_id=past.another(ledger, block, own),
        row=row,
        group_id=view.group.group_id,
        position=index * view.group.block_size,
        block_id=block,
        generation=past.generation(ledger, block),
        expected=expected,
        actual=actual,
    )


def write_finding(view: GroupView, ledger: BlockLedger, row: int, token: int, expected: str, actual: str) -> Finding:
    """About the block in which a token is about to be stored."""
    own, block = view.step.plan.request_ids[row], int(view.target_blocks[token])
    return Finding(
        reason="",
        step=view.step.declaration.step,
        trace_id=view.step.declaration.trace_id,
        request_id=own,
        other_request_id=past.another(ledger, block, own),
        row=row,
        group_id=view.group.group_id,
        token_index=token,
        position=int(view.step.plan.positions[token]),
        block_id=block,
        slot=int(view.slots[token]),
        generation=past.generation(ledger, block),
        expected=expected,
        actual=actual,
    )


def _stale(view: GroupView) -> Iterator[tuple[int, dict[int, int]]]:
    """The rows whose requests go on with blocks that they released, and the generations that they knew."""
    stale = view.step.legality.stale if view.step.legality is not None else {}
    for request_id, blocks in stale.items():
        row = view.step.row_of.get(request_id)
        if row is not None:
            yield row, blocks


def _released(ledger: BlockLedger, blocks: Int64) -> Bool:
    """Blocks, of any shape, that were handed out once and that nobody refers to now."""
    flat = blocks.ravel()
    free: Bool = (ledger.status_of(flat) == Status.FREE) & (ledger.generation_of(flat) > 0)
    return free.reshape(blocks.shape)


def _tell_release(view: GroupView, ledger: BlockLedger, finding: Finding, declared: int) -> Finding:
    """Say which generation the reference is from: the one that the request knew, else that in which it was freed."""
    block = finding.block_id
    known = next((blocks.get(block) for row, blocks in _stale(view) if row == finding.row), None) if block else None
    if known is not None and block is not None:
        finding.generation = known
        finding.expected = f"generation {known}, in which it had the block"
        finding.actual = f"released since: {past.told(ledger, block)}"
    else:
        finding.expected = f"block {declared}, as declared"
        finding.actual = past.told(ledger, block or 0)
    return finding


@rule(
    check="C2",
    severity="error",
    rank=r.RELEASED,
    title="attention reads a block that was released",
    fires="A visible entry of a block table leads to a block that this request has released while it goes on, or, "
    "where it is not the declared one, to a block that nobody refers to.",
    silent="Entries before the attention window, whose blocks were given back; blocks that the request shares and "
    "still has.",
    sources=(r.PLAN_TABLES, _CALLS),
)
def read_after_release(view: GroupView) -> Iterator[Finding]:
    ledger = view.step.ledger
    if ledger is None:
        return
    read = view.entries_differ & _released(ledger, view.tables.astype(np.int64))
    for row, blocks in _stale(view):
        read[row] |= view.visible[row] & np.isin(view.tables[row], list(blocks))
    for row, index in first_entries(read):
        finding = read_finding(view, ledger, row, index, "", "")
        yield _tell_release(view, ledger, finding, int(view.declared[row, index]))


@rule(
    check="C2",
    severity="error",
    rank=r.RELEASED,
    title="a token is written into a block that was released",
    fires="The slot of a real token lies in a block that this request has released while it goes on, or, where it is "
    "not the declared one, in a block that nobody refers to.",
    silent="Padding; blocks that were handed out again to the same request.",
    sources=(r.PLAN_SLOTS, _CALLS),
)
def write_after_release(view: GroupView) -> Iterator[Finding]:
    ledger = view.step.ledger
    if ledger is None:
        return
    written = view.slots_differ & _released(ledger, view.target_blocks)
    for row, blocks in _stale(view):
        written |= (view.step.token_row == row) & np.isin(view.target_blocks, list(blocks))
    for row, token in first_tokens(view, written):
        finding = write_finding(view, ledger, row, token, "", "")
        yield _tell_release(view, ledger, finding, int(view.expected_blocks[token]))


@rule(
    check="C2",
    severity="error",
    rank=r.RESERVED,
    title="attention reads a block that waits for a receive",
    fires="A visible entry of a block table leads to a block that a load, which no step is ordered with, has yet to "
    "fill.",
    silent="Loads inside the step, which attention waits for; blocks whose receive has ended, well or not.",
    sources=(r.PLAN_TABLES, "the receives that were begun and have not ended"),
    proves_not="That the transfer has not arrived: only that nobody has said so.",
)
def read_reserved_block(view: GroupView) -> Iterator[Finding]:
    ledger = view.step.ledger
    if ledger is None:
        return
    reserved = (ledger.status_of(view.tables.ravel()) == Status.RESERVED).reshape(view.tables.shape)
    for row, index in first_entries(reserved & view.visible):
        actual = past.told(ledger, int(view.tables[row, index]))
        yield read_finding(view, ledger, row, index, "a block that no receive has yet to fill", actual)


@rule(
    check="C2",
    severity="error",
    rank=r.RESERVED,
    title="a token is written into a block that waits for a receive",
    fires="The slot of a real token lies in a block that a load, which no step is ordered with, has yet to fill.",
    silent="Loads inside the step; blocks whose receive has ended, well or not; padding.",
    sources=(r.PLAN_SLOTS, "the receives that were begun and have not ended"),
    proves_not="Which of the two the block holds in the end.",
)
def write_reserved_block(view: GroupView) -> Iterator[Finding]:
    ledger = view.step.ledger
    if ledger is None:
        return
    for row, token in first_tokens(view, ledger.status_of(view.target_blocks) == Status.RESERVED):
        actual = past.told(ledger, int(view.target_blocks[token]))
        yield write_finding(view, ledger, row, token, "a block that no receive has yet to fill", actual)


GENERATION_RULES = (write_after_release, write_reserved_block, read_after_release, read_reserved_block)
