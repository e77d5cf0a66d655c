"""Findings of the guard with what a ledger knows about their blocks, each told from the calls of a pool."""

from __future__ import annotations

from typing import Any

from kvscope.analysis.blocks import Tenure
from kvscope.analysis.scene import Scene
from kvscope.analysis.tally import FoldedFinding
from kvscope.checks.finding import Finding
from kvscope.events.histories import history_of
from kvscope.facts.allocator import ALLOC, CACHE, FREE, TOUCH, PoolOperation
from kvscope.state.blocks import BlockLedger

NUM_BLOCKS = 2048
OLD, READER, OWNER, BYSTANDER = "cmpl-5aa", "cmpl-7d1", "cmpl-6f0", "cmpl-4c2"


def say(kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> PoolOperation:
    group = None if request_id is None else 0
    return PoolOperation(
        **{"kind": kind, "block_ids": block_ids, "request_id": request_id, "group_id": group, **fields}
    )


def told(*operations: tuple[int, PoolOperation]) -> BlockLedger:
    """Operations, each with its step."""
    ledger = BlockLedger(NUM_BLOCKS, 0)
    for step, operation in operations:
        ledger.apply(operation, step)
    return ledger


def live(ledger: BlockLedger | None, *, process: str, runner: str | None = None, **fields: Any) -> FoldedFinding:
    """As a record tells it that stands alone: no replay has seen the finding."""
    finding = Finding(**{"step": 214, "trace_id": "1795981958.0.214", "group_id": 0, **fields})
    return FoldedFinding(
        first=finding,
        history=None if ledger is None else history_of(finding, ledger),
        process=process,
        processes=[process],
        runner=runner,
        action="log",
        in_trace=1,
        first_step=214,
        last_step=214,
        requests=[] if finding.request_id is None else [finding.request_id],
        num_requests=1,
    )


BEFORE = (
    (2, say(ALLOC, [40, 41, 45], OLD, first_index=0)),
    (9, say(FREE, [45, 41, 40], OLD, cause="finish")),
    (9, say(ALLOC, [45], BYSTANDER, first_index=0)),
    (11, say(FREE, [45], BYSTANDER, cause="abort")),
)
COMES = (150, say(ALLOC, [45, 46, 48, 49], READER, first_index=13))
PREEMPTED = (171, say(FREE, [49, 48, 46, 45], READER, cause="preempt"))
HANDED_ON = (180, say(ALLOC, [42, 43, 44, 45], OWNER, first_index=0))
CACHED = (172, say(CACHE, [49], READER, hash_counts=[1]))

STALE = told(*BEFORE, COMES, CACHED, PREEMPTED, HANDED_ON)
STALE.declare_written([45], [16], 213)
STALE.confirm(213)

USE_AFTER_FREE_READ = live(
    STALE,
    process="worker-0-4711",
    runner="V2",
    reason="read_after_release",
    request_id=READER,
    other_request_id=OWNER,
    row=3,
    position=217,
    block_id=45,
    generation=3,
    expected="generation 3, in which it had the block",
    actual="released since: generation 4, handed out in step 180; freed in step 171 (preempt) before that",
)

NOT_HANDED_ON = told(*BEFORE, COMES, (160, say(CACHE, [45], READER, hash_counts=[1])), PREEMPTED)
USE_AFTER_FREE_WRITE = live(
    NOT_HANDED_ON,
    process="worker-0-4711",
    runner="V1",
    reason="write_after_release",
    request_id=READER,
    row=0,
    token_index=0,
    position=213,
    block_id=45,
    slot=725,
    generation=3,
    expected="generation 3, in which it had the block",
    actual="released since: generation 3, freed in step 171 (preempt)",
)
USE_AFTER_FREE_WRITE.in_replay = 1
USE_AFTER_FREE_WRITE.scene = Scene(
    num_blocks=NUM_BLOCKS,
    null_block_id=0,
    slots_per_block=16,
    logical_block=13,
    declared_block=45,
    holders=[READER],
    tenures=[Tenure(request_id=READER, group_index=0, index=13, since_step=150)],
    strip=[],
)

DOUBLE_FREE = live(
    told(*BEFORE, (20, say(ALLOC, [40, 41, 45], OWNER, first_index=0)), (30, say(FREE, [45], OWNER, cause="window"))),
    process="engine-0-4700",
    reason="double_free",
    request_id=OWNER,
    block_id=45,
    generation=3,
    expected="no more releases than references",
    actual="1 reference released, of 0; generation 3, freed in step 30 (window)",
)

DOUBLE_FREE_AT_ONCE = live(
    told(*BEFORE, (20, say(ALLOC, [40, 41, 45], OWNER, first_index=0))),
    process="engine-0-4700",
    reason="double_free",
    request_id=OWNER,
    block_id=45,
    generation=3,
    expected="no more references released than it has",
    actual="2 released of 1; generation 3, handed out in step 20",
)

LEAK = live(
    told((2, say(ALLOC, [44, 45], OLD, first_index=0)), (9, say(FREE, [44], OLD, cause="finish"))),
    process="engine-0-4700",
    reason="leak_after_finish",
    request_id=OLD,
    block_id=45,
    generation=1,
    expected="all its blocks released or held",
    actual="1 block still in its table; the first: generation 1, handed out in step 2",
)  # fmt: skip

FOREIGN_WRITE = live(
    told(*BEFORE, (180, say(ALLOC, [44, 45], OWNER, first_index=3)), (181, say(ALLOC, [53], READER, first_index=13))),
    process="all-0-4711",
    runner="V2",
    reason="write_foreign_block",
    request_id=READER,
    other_request_id=OWNER,
    row=3,
    token_index=3,
    position=217,
    block_id=45,
    slot=725,
    expected=853,
    actual=725,
    also=("write_target_mismatch",),
)

NULL_BLOCK = live(
    told(*BEFORE, (20, say(ALLOC, [1, 2, 3], READER, first_index=0))),
    process="all-0-4711",
    runner="V1",
    reason="null_block_write",
    request_id=READER,
    row=0,
    token_index=0,
    position=41,
    block_id=0,
    slot=3,
    expected=57,
    actual=3,
)

OUTSIDE_CACHE = live(
    told((2, say(ALLOC, [2046, 2047], OWNER, first_index=0)), (3, say(ALLOC, [7], READER, first_index=2))),
    process="worker-1-4712",
    runner="V1",
    reason="read_outside_cache",
    request_id=READER,
    row=0,
    position=32,
    block_id=2050,
    expected=7,
    actual=2050,
    launch_fatal=True,
)

ALIAS = live(
    told(COMES, (171, say(FREE, [45], OLD, cause="finish")), (180, say(ALLOC, [45], OWNER, first_index=0))),
    process="engine-0-4700",
    reason="alias_owner_mismatch",
    request_id=READER,
    other_request_id=OWNER,
    block_id=45,
    generation=2,
    expected="2 references, one for each place in a table",
    actual="1; generation 2, handed out in step 180; freed in step 171 (finish) before that",
)

_UNWRITTEN = told(
    *BEFORE, (200, say(ALLOC, [45], OWNER, first_index=2)), (210, say(TOUCH, [45], READER, first_index=2))
)
_UNWRITTEN.declare_written([45], [5], 209)
UNINITIALIZED = live(
    _UNWRITTEN,
    process="worker-0-4711",
    runner="V2",
    reason="read_uninitialized",
    request_id=READER,
    row=1,
    position=47,
    block_id=45,
    generation=3,
    expected="16 tokens of the block written",
    actual="5; generation 3, handed out in step 200",
)

STORIES = {
    "use_after_free_read": USE_AFTER_FREE_READ,
    "use_after_free_write": USE_AFTER_FREE_WRITE,
    "double_free": DOUBLE_FREE,
    "double_free_at_once": DOUBLE_FREE_AT_ONCE,
    "leak_after_finish": LEAK,
    "foreign_write_by_pool": FOREIGN_WRITE,
    "null_block": NULL_BLOCK,
    "outside_cache": OUTSIDE_CACHE,
    "alias": ALIAS,
    "uninitialized": UNINITIALIZED,
}
