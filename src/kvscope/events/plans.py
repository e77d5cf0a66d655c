"""kv.write, kv.read and the dummy kv.boundary: facts.plans to records and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import UNSET, UnsetType

from kvscope.events.envelope import Runs, given
from kvscope.events.names import PLAIN, RequestNames, known
from kvscope.events.plan_schema import ReadRecord, TableRow, WriteRecord
from kvscope.events.ranges import Integers, from_ranges, from_runs, to_ranges, to_runs
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.plans import AgreedPlan, DummyRun, GroupSnapshot, Int32, Int64, PersistentSlots, PlanSnapshot


def write_read_records(
    snapshot: PlanSnapshot,
    names: RequestNames = PLAIN,
    *,
    full: bool = False,
    block_sizes: Mapping[int, int] | None = None,
) -> tuple[WriteRecord, ReadRecord]:
    """The kv.write and the kv.read of one step; :func:`snapshot_from` is the inverse.

    ``full`` spells every column. ``block_sizes`` (group to tokens a block) is what ``target_blocks`` need.
    """
    return _write_record(snapshot, names, full, block_sizes or {}), _read_record(snapshot, names, full)


def agreed_records(plan: AgreedPlan, names: RequestNames = PLAIN) -> tuple[WriteRecord, ReadRecord]:
    """What :func:`write_read_records` makes in compact of ``plan.snapshot()``, without going through arrays.

    Nearly every step of a server is such a plan. Each row has one token, right behind what was computed, and all that
    follows from it is left out in compact. Both records share their lists, with each other and with other steps.
    """
    computed, groups = plan.computed, plan.groups
    requests = names.of(plan.request_ids)
    group_ids = [group.group_id for group in groups]
    columns = [group.shared_columns() for group in groups]
    write = WriteRecord(
        trace_id=plan.trace_id,
        step=plan.step,
        requests=requests,
        groups=group_ids,
        num_tokens=len(computed),
        graph_mode=plan.graph_mode,
        query_len=[1] * len(computed),
        first_position=computed,
        slots=[[start + position for start, position in zip(g.tail_starts, computed, strict=True)] for g in groups],
        padding_slots=[group.padding_slots for group in groups],
    )
    read = ReadRecord(
        trace_id=plan.trace_id,
        step=plan.step,
        requests=requests,
        groups=group_ids,
        blocks_needed=[column.blocks_needed for column in columns],
        digest=[column.digests for column in columns],
    )
    if any(column.has_skipped for column in columns):
        read.window_skipped = [column.window_skipped for column in columns]
    if any(column.has_ignored for column in columns):
        read.tail_ignored = [column.tail_ignored for column in columns]
    return write, read


def _write_record(
    snapshot: PlanSnapshot, names: RequestNames, full: bool, block_sizes: Mapping[int, int]
) -> WriteRecord:
    groups = snapshot.groups
    first, computed = snapshot.first_positions, snapshot.computed
    slots = [_by_row(group.slots, snapshot.query_lens) for group in groups]
    record = WriteRecord(
        trace_id=snapshot.trace_id,
        step=snapshot.step,
        requests=names.of(snapshot.request_ids),
        groups=[group.group_id for group in groups],
        num_tokens=snapshot.num_tokens,
        graph_mode=snapshot.graph_mode,
        query_len=snapshot.query_lens.tolist(),
        first_position=first.tolist(),
        slots=[rows for rows, _ in slots],
        padding_slots=[group.padding_slots for group in groups],
    )
    if any(rest != [] for _, rest in slots):
        record.slots_rest = [rest for _, rest in slots]
    if full or not np.array_equal(snapshot.last_positions, first.astype(np.int64) + snapshot.query_lens - 1):
        record.last_position = snapshot.last_positions.tolist()
    if full or not np.array_equal(computed, first):
        record.computed_before = computed.tolist()
    if full or not np.array_equal(snapshot.seq_lens, computed.astype(np.int64) + snapshot.query_lens):
        record.seq_len = snapshot.seq_lens.tolist()
    if full or any(len(group.padding_enabled) for group in groups):
        record.padding_enabled = [_one_row(group.padding_enabled) for group in groups]
    if snapshot.positions is not None:
        record.positions, rest = _by_row(snapshot.positions, snapshot.query_lens)
        if rest != []:
            record.positions_rest = rest
    _say_what_is_unusual(record, snapshot, full)
    if full:
        record.is_dummy = False
        record.positions_consecutive = snapshot.positions is None
        if snapshot.positions is None:
            record.positions = [
                start if length == 1 else [[start, start + length - 1]] if length > 0 else []
                for start, length in zip(first.tolist(), snapshot.query_lens.tolist(), strict=False)
            ]
        lens = _row_lengths(snapshot.query_lens, snapshot.num_tokens)
        if all(group.group_id in block_sizes and len(group.slots) == lens.sum() for group in groups):
            record.target_blocks = [_blocks(group.slots, lens, block_sizes[group.group_id]) for group in groups]
    return record


def _say_what_is_unusual(record: WriteRecord, snapshot: PlanSnapshot, full: bool) -> None:
    if full or snapshot.coordinates != "global":
        record.coordinates = snapshot.coordinates
    if full or not snapshot.exact:
        record.exact = snapshot.exact
    if full or snapshot.first_offset:
        record.first_offset = snapshot.first_offset


def _read_record(snapshot: PlanSnapshot, names: RequestNames, full: bool) -> ReadRecord:
    groups = snapshot.groups
    tail = [group.table_blocks.astype(np.int64) - group.blocks_needed for group in groups]
    record = ReadRecord(
        trace_id=snapshot.trace_id,
        step=snapshot.step,
        requests=names.of(snapshot.request_ids),
        groups=[group.group_id for group in groups],
        blocks_needed=[group.blocks_needed.tolist() for group in groups],
        digest=[[f"{digest:016x}" for digest in group.digests.tolist()] for group in groups],
    )
    if full:
        record.seq_len = snapshot.seq_lens.tolist()
    if full or any(group.window_skipped.any() for group in groups):
        record.window_skipped = [group.window_skipped.tolist() for group in groups]
    if full or any(ignored.any() for ignored in tail):
        record.tail_ignored = [ignored.tolist() for ignored in tail]
    if full or any(group.tables for group in groups):
        record.tables = [
            [TableRow(row=int(row), blocks=to_ranges(blocks)) for row, blocks in sorted(group.tables.items())]
            for group in groups
        ]
    return record


def snapshot_from(write: WriteRecord, read: ReadRecord) -> PlanSnapshot:
    """The snapshot that a kv.write and its kv.read were made of.

    Raises:
        ValueError: the two do not belong together or contradict themselves, or the trace was written without request
            ids.
        OverflowError: a number is larger than any that was recorded.
    """
    if (write.trace_id, write.step, write.groups) != (read.trace_id, read.step, read.groups):
        raise ValueError("this kv.write and this kv.read are not of the same step")
    if write.requests != read.requests:
        raise ValueError("this kv.write and this kv.read are not of the same requests")
    _require_each_group(write, read)
    query_lens = np.array(write.query_len, dtype=np.int64)
    first = np.array(write.first_position, dtype=np.int64)
    last = first + query_lens - 1 if _absent(write.last_position) else np.array(write.last_position, dtype=np.int64)
    computed = first if _absent(write.computed_before) else np.array(write.computed_before, dtype=np.int64)
    seq_lens = computed + query_lens if _absent(write.seq_len) else np.array(write.seq_len, dtype=np.int64)
    positions: Int64 | None = None
    if not isinstance(write.positions, UnsetType) and write.positions_consecutive is not True:
        rest: list[Runs] = [] if isinstance(write.positions_rest, UnsetType) else [write.positions_rest]
        positions = from_runs([*write.positions, *rest])
    return PlanSnapshot(
        step=given(write.step, 0),
        trace_id=given(write.trace_id, ""),
        request_ids=[known(name) for name in write.requests],
        query_lens=_int32(query_lens),
        first_positions=first,
        last_positions=last,
        positions=positions,
        computed=_int32(computed),
        seq_lens=_int32(seq_lens),
        num_tokens=write.num_tokens,
        graph_mode=write.graph_mode,
        exact=given(write.exact, True),
        groups=[_group(write, read, index) for index in range(len(write.groups))],
        coordinates=given(write.coordinates, "global"),
        first_offset=given(write.first_offset, 0),
    )


def _group(write: WriteRecord, read: ReadRecord, index: int) -> GroupSnapshot:
    needed = np.array(read.blocks_needed[index], dtype=np.int64)
    ignored = 0 if isinstance(read.tail_ignored, UnsetType) else np.array(read.tail_ignored[index], dtype=np.int64)
    skipped = np.zeros_like(needed) if isinstance(read.window_skipped, UnsetType) else read.window_skipped[index]
    rest: list[Runs] = [] if isinstance(write.slots_rest, UnsetType) else [write.slots_rest[index]]
    enabled = [] if isinstance(write.padding_enabled, UnsetType) else [write.padding_enabled[index]]
    tables = [] if isinstance(read.tables, UnsetType) else read.tables[index]
    return GroupSnapshot(
        group_id=write.groups[index],
        slots=from_runs([*write.slots[index], *rest]),
        padding_slots=write.padding_slots[index],
        padding_enabled=from_runs(enabled),
        table_blocks=_int32(needed + ignored),
        blocks_needed=_int32(needed),
        window_skipped=np.array(skipped, dtype=np.int32),
        digests=np.array([int(digest, 16) for digest in read.digest[index]], dtype=np.uint64),
        tables={entry.row: np.array(from_ranges(entry.blocks), dtype=np.int32) for entry in tables},
    )


def _require_each_group(write: WriteRecord, read: ReadRecord) -> None:
    by_group = (write.slots, write.padding_slots, write.slots_rest, write.padding_enabled, write.target_blocks,
                read.blocks_needed, read.digest, read.window_skipped, read.tail_ignored, read.tables)  # fmt: skip
    if any(not isinstance(column, UnsetType) and len(column) != len(write.groups) for column in by_group):
        raise ValueError("a column has not one entry a group")


def _int32(values: Int64) -> Int32:
    narrow = values.astype(np.int32)
    if (narrow != values).any():
        raise OverflowError("a number is larger than any that was recorded")
    return narrow


def dummy_record(dummy: DummyRun) -> BoundaryRecord:
    groups = sorted(dummy.slots)
    record = BoundaryRecord(
        kind="dummy",
        num_tokens=dummy.num_tokens,
        groups=groups,
        dummy_slots=[_one_row(dummy.slots[group_id]) for group_id in groups],
    )
    if dummy.persistent:
        rest = [dummy.persistent[group_id] for group_id in groups]
        record.persistent_slots = [of.checked for of in rest]
        if any(of.indexes.size for of in rest):
            record.persistent_indexes = [_one_row(of.indexes) for of in rest]
            record.persistent_enabled = [_one_row(of.slots) for of in rest]
    if dummy.warm_up:
        record.warm_up = True
    return record


def dummy_from(record: BoundaryRecord) -> DummyRun:
    """The run that a record was made of.

    Raises:
        ValueError: its columns have different lengths, or hold no runs.
    """
    groups, checked = given(record.groups, []), given(record.persistent_slots, [])
    nothing: list[Runs] = [[] for _ in checked]
    indexes, enabled = given(record.persistent_indexes, nothing), given(record.persistent_enabled, nothing)
    return DummyRun(
        slots={
            group_id: from_runs([runs]) for group_id, runs in zip(groups, given(record.dummy_slots, []), strict=True)
        },
        num_tokens=given(record.num_tokens, 0),
        persistent={
            group_id: PersistentSlots(checked=count, indexes=from_runs([where]), slots=from_runs([slots]))
            for group_id, count, where, slots in zip(groups, checked, indexes, enabled, strict=True)
        }
        if checked
        else {},
        warm_up=given(record.warm_up, False),
    )


def _row_lengths(query_lens: Integers, available: int) -> Int64:
    """The lengths of the rows as far as they are sound: a damaged plan may have negative ones, or too many tokens."""
    ends = np.minimum(np.cumsum(np.maximum(query_lens, 0), dtype=np.int64), available)
    ends[1:] -= ends[:-1].copy()
    return ends


def _by_row(values: Integers, query_lens: Integers) -> tuple[list[Runs], Runs]:
    """The values of each row, and those behind the last row."""
    if len(values) == len(query_lens) and bool((query_lens == 1).all()):  # a decode batch: most steps of a server
        return values.tolist(), []
    lengths = _row_lengths(query_lens, len(values))
    covered = int(lengths.sum())
    return to_runs(values[:covered], lengths), _one_row(values[covered:])


def _one_row(values: Integers) -> Runs:
    return to_runs(values, np.array([len(values)], dtype=np.int64))[0]


def _blocks(slots: Int64, lengths: Int64, block_size: int) -> list[Runs]:
    """The blocks that each row writes to, in the order of its tokens."""
    blocks = slots // block_size
    rows = np.repeat(np.arange(len(lengths)), lengths)
    keep = slots >= 0
    keep[1:] &= (blocks[1:] != blocks[:-1]) | (rows[1:] != rows[:-1])
    return to_runs(blocks[keep], np.bincount(rows[keep], minlength=len(lengths)))


def _absent(field: object) -> bool:
    return field is UNSET
