"""The allocator's records: facts.allocator and the ledger's snapshot to records and back.

A PoolOperation of kind ``hold`` becomes a kv.free that says ``held``: the request ends its use of the blocks, which is
what a reader looks for there, although their references go later. Kind ``receive`` is no call of the pool, but a
message that came through a connector: it becomes a kv.boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import UNSET, UnsetType

from kvscope.events.envelope import Runs, given, or_absent
from kvscope.events.names import PLAIN, RequestNames, known
from kvscope.events.pool_schema import (
    AllocRecord,
    CacheRecord,
    EvictRecord,
    FreeRecord,
    OwnerShare,
    PoolRecord,
    ResetRecord,
    StateRecord,
    TouchRecord,
)
from kvscope.events.ranges import from_run, from_runs, to_run, to_runs
from kvscope.events.schema import BoundaryRecord
from kvscope.facts import allocator as facts
from kvscope.facts.allocator import PoolOperation
from kvscope.facts.plans import Int32
from kvscope.state.block_columns import Status
from kvscope.state.blocks import LedgerSnapshot
from kvscope.state.shares import Share

CONNECTOR_RESULT = "connector_result"

_RECORD_OF: dict[str, type[PoolRecord]] = {
    facts.ALLOC: AllocRecord,
    facts.TOUCH: TouchRecord,
    facts.FREE: FreeRecord,
    facts.HOLD: FreeRecord,
    facts.CACHE: CacheRecord,
    facts.EVICT: EvictRecord,
    facts.RESET: ResetRecord,
}
_KIND_OF: dict[type[PoolRecord], str] = {
    AllocRecord: facts.ALLOC,
    TouchRecord: facts.TOUCH,
    FreeRecord: facts.FREE,
    CacheRecord: facts.CACHE,
    EvictRecord: facts.EVICT,
    ResetRecord: facts.RESET,
}


def operation_record(operation: PoolOperation, names: RequestNames = PLAIN) -> PoolRecord | BoundaryRecord:
    """The record of one operation; :func:`operation_from` is its inverse.

    Raises:
        ValueError: there is no such kind.
    """
    if operation.kind == facts.RECEIVE:
        return _receive_record(operation, names)
    make = _RECORD_OF.get(operation.kind)
    if make is None:
        raise ValueError(f"{operation.kind!r} is nothing that a pool does")
    record = make(
        step=operation.step if operation.scheduling else UNSET,
        after_step=UNSET if operation.scheduling else operation.step,
        block_ids=to_run(operation.block_ids),
        cause=operation.cause,
        pool=operation.pool or UNSET,
        request_id=UNSET if operation.request_id is None else names(operation.request_id),
        group_id=or_absent(operation.group_id),
        first_index=or_absent(operation.first_index),
        ref_count=_observed(operation.ref_counts),
        hash_count=_observed(operation.hash_counts),
        hash_tokens=_observed(operation.hash_tokens),
    )
    if isinstance(record, AllocRecord):
        record.generation = _observed(operation.generations)
        record.reserved = operation.reserved or UNSET
    elif operation.kind == facts.HOLD and isinstance(record, FreeRecord):
        record.held = True
    return record


def operation_from(record: PoolRecord | BoundaryRecord) -> PoolOperation:
    """The operation that a record of the allocator, or a ``connector_result``, was made of.

    Raises:
        ValueError: it names a request, and the trace was written without request ids; or it contradicts itself.
    """
    scheduling = not isinstance(record.step, UnsetType)
    operation = PoolOperation(
        kind=facts.RECEIVE if isinstance(record, BoundaryRecord) else _KIND_OF[type(record)],
        block_ids=_numbers(record.block_ids) or [],
        step=given(record.step, 0) if scheduling else given(record.after_step, 0),
        scheduling=scheduling,
        pool=given(record.pool, 0),
        cause=given(record.cause, facts.CAUSE_UNKNOWN),
        request_id=None if isinstance(record.request_id, UnsetType) else known(record.request_id),
        group_id=given(record.group_id, None),
    )
    if isinstance(record, BoundaryRecord):
        operation.filled = _numbers(record.filled)
        return operation
    operation.first_index = given(record.first_index, None)
    operation.ref_counts = _numbers(record.ref_count)
    operation.hash_counts = _numbers(record.hash_count)
    operation.hash_tokens = _numbers(record.hash_tokens)
    if isinstance(record, AllocRecord):
        operation.generations = _numbers(record.generation)
        operation.reserved = given(record.reserved, False)
    elif isinstance(record, FreeRecord) and given(record.held, False):
        operation.kind = facts.HOLD
    return operation


def state_record(snapshot: LedgerSnapshot, names: RequestNames = PLAIN) -> StateRecord:
    """The kv.state of a snapshot; :func:`state_from` is its inverse."""
    places: dict[str, int] = {}
    allocated_for, freed_by = (
        [-1 if name is None else places.setdefault(name, len(places)) for name in who]
        for who in (snapshot.allocated_for, snapshot.freed_by)
    )
    causes: dict[str, list[int]] = {}
    for block, cause in zip(snapshot.block_ids.tolist(), snapshot.freed_cause, strict=True):
        if cause is not None:
            causes.setdefault(cause, []).append(block)
    return StateRecord(
        block_ids=_run(snapshot.block_ids),
        requests=names.of(places),
        generation=_run(snapshot.generation),
        status={
            status.name.lower(): _run(snapshot.block_ids[snapshot.status == status])
            for status in Status
            if (snapshot.status == status).any()
        },
        ref_count=_run(snapshot.references),
        hash_count=_run(snapshot.hashes),
        hash_tokens=_run(snapshot.hash_tokens),
        init_prefix_len=_run(snapshot.confirmed),
        init_prefix_declared=_run(snapshot.declared),
        written_step=_run(snapshot.written_step),
        allocated_step=_run(snapshot.allocated_step),
        allocated_for=_run(allocated_for),
        freed_step=_run(snapshot.freed_step),
        freed_by=_run(freed_by),
        freed_cause={cause: _run(blocks) for cause, blocks in causes.items()},
        group_id=_run(snapshot.group),
        logical_index=_run(snapshot.index),
        owners=list(_owners(snapshot.shares, names)),
    )


def state_from(record: StateRecord) -> LedgerSnapshot:
    """The snapshot that a kv.state was made of.

    Raises:
        ValueError: the trace was written without request ids, or the record contradicts itself.
        LookupError: the record contradicts itself.
    """
    block_ids = from_run(record.block_ids)
    statuses = {block: Status[name.upper()] for name, run in record.status.items() for block in from_run(run)}
    causes = {block: cause for cause, run in record.freed_cause.items() for block in from_run(run)}
    requests = [known(name) for name in record.requests]

    def column(run: Runs) -> Int32:
        values = from_runs([run]).astype(np.int32)
        if len(values) != len(block_ids):
            raise ValueError("its columns have different lengths")
        return values

    def named(run: Runs) -> list[str | None]:
        return [None if place < 0 else requests[place] for place in column(run).tolist()]

    return LedgerSnapshot(
        block_ids=column(record.block_ids),
        generation=column(record.generation),
        references=column(record.ref_count),
        status=np.array([statuses[block] for block in block_ids], np.uint8),
        hashes=column(record.hash_count),
        hash_tokens=column(record.hash_tokens),
        declared=column(record.init_prefix_declared),
        confirmed=column(record.init_prefix_len),
        written_step=column(record.written_step),
        allocated_step=column(record.allocated_step),
        allocated_for=named(record.allocated_for),
        freed_step=column(record.freed_step),
        freed_by=named(record.freed_by),
        freed_cause=[causes.get(block) for block in block_ids],
        group=column(record.group_id),
        index=column(record.logical_index),
        shares=[share for owner in record.owners for share in _shares(owner)],
    )


def _receive_record(operation: PoolOperation, names: RequestNames) -> BoundaryRecord:
    return BoundaryRecord(
        kind=CONNECTOR_RESULT,
        step=operation.step if operation.scheduling else UNSET,
        after_step=UNSET if operation.scheduling else operation.step,
        request_id=UNSET if operation.request_id is None else names(operation.request_id),
        block_ids=to_run(operation.block_ids),
        group_id=or_absent(operation.group_id),
        filled=_observed(operation.filled),
        cause=operation.cause,
        pool=operation.pool or UNSET,
    )


def _owners(shares: Iterable[Share], names: RequestNames) -> Iterator[OwnerShare]:
    """Shares that follow each other in one table become one entry."""
    blocks: list[int] = []
    last: Share | None = None
    entry: OwnerShare | None = None
    for share in shares:
        if last is None or entry is None or not _follows(share, last):
            if entry is not None:
                entry.block_ids = to_run(blocks)
                yield entry
            blocks = []
            entry = OwnerShare(
                request_id=names(share.request_id),
                block_ids=[],
                group_id=or_absent(share.group_id),
                first_index=or_absent(share.index),
                held=UNSET if share.live else True,
                times=UNSET if share.count == 1 else share.count,
            )
        blocks.append(share.block_id)
        last = share
    if entry is not None:
        entry.block_ids = to_run(blocks)
        yield entry


def _follows(share: Share, last: Share) -> bool:
    if (share.request_id, share.group_id, share.live, share.count) != (
        last.request_id, last.group_id, last.live, last.count,
    ):  # fmt: skip
        return False
    if share.index is None or last.index is None:
        return share.index is last.index
    return share.index == last.index + 1


def _shares(owner: OwnerShare) -> Iterator[Share]:
    first = given(owner.first_index, None)
    for offset, block in enumerate(from_run(owner.block_ids)):
        yield Share(
            block_id=block,
            request_id=known(owner.request_id),
            group_id=given(owner.group_id, None),
            index=None if first is None else first + offset,
            live=not given(owner.held, False),
            count=given(owner.times, 1),
        )


def _run(values: Int32 | list[int]) -> Runs:
    array = np.asarray(values, np.int32)
    return to_runs(array, np.array([len(array)], np.int64))[0]


def _observed(values: list[int] | None) -> Runs | UnsetType:
    return UNSET if values is None else to_run(values)


def _numbers(run: Runs | UnsetType) -> list[int] | None:
    return None if isinstance(run, UnsetType) else from_run(run)
