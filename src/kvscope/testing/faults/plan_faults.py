"""The faults that change the plan: each takes a `Plan`, changes it and says where, or returns None to wait on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvscope.testing.faults.plan import Plan, Row

FAR_BLOCKS = 1 << 22
"""How far beyond the pool an id "outside" lies: near ones would hit the process's other memory and not a hole."""

What = dict[str, Any]
History = dict[str, list[int]]
"""The blocks that each request last read through, in logical order."""


@dataclass(frozen=True, slots=True)
class PlanFault:
    """`inputs` faults precede the V2 runner's gathering of tables and slots; `final` ones come after it."""

    inject: Callable[[Plan, History], What | None]
    stage: Literal["inputs", "final"] = "final"


def _note(row: Row, **fields: Any) -> What:
    return {"request_id": row.request_id, "row": row.index, **fields}


def redirect_write(plan: Plan, row: Row, slot: int, *, offset: int = 0, **fields: Any) -> What:
    """Send one token of a row to another slot, and say so."""
    token, before = row.first_token + offset, int(plan.slots[row.first_token + offset])
    plan.slots[token] = slot
    return _note(
        row,
        token_index=token,
        query_offset=offset,
        position=row.num_computed + offset,
        slot=slot,
        block_id=slot // plan.block_size,
        expected_slot=before,
        expected_block_id=before // plan.block_size,
        **fields,
    )


def _read(plan: Plan, row: Row, index: int, block_id: int, **fields: Any) -> What:
    """Put another block into one row's table."""
    before = int(plan.table(row)[index])
    plan.set_table(row, index, block_id)
    return _note(row, logical_index=index, block_id=block_id, expected_block_id=before, **fields)


def _foreign_blocks(plan: Plan, row: Row) -> Iterator[tuple[Row, int]]:
    """Blocks that other rows read and this one does not, each other row's newest first."""
    own = {0, *plan.visible(row)}
    for other in plan.rows:
        if other is not row:
            yield from ((other, block) for block in reversed(plan.visible(other)) if block not in own)


def _slot_plus_one(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        slot = int(plan.slots[row.first_token])
        if (slot + 1) % plan.block_size:
            return redirect_write(plan, row, slot + 1)
    return None


def _slot_foreign_block(plan: Plan, _: History) -> What | None:
    taken = set(plan.slots.tolist())
    for row in plan.decoding():
        offset = row.num_computed % plan.block_size
        for other, block in _foreign_blocks(plan, row):
            slot = block * plan.block_size + offset
            if slot not in taken:
                return redirect_write(plan, row, slot, other_request_id=other.request_id, other_row=other.index)
    return None


def _slot_null_block(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        return redirect_write(plan, row, row.num_computed % plan.block_size)
    return None


def _slot_outside_cache(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        block = plan.pool_blocks + FAR_BLOCKS
        return redirect_write(plan, row, block * plan.block_size + row.num_computed % plan.block_size)
    return None


def _two_slots_equal(plan: Plan, _: History) -> What | None:
    for row in plan.rows:
        for offset in range(1, row.num_tokens):
            slot = int(plan.slots[row.first_token + offset - 1])
            if (slot + 1) % plan.block_size:
                other = row.first_token + offset - 1
                return redirect_write(plan, row, slot, offset=offset, other_token_index=other)
    return None


def _position_shifted(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        position = row.num_computed + 1
        if position % plan.block_size:
            plan.positions[row.first_token] = position
            plan.recompute_slots()
            slot = plan.visible(row)[-1] * plan.block_size + position % plan.block_size
            return _note(
                row,
                token_index=row.first_token,
                query_offset=0,
                position=position,
                expected_position=position - 1,
                slot=slot,
                expected_slot=slot - 1,
                block_id=slot // plan.block_size,
            )
    return None


def _length(plan: Plan, row: Row, change: int) -> What:
    plan.seq_lens[row.index] += change
    return _note(row, seq_len=row.seq_len + change, expected_seq_len=row.seq_len)


def _seq_len_plus(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        if plan.needed(row) < len(plan.table(row)):
            return _length(plan, row, plan.block_size)
    return None


def _seq_len_minus(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        # A length below the prompt's would make the V2 runner withhold the token (`get_num_sampled_and_rejected`).
        if row.seq_len > row.prefill_tokens + 1:
            return _length(plan, row, -1)
    return None


def _table_null_in_tail(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        return _read(plan, row, plan.needed(row) - 1, 0)
    return None


def _table_outside_cache(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        return _read(plan, row, plan.needed(row) - 1, plan.pool_blocks + FAR_BLOCKS)
    return None


def _table_foreign_block(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        for other, block in _foreign_blocks(plan, row):
            fields = {"other_request_id": other.request_id, "other_row": other.index}
            return _read(plan, row, plan.needed(row) - 1, block, **fields)
    return None


def _table_ids_swapped(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        visible = plan.visible(row)
        if len(visible) >= 2 and 0 not in visible[-2:]:
            last = len(visible) - 1
            plan.set_table(row, last, visible[last - 1])
            return _read(plan, row, last - 1, visible[last], other_logical_index=last)
    return None


def _rows_swapped(plan: Plan, _: History) -> What | None:
    decoding = plan.decoding()
    for row in decoding:
        for other in decoding:
            ours, theirs = plan.visible(row), plan.visible(other)
            # Where a prefix is shared the exchange would show only in part of the row.
            if row.index < other.index and len(ours) == len(theirs) and not set(ours) & set(theirs):
                for index, (our_block, their_block) in enumerate(zip(ours, theirs, strict=True)):
                    plan.set_table(row, index, their_block)
                    plan.set_table(other, index, our_block)
                return _note(
                    row,
                    other_request_id=other.request_id,
                    other_row=other.index,
                    logical_index=0,
                    block_id=theirs[0],
                    expected_block_id=ours[0],
                )
    return None


def _table_short(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        needed = plan.needed(row)
        if needed > 1:
            block = plan.visible(row)[-1]
            plan.count_blocks(row, needed - 1)
            return _note(row, logical_index=needed - 1, block_id=block, counted=needed - 1, expected_counted=needed)
    return None


def _stale_row_after_preemption(plan: Plan, history: History) -> What | None:
    for row in plan.rows:
        if row.request_id not in plan.resumed or row.request_id not in history:
            continue
        old, new = history[row.request_id], plan.visible(row)
        stale = [index for index, (was, is_) in enumerate(zip(old, new, strict=False)) if 0 != was != is_]
        if not stale:
            continue
        foreign = {block: other for other, block in _foreign_blocks(plan, row)}
        # The entry to be named is the one whose block somebody else holds by now, if there is one.
        index = next((index for index in stale if old[index] in foreign), stale[0])
        fields: dict[str, Any] = {"stale_indices": stale, "expected": "read_target_mismatch"}
        if old[index] in foreign:
            other = foreign[old[index]]
            fields |= {"expected": "read_foreign_block", "other_request_id": other.request_id}
            fields |= {"other_row": other.index}
        for each in stale:
            if each != index:
                plan.set_table(row, each, old[each])
        return _read(plan, row, index, old[index], **fields)
    return None


def _slot_switched_off(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        what = redirect_write(plan, row, -1)
        return {name: value for name, value in what.items() if name not in {"block_id", "expected_block_id"}}
    return None


def _slots_cut(plan: Plan, _: History) -> What | None:
    row = plan.rows[-1]
    if not row.decodes:
        return None
    plan.cut_slots(row.first_token)
    return _note(row, token_index=row.first_token, position=row.num_computed, slots=row.first_token)


def _offset_short(plan: Plan, _: History) -> What | None:
    row, last = plan.rows[-1], len(plan.rows)
    if not row.decodes:
        return None
    plan.undo.value(plan.offsets, last)
    plan.offsets[last] -= 1
    return _note(row, offset=row.first_token, expected_offset=row.first_token + 1)


def _table_block_twice(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        visible = plan.visible(row)
        if len(visible) >= 2 and 0 not in visible:
            return _read(plan, row, len(visible) - 1, visible[-2], other_logical_index=len(visible) - 2)
    return None


def _table_ids_rotated(plan: Plan, _: History) -> What | None:
    for row in plan.decoding():
        visible = plan.visible(row)
        if len(visible) >= 3 and 0 not in visible:
            for index, block in enumerate(visible[:-1], start=1):
                plan.set_table(row, index, block)
            return _read(plan, row, 0, visible[-1])
    return None


PLAN_FAULTS: dict[str, PlanFault] = {
    "slot_plus_one": PlanFault(_slot_plus_one),
    "slot_foreign_block": PlanFault(_slot_foreign_block),
    "slot_null_block": PlanFault(_slot_null_block),
    "slot_outside_cache": PlanFault(_slot_outside_cache),
    "two_slots_equal": PlanFault(_two_slots_equal),
    "position_shifted": PlanFault(_position_shifted, "inputs"),
    "seq_len_plus": PlanFault(_seq_len_plus, "inputs"),
    "seq_len_minus": PlanFault(_seq_len_minus, "inputs"),
    "table_null_in_tail": PlanFault(_table_null_in_tail),
    "table_outside_cache": PlanFault(_table_outside_cache),
    "table_foreign_block": PlanFault(_table_foreign_block),
    "table_ids_swapped": PlanFault(_table_ids_swapped),
    "rows_swapped": PlanFault(_rows_swapped),
    "slot_switched_off": PlanFault(_slot_switched_off),
    "slots_cut": PlanFault(_slots_cut),
    "offset_short": PlanFault(_offset_short),
    "table_block_twice": PlanFault(_table_block_twice),
    "table_ids_rotated": PlanFault(_table_ids_rotated),
    "table_short": PlanFault(_table_short, "inputs"),
    "stale_row_after_preemption": PlanFault(_stale_row_after_preemption),
}
