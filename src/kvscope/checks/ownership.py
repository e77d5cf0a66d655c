"""C3 against the pool: whose the block is in which a token is about to be stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..state.block_columns import Status
from ..state.blocks import BlockLedger
from ..state.doubts import SharedWrite
from . import past
from . import rule as r
from .finding import Finding
from .generation import first_tokens, write_finding
from .plan_view import Bool, GroupView
from .rule import rule

_OWNERS = "the requests to which the pool has given the block"


def _elsewhere(view: GroupView) -> Iterator[tuple[int, int, int]]:
    """``(row, token, block)``: the first token in each block where a row stores something against its declaration."""
    wrong = np.flatnonzero(view.slots_differ)
    pairs = view.step.token_row[wrong] * view.step.bindings.topology.num_blocks + view.target_blocks[wrong]
    _, first = np.unique(pairs, return_index=True)
    for token in wrong[np.sort(first)].tolist():
        yield int(view.step.token_row[token]), token, int(view.target_blocks[token])


def shared_writes(view: GroupView, *, loaded: bool) -> Iterator[tuple[SharedWrite, int, int]]:
    """What a declaration writes into although others rely on it, with the row and its first token in that block."""
    for shared in view.step.legality.shared if view.step.legality is not None else ():
        row = view.step.row_of.get(shared.request_id)
        if row is None or shared.group_index != view.group_index or shared.loaded != loaded:
            continue
        tokens: Bool = (view.step.token_row == row) & (view.target_blocks == shared.block_id)
        for _, token in first_tokens(view, tokens):
            yield shared, row, token


def _owned(ledger: BlockLedger, request_id: str, block: int) -> bool:
    return any(share.request_id == request_id for share in ledger.owners(block))


@rule(
    check="C3",
    severity="error",
    rank=r.FOREIGN_OWNER,
    title="a token is written into a block that the pool has given to another request",
    fires="The slot lies in a block that another request has, or has given up and not yet released, and this one has "
    "not.",
    silent="Blocks that both have through a prefix hit (write_shared_block); blocks that nobody has.",
    sources=(r.PLAN_SLOTS, _OWNERS),
)
def write_foreign_owner(view: GroupView) -> Iterator[Finding]:
    ledger, ids = view.step.ledger, view.step.plan.request_ids
    if ledger is None:
        return
    told: set[int] = set()
    suspects = [(row, token, shared.block_id) for shared, row, token in shared_writes(view, loaded=False)]
    for row, token, block in (*suspects, *_elsewhere(view)):
        owners = dict.fromkeys(share.request_id for share in ledger.owners(block))
        if row not in told and owners and ids[row] not in owners:
            told.add(row)
            yield write_finding(view, ledger, row, token, "a block of its own", past.told(ledger, block))


@rule(
    check="C3",
    severity="error",
    rank=r.SHARED,
    title="a token is written into a block that others rely on",
    fires="A request that has the block through a hit writes into it while others have it, too, or below what its hash "
    "covers; or a slot lies, against the declaration, in such a block of its own.",
    silent="A private copy made for the write; the last token of a prompt that was loaded whole, which is computed "
    "again in place; behind what the hash covers in a block that nobody else has.",
    sources=(r.PLAN_SLOTS, "the references to the block and what its hash covers"),
    proves_not="That what is written differs from what stood there.",
)
def write_shared_block(view: GroupView) -> Iterator[Finding]:
    ledger, ids = view.step.ledger, view.step.plan.request_ids
    if ledger is None:
        return
    for shared, row, token in shared_writes(view, loaded=False):
        if (shared.owners > 1 or shared.offset < shared.hashed_tokens) and _owned(ledger, ids[row], shared.block_id):
            yield _shared(view, ledger, row, token, shared.owners, shared.hashed_tokens)
    for row, token, block in _elsewhere(view):
        mine = view.step.token_row == row
        if not ledger.owns(ids[row], block) or (view.expected_blocks[mine] == block).any():
            continue
        references, hashed = int(ledger.references_of([block])[0]), int(ledger.hash_tokens_of([block])[0])
        if references > 1 or view.token_offset(int(view.slots[token])) < hashed:
            yield _shared(view, ledger, row, token, references, hashed)


def _shared(view: GroupView, ledger: BlockLedger, row: int, token: int, references: int, hashed: int) -> Finding:
    covers = f", {past.counted(hashed, 'tokens')} covered by its hash" if hashed > 0 else ""
    finding = write_finding(view, ledger, row, token, "a block that nobody else relies on", "")
    finding.actual = f"{past.counted(references, 'references')}{covers}; {past.told(ledger, finding.block_id or 0)}"
    return finding


@rule(
    check="C3",
    severity="error",
    rank=r.UNDECLARED,
    title="a token is written into a block that its request was never told of",
    fires="The slot lies in a block of the pool that does not stand in the request's declared table of the group.",
    silent="The null block and slots outside the cache, which have reasons of their own; a wrong block that is the "
    "request's own (write_target_mismatch).",
    sources=(r.PLAN_SLOTS, r.DECLARATION),
)
def write_block_not_declared(view: GroupView) -> Iterator[Finding]:
    ledger, bindings = view.step.ledger, view.step.bindings
    if ledger is None:
        return
    told: set[int] = set()
    for row, token, block in _elsewhere(view):
        if row in told or ledger.status_of([block])[0] == Status.NULL:
            continue
        if not (bindings.table(view.step.plan.request_ids[row], view.group_index) == block).any():
            told.add(row)
            yield write_finding(view, ledger, row, token, "a block of its declared table", past.told(ledger, block))


OWNERSHIP_RULES = (write_foreign_owner, write_shared_block, write_block_not_declared)
