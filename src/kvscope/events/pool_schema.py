"""The records of the allocator: what the block pool did, one record a call, and what is known of its blocks.

They go the way of every other record (see ``events.schema``). Arrays about blocks share the index of ``block_ids``.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvscope.events.envelope import Envelope, RequestId, Runs
from kvscope.facts.allocator import CAUSES

Cause = Annotated[str, Meta(extra_json_schema={"enum": list(CAUSES)})]


class PoolRecord(Envelope, kw_only=True):
    """What all calls of a pool say.

    ``request_id`` and ``group_id`` are whose table of which group got, lost or hashed the blocks (absent: nobody's, or
    not known), ``first_index`` where the first block stands in it. ``ref_count`` and ``hash_count`` are the host's
    references of each block and hashes that lead to it, after the call; ``hash_tokens`` how many of its tokens its
    primary hash covers. ``pool`` is absent for the one that attention uses; others are numbered from 1.
    """

    block_ids: Runs
    cause: Cause
    pool: int | UnsetType = UNSET
    request_id: RequestId | UnsetType = UNSET
    group_id: int | UnsetType = UNSET
    first_index: int | UnsetType = UNSET
    ref_count: Runs | UnsetType = UNSET
    hash_count: Runs | UnsetType = UNSET
    hash_tokens: Runs | UnsetType = UNSET


class AllocRecord(PoolRecord, kw_only=True, tag="kv.alloc"):
    """Free blocks were handed out, each with one reference and without a hash.

    ``generation`` is how often each block has now been handed out: one more than before. ``reserved``: the blocks wait
    for a receive that no step is ordered with.
    """

    generation: Runs | UnsetType = UNSET
    reserved: bool | UnsetType = UNSET


class TouchRecord(PoolRecord, kw_only=True, tag="kv.touch"):
    """Each block got one more reference: a hit, a private copy, or somebody who keeps it for a transfer."""


class FreeRecord(PoolRecord, kw_only=True, tag="kv.free"):
    """Each block lost one reference: a block may stand there twice.

    With ``held`` no reference went, and ``ref_count`` says so. The request no longer uses the blocks, but somebody else
    does: their references go with a later kv.free, a deferred one or that of a connector (then it has given up its
    whole table), or, with cause ``copy``, that of the copy.
    """

    held: bool | UnsetType = UNSET


class EvictRecord(PoolRecord, kw_only=True, tag="kv.evict"):
    """All hashes of the blocks were dropped, other than by handing them out."""


class CacheRecord(PoolRecord, kw_only=True, tag="kv.cache"):
    """Hashes of the blocks were set or moved. Where ``hash_count`` is absent, each block has one or more."""


class ResetRecord(PoolRecord, kw_only=True, tag="kv.reset"):
    """The prefix cache was emptied: no block of the pool has a hash any more. It names no blocks."""


class OwnerShare(msgspec.Struct, kw_only=True):
    """Blocks that stand one after the other in a request's table of ``group_id``, the first at ``first_index`` (absent:
    not known where). With ``held`` the request has given them up while their references stay. ``times`` is how often
    each of them stands there, absent for once.
    """

    request_id: RequestId
    block_ids: Runs
    group_id: int | UnsetType = UNSET
    first_index: int | UnsetType = UNSET
    held: bool | UnsetType = UNSET
    times: int | UnsetType = UNSET


class StateRecord(Envelope, kw_only=True, tag="kv.state"):
    """What is known of blocks of the pool, from its own operations: not what the host says at this moment.

    ``status`` and ``freed_cause`` name blocks by what they are and by why their last reference went; a block without
    has not been freed. ``init_prefix_len`` is how many of its tokens are written in this generation, by completed steps
    and receives, ``init_prefix_declared`` the same with the steps that are on their way, ``written_step`` the last step
    that was declared to write into it.

    ``allocated_for`` and ``freed_by`` are places in ``requests``. ``group_id`` and ``logical_index`` say where a block
    stands in the table of whom it was handed to; ``owners`` say where it stands now. -1 means none, or not known.
    """

    block_ids: Runs
    requests: list[RequestId]
    generation: Runs
    status: dict[str, Runs]
    ref_count: Runs
    hash_count: Runs
    hash_tokens: Runs
    init_prefix_len: Runs
    init_prefix_declared: Runs
    written_step: Runs
    allocated_step: Runs
    allocated_for: Runs
    freed_step: Runs
    freed_by: Runs
    freed_cause: dict[str, Runs]
    group_id: Runs
    logical_index: Runs
    owners: list[OwnerShare]


PoolEvent = Union[  # noqa: UP007 - as `Record` in `events.schema`, which it becomes a part of
    AllocRecord,
    TouchRecord,
    FreeRecord,
    EvictRecord,
    CacheRecord,
    ResetRecord,
    StateRecord,
]

POOL_RECORDS: dict[str, type[Envelope]] = {
    "kv.alloc": AllocRecord,
    "kv.touch": TouchRecord,
    "kv.free": FreeRecord,
    "kv.evict": EvictRecord,
    "kv.cache": CacheRecord,
    "kv.reset": ResetRecord,
    "kv.state": StateRecord,
}
