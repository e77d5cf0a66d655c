"""How ids, slots and accesses are put into words."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope.analysis.scene import Scene
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.events.finding_schema import BlockHistory
from kvscope.facts.plans import PAD_SLOT
from kvscope.reports.printable import clean

Fact = tuple[str, str]
"""A label and what stands behind it."""

SLOT, BLOCK, BLOCKS, TOKENS, POSITION = "slot", "block", "blocks", "tokens", "position"

_UNIT_OF_REASON = {
    "write_position_mismatch": POSITION,
    "write_length_mismatch": TOKENS,
    "read_length_exceeds_declared": TOKENS,
    "read_table_short": BLOCKS,
    "bind_block_shortfall": BLOCKS,
    "bind_block_out_of_range": BLOCK,
    "dummy_slot_enabled": SLOT,
    "null_block_write": SLOT,
}
_UNIT_OF_FAMILY = {"write": SLOT, "read": BLOCK}
"""What the numbers in ``expected`` and ``actual`` count, unless the reason has a unit of its own."""

_ACTION_OF_REASON = {
    "free_inflight_step": "RESERVED",
    "free_list_damaged": "FREE QUEUE",
    "double_free": "FREED TWICE",
    "ref_underflow": "COUNTED",
    "leak_after_finish": "NOT FREED",
    "hold_deadline_exceeded": "STILL HELD",
    "aborted_block_still_cached": "STILL CACHED",
    "ledger_pool_mismatch": "COUNTED",
    "alias_owner_mismatch": "COUNTED",
    "watermark_exceeded": "DECLARED",
    "evict_referenced": "HASHES DROPPED",
}
_ACTION_OF_FAMILY = {
    "write": "WRITE",
    "null": "WRITE",
    "read": "READ",
    "bind": "DECLARED",
    "handover": "HANDED OVER",
    "dummy": "DUMMY RUN",
    "alloc": "HANDED OUT",
    "free": "FREED",
    "hit": "PREFIX HIT",
    "zero": "ZEROED",
}
_ACCESSES = frozenset({"WRITE", "READ", "DUMMY RUN"})


def is_after_release(reason: str) -> bool:
    """Whether a finding is about the use of a block through a reference from before it was freed."""
    return reason.endswith("_after_release")


def is_about_content(reason: str) -> bool:
    """Whether what is written in the block belongs to what a reader has to know."""
    return reason.startswith(("hit_", "zero_", "aborted_", "write_loaded")) or "uninitialized" in reason


def is_of_scheduler(reason: str) -> bool:
    """Whether a finding is about what the scheduler or its pool does, so that no runner had a part in it."""
    rule = RULES.get(reason)
    return reason.startswith(("bind_", "hit_", "zero_", "aborted_")) or (rule is not None and rule.check == "A")


def action_of(reason: str) -> str:
    """What was done with the block."""
    return _ACTION_OF_REASON.get(reason) or _ACTION_OF_FAMILY.get(reason.partition("_")[0], "SEEN")


def listed(names: Sequence[str], most: int) -> str:
    """``a, b and 2 more``."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def counted(count: int, one: str, many: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count:,} {one if count == 1 else many}"


def ordinal(number: int) -> str:
    """``3rd``."""
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def unit_of(reason: str) -> str | None:
    """What a number in ``expected`` or ``actual`` is."""
    return _UNIT_OF_REASON.get(reason) or _UNIT_OF_FAMILY.get(reason.partition("_")[0])


def access_of(finding: Finding, scene: Scene | None, history: BlockHistory | None = None) -> Fact:
    """What was done and to what."""
    action = action_of(finding.reason)
    if finding.slot is not None:
        what = slot_text(finding.slot, scene, finding.block_id)
    elif finding.block_id is not None:
        what = f"block {finding.block_id}"
    elif unit_of(finding.reason) in {TOKENS, POSITION}:
        return action, f"{value_text(finding.actual, finding, scene)} instead of {finding.expected}"
    else:
        return action, value_text(finding.actual, finding, scene)
    if is_after_release(finding.reason) and finding.block_id is not None:
        return action, f"{what}, after the block was freed{_step('in', history)}"
    if finding.reason == "double_free" and history is not None and history.status == "free":
        return "FREED AGAIN", f"{what}, which is free{_step('since', history)}"
    return action, what


def _step(preposition: str, history: BlockHistory | None) -> str:
    """When the block was freed, if that is known."""
    return "" if history is None or history.freed_step is None else f" {preposition} step {history.freed_step}"


def other_request_of(finding: Finding, history: BlockHistory | None) -> Fact:
    """The finding's second request: whom the access hits, unless the request is only named for its part in it."""
    name = finding.other_request_id
    has_block = history is None or name in {owner.request_id for owner in history.owners}
    hits = action_of(finding.reason) in _ACCESSES and has_block
    return ("hits" if hits else "other request"), clean(name or "")


def slot_text(slot: int, scene: Scene | None, block_id: int | None = None) -> str:
    """The slot, and the block and offset that it is."""
    if slot == PAD_SLOT:
        return f"slot {slot} (padding: nothing is written)"
    if scene is not None and scene.slots_per_block is not None and slot >= 0:
        return f"slot {slot} (block {slot // scene.slots_per_block}, offset {slot % scene.slots_per_block})"
    return f"slot {slot}" if block_id is None else f"slot {slot} (block {block_id})"


def value_text(value: int | str | None, finding: Finding, scene: Scene | None) -> str:
    """``expected`` or ``actual`` with its unit."""
    if value is None:
        return "not stated"
    if isinstance(value, str):
        return clean(value)
    unit = unit_of(finding.reason)
    if unit == SLOT:
        return slot_text(value, scene)
    if unit == BLOCK:
        limit = finding.reason == "bind_block_out_of_range" and value == finding.expected
        return f"{'at most ' if limit else ''}block {value}"
    if unit == POSITION:
        return f"position {value}"
    return f"{value} {unit}" if unit else str(value)
