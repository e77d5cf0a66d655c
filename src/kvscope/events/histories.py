"""What a ledger says about the block of a finding, as a kv.violation carries it."""

from __future__ import annotations

import numpy as np

from kvscope.checks.finding import Finding
from kvscope.events import finding_schema as words
from kvscope.events.finding_schema import MOST_OWNERS, STATUS_WORDS, STRIP_BLOCKS, BlockHistory, BlockOwner, BlockStrip
from kvscope.events.names import PLAIN, RequestNames
from kvscope.state.block_columns import Status
from kvscope.state.blocks import BlockHistory as KeptHistory
from kvscope.state.blocks import BlockLedger
from kvscope.state.shares import Share


def history_of(finding: Finding, ledger: BlockLedger, names: RequestNames = PLAIN) -> BlockHistory | None:
    """The history of the finding's block at this moment, with request ids as ``names`` has them. None: it names no
    block. Of a block that the pool does not have there are only the neighbours.

    Not for every finding of a storm: it walks all requests.
    """
    if finding.block_id is None:
        return None
    block = int(finding.block_id)
    kept, shares = ledger.history(block), ledger.owners(block)
    strip = _strip(finding, block, ledger, shares)
    if kept is None:
        return BlockHistory(strip=strip)
    references = int(ledger.references_of([block])[0])
    declared, confirmed = ledger.written_of([block])
    return BlockHistory(
        generation=kept.generation,
        status=STATUS_WORDS[kept.status],
        references=references,
        hash_count=int(ledger.hashes_of([block])[0]),
        init_prefix_len=int(confirmed[0]),
        init_prefix_declared=int(declared[0]),
        allocated_for=_named(kept.allocated_for, names),
        allocated_step=kept.allocated_step,
        last_written_step=kept.written_step,
        freed_by=_named(kept.freed_by, names),
        freed_step=kept.freed_step,
        freed_cause=kept.freed_cause,
        freed_generation=_freed_generation(kept, references),
        owners=[
            BlockOwner(
                request_id=names(share.request_id),
                group_id=share.group_id,
                logical_index=share.index,
                live=share.live,
            )
            for share in shares[:MOST_OWNERS]
        ],
        num_owners=len(shares),
        strip=strip,
    )


def _named(request_id: str | None, names: RequestNames) -> str | None:
    return None if request_id is None else names(request_id)


def _freed_generation(kept: KeptHistory, references: int) -> int | None:
    """The generation that the last release ended.

    A block in use was released in its present generation if it was hit since. Steps tell that, unless release and
    handing out fell into one step: then the release by whom it had been handed out to came after it.
    """
    if kept.freed_step is None:
        return None
    if references == 0 or kept.allocated_step is None or kept.freed_step > kept.allocated_step:
        return kept.generation
    if kept.freed_step == kept.allocated_step and kept.freed_by is not None and kept.freed_by == kept.allocated_for:
        return kept.generation
    return kept.generation - 1


def _strip(finding: Finding, block: int, ledger: BlockLedger, shares: list[Share]) -> BlockStrip:
    """Inside the pool as far as possible, around the block where it lies outside."""
    first = block - STRIP_BLOCKS // 2
    if 0 <= block < ledger.num_blocks:
        first = max(min(first, ledger.num_blocks - STRIP_BLOCKS), 0)
    block_ids = list(range(first, first + STRIP_BLOCKS))  # a damaged id may be of any size
    status, references = ledger.status_of(block_ids), ledger.references_of(block_ids)
    cached = ledger.hashes_of(block_ids) > 0
    is_own = np.zeros(STRIP_BLOCKS, np.bool_)
    if finding.request_id is not None:
        is_own = ledger.is_owner(finding.request_id, block_ids)
    found = [
        _word(Status(state), is_own=own, is_shared=count > 1, is_cached=hashed)
        for state, own, count, hashed in zip(
            status.tolist(), is_own.tolist(), references.tolist(), cached.tolist(), strict=True
        )
    ]
    tables = sum(share.count for share in shares if share.live)
    if tables > references[block - first] and found[block - first] not in {words.NULL, words.OUTSIDE}:
        found[block - first] = words.DISPUTED
    return BlockStrip(first_block=first, blocks=found)


_WORD_OF_STATUS = {
    Status.HELD: words.HELD,
    Status.ACTIVE: words.OTHER,
    Status.RESERVED: words.RECEIVING,
    Status.NULL: words.NULL,
    Status.OUTSIDE: words.OUTSIDE,
}


def _word(status: Status, *, is_own: bool, is_shared: bool, is_cached: bool) -> str:
    if status is Status.FREE:
        return words.CACHED if is_cached else words.NOBODY
    if status is Status.ACTIVE and is_own:
        return words.SHARED if is_shared else words.OWN
    return _WORD_OF_STATUS[status]
