"""C3, C4 and C6 on the read side: the block tables that attention follows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import rule as r
from .finding import Finding
from .plan_view import Bool, GroupView
from .rule import rule

_MORE_THAN_AN_EXCHANGE = 3


def _entry_finding(view: GroupView, row: int, index: int, other_request_id: str | None = None) -> Finding:
    block = int(view.tables[row, index])
    return Finding(
        reason="",
        step=view.step.declaration.step,
        trace_id=view.step.declaration.trace_id,
        request_id=view.step.plan.request_ids[row],
        other_request_id=other_request_id,
        row=row,
        group_id=view.group.group_id,
        position=index * view.group.block_size,
        block_id=block,
        expected=int(view.declared[row, index]),
        actual=block,
    )


def _first_of_each_row(entries: Bool) -> Iterator[tuple[int, int]]:
    """``(row, logical block)`` of the first marked entry of each row that has one."""
    for row in np.flatnonzero(entries.any(axis=1)).tolist():
        yield row, int(entries[row].argmax())


@rule(
    check="C4",
    severity="fatal",
    rank=r.OUTSIDE,
    title="attention reads outside the cache",
    fires="A visible entry of a block table is negative or not below the number of blocks.",
    silent="Entries behind the sequence or before the attention window; nothing follows them.",
    sources=(r.PLAN_TABLES, "the size of the pool"),
)
def read_outside_cache(view: GroupView) -> Iterator[Finding]:
    outside = (view.tables < 0) | (view.tables >= view.step.bindings.topology.num_blocks)
    for row, index in _first_of_each_row(outside & view.visible):
        finding = _entry_finding(view, row, index)
        finding.launch_fatal = True
        finding.expected = f"0 to {view.step.bindings.topology.num_blocks - 1}"
        yield finding


@rule(
    check="C6",
    severity="error",
    rank=r.NULL,
    title="attention reads the null block inside its window",
    fires="A visible entry of a block table is the null block, whether or not the declaration says so too.",
    silent="Entries before the attention window, which the manager replaces by the null block; padding rows.",
    sources=(r.PLAN_TABLES, "the rule that nobody owns the null block"),
    invariant=True,
)
def read_null_block(view: GroupView) -> Iterator[Finding]:
    null = view.tables == view.step.bindings.topology.null_block_id
    for row, index in _first_of_each_row(null & view.visible):
        finding = _entry_finding(view, row, index)
        finding.expected = "a block that somebody owns"
        yield finding


@rule(
    check="C3",
    severity="error",
    rank=r.FOREIGN_ROW,
    title="a row of the block table belongs to another request",
    fires="The visible entries of a row are not its own declared ones but, as far as both reach, those of another live "
    "request.",
    silent="Requests that declare the same blocks through a prefix hit; a single foreign block (read_foreign_block).",
    sources=(r.PLAN_TABLES, r.DECLARATION),
)
def read_row_request_mismatch(view: GroupView) -> Iterator[Finding]:
    for row, index in _first_of_each_row(view.entries_differ):
        own = view.step.plan.request_ids[row]
        first, needed = int(view.batch.first_visible[row]), int(view.needed[row])
        # Whose row it is shows at its end: what stands in front may be a prefix that several requests share.
        for last in range(needed - 1, index - 1, -1):
            other = view.step.bindings.a_holder(view.group_index, int(view.tables[row, last]))
            if other is not None:
                break
        else:
            continue
        table = view.step.bindings.table(other, view.group_index)
        # A sequence that is longer or shorter by a few blocks is still the other request's row.
        shared = min(needed, len(table))
        if other != own and shared > index and np.array_equal(view.tables[row, first:shared], table[first:shared]):
            yield _entry_finding(view, row, index, other)


@rule(
    check="C3",
    severity="error",
    rank=r.FOREIGN,
    title="attention reads another request's block",
    fires="A visible entry is not in this request's declared table and is in that of another live request.",
    silent="Blocks shared by a prefix hit (they are in both tables); blocks that nobody has.",
    sources=(r.PLAN_TABLES, r.DECLARATION),
)
def read_foreign_block(view: GroupView) -> Iterator[Finding]:
    for row in np.flatnonzero(view.entries_differ.any(axis=1)).tolist():
        own = view.step.plan.request_ids[row]
        for index in np.flatnonzero(view.entries_differ[row]).tolist():
            other = view.step.bindings.foreign_holder(view.group_index, int(view.tables[row, index]), own)
            if other is not None:
                yield _entry_finding(view, row, index, other)
                break


@rule(
    check="C4",
    severity="error",
    rank=r.ORDER,
    title="the blocks of a row stand in another order",
    fires="Three or more visible entries of a row differ from the declaration, and are the declared blocks of these "
    "very places in another order.",
    silent="Two entries in each other's place, which are two wrong entries (read_target_mismatch); rows in which a "
    "block is missing or stands twice.",
    sources=(r.PLAN_TABLES, r.DECLARATION),
)
def logical_order_mismatch(view: GroupView) -> Iterator[Finding]:
    for row in np.flatnonzero(view.entries_differ.sum(axis=1) >= _MORE_THAN_AN_EXCHANGE).tolist():
        places = view.entries_differ[row]
        if np.array_equal(np.sort(view.tables[row, places]), np.sort(view.declared[row, places])):
            yield _entry_finding(view, row, int(places.argmax()))


@rule(
    check="C4",
    severity="error",
    rank=r.TWICE,
    title="a row leads to the same block twice",
    fires="A visible entry that is not the declared one is a block of the pool that another visible entry of the row "
    "is, too.",
    silent="The null block; a block that the declaration itself has twice (bind_duplicate_block); the same block in "
    "the rows of several requests, which share a prefix.",
    sources=(r.PLAN_TABLES, "the rule that a block holds one logical index"),
    invariant=True,
)
def read_duplicate_block(view: GroupView) -> Iterator[Finding]:
    topology = view.step.bindings.topology
    for row in np.flatnonzero(view.entries_differ.any(axis=1)).tolist():
        seen = view.tables[row][view.visible[row]]
        blocks, counts = np.unique(seen, return_counts=True)
        twice = blocks[(counts > 1) & (blocks != topology.null_block_id) & (blocks >= 0)]
        wrong = view.entries_differ[row] & np.isin(view.tables[row], twice[twice < topology.num_blocks])
        if wrong.any():
            yield _entry_finding(view, row, int(wrong.argmax()))


@rule(
    check="C4",
    severity="error",
    rank=r.TARGET,
    title="logical block i is not the i-th declared block",
    fires="A visible entry of a block table differs from the declared block at the same index.",
    silent="Entries behind the sequence or before the attention window; groups with other semantics.",
    sources=(r.PLAN_TABLES, r.DECLARATION),
)
def read_target_mismatch(view: GroupView) -> Iterator[Finding]:
    for row, index in _first_of_each_row(view.entries_differ):
        yield _entry_finding(view, row, index)


@rule(
    check="C4",
    severity="error",
    rank=r.SHORT,
    title="a block table is shorter than the sequence",
    fires="The valid length of a table row covers fewer blocks than the declared tokens need.",
    silent="Longer rows: lookahead blocks are allocated before they are needed.",
    sources=(r.PLAN_TABLES, r.DECLARATION),
)
def read_table_short(view: GroupView) -> Iterator[Finding]:
    for row in np.flatnonzero(view.plan.table_blocks < view.needed).tolist():
        have, need = int(view.plan.table_blocks[row]), int(view.needed[row])
        finding = _entry_finding(view, row, min(max(have, 0), need - 1))
        finding.expected, finding.actual = need, have
        yield finding


READ_RULES = (
    read_outside_cache,
    read_null_block,
    read_row_request_mismatch,
    read_foreign_block,
    logical_order_mismatch,
    read_duplicate_block,
    read_target_mismatch,
    read_table_short,
)
