"""A over time: what a request leaves behind, what is held for too long, and tokens without a block to hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..state.blocks import BlockLedger
from ..state.holds import Held
from ..state.doubts import Exceeded
from ..state.shares import Share
from . import past
from . import rule as r
from .finding import Finding
from .past import counted
from .rule import rule


class LifetimeView(msgspec.Struct, frozen=True, kw_only=True):
    """What is due at a step: ``ended`` requests that have finished and still stand in tables, ``exceeded`` ones that
    have more tokens than blocks, ``held`` ones whose blocks should have come back.
    """

    step: int
    trace_id: str
    ledger: BlockLedger
    ended: Sequence[str] = ()
    exceeded: Sequence[Exceeded] = ()
    held: Sequence[Held] = ()


def _finding(view: LifetimeView, request_id: str, group_id: int | None, block_id: int | None) -> Finding:
    return Finding(
        reason="",
        step=view.step,
        trace_id=view.trace_id,
        request_id=request_id,
        group_id=group_id,
        block_id=block_id,
        generation=None if block_id is None else past.generation(view.ledger, block_id),
    )


@rule(
    check="A",
    severity="error",
    rank=r.OTHER,
    title="a finished request still has blocks",
    fires="A request was declared finished, and blocks stand in its tables that it neither released nor gave up.",
    silent="Cached blocks, which nobody has; deferred frees and blocks that a connector still sends (held until then).",
    sources=(r.DECLARATION, "the calls of the pool, added up"),
    proves_not="That the blocks never come back: they have not when the step is declared.",
)
def leak_after_finish(view: LifetimeView) -> Iterator[Finding]:
    for request_id in view.ended:
        by_group: dict[int | None, list[Share]] = {}
        for share in view.ledger.owned_by(request_id):
            if share.live:
                by_group.setdefault(share.group_id, []).append(share)
        for group_id, shares in by_group.items():
            finding = _finding(view, request_id, group_id, shares[0].block_id)
            finding.expected = "all its blocks released or held"
            what = past.told(view.ledger, shares[0].block_id)
            finding.actual = f"{counted(len(shares), 'blocks')} still in its table; the first: {what}"
            yield finding


@rule(
    check="A",
    severity="warning",
    rank=r.OTHER,
    title="blocks are held past their deadline",
    fires="A request has given up its blocks, and their references are still there when the step that they wait for, "
    "or the longest time that a connector may take, is long over.",
    silent="Holds within their limit; blocks that were released since.",
    sources=("the calls of the pool, added up", "the rule that a hold ends by its deadline"),
    invariant=True,
    proves_not="Who should have released them: the host, its connector, or the peer that fetches them.",
)
def hold_deadline_exceeded(view: LifetimeView) -> Iterator[Finding]:
    for held in view.held:
        due = set(held.block_ids)
        still = [s for s in view.ledger.owned_by(held.request_id) if not s.live and s.block_id in due]
        if still:
            finding = _finding(view, held.request_id, still[0].group_id, still[0].block_id)
            finding.expected = f"released within {held.limit}"
            finding.actual = f"{counted(len(still), 'blocks')} held since step {held.since_step} ({held.cause})"
            yield finding


@rule(
    check="A",
    severity="error",
    rank=r.SHORT,
    title="a request has more tokens than blocks",
    fires="The tokens that a request is declared to have written after the step exceed what the pool has given it in "
    "one group.",
    silent="Blocks for tokens to come; groups in which a block means something else; what the declaration itself lacks "
    "(bind_block_shortfall).",
    sources=(r.DECLARATION, "the calls of the pool, added up"),
    proves_not="Where the tokens beyond go; the worker's rules see that.",
)
def watermark_exceeded(view: LifetimeView) -> Iterator[Finding]:
    for exceeded in view.exceeded:
        finding = _finding(view, exceeded.request_id, exceeded.group_index, None)
        finding.position = exceeded.allocated
        finding.expected = f"at most {counted(exceeded.allocated, 'tokens')}, for which it has blocks"
        finding.actual = f"{counted(exceeded.tokens, 'tokens')}"
        yield finding


LIFETIME_RULES = (leak_after_finish, hold_deadline_exceeded, watermark_exceeded)
