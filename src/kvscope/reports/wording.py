"""How ids, slots and accesses are put into words."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope.analysis.scene import Scene
from kvscope.checks.finding import Finding
from kvscope.reports.printable import clean

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

_ACTION_OF_FAMILY = {
    "write": "WRITE",
    "null": "WRITE",
    "read": "READ",
    "bind": "DECLARED",
    "handover": "HANDED OVER",
    "dummy": "DUMMY RUN",
}


def listed(names: Sequence[str], most: int) -> str:
    """``a, b and 2 more``."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def unit_of(reason: str) -> str | None:
    """What a number in ``expected`` or ``actual`` is."""
    return _UNIT_OF_REASON.get(reason) or _UNIT_OF_FAMILY.get(reason.partition("_")[0])


def access_of(finding: Finding, scene: Scene | None) -> tuple[str, str]:
    """What was done and to what, as label and text."""
    action = _ACTION_OF_FAMILY.get(finding.reason.partition("_")[0], "SEEN")
    if finding.slot is not None:
        return action, slot_text(finding.slot, scene)
    if finding.block_id is not None:
        return action, f"block {finding.block_id}"
    if unit_of(finding.reason) in {TOKENS, POSITION}:
        return action, f"{value_text(finding.actual, finding, scene)} instead of {finding.expected}"
    return action, value_text(finding.actual, finding, scene)


def slot_text(slot: int, scene: Scene | None) -> str:
    """The slot, and the block and offset that it is."""
    if slot == -1:
        return "slot -1 (padding: nothing is written)"
    if scene is None or scene.block_size is None or slot < 0:
        return f"slot {slot}"
    return f"slot {slot} (block {slot // scene.block_size}, offset {slot % scene.block_size})"


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
