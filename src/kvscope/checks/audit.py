"""A where two books about the same blocks disagree: after a call of the pool, or in an audit of the whole pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..state import block_audit as audit
from ..state.block_audit import Difference
from ..state.blocks import BlockLedger
from ..state.legality import Legality
from . import past
from . import rule as r
from .finding import Finding
from .past import counted, some_of
from .rule import rule


class BooksView(msgspec.Struct, frozen=True, kw_only=True):
    """What differs, at a moment when no call of the pool is under way, and the ledger as it is then.

    ``request_id`` and ``group_id`` are those of the call after which this was seen; None: an audit.
    """

    differences: Sequence[Difference]
    ledger: BlockLedger
    step: int
    trace_id: str
    request_id: str | None = None
    group_id: int | None = None


def aliases(legality: Legality) -> Iterator[Difference]:
    """Blocks with which a request comes in, and to which there are too few references for it and whoever has them."""
    ledger = legality.ledger
    for unowned in legality.hits.unowned:
        places = int(ledger.places_of([unowned.block_id])[0]) + 1
        references = int(ledger.references_of([unowned.block_id])[0])
        if places > references:
            yield Difference(
                kind=audit.ALIASED,
                block_id=unowned.block_id,
                ours=places,
                host=references,
                request_id=unowned.request_id,
                group_id=unowned.group_id,
            )


def _of(view: BooksView, *kinds: str) -> Iterator[tuple[Difference, str]]:
    """The first difference of each block, for the first blocks, and what to add to the text."""
    found: dict[int, Difference] = {}
    for difference in view.differences:
        if difference.kind in kinds:
            found.setdefault(difference.block_id, difference)
    for block, more in some_of(list(found)):
        yield found[block], more


def _finding(view: BooksView, difference: Difference, expected: str, actual: str) -> Finding:
    block, request = difference.block_id, difference.request_id or view.request_id
    return Finding(
        reason="",
        step=view.step,
        trace_id=view.trace_id,
        request_id=request,
        other_request_id=past.another(view.ledger, block, request),
        group_id=view.group_id if difference.group_id is None else difference.group_id,
        block_id=block,
        generation=past.generation(view.ledger, block),
        expected=expected,
        actual=actual,
    )


@rule(
    check="A",
    severity="error",
    rank=r.FOREIGN,
    title="a block has more owners than references",
    fires="A block stands in more tables of requests than there are references to it: it was freed under one of them.",
    silent="Blocks shared by prefix hits, each with a reference of its own; references of nobody, which only add to "
    "the count.",
    sources=("the places where the block stands in requests' tables", "the references to it"),
    proves_not="Which of the owners has lost its reference.",
)
def alias_owner_mismatch(view: BooksView) -> Iterator[Finding]:
    for difference, more in _of(view, audit.ALIASED):
        owners = dict.fromkeys(share.request_id for share in view.ledger.owners(difference.block_id) if share.live)
        expected = f"{counted(difference.ours, 'references')}, one for each place in a table"
        actual = f"{difference.host}; {past.told(view.ledger, difference.block_id)}{more}"
        finding = _finding(view, difference, expected, actual)
        if finding.request_id is None:
            finding.request_id, finding.other_request_id = (*owners, None, None)[:2]
        yield finding


@rule(
    check="A",
    severity="error",
    rank=r.LENGTH,
    title="the free list is damaged",
    fires="The pool's free queue lacks a block without references, or has one with references, one outside the pool, "
    "the null block, or a block more than once.",
    silent="The order of the queue, which is the pool's own business.",
    sources=("the pool's free queue", "the pool's own reference counts"),
    proves_not="Which call damaged it: the queue is looked at now and then.",
)
def free_list_damaged(view: BooksView) -> Iterator[Finding]:
    for difference, more in _of(view, audit.FREE_QUEUE):
        expected = "once in the free queue" if difference.ours else "not in the free queue"
        actual = f"{difference.host} times in it; {past.told(view.ledger, difference.block_id)}{more}"
        yield _finding(view, difference, expected, actual)


@rule(
    check="A",
    severity="error",
    rank=r.OTHER,
    title="the pool's book differs from what its calls add up to",
    fires="The pool's reference count, number of hashes or table entry of a block is not what its calls lead to: "
    "something was changed past them, or a call was missed.",
    silent="The null block; a count below zero that a double free has left (ref_underflow).",
    sources=("the pool's own book", "the calls of the pool, added up"),
    proves_not="Which of the two is wrong.",
)
def ledger_pool_mismatch(view: BooksView) -> Iterator[Finding]:
    for difference, more in _of(view, audit.REFERENCES, audit.HASHES, audit.TABLE):
        if difference.kind == audit.TABLE:
            place = "in the table" if difference.index is None else f"at logical block {difference.index}"
            expected, actual = f"{_block(difference.ours)} {place}", f"{_block(difference.host)}{more}"
        else:
            expected, actual = counted(difference.ours, difference.kind), f"{difference.host}{more}"
        yield _finding(view, difference, expected, actual)


def _block(block_id: int | None) -> str:
    return "no block" if block_id is None else f"block {block_id}"


BOOKS_RULES = (alias_owner_mismatch, free_list_damaged, ledger_pool_mismatch)
