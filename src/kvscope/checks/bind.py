"""C1, C4, C6 and L on the declaration itself, judged in EngineCore before anything is sent to a worker."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..facts.plans import Int32
from ..facts.requests import BlockIds, Declaration
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.visibility import first_visible_block
from . import rule as r
from .finding import Finding
from .rule import rule


class BindView(msgspec.Struct, frozen=True, kw_only=True):
    """One declaration and the tables that it leads to (the bindings have already taken it over).

    ``ledger``, advanced to it as well, is None where the pool is not followed.
    """

    declaration: Declaration
    bindings: Bindings
    ledger: BlockLedger | None = None

    def deltas(self) -> Iterator[tuple[str, BlockIds]]:
        """Every request that was given blocks in this step, with exactly those blocks of the pool's groups."""
        groups = len(self.bindings.topology.groups)
        for request_id, delta in self.lists():
            yield request_id, delta[:groups]

    def lists(self) -> Iterator[tuple[str, BlockIds]]:
        """The same, with every list that was declared."""
        requests = self.declaration.requests
        yield from zip(requests.new_ids, requests.new_blocks, strict=True)
        for request_id, delta in zip(requests.cached_ids, requests.cached_blocks, strict=True):
            if delta is not None:
                yield request_id, delta


def _bind_finding(view: BindView, request_id: str, group_index: int, block_id: int | None, index: int) -> Finding:
    group = view.bindings.topology.groups[group_index]
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        request_id=request_id,
        group_id=group.group_id,
        position=index * group.block_size,
        block_id=block_id,
    )


@rule(
    check="C1",
    severity="fatal",
    rank=r.OUTSIDE,
    title="the scheduler hands out a block that does not exist",
    fires="A declared block id is negative or not below the number of blocks of the pool.",
    silent="The null block (a use of it is a finding at the plan); ids of another pool that are in range.",
    sources=("the scheduler's declaration", "the size of the pool"),
    proves_not="That the worker uses the block; the declaration alone is judged.",
)
def bind_block_out_of_range(view: BindView) -> Iterator[Finding]:
    num_blocks = view.bindings.topology.num_blocks
    for request_id, delta in view.deltas():
        for group_index, block_ids in enumerate(delta):
            if not block_ids or (min(block_ids) >= 0 and max(block_ids) < num_blocks):
                continue
            block = next(b for b in block_ids if not 0 <= b < num_blocks)
            first_new = len(view.bindings.table(request_id, group_index)) - len(block_ids)
            finding = _bind_finding(view, request_id, group_index, block, first_new + block_ids.index(block))
            finding.expected, finding.actual, finding.launch_fatal = num_blocks - 1, block, True
            yield finding


@rule(
    check="C4",
    severity="error",
    rank=r.TARGET,
    title="the scheduler gives one request the same block twice",
    fires="A block that is handed over in this step stands at two visible indices of the request's table in one group.",
    silent="The null block; entries before the attention window, whose blocks may come back to the same request; "
    "requests whose table is not known from its start.",
    sources=("the scheduler's declaration", "the rule that a block holds one logical index"),
    invariant=True,
    proves_not="That both indices are read or written in this step.",
)
def bind_duplicate_block(view: BindView) -> Iterator[Finding]:
    null = view.bindings.topology.null_block_id
    for request_id, delta in view.deltas():
        if request_id in view.bindings.partial:
            continue
        row = view.bindings.rows_of([request_id])
        for group_index, block_ids in enumerate(delta):
            group = view.bindings.topology.groups[group_index]
            if not block_ids or not group.judged:
                continue
            table = view.bindings.table(request_id, group_index)
            start = int(first_visible_block(group, view.bindings.computed[row])[0])
            duplicate = _duplicate(table[start:], len(block_ids), null)
            if duplicate is not None:
                index, earlier = duplicate
                finding = _bind_finding(view, request_id, group_index, int(table[start + index]), start + index)
                finding.expected, finding.actual = "each block once", f"also at logical block {start + earlier}"
                yield finding


def _duplicate(visible: Int32, appended: int, null: int) -> tuple[int, int] | None:
    """``(index, earlier index)`` of the first appended entry that stands in ``visible`` before it, else None."""
    if not visible.size:  # a table that ends before the window begins: bind_block_shortfall
        return None
    first_new = max(len(visible) - appended, 0)
    if appended == 1:
        last = int(visible[-1])
        matches = np.flatnonzero(visible[:first_new] == last)
        return (len(visible) - 1, int(matches[0])) if last != null and matches.size else None
    kept = visible[visible != null]
    if len(set(kept.tolist())) == len(kept):
        return None
    seen: dict[int, int] = {}
    for index, block in enumerate(visible.tolist()):
        if block != null and block in seen and index >= first_new:
            return index, seen[block]
        seen.setdefault(block, index)
    return None


@rule(
    check="C6",
    severity="error",
    rank=r.NULL,
    title="the scheduler gives a request the null block for tokens that count",
    fires="The null block is handed over in this step at an index where attention looks, or that the step writes.",
    silent="Null blocks before the attention window, for what a hit skips; behind the tokens of the step (a use of "
    "them is a finding at the plan); groups with other semantics; requests whose table is not known from its start.",
    sources=("the scheduler's declaration", "the rule that nobody owns the null block"),
    invariant=True,
    proves_not="That the worker uses it; the declaration alone is judged.",
)
def bind_null_block_declared(view: BindView) -> Iterator[Finding]:
    null = view.bindings.topology.null_block_id
    for request_id, delta in view.deltas():
        if request_id in view.bindings.partial:
            continue
        row = view.bindings.rows_of([request_id])
        for group_index, block_ids in enumerate(delta):
            group = view.bindings.topology.groups[group_index]
            if not group.judged or null not in block_ids:
                continue
            table = view.bindings.table(request_id, group_index)
            start = max(int(first_visible_block(group, view.bindings.computed[row])[0]), len(table) - len(block_ids))
            end = -(-int(view.bindings.seq_lens[row][0]) // group.block_size)
            found = np.flatnonzero(table[start:end] == null)
            if found.size:
                finding = _bind_finding(view, request_id, group_index, null, start + int(found[0]))
                finding.expected, finding.actual = "a block that somebody owns", null
                yield finding


@rule(
    check="C4",
    severity="error",
    rank=r.SHORT,
    title="the scheduler gives a request too few blocks",
    fires="The declared table covers fewer tokens than declared computed + scheduled tokens.",
    silent="Longer tables (lookahead); groups with other semantics, such as one state slot a request; requests that "
    "were admitted before kvscope was switched on.",
    sources=("the scheduler's declared blocks", "the scheduler's declared token counts"),
    proves_not="Which of the two is wrong.",
)
def bind_block_shortfall(view: BindView) -> Iterator[Finding]:
    bindings = view.bindings
    request_ids = list(view.declaration.requests.scheduled)
    rows = bindings.rows_of(request_ids)
    tokens = bindings.seq_lens[rows]
    for group_index, group in enumerate(bindings.topology.groups):
        if not group.judged:
            continue
        have = bindings.lengths[group_index].take(rows)
        if not (have * group.block_size < tokens).any():
            continue
        for index in np.flatnonzero((have * group.block_size < tokens) & (rows >= 0)).tolist():
            if request_ids[index] in bindings.partial:
                continue
            finding = _bind_finding(view, request_ids[index], group_index, None, int(have[index]))
            finding.expected = -(-int(tokens[index]) // group.block_size)
            finding.actual = int(have[index])
            yield finding


@rule(
    check="L",
    severity="error",
    rank=r.SHORT,
    title="a request is given more or fewer block lists than there are groups",
    fires="The number of block lists of a request that is given blocks in this step is not the number of the pool's "
    "KV-cache groups.",
    silent="Empty lists: a group may have nothing new.",
    sources=("the scheduler's declared blocks", "the groups of the pool"),
    proves_not="Which group lacks its list; all that is compared is how many there are.",
)
def bind_group_count_mismatch(view: BindView) -> Iterator[Finding]:
    groups = len(view.bindings.topology.groups)
    for request_id, lists in view.lists():
        if len(lists) != groups:
            yield Finding(
                reason="",
                step=view.declaration.step,
                trace_id=view.declaration.trace_id,
                request_id=request_id,
                expected=groups,
                actual=len(lists),
            )


BIND_RULES = (
    bind_block_out_of_range,
    bind_null_block_declared,
    bind_duplicate_block,
    bind_block_shortfall,
    bind_group_count_mismatch,
)
