"""How an extension is written. `mypy --strict` reads this file, and `test_monitor` runs it."""

from __future__ import annotations

from collections import Counter

from kvscope.monitor import GuardViolationEvent, Subscription, subscribe_guard_events

seen: Counter[str] = Counter()
blocks: dict[int, tuple[str, ...]] = {}


def remember(event: GuardViolationEvent) -> None:
    """Runs in a thread of its own, never on the step path."""
    reason: str = event.reason
    if event.block_id is not None:
        blocks[event.block_id] = event.request_ids
    seen[reason] += 1


handle: Subscription = subscribe_guard_events(remember)


def health() -> str:
    """What a status page of this extension could say."""
    return f"{handle.delivered} told, {handle.dropped} dropped, {handle.faults} faults, active: {handle.active}"
