"""C5 as a step is declared: what is hit, cached or cleared, against what has been written into it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.plans import Int32
from ..facts.requests import Declaration
from ..state.block_columns import Status
from ..state.legality import Legality
from ..state.shares import Share
from . import past
from . import rule as r
from .finding import Finding
from .past import some_of
from .rule import rule

_WRITTEN = "the tokens declared written since the block was handed out"


class ContentView(msgspec.Struct, frozen=True, kw_only=True):
    """One declaration, and what is known of the blocks; what the step itself is going to write is already part of it.

    So a hit on a block that another request of the same step fills is a hit on what is written.
    """

    declaration: Declaration
    legality: Legality

    def hits(self) -> Iterator[tuple[PoolOperation, int]]:
        """Each call of this step by which a request hit blocks, with the block size of its group."""
        sizes = self.legality.block_sizes
        for operation in self.legality.interval:
            if operation.kind == facts.TOUCH and operation.cause == facts.CAUSE_HIT and operation.group_id in sizes:
                yield operation, sizes[operation.group_id]


def content_agrees(view: ContentView) -> bool:
    """The common case at its lowest price. True means that no rule about contents can fire."""
    if view.declaration.zero_blocks and _cleared(view):
        return False
    if view.legality.hits.unindexed or (view.legality.aborted and _aborted(view)):
        return False
    return not any((_missing(view, operation, size) > 0).any() for operation, size in view.hits())


def _missing(view: ContentView, operation: PoolOperation, size: int) -> Int32:
    """How many tokens of each block that was hit are not written, ``int32 [n]``."""
    ledger = view.legality.ledger
    covered = ledger.hash_tokens_of(operation.block_ids)
    missing: Int32 = np.where(covered > 0, covered, size) - ledger.written_of(operation.block_ids)[0]
    return missing


def _aborted(view: ContentView) -> list[int]:
    """Cached blocks that a step should have written whose result never came, and that lack these tokens ever since."""
    legality, aborted = view.legality, view.legality.aborted
    ledger, blocks = legality.ledger, np.array(list(aborted), np.int64)
    tokens = ledger.hash_tokens_of(blocks)
    covered = np.where(tokens > 0, tokens, min(legality.block_sizes.values(), default=0))
    same = ledger.generation_of(blocks) == np.array(list(aborted.values()), np.int64)
    lacking: list[int] = blocks[
        same & (ledger.hashes_of(blocks) > 0) & (ledger.written_of(blocks)[0] < covered)
    ].tolist()
    return lacking


def _cleared(view: ContentView) -> list[int]:
    """Blocks in use that the step clears though they were not handed out in it."""
    ledger = view.legality.ledger
    blocks = np.array(view.declaration.zero_blocks or (), np.int64)
    before = ledger.allocated_step_of(blocks) < view.declaration.step
    cleared: list[int] = blocks[before & (ledger.references_of(blocks) > 0)].tolist()
    return cleared


def _finding(view: ContentView, block_id: int, share: Share | None = None) -> Finding:
    ledger, size = view.legality.ledger, None
    if share is not None and share.group_id is not None:
        size = view.legality.block_sizes.get(share.group_id)
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        request_id=None if share is None else share.request_id,
        other_request_id=past.another(ledger, block_id, None if share is None else share.request_id),
        group_id=None if share is None else share.group_id,
        position=None if share is None or share.index is None or size is None else share.index * size,
        block_id=block_id,
        generation=past.generation(ledger, block_id),
    )


def _hit(view: ContentView, operation: PoolOperation, block_id: int) -> Share | None:
    """The place at which the request has what it hit; None if it has let go of it in the same step."""
    shares = view.legality.ledger.owned_by(operation.request_id) if operation.request_id is not None else ()
    return next((s for s in shares if s.block_id == block_id and s.group_id == operation.group_id), None)


@rule(
    check="C5",
    severity="error",
    rank=r.UNWRITTEN - 1,
    title="a request hits a block whose writing step failed",
    fires="A prefix hit leads to a block that a step should have written whose result never came.",
    silent="Blocks that were handed out again or written again since; steps that are still on their way.",
    sources=("the calls by which the request hit the block", "the steps whose result never came"),
    proves_not="That the step wrote nothing before it failed.",
)
def hit_before_write(view: ContentView) -> Iterator[Finding]:
    failed = set(_aborted(view))
    for operation, _ in view.hits() if failed else ():
        for block, more in some_of([block for block in operation.block_ids if block in failed]):
            share = _hit(view, operation, block)
            if share is not None:
                finding = _finding(view, block, share)
                finding.expected = "a block whose writing step has returned"
                finding.actual = f"written by a step that failed; {past.told(view.legality.ledger, block)}{more}"
                yield finding


@rule(
    check="C5",
    severity="error",
    rank=r.UNWRITTEN,
    title="a request hits a block that is not written",
    fires="A prefix hit leads to a block of which fewer tokens were ever declared written than its hash covers, or to "
    "one that had no hash: it has lost it with its last user, or when the cache was reset.",
    silent="A block that another request fills in the same step; one that a receive has filled; groups in which a "
    "block means something else.",
    sources=("the calls by which the request hit the block", _WRITTEN),
    proves_not="What the block holds: it may be left over from whoever had it before.",
)
def hit_uninitialized(view: ContentView) -> Iterator[Finding]:
    legality = view.legality
    ledger = legality.ledger
    for operation, size in view.hits():
        short = np.flatnonzero(_missing(view, operation, size) > 0)
        for share in (s for i in short.tolist() for s in ledger.owners(operation.block_ids[i]) if s.live):
            if share.request_id != operation.request_id:
                legality.flush(share.request_id)  # its last block, which is known from its number of tokens
        missing = _missing(view, operation, size)
        short_blocks = [operation.block_ids[i] for i in np.flatnonzero(missing > 0).tolist()]
        for block, more in some_of(short_blocks):
            share_of_hit = _hit(view, operation, block)
            if share_of_hit is None:
                continue
            finding = _finding(view, block, share_of_hit)
            declared = int(ledger.written_of([block])[0][0])
            finding.expected = (
                f"{declared + int(missing[operation.block_ids.index(block)])} tokens of the block written"
            )
            finding.actual = f"{declared}; {past.told(ledger, block)}{more}"
            yield finding
    for operation in legality.hits.unindexed:
        for block, more in some_of(operation.block_ids if operation.group_id in legality.block_sizes else ()):
            share_of_hit = _hit(view, operation, block)
            if share_of_hit is not None:
                finding = _finding(view, block, share_of_hit)
                finding.expected = "a block to which a hash leads"
                finding.actual = f"none when it was hit; {past.told(ledger, block)}{more}"
                yield finding


@rule(
    check="C5",
    severity="error",
    rank=r.OTHER,
    title="a hash still leads to a block whose writing step failed",
    fires="A step never returned, and a block that it should have written can still be found by its hash.",
    silent="Blocks that were handed out again, written again, or lost their hashes; steps that are still on their way.",
    sources=("the hashes that lead to the block", "the steps whose result never came"),
    proves_not="That anybody will hit it.",
)
def aborted_block_still_cached(view: ContentView) -> Iterator[Finding]:
    for block, more in some_of(_aborted(view)):
        finding = _finding(view, block)
        finding.expected = "no hash that leads to it"
        finding.actual = f"cached; written by a step that failed; {past.told(view.legality.ledger, block)}{more}"
        yield finding


@rule(
    check="C5",
    severity="error",
    rank=r.OTHER,
    title="a block in use is cleared",
    fires="The step clears a block that somebody has and that was written before.",
    silent="Blocks handed out in the step; blocks that nobody has written yet, such as those that a failed load left.",
    sources=("the scheduler's list of blocks to clear", _WRITTEN),
    proves_not="That the device clears it; the worker is told to.",
)
def zero_live_block(view: ContentView) -> Iterator[Finding]:
    for block, share, more in _damaged(view, received=False):
        finding = _finding(view, block, share)
        finding.expected = "a block that nobody has written"
        finding.actual = f"cleared; {past.told(view.legality.ledger, block)}{more}"
        yield finding


@rule(
    check="C5",
    severity="error",
    rank=r.OTHER,
    title="a block is cleared that a receive fills or has filled",
    fires="The step clears a block that somebody has and whose contents came, or are coming, by a receive.",
    silent="Blocks handed out in the step; what a failed load left unwritten.",
    sources=("the scheduler's list of blocks to clear", "the receives that were begun or have ended"),
    proves_not="That the device clears it; the worker is told to.",
)
def zero_after_receive(view: ContentView) -> Iterator[Finding]:
    for block, share, more in _damaged(view, received=True):
        finding = _finding(view, block, share)
        finding.expected = "a block that no receive fills"
        finding.actual = f"cleared; {past.told(view.legality.ledger, block)}{more}"
        yield finding


def _damaged(view: ContentView, *, received: bool) -> Iterator[tuple[int, Share | None, str]]:
    """Blocks whose contents the clearing destroys, one of their places, and what to add to the text."""
    found: dict[int, Share | None] = {}
    for block in _cleared(view):
        shares = [share for share in view.legality.ledger.owners(block) if share.live]
        filled = next((share for share in shares if _came_by_receive(view, share)), None)
        if (filled is not None) == received and (received or _written_before(view, block, shares)):
            found[block] = filled or (shares[0] if shares else None)
    for block, more in some_of(list(found)):
        yield block, found[block], more


def _came_by_receive(view: ContentView, share: Share) -> bool:
    legality = view.legality
    if legality.ledger.status_of([share.block_id])[0] == Status.RESERVED:
        return True
    size = legality.block_sizes.get(share.group_id) if share.group_id is not None else None
    loaded = legality.loaded_tokens(share.request_id)
    return size is not None and share.index is not None and share.index * size < loaded


def _written_before(view: ContentView, block: int, shares: list[Share]) -> bool:
    """Whether something stood in the block before the step, which may be about to write into it for the first time."""
    legality, computed = view.legality, view.declaration.requests.computed()
    of_step = [share for share in shares if share.request_id in computed]
    for share in of_step:
        size = legality.block_sizes.get(share.group_id) if share.group_id is not None else None
        if size is not None and share.index is not None and computed[share.request_id] > share.index * size:
            return True
    for share in shares:
        legality.flush(share.request_id)
    return not of_step and int(legality.ledger.written_of([block])[0][0]) > 0


CONTENT_RULES = (hit_before_write, hit_uninitialized, aborted_block_still_cached, zero_live_block, zero_after_receive)
