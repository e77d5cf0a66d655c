"""What a rule says when it fires."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rule fired once. Field meanings follow the kv.violation record; None means "does not apply".

    ``row`` is the row of the batch, ``token_index`` counts tokens of the batch, ``position`` tokens of the sequence.
    ``expected`` / ``actual`` are numbers or short texts (slots, blocks, counts): never token ids or text.
    ``also`` names the reasons that fit as well, in the order of precedence. ``launch_fatal`` marks an access that can
    crash the process when launched.
    """

    reason: str
    step: int
    trace_id: str
    request_id: str | None = None
    other_request_id: str | None = None
    row: int | None = None
    group_id: int | None = None
    token_index: int | None = None
    position: int | None = None
    block_id: int | None = None
    slot: int | None = None
    generation: int | None = None
    expected: int | str | None = None
    actual: int | str | None = None
    also: tuple[str, ...] = ()
    tp_rank: int | None = None
    pp_rank: int | None = None
    launch_fatal: bool = False
