"""kv.boundary of kind ``cp_context``: facts.context_parallel to records and back."""

from __future__ import annotations

import numpy as np
from msgspec import UNSET, UnsetType

from kvscope.events.context_schema import RankCoordinates
from kvscope.events.envelope import Runs, given
from kvscope.events.names import PLAIN, RequestNames, known
from kvscope.events.ranges import from_runs, to_runs
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.context_parallel import ContextParallel, Int64, LocalLengths, LocalRows

KIND = "cp_context"

ContextFact = ContextParallel | LocalRows | LocalLengths


def context_record(fact: ContextFact, names: RequestNames = PLAIN) -> BoundaryRecord:
    """The record of a rank's coordinates, of its own rows of a batch, or of its local lengths."""
    if isinstance(fact, ContextParallel):
        return BoundaryRecord(
            kind=KIND,
            groups=list(fact.sharded),
            coordinates=RankCoordinates(
                pcp_size=fact.pcp_size,
                pcp_rank=fact.pcp_rank,
                dcp_size=fact.dcp_size,
                dcp_rank=fact.dcp_rank,
                interleave=fact.interleave,
            ),
        )
    if isinstance(fact, LocalLengths):
        return BoundaryRecord(
            kind=KIND,
            local_requests=names.of(fact.request_ids),
            local_lengths=fact.lengths.tolist(),
            seq_len=UNSET if fact.seq_lens is None else fact.seq_lens.tolist(),
        )
    lengths = np.diff(fact.query_start).astype(np.int64)
    return BoundaryRecord(
        kind=KIND,
        local_requests=names.of(fact.request_ids),
        query_len=lengths.tolist(),
        positions=_runs(fact.positions),
        seq_len=fact.seq_lens.tolist(),
        writers=_runs(fact.writers),
    )


def context_from(record: BoundaryRecord) -> ContextFact:
    """The fact that a record was made of.

    Raises:
        ValueError: the record says neither, or the trace was written without request ids.
    """
    if not isinstance(record.coordinates, UnsetType):
        at = record.coordinates
        return ContextParallel(
            pcp_size=at.pcp_size,
            pcp_rank=at.pcp_rank,
            dcp_size=at.dcp_size,
            dcp_rank=at.dcp_rank,
            interleave=at.interleave,
            sharded=tuple(given(record.groups, [])),
        )
    if isinstance(record.local_requests, UnsetType):
        raise ValueError("this cp_context says neither where a rank stands nor what it computes")
    request_ids = [known(name) for name in record.local_requests]
    whole = None if isinstance(record.seq_len, UnsetType) else np.array(record.seq_len, np.int32)
    if not isinstance(record.local_lengths, UnsetType):
        lengths = np.array(record.local_lengths, np.int32)
        return LocalLengths(request_ids=request_ids, lengths=lengths, seq_lens=whole)
    query_lens = np.array(given(record.query_len, []), np.int64)
    if whole is None or len(query_lens) != len(request_ids) or len(whole) != len(request_ids):
        raise ValueError("its columns have different lengths")
    return LocalRows(
        request_ids=request_ids,
        query_start=np.append(0, np.cumsum(query_lens)).astype(np.int32),
        positions=_numbers(record.positions),
        seq_lens=whole,
        writers=_numbers(record.writers),
    )


def _runs(numbers: Int64) -> Runs:
    return to_runs(numbers, np.array([len(numbers)], np.int64))[0]


def _numbers(runs: Runs | UnsetType) -> Int64:
    return from_runs([] if isinstance(runs, UnsetType) else [runs])
