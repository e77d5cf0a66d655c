"""After the ledger has taken over a call of the pool: do its books and the host's agree about those blocks?

What differs is told as an audit tells it (``state.block_audit``), and judged by the same rules (``checks.audit``).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..facts.allocator import PoolOperation
from ..state.block_audit import ALIASED, REFERENCES, Difference
from ..state.blocks import BlockLedger


def settled_agrees(operation: PoolOperation, ledger: BlockLedger) -> bool:
    """The common case at its lowest price. True means that :func:`differences_after` finds nothing."""
    return ledger.balanced(operation.block_ids, operation.ref_counts)


def differences_after(operation: PoolOperation, ledger: BlockLedger) -> Iterator[Difference]:
    """Each block of the call whose references the host counts otherwise, or that has more owners than references.

    A count that the host has below zero is none that could differ from ours: it is ref_underflow.
    """
    blocks, said = operation.block_ids, operation.ref_counts
    host = dict(zip(blocks, said, strict=False)) if said is not None else {}
    for block in dict.fromkeys(blocks):
        if not 0 <= block < ledger.num_blocks or block == ledger.null_block_id:
            continue
        ours = int(ledger.references_of([block])[0])
        theirs = host.get(block, ours)
        if max(theirs, 0) != ours:
            yield Difference(kind=REFERENCES, block_id=block, ours=ours, host=theirs)
        owners = int(ledger.places_of([block])[0])
        if owners > max(theirs, ours):
            yield Difference(kind=ALIASED, block_id=block, ours=owners, host=theirs)
