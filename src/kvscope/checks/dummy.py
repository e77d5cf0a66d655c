"""C1 and C5 on runs that serve no request: profiling, warm-up, capture, an idle data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..facts.context_parallel import ContextParallel
from ..facts.plans import PAD_SLOT, DummyRun
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.token_shares import block_offset
from . import past
from . import rule as r
from .finding import Finding
from .rule import rule


class DummyView(msgspec.Struct, frozen=True, kw_only=True):
    """A dummy run after step ``after_step``, beside the tables of the requests that are alive meanwhile.

    ``ledger`` is None where the blocks of the pool are not followed, ``context`` where each rank stores all tokens.
    """

    after_step: int
    run: DummyRun
    bindings: Bindings
    ledger: BlockLedger | None = None
    context: ContextParallel | None = None


@rule(
    check="C1",
    severity="error",
    rank=r.OTHER,
    title="a dummy run may write into the cache",
    fires="A slot of a dummy run is not the padding value.",
    silent="Groups that have no slot mapping; state slots, which dummy runs may use; a warm-up, whose made-up requests "
    "store their tokens.",
    sources=(r.PLAN_SLOTS, "the rule that a dummy run writes nothing"),
    invariant=True,
)
def dummy_slot_enabled(view: DummyView) -> Iterator[Finding]:
    for group_index, group in enumerate(view.bindings.topology.groups):
        slots = view.run.slots.get(group.group_id)
        if slots is None or not group.judged or view.run.warm_up:
            continue
        enabled = np.flatnonzero(slots != PAD_SLOT)
        if not enabled.size:
            continue
        slot = int(slots[enabled[0]])
        holders = view.bindings.holders(group_index, slot // group.slots_per_block)
        yield Finding(
            reason="",
            step=view.after_step,
            trace_id="",
            other_request_id=holders[0] if holders else None,
            group_id=group.group_id,
            token_index=int(enabled[0]),
            block_id=slot // group.slots_per_block,
            slot=slot,
            expected=PAD_SLOT,
            actual=slot,
        )


@rule(
    check="C1",
    severity="error",
    rank=r.OTHER,
    title="a dummy run leaves a slot on that a graph could replay",
    fires="Behind the slots of a dummy run's tokens the buffer that they stand in has a slot that is on: in the "
    "padding that was handed on with them, or anywhere else if the run has put it there or should have turned it off.",
    silent="V1: what the last real step has left behind the padding, since every run fills what it hands on; padding "
    "entries that are off, however many; a warm-up.",
    sources=("the runner's persistent slots after a dummy run", "the rule that a dummy run writes nothing"),
    invariant=True,
    proves_not="That a graph has read it; it would have, over so many tokens.",
)
def dummy_persistent_slot_enabled(view: DummyView) -> Iterator[Finding]:
    for group_index, group in enumerate(view.bindings.topology.groups):
        rest = view.run.persistent.get(group.group_id)
        if rest is None or not group.judged or not rest.indexes.size:
            continue
        index, slot = int(rest.indexes[0]), int(rest.slots[0])
        holders = view.bindings.holders(group_index, slot // group.block_size)
        yield Finding(
            reason="",
            step=view.after_step,
            trace_id="",
            other_request_id=holders[0] if holders else None,
            group_id=group.group_id,
            token_index=index,
            block_id=slot // group.block_size,
            slot=slot,
            expected=PAD_SLOT,
            actual=slot,
        )


@rule(
    check="C5",
    severity="error",
    rank=r.UNWRITTEN,
    title="a dummy run may overwrite what a request has written",
    fires="A slot of a dummy run that is not the padding value is that of a token that is written, in a block that "
    "somebody has.",
    silent="Slots in blocks that nobody has, or behind what is written in them (dummy_slot_enabled); groups that have "
    "no slot mapping; state slots.",
    sources=(r.PLAN_SLOTS, "the tokens declared written since the block was handed out"),
)
def dummy_table_live(view: DummyView) -> Iterator[Finding]:
    for group_index, group in enumerate(view.bindings.topology.groups):
        slots = view.run.slots.get(group.group_id)
        if slots is None or not group.judged or view.ledger is None:
            continue
        blocks = slots // group.slots_per_block
        live = (slots != PAD_SLOT) & (view.ledger.references_of(blocks) > 0)
        for token in np.flatnonzero(live).tolist():
            block, offset = divmod(int(slots[token]), group.slots_per_block)
            if group.shards > 1 and view.context is not None:
                offset = block_offset(view.context, offset)
            owner = _written_by(view, view.ledger, group_index, block, offset)
            if owner is None:
                continue
            yield Finding(
                reason="",
                step=view.after_step,
                trace_id="",
                other_request_id=owner or None,
                group_id=group.group_id,
                token_index=token,
                block_id=block,
                slot=int(slots[token]),
                generation=past.generation(view.ledger, block),
                expected="a padding slot",
                actual=f"a token that is written; {past.told(view.ledger, block)}",
            )
            break


def _written_by(view: DummyView, ledger: BlockLedger, group_index: int, block: int, offset: int) -> str | None:
    """Who has the token of a block, ``""`` where that is not known, None if it is not written."""
    bindings = view.bindings
    for holder in bindings.holders(group_index, block):
        index = int(np.flatnonzero(bindings.table(holder, group_index) == block)[0])
        written = int(bindings.seq_lens[bindings.rows_of([holder])[0]])
        if index * bindings.topology.groups[group_index].block_size + offset < written:
            return holder
    return (past.another(ledger, block, None) or "") if offset < int(ledger.written_of([block])[0][0]) else None


DUMMY_RULES = (dummy_table_live, dummy_slot_enabled, dummy_persistent_slot_enabled)
