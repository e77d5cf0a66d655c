"""What became of a block, in words that name no request: their ids stand in fields of a finding, never in its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ..state.block_columns import Status
from ..state.blocks import BlockHistory, BlockLedger

Block = TypeVar("Block")
"""A block, or the source and destination of a copy."""

MOST_BLOCKS = 8
"""Findings of one reason about blocks of one call or one audit; the text of each says how many there are."""


def some_of(blocks: Sequence[Block]) -> Iterator[tuple[Block, str]]:
    """The first blocks, each once, and what to add to the text about each if there are more."""
    distinct = list(dict.fromkeys(blocks))
    more = f"; 1 of {len(distinct)} such blocks" if len(distinct) > MOST_BLOCKS else ""
    for block in distinct[:MOST_BLOCKS]:
        yield block, more


def counted(count: int | None, what: str) -> str:
    """``1 reference``, ``2 references``; ``what`` is the plural."""
    if count != 1:
        return f"{count} {what}"
    return f"1 {what.removesuffix('es' if what.endswith('hes') else 's')}"


def another(ledger: BlockLedger, block_id: int, own: str | None) -> str | None:
    """Who has the block beside ``own``, the live first; else who freed it last. None: nobody, or only ``own``."""
    for share in ledger.owners(block_id):
        if share.request_id != own:
            return share.request_id
    history = ledger.history(block_id)
    return None if history is None or history.freed_by == own else history.freed_by


def generation(ledger: BlockLedger, block_id: int) -> int | None:
    """How often the block has been handed out; None outside the pool."""
    history = ledger.history(block_id)
    return None if history is None else history.generation


def told(ledger: BlockLedger, block_id: int) -> str:
    """What the block is now, since when, and what was before: ``generation 2, handed out in step 6; freed before that
    in step 5 (finish)``.
    """
    history = ledger.history(block_id)
    if history is None:
        return f"outside the pool of {ledger.num_blocks} blocks"
    if history.status == Status.NULL:
        return "the null block"
    if not history.generation:
        return "never handed out"
    what = f"generation {history.generation}"
    if history.status == Status.FREE:
        return f"{what}, {freed(history)}"
    what += "" if history.allocated_step is None else f", handed out in step {history.allocated_step}"
    if history.status == Status.RESERVED:
        what += ", waiting for a receive"
    elif history.status == Status.HELD:
        what += ", given up and not yet released"
    if history.freed_step is None or history.allocated_step is None:
        return what
    if history.freed_step < history.allocated_step:
        return f"{what}; {freed(history)} before that"
    if history.freed_step > history.allocated_step:
        return f"{what}; {freed(history)} and hit again"
    return f"{what}; {freed(history)}"  # in the same step: before or after, the steps do not tell


def freed(history: BlockHistory) -> str:
    """``freed in step 5 (finish)``."""
    if history.freed_step is None:
        return "free"
    return f"freed in step {history.freed_step} ({history.freed_cause})"
