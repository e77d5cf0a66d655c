"""Which blocks findings are about, for the state of the pool beside them."""

from __future__ import annotations

from collections.abc import Sequence

from ..checks.finding import Finding
from ..state.blocks import BlockLedger

MOST_BLOCKS = 512
NEIGHBOURS = 8


def concerned_blocks(findings: Sequence[Finding], ledger: BlockLedger) -> list[int]:
    """The blocks that findings name, their neighbours, and those of the requests that they name: at most
    ``MOST_BLOCKS`` of the pool.
    """
    blocks: dict[int, None] = {}
    for finding in findings:
        if finding.block_id is not None:
            around = range(finding.block_id - NEIGHBOURS, finding.block_id + NEIGHBOURS)
            blocks.update(dict.fromkeys(block for block in around if 0 <= block < ledger.num_blocks))
        for request_id in (finding.request_id, finding.other_request_id):
            if request_id is not None:
                blocks.update(dict.fromkeys(share.block_id for share in ledger.owned_by(request_id)))
        if len(blocks) >= MOST_BLOCKS:
            break
    return list(blocks)[:MOST_BLOCKS]
