"""A on one call of the block pool, before the ledger takes it over: does it fit what all calls before add up to?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..state.blocks import BlockLedger
from . import past
from . import rule as r
from .finding import Finding
from .past import some_of
from .rule import rule

_MAY_DROP_HASHES = frozenset({facts.CAUSE_LOAD_FAILED, facts.CAUSE_COPY, facts.CAUSE_EVICT})
_CALL = "the call of the block pool"
_CALLS_BEFORE = "the calls before it, added up"
_NOTHING: Mapping[int, int] = {}


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the pool beside the ledger as it was before that call.

    ``in_flight``: block -> the last step that may still touch it and whose result has not come back.
    """

    operation: PoolOperation
    ledger: BlockLedger
    trace_id: str
    in_flight: Mapping[int, int] = _NOTHING


def pool_agrees(operation: PoolOperation, ledger: BlockLedger, in_flight: Mapping[int, int] = _NOTHING) -> bool:
    """The common case at its lowest price. True means that no rule about a call can fire."""
    counts, kind = operation.ref_counts, operation.kind
    if counts and min(counts) < 0:
        return False
    if kind == facts.ALLOC:
        return not (operation.reserved and in_flight) and ledger.all_unused(operation.block_ids)
    if kind == facts.FREE:
        return ledger.all_in_use(operation.block_ids)
    if kind == facts.EVICT:
        return operation.cause in _MAY_DROP_HASHES or ledger.all_unused(operation.block_ids)
    return kind != facts.RESET or not _in_use(ledger)


def _in_use(ledger: BlockLedger) -> list[int]:
    """Every block that has a reference."""
    blocks: list[int] = np.flatnonzero(ledger.references_of(np.arange(ledger.num_blocks)) > 0).tolist()
    return blocks


def _finding(view: PoolView, block_id: int, expected: str, actual: str) -> Finding:
    operation = view.operation
    return Finding(
        reason="",
        step=operation.step,
        trace_id=view.trace_id,
        request_id=operation.request_id,
        other_request_id=past.another(view.ledger, block_id, operation.request_id),
        group_id=operation.group_id,
        block_id=block_id,
        generation=past.generation(view.ledger, block_id),
        expected=expected,
        actual=actual,
    )


@rule(
    check="A",
    severity="fatal",
    rank=r.NULL,
    title="the pool hands out the null block",
    fires="get_new_blocks returns the null block.",
    silent="Null blocks that a manager puts into a table itself, for tokens that attention does not look at.",
    sources=(_CALL, "the rule that nobody owns the null block"),
    invariant=True,
    proves_not="That somebody writes into it.",
)
def alloc_null_block(view: PoolView) -> Iterator[Finding]:
    null = view.ledger.null_block_id
    if view.operation.kind == facts.ALLOC and null in view.operation.block_ids:
        yield _finding(view, null, "a block that somebody may own", "the null block")


@rule(
    check="A",
    severity="error",
    rank=r.FOREIGN,
    title="the pool hands out a block that is in use",
    fires="get_new_blocks returns a block that has references, or one block twice.",
    silent="Free blocks that still have a hash: they may be handed out and lose it.",
    sources=(_CALL, _CALLS_BEFORE),
    proves_not="That both owners write into the block; the worker's rules see that.",
)
def alloc_live_block(view: PoolView) -> Iterator[Finding]:
    operation, ledger = view.operation, view.ledger
    if operation.kind != facts.ALLOC:
        return
    blocks = operation.block_ids
    references = dict(zip(blocks, ledger.references_of(blocks).tolist(), strict=True))
    times = Counter(blocks)
    for block, more in some_of([block for block in blocks if references[block] > 0 or times[block] > 1]):
        if block == ledger.null_block_id:
            continue
        actual = past.told(ledger, block) if references[block] > 0 else f"{times[block]} times in one call"
        yield _finding(view, block, "a free block", actual + more)


@rule(
    check="A",
    severity="error",
    rank=r.OTHER,
    title="a block that a running step may touch is reserved for a receive",
    fires="A block is handed out for a load that no step is ordered with, while a step whose result is not back may "
    "still read or write it.",
    silent="Blocks handed out for steps: those run in order, so that reuse is safe; blocks whose last step has "
    "returned; deferred frees, which wait for it.",
    sources=("the reservation of the block", "the steps whose result has not come back"),
    proves_not="That the transfer begins before the step has finished with the block.",
)
def free_inflight_step(view: PoolView) -> Iterator[Finding]:
    operation, running = view.operation, view.in_flight
    if operation.kind == facts.ALLOC and operation.reserved:
        for block, more in some_of([block for block in operation.block_ids if block in running]):
            actual = f"step {running[block]} may still touch it; {past.told(view.ledger, block)}"
            yield _finding(view, block, "a block that no running step touches", actual + more)


@rule(
    check="A",
    severity="error",
    rank=r.OUTSIDE,
    title="a block is freed that was never handed out",
    fires="free_blocks releases a reference to a block of which no call ever gave one, or to one outside the pool.",
    silent="The null block, whose count means nothing; blocks that are free again (double_free).",
    sources=(_CALL, _CALLS_BEFORE),
    proves_not="Which block was meant.",
)
def free_unallocated(view: PoolView) -> Iterator[Finding]:
    operation, ledger = view.operation, view.ledger
    if operation.kind != facts.FREE:
        return
    blocks = operation.block_ids
    generations, references = ledger.generation_of(blocks).tolist(), ledger.references_of(blocks).tolist()
    wrong = [block for block, g, n in zip(blocks, generations, references, strict=True) if g <= 0 and n <= 0]
    for block, more in some_of([block for block in wrong if block != ledger.null_block_id]):
        yield _finding(view, block, "a block that was handed out", past.told(ledger, block) + more)


@rule(
    check="A",
    severity="error",
    rank=r.RELEASED,
    title="a block is freed twice",
    fires="free_blocks releases a reference to a block that is free in this generation, or more references than it "
    "has, within one call or over time.",
    silent="A block released once for each request that has it; releases that come late (deferred frees).",
    sources=(_CALL, _CALLS_BEFORE),
    proves_not="Which of the releases was the wrong one.",
)
def double_free(view: PoolView) -> Iterator[Finding]:
    operation, ledger = view.operation, view.ledger
    if operation.kind != facts.FREE:
        return
    released = Counter(operation.block_ids)
    blocks = list(released)
    generations, references = ledger.generation_of(blocks).tolist(), ledger.references_of(blocks).tolist()
    have = {block: n for block, g, n in zip(blocks, generations, references, strict=True) if g > 0 or n > 0}
    for block, more in some_of([block for block in have if released[block] > have[block]]):
        count = f"{released[block]} released of {have[block]}"
        yield _finding(
            view, block, "no more references released than it has", f"{count}; {past.told(ledger, block)}{more}"
        )


@rule(
    check="A",
    severity="error",
    rank=r.SHORT,
    title="a reference count is below zero",
    fires="After a call the pool's own count of references to one of its blocks is negative.",
    silent="The null block, whose count means nothing.",
    sources=("the pool's own reference count", "the rule that a count is never below zero"),
    invariant=True,
    proves_not="Which release was the wrong one; double_free does, where the pool's calls tell.",
)
def ref_underflow(view: PoolView) -> Iterator[Finding]:
    operation = view.operation
    counts = dict(zip(operation.block_ids, operation.ref_counts or (), strict=False))
    below = [block for block, count in counts.items() if count < 0 and block != view.ledger.null_block_id]
    for block, more in some_of(below):
        yield _finding(view, block, "0 or more references", f"{counts[block]}{more}")


@rule(
    check="A",
    severity="warning",
    rank=r.OTHER,
    title="the hashes of a block in use are dropped",
    fires="A block that has references loses its hashes outside of an allocation, or the whole prefix cache is reset "
    "while one has.",
    silent="Invalid loads, copies on write and the transient checkpoints of state groups, which the host drops on "
    "purpose; free blocks.",
    sources=(_CALL, _CALLS_BEFORE),
    proves_not="That the contents are wrong: whoever has the block goes on using it.",
)
def evict_referenced(view: PoolView) -> Iterator[Finding]:
    operation, ledger = view.operation, view.ledger
    if operation.kind == facts.RESET:
        blocks = _in_use(ledger)
    elif operation.kind == facts.EVICT and operation.cause not in _MAY_DROP_HASHES:
        references = ledger.references_of(operation.block_ids).tolist()
        blocks = [block for block, count in zip(operation.block_ids, references, strict=True) if count > 0]
    else:
        return
    for block, more in some_of(blocks):
        yield _finding(view, block, "a block without references", past.told(ledger, block) + more)


POOL_RULES = (
    alloc_null_block,
    alloc_live_block,
    free_inflight_step,
    free_unallocated,
    double_free,
    ref_underflow,
    evict_referenced,
)
