"""What the rules about plans must find, worked out token by token and entry by entry from what the rules say.

Written from the texts of the rules and from the order of precedence, without a look at how they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.facts.plans import Plan
from unit.checks.worlds import NULL, World, blocks_for, first_visible

PRECEDENCE = [
    # outside cache
    "write_outside_cache",
    "read_outside_cache",
    # null block
    "null_block_write",
    "read_null_block",
    # foreign
    "read_row_request_mismatch",
    "write_foreign_block",
    "read_foreign_block",
    # two tokens in one place
    "write_slot_collision",
    # target or length
    "write_position_mismatch",
    "logical_order_mismatch",
    "write_slot_negative",
    "read_duplicate_block",
    "write_target_mismatch",
    "read_target_mismatch",
    "read_length_exceeds_declared",
    "read_table_short",
    "write_length_mismatch",
    "write_slot_count_mismatch",
    "write_padding_slot_enabled",
]
FATAL = ("write_outside_cache", "read_outside_cache")
FILLED = ("group_id", "block_id", "slot", "token_index", "position")


class UnclearError(Exception):
    """The rule's text leaves open which request is meant."""


OWNED = "a block that somebody owns"

Found = dict[str, Any]


def described(findings: list[Finding]) -> list[Found]:
    """Findings as plain values."""
    return [{name: getattr(f, name) for name in f.__struct_fields__} for f in findings]


def agree(found: list[Found], expected: list[Found]) -> bool:
    """Whether the same is said in any order. ``other_request_id`` is one of those that the reference has, if any."""
    rest = list(expected)
    for said in found:
        others = said["other_request_id"]
        match = next(
            (
                fact
                for fact in rest
                if {**fact, "other_request_id": others} == said
                and (others in fact["other_request_id"] or (others is None and not fact["other_request_id"]))
            ),
            None,
        )
        if match is None:
            return False
        rest.remove(match)
    return not rest


def reference(world: World, plan: Plan) -> list[Found]:
    """Every finding that the plan must cause, as :func:`described` puts them, but with all possible others."""
    found: dict[tuple[Any, ...], list[Found]] = {}
    row_wide = set()
    for fact in _about_rows(world, plan):
        row_wide.add((_reads(fact["reason"]), fact["row"]))
        found.setdefault((_reads(fact["reason"]), fact["row"]), []).append(fact)
    for index in range(len(world.groups)):
        for fact in _about_group(world, plan, index):
            row = (_reads(fact["reason"]), fact["row"])
            found.setdefault(row if row in row_wide else (*row, index), []).append(fact)
    merged = []
    for facts in found.values():
        facts.sort(key=lambda fact: PRECEDENCE.index(fact["reason"]))
        first = facts[0]
        first["also"] = tuple(dict.fromkeys(f["reason"] for f in facts if f["reason"] != first["reason"]))
        first["launch_fatal"] = any(f["launch_fatal"] for f in facts)
        for name in FILLED:
            first[name] = next((f[name] for f in facts if f[name] is not None), None)
        others = first.pop("other_request_id")
        finding = Finding(step=world.step_number, trace_id=f"t{world.step_number}", **first)
        merged.append({**described([finding])[0], "other_request_id": others})
    return merged


def _reads(reason: str) -> bool:
    return reason == "logical_order_mismatch" or reason.startswith("read_")


def _fact(reason: str, row: int | None, request_id: str | None, **fields: Any) -> Found:
    empty: Found = dict.fromkeys(("group_id", "token_index", "position", "block_id", "slot"))
    empty["other_request_id"] = set()
    fatal = {"launch_fatal": reason in FATAL}
    return {"reason": reason, "row": row, "request_id": request_id, **empty, **fatal, **fields}


def _rows(world: World, plan: Plan) -> Iterator[tuple[int, str, list[int]]]:
    """``(row, request, its tokens)``."""
    starts = plan.query_start.tolist()
    for row, name in enumerate(plan.request_ids):
        yield row, name, list(range(starts[row], starts[row + 1]))


def _about_rows(world: World, plan: Plan) -> Iterator[Found]:
    positions, seq_lens = plan.positions.tolist(), plan.seq_lens.tolist()
    for row, name, tokens in _rows(world, plan):
        request = world.live[name]
        for offset, token in enumerate(tokens):
            if positions[token] != request.computed + offset:
                wrong = {"token_index": token, "position": positions[token], "actual": positions[token]}
                yield _fact("write_position_mismatch", row, name, expected=request.computed + offset, **wrong)
                break
        if seq_lens[row] > request.declared:
            yield _fact("read_length_exceeds_declared", row, name, expected=request.declared, actual=seq_lens[row])
        if seq_lens[row] < request.declared:
            yield _fact("write_length_mismatch", row, name, expected=request.declared, actual=seq_lens[row])


def _about_group(world: World, plan: Plan, index: int) -> Iterator[Found]:
    yield from _about_writes(world, plan, index)
    for row, name, _ in _rows(world, plan):
        yield from _about_table(world, plan, index, row, name)


def _holders(world: World, index: int, block: int) -> set[str]:
    """Who has the block and can still look at it. Nobody has the null block."""
    of = world.groups[index]
    return {
        name
        for name, request in world.live.items()
        if block in request.tables[index][first_visible(of, request.computed) :] and block != NULL
    }


def _foreign(world: World, index: int, block: int, own: str) -> set[str]:
    """Who has a block that ``own`` was never given."""
    return set() if block in world.live[own].tables[index] else _holders(world, index, block)


def _about_writes(world: World, plan: Plan, index: int) -> Iterator[Found]:
    of, slots, positions = world.groups[index], plan.groups[index].slots.tolist(), plan.positions.tolist()
    size, end = of.block_size, world.num_blocks * of.block_size
    right: dict[int, int] = {}
    row_of: dict[int, tuple[int, str]] = {}
    for row, name, tokens in _rows(world, plan):
        request = world.live[name]
        for offset, token in enumerate(tokens):
            position = request.computed + offset
            right[token] = request.tables[index][position // size] * size + position % size
            row_of[token] = (row, name)

    def fact(reason: str, token: int, **fields: Any) -> Found:
        slot = slots[token]
        where = {"group_id": of.group_id, "token_index": token, "position": positions[token]}
        what = {"block_id": slot // size, "slot": slot, "expected": right[token], "actual": slot}
        return _fact(reason, *row_of[token], **{**where, **what, **fields})

    told: set[tuple[str, int]] = set()
    mapped = min(plan.num_tokens, len(slots))
    if mapped < plan.num_tokens:
        where = {"group_id": of.group_id, "token_index": mapped, "position": positions[mapped]}
        yield _fact("write_slot_count_mismatch", *row_of[mapped], **where, expected=plan.num_tokens, actual=mapped)
    for token in range(mapped):
        slot, (row, name) = slots[token], row_of[token]
        outside = slot >= end or slot < -1
        foreign: set[str] = set()
        if slot != right[token] and not outside and slot != -1:
            foreign = _foreign(world, index, slot // size, name)
        for reason, fits, fields in (
            ("write_outside_cache", outside, {"expected": f"0 to {end - 1}"}),
            ("null_block_write", slot // size == NULL, {"expected": OWNED}),
            ("write_foreign_block", bool(foreign), {"other_request_id": foreign}),
            ("write_slot_negative", slot < 0, {}),
            ("write_target_mismatch", slot != right[token], {}),
        ):
            if fits and (reason, row) not in told:
                told.add((reason, row))
                yield fact(reason, token, **fields)
        for earlier in range(token):
            if slots[earlier] == slot != -1:
                culprit, other_token = (earlier, token) if slots[earlier] != right[earlier] else (token, earlier)
                other_name = row_of[other_token][1]
                others = {other_name} - {row_of[culprit][1]}
                yield fact("write_slot_collision", culprit, other_request_id=others)
    for token in range(plan.num_tokens, len(slots)):
        if slots[token] != -1:
            yield _fact(
                "write_padding_slot_enabled",
                None,
                None,
                other_request_id=_holders(world, index, slots[token] // size),
                group_id=of.group_id,
                token_index=token,
                block_id=slots[token] // size,
                slot=slots[token],
                expected=-1,
                actual=slots[token],
                launch_fatal=slots[token] >= end or slots[token] < -1,
            )
            break


def _about_table(world: World, plan: Plan, index: int, row: int, name: str) -> Iterator[Found]:
    of, request = world.groups[index], world.live[name]
    table, told = plan.groups[index].tables[row].tolist(), request.tables[index]
    needed = blocks_for(request.declared, of.block_size)
    visible = range(first_visible(of, request.computed), needed)

    def fact(reason: str, logical: int, **fields: Any) -> Found:
        block = table[logical]
        values = {"expected": told[logical], "actual": block, **fields}
        position = logical * of.block_size
        return _fact(reason, row, name, group_id=of.group_id, position=position, block_id=block, **values)

    differing = [logical for logical in visible if table[logical] != told[logical]]
    for logical in visible:
        if not 0 <= table[logical] < world.num_blocks:
            yield fact("read_outside_cache", logical, expected=f"0 to {world.num_blocks - 1}")
            break
    for logical in visible:
        if table[logical] == NULL:
            yield fact("read_null_block", logical, expected=OWNED)
            break
    if others := _whose_row(world, index, table, visible, differing, name):
        yield fact("read_row_request_mismatch", differing[0], other_request_id=others)
    for logical in differing:
        if foreign := _foreign(world, index, table[logical], name):
            yield fact("read_foreign_block", logical, other_request_id=foreign)
            break
    if len(differing) > 2 and sorted(table[i] for i in differing) == sorted(told[i] for i in differing):
        yield fact("logical_order_mismatch", differing[0])
    for logical in differing:
        again = [other for other in visible if other != logical and table[other] == table[logical]]
        if again and table[logical] != NULL and 0 <= table[logical] < world.num_blocks:
            yield fact("read_duplicate_block", logical)
            break
    if differing:
        yield fact("read_target_mismatch", differing[0])
    have = int(plan.groups[index].table_blocks[row])
    if have < needed:
        yield fact("read_table_short", min(max(have, 0), needed - 1), expected=needed, actual=have)


def _whose_row(world: World, index: int, table: list[int], visible: range, differing: list[int], own: str) -> set[str]:
    """Other requests whose row this may be. That shows at its end: in front there may be a prefix that several share.

    Raises:
        UnclearError: the last block that anybody has is also its own, or of several of which only some have the rest.
    """
    for last in reversed(visible[visible.index(differing[0]) :] if differing else ()):
        if holders := _holders(world, index, table[last]):
            break
    else:
        return set()
    same = set()
    for other in holders - {own}:
        theirs = world.live[other].tables[index]
        both = [logical for logical in visible if logical < len(theirs)]
        if differing[0] in both and all(table[i] == theirs[i] for i in both):
            same.add(other)
    if same and same != holders:
        raise UnclearError
    return same
