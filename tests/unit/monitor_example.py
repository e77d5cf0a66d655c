"""How an extension is written. `mypy --strict` reads this file, and `test_monitor` runs it."""

from __future__ import annotations

from collections import Counter

from kvscope.monitor import (
    CollectorContext,
    GuardViolationEvent,
    RegisteredCollector,
    Subscription,
    register_collector,
    subscribe_guard_events,
)

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


@register_collector(name="vllm_ascend_held_ratio", metric_type="gauge")
def held_ratio(ctx: CollectorContext) -> float:
    """Blocks that are held, of all blocks (0 to 1)."""
    held = ctx.metrics.total("kv_blocks", state="held") or 0.0
    return held / (ctx.metrics.total("kv_blocks") or 1.0)


@register_collector(name="vllm_ascend_remembered_blocks", metric_type="counter", process="engine")
def remembered(ctx: CollectorContext) -> float:
    """Blocks that this extension has been told of."""
    return float(len(blocks)) if ctx.engine == "0" else 0.0


collectors: list[RegisteredCollector] = [held_ratio, remembered]
