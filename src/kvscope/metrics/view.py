"""What a person is shown of a run at one time: prepared once, drawn by the live page and by the terminal.

What is not known is None, and `no_data` says why; nothing is shown as zero that was not counted.
"""

from __future__ import annotations

import msgspec

__all__ = ["Cost", "Coverage", "EngineView", "Hold", "Latency", "Pool", "RequestBlocks", "Reuse", "Transfers", "View"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool of one engine. `usage` is a share of 0 to 1; rates are blocks a second."""

    usage: float | None
    blocks: dict[str, int]
    held: dict[str, int]
    fill: dict[str, float]
    deferred_blocks: int | None
    alloc_per_s: float | None
    free_per_s: float | None
    evict_per_s: float | None


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix cache hits, by unit (`token`, `block`): the share within the window, and since the start."""

    window: dict[str, float]
    since_start: dict[str, float]
    queries: dict[str, int]


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    p50_s: float | None
    p95_s: float | None


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill to decode, by direction (`sent`, `received`). `latency` and `wait` are since the start."""

    connector: str
    tokens: dict[str, int]
    tokens_per_s: dict[str, float]
    queued: int | None
    in_flight: int | None
    failures: dict[str, int]
    latency: Latency | None
    wait: Latency | None


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine (data-parallel rank). `no_data` says why `pool`, `reuse` or `transfers` is missing."""

    engine: str
    pool: Pool | None
    reuse: Reuse | None
    transfers: Transfers | None
    no_data: dict[str, str]


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are referenced but owned by no running request. `for_s` is how long there have been some without a
    gap, as far as it was watched: no block need be held that long, and none was held longer while it was watched.
    """

    engine: str
    cause: str
    blocks: int
    for_s: float
    since_before: bool
    """They were there already when watching began, so that it may be longer."""


class RequestBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A live request and how many blocks it holds, over all groups."""

    engine: str
    request_id: str
    blocks: int
    tokens: int


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """`share` is that of the scheduled rows, where the source knows it."""

    rows_audited: int
    share: float | None
    checks: dict[str, int]
    skipped: dict[str, int]
    stalled: list[str]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What kvscope itself takes. `share` is time in hooks, of all processes together, per second of time."""

    hook_s: float
    share: float | None
    hooks: dict[str, float]
    faults: dict[str, int]
    dropped: dict[str, int]
    snapshot_age_s: float | None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """`over_s` is the time over which rates are taken, None for a single look. `findings` counts by reason.

    `no_data` says why `engines`, `holds`, `requests`, `findings`, `coverage` or `cost` is missing.
    """

    source: str
    run_id: str | None
    at_s: float
    over_s: float | None
    engines: list[EngineView]
    holds: list[Hold] | None
    requests: list[RequestBlocks] | None
    requests_more: int
    findings: dict[str, int] | None
    coverage: Coverage | None
    cost: Cost | None
    no_data: dict[str, str]
