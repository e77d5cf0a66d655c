"""C1, C3 and C6 on the write side: where each token of the step is about to be stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..facts.plans import PAD_SLOT, Int64
from . import rule as r
from .finding import Finding
from .plan_view import Bool, GroupView, StepView
from .rule import rule


def _first_of_each_row(view: StepView, tokens: Bool) -> Iterator[tuple[int, int]]:
    """``(row, token)`` of the first marked token of each row that has one."""
    marked = np.flatnonzero(tokens)
    rows, first = np.unique(view.token_row[marked], return_index=True)
    for row, index in zip(rows.tolist(), first.tolist(), strict=True):
        yield row, int(marked[index])


def _token_finding(view: GroupView, row: int, token: int, **fields: object) -> Finding:
    slot = int(view.slots[token])
    return Finding(
        reason="",
        step=view.step.declaration.step,
        trace_id=view.step.declaration.trace_id,
        request_id=view.step.plan.request_ids[row],
        row=row,
        group_id=view.group.group_id,
        token_index=token,
        position=int(view.step.plan.positions[token]),
        block_id=slot // view.group.slots_per_block,
        slot=slot,
        expected=int(view.expected_slots[token]),
        actual=slot,
        **fields,  # type: ignore[arg-type]  # the keyword names are Finding's own; checked by its constructor
    )


def _blocks(view: GroupView) -> Int64:
    return view.slots // view.group.slots_per_block


def _outside(view: GroupView) -> Bool:
    outside: Bool = (view.slots >= view.end_slot) | (view.slots < PAD_SLOT)
    return outside


@rule(
    check="C1",
    severity="fatal",
    rank=r.OUTSIDE,
    title="a token is written outside the cache",
    fires="The slot of a real token lies beyond the slots of the pool on this rank, or is negative and not the padding "
    "value.",
    silent="Padding slots; a slot in the wrong block of the pool (write_target_mismatch).",
    sources=(r.PLAN_SLOTS, "the size of the pool"),
)
def write_outside_cache(view: GroupView) -> Iterator[Finding]:
    for row, token in _first_of_each_row(view.step, _outside(view)):
        finding = _token_finding(view, row, token, launch_fatal=True)
        finding.expected = f"0 to {view.end_slot - 1}"
        yield finding


@rule(
    check="C6",
    severity="error",
    rank=r.NULL,
    title="a real token is written to the null block",
    fires="The slot of a real token lies in the null block, whether or not the declaration says so too.",
    silent="Dummy runs and padding; state groups, whose dummy runs use the null state slot.",
    sources=(r.PLAN_SLOTS, "the rule that nobody owns the null block"),
    invariant=True,
)
def null_block_write(view: GroupView) -> Iterator[Finding]:
    null = _blocks(view) == view.step.bindings.topology.null_block_id
    for row, token in _first_of_each_row(view.step, null):
        finding = _token_finding(view, row, token)
        finding.expected = "a block that somebody owns"
        yield finding


@rule(
    check="C3",
    severity="error",
    rank=r.FOREIGN,
    title="a token is written into another request's block",
    fires="The slot lies in a block that is not in this request's declared table and is in that of another live one.",
    silent="Blocks shared by a prefix hit (they are in both tables); blocks that nobody has.",
    sources=(r.PLAN_SLOTS, r.DECLARATION),
)
def write_foreign_block(view: GroupView) -> Iterator[Finding]:
    wrong = np.flatnonzero((view.slots != view.expected_slots) & ~_outside(view) & (view.slots != PAD_SLOT))
    # One token a row and block is enough to tell whose block it is.
    pairs = view.step.token_row[wrong] * view.step.bindings.topology.num_blocks + _blocks(view)[wrong]
    _, first = np.unique(pairs, return_index=True)
    told: set[int] = set()
    for token in wrong[np.sort(first)].tolist():
        row = int(view.step.token_row[token])
        if row in told:
            continue
        block = int(view.slots[token]) // view.group.slots_per_block
        other = view.step.bindings.foreign_holder(view.group_index, block, view.step.plan.request_ids[row])
        if other is not None:
            told.add(row)
            yield _token_finding(view, row, token, other_request_id=other)


@rule(
    check="C1",
    severity="error",
    rank=r.COLLISION,
    title="two tokens of one step are written to the same slot",
    fires="Two real tokens of one step and group have the same slot.",
    silent="The same slot in different groups or steps; padding; a rejected draft rewritten by a later step.",
    sources=(r.PLAN_SLOTS, "the rule that a slot holds one token"),
    invariant=True,
)
def write_slot_collision(view: GroupView) -> Iterator[Finding]:
    order = np.argsort(view.slots[: view.slots.size - view.unmapped], kind="stable")
    ordered = view.slots[order]
    repeated = np.unique(ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != PAD_SLOT)])
    wrong = view.slots != view.expected_slots
    for begin, end in zip(np.searchsorted(ordered, repeated), np.searchsorted(ordered, repeated, "right"), strict=True):
        tokens = order[begin:end].tolist()
        rightful: int | None = None
        for place, token in enumerate(tokens):
            # Whoever is not where it should be is the culprit, and whoever comes to a slot that is rightly another's.
            other = rightful if rightful is not None else next(iter(tokens[place + 1 :]), None)
            if other is not None and (rightful is not None or wrong[token]):
                row, others_row = int(view.step.token_row[token]), int(view.step.token_row[other])
                names = view.step.plan.request_ids
                other_request = names[others_row] if names[others_row] != names[row] else None
                yield _token_finding(view, row, token, other_request_id=other_request)
            if rightful is None and not wrong[token]:
                rightful = token


@rule(
    check="C1",
    severity="error",
    rank=r.NEGATIVE,
    title="a token has a negative slot",
    fires="The slot of a real token is negative although the declaration gives it one; with -1 the kernels leave the "
    "token out without a word, so that later ones read what nobody wrote.",
    silent="Padding; tokens that are declared to be stored elsewhere, as on another context-parallel rank.",
    sources=(r.PLAN_SLOTS, r.DECLARATION),
)
def write_slot_negative(view: GroupView) -> Iterator[Finding]:
    for row, token in _first_of_each_row(view.step, (view.slots < 0) & (view.expected_slots >= 0)):
        yield _token_finding(view, row, token)


@rule(
    check="C1",
    severity="error",
    rank=r.COUNT,
    title="not every token has a slot",
    fires="The slot mapping of a group ends before the tokens of the step, as declared or as planned, do.",
    silent="A longer mapping: what is behind the tokens is padding (write_padding_slot_enabled).",
    sources=(r.PLAN_SLOTS, r.DECLARATION),
)
def write_slot_count_mismatch(view: GroupView) -> Iterator[Finding]:
    have, need = view.plan.slots.size, view.step.slots_needed
    if have >= need:
        return
    is_planned = have < view.step.plan.num_tokens
    row = view.step.token_row[have] if is_planned else np.searchsorted(np.cumsum(view.step.scheduled), have, "right")
    yield Finding(
        reason="",
        step=view.step.declaration.step,
        trace_id=view.step.declaration.trace_id,
        request_id=view.step.plan.request_ids[int(row)],
        row=int(row),
        group_id=view.group.group_id,
        token_index=have,
        position=int(view.step.plan.positions[have]) if is_planned else None,
        expected=need,
        actual=have,
    )


@rule(
    check="C1",
    severity="error",
    rank=r.TARGET,
    title="a token has another slot than the declaration gives it",
    fires="The slot differs from declared block of the position * block_size + offset, in a group that is judged.",
    silent="Padding; rows whose computed length the host itself only estimates; groups with other semantics.",
    sources=(r.PLAN_SLOTS, r.DECLARATION),
)
def write_target_mismatch(view: GroupView) -> Iterator[Finding]:
    for row, token in _first_of_each_row(view.step, view.slots != view.expected_slots):
        yield _token_finding(view, row, token)


@rule(
    check="C1",
    severity="error",
    rank=r.OTHER,
    title="a padding slot is enabled",
    fires="An entry of the slot mapping behind the real tokens is not the padding value, so the kernel may write it.",
    silent="Everything when the mapping ends with the real tokens.",
    sources=(r.PLAN_SLOTS, "the rule that padding is never written"),
    invariant=True,
)
def write_padding_slot_enabled(view: GroupView) -> Iterator[Finding]:
    enabled = np.flatnonzero(view.padding != PAD_SLOT)
    if not enabled.size:
        return
    index = int(enabled[0])
    slot = int(view.padding[index])
    holders = view.step.bindings.holders(view.group_index, slot // view.group.slots_per_block)
    yield Finding(
        reason="",
        step=view.step.declaration.step,
        trace_id=view.step.declaration.trace_id,
        other_request_id=holders[0] if holders else None,
        group_id=view.group.group_id,
        token_index=view.step.plan.num_tokens + index,
        block_id=slot // view.group.slots_per_block,
        slot=slot,
        expected=PAD_SLOT,
        actual=slot,
        launch_fatal=slot >= view.end_slot or slot < PAD_SLOT,
    )


WRITE_RULES = (
    write_outside_cache,
    null_block_write,
    write_foreign_block,
    write_slot_collision,
    write_slot_negative,
    write_target_mismatch,
    write_slot_count_mismatch,
    write_padding_slot_enabled,
)
