"""What can be wrong with a declaration, as facts for the rules: each says of which request, group and block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..facts.topology import Group
from .bindings import Table
from .blocks import BlockLedger


class Unwritten(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Logical block ``index`` of a request's table in a group (by its place in the topology).

    ``needed`` tokens of it are relied on, and ``declared`` were ever declared written since it was handed out.
    """

    request_id: str
    group_index: int
    index: int
    block_id: int
    needed: int
    declared: int


class Unowned(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Logical block ``index`` of the table with which a request comes in, of which the pool has given it no share."""

    request_id: str
    group_id: int
    index: int
    block_id: int


class SharedWrite(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request's first write of a step goes to token ``offset`` of a block that holds what others rely on.

    ``owners`` counts who has it, ``hashed_tokens`` what its hash covers. ``loaded``: a receive has filled it.
    """

    request_id: str
    group_index: int
    index: int
    block_id: int
    offset: int
    owners: int
    hashed_tokens: int
    loaded: bool = False


class Exceeded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request is declared to have ``tokens``, and the pool has handed out blocks for ``allocated`` of them."""

    request_id: str
    group_index: int
    tokens: int
    allocated: int


class Stranger(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request is scheduled as known, or without being listed at all, and may not be: ``cause`` is ``finished``,
    ``preempted`` or ``unknown``.
    """

    request_id: str
    cause: str


class Regressed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that had ``tokens`` after its last step is declared to have ``computed`` of them, fewer than any draft
    that was rejected or load that failed since explains.
    """

    request_id: str
    tokens: int
    computed: int


def unwritten_from(
    request_id: str, table: Table, groups: Sequence[tuple[int, Group]], needed: int, written: int
) -> Iterator[Unwritten]:
    """Where a request that has ``written`` tokens and claims ``needed`` of them begins to lack them, in each group."""
    for group_index, group in groups:
        index, declared = divmod(written, group.block_size)
        blocks = table.blocks[group_index]
        if index < len(blocks):
            yield Unwritten(
                request_id=request_id,
                group_index=group_index,
                index=index,
                block_id=blocks[index],
                needed=min(group.block_size, needed - index * group.block_size),
                declared=declared,
            )


def shared_write(
    request_id: str, group_index: int, index: int, block_id: int, offset: int, ledger: BlockLedger, *, loaded: bool
) -> SharedWrite:
    """The first write of a request into a block, with what the ledger knows of the block."""
    return SharedWrite(
        request_id=request_id,
        group_index=group_index,
        index=index,
        block_id=block_id,
        offset=offset,
        owners=int(ledger.references_of([block_id])[0]),
        hashed_tokens=int(ledger.hash_tokens_of([block_id])[0]),
        loaded=loaded,
    )
