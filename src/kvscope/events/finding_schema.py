"""The record of a finding, and what kv.coverage says about many of them.

They go the way of every other record (see ``events.schema``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvscope.events.envelope import Count, Envelope, RequestId

STRIP_BLOCKS = 16
MOST_OWNERS = 8

OWN = "own"
SHARED = "shared"
OTHER = "other"
DISPUTED = "disputed"
RECEIVING = "receiving"
HELD = "held"
CACHED = "cached"
NOBODY = "nobody"
NULL = "null"
OUTSIDE = "outside"

NEIGHBOUR_WORDS = (OWN, SHARED, OTHER, DISPUTED, RECEIVING, HELD, CACHED, NOBODY, NULL, OUTSIDE)
"""What a block of the strip is, as the finding's request sees it. ``own`` and ``shared`` stand in its tables, ``other``
in those of other requests alone; ``disputed`` stands in more tables than it has references. ``receiving`` waits for a
receive that has not ended, ``held`` has references and stands in no live table, ``cached`` has none and can be hit,
``nobody`` has neither a reference nor a hash."""

STATUS_WORDS = ("free", "held", "active", "reserved", "null", "outside")
"""In the order of ``state.block_columns.Status``."""

Neighbour = Annotated[str, Meta(extra_json_schema={"enum": list(NEIGHBOUR_WORDS)})]
StatusWord = Annotated[str, Meta(extra_json_schema={"enum": list(STATUS_WORDS)})]


class BlockOwner(msgspec.Struct, kw_only=True):
    """A request that has the block as ``logical_index`` of its table of a group, or (``live`` false) has given it up
    while its reference stays. Index and group are null where they are not known.
    """

    request_id: RequestId
    group_id: int | None
    logical_index: int | None
    live: bool


class BlockStrip(msgspec.Struct, kw_only=True):
    """The block of a finding and its neighbours in the pool: ``blocks[i]`` is about block ``first_block + i``."""

    first_block: int
    blocks: list[Neighbour]


class BlockHistory(msgspec.Struct, kw_only=True):
    """What the ledger knew about the block of a finding when the finding was made; null where it does not.

    ``generation`` is how often the block has been handed out until then, the last time ``allocated_for`` a request in
    ``allocated_step``. ``references`` are those that follow from the pool's operations. ``init_prefix_len`` of its
    tokens are written in this generation by completed steps and receives, ``init_prefix_declared`` with the steps that
    are on their way; ``last_written_step`` is the last one that was declared to write into it. ``hash_count`` hashes
    lead to it.

    ``freed_by`` released the last reference in ``freed_step`` for ``freed_cause``, which ended ``freed_generation``
    (the present one where the block is free, or was hit since). ``owners`` are the first of ``num_owners`` that have
    the block now.
    """

    generation: int | None = None
    status: StatusWord | None = None
    references: int | None = None
    hash_count: int | None = None
    init_prefix_len: int | None = None
    init_prefix_declared: int | None = None
    allocated_for: RequestId = None
    allocated_step: int | None = None
    last_written_step: int | None = None
    freed_by: RequestId = None
    freed_step: int | None = None
    freed_cause: str | None = None
    freed_generation: int | None = None
    owners: list[BlockOwner] = msgspec.field(default_factory=list)
    num_owners: Count = 0
    strip: BlockStrip | None = None


class ViolationRecord(Envelope, kw_only=True, tag="kv.violation"):
    """A rule fired. ``evidence`` names the two sources that disagree, ``also`` further reasons that fit the same
    access, ``repeats`` how many findings of the same reason and group came before this one.

    Of many findings of one reason, group and request (or block, where no request is named) the 1st, 2nd, 4th, 8th and
    so on are written, and at the end the last of the reason and group; kv.coverage counts all of them.
    ``seen_by_tp_rank`` and ``seen_by_pp_rank`` tell where it was seen, when another process reports it.
    """

    reason: str
    check: str
    severity: Annotated[str, Meta(extra_json_schema={"enum": ["info", "warning", "error", "fatal"]})]
    evidence: str
    action: str
    repeats: Count
    also: list[str]
    request_id: RequestId | UnsetType = UNSET
    other_request_id: RequestId | UnsetType = UNSET
    row: int | UnsetType = UNSET
    group_id: int | UnsetType = UNSET
    token_index: int | UnsetType = UNSET
    position: int | UnsetType = UNSET
    block_id: int | UnsetType = UNSET
    slot: int | UnsetType = UNSET
    generation: int | UnsetType = UNSET
    expected: int | str | UnsetType = UNSET
    actual: int | str | UnsetType = UNSET
    seen_by_tp_rank: int | UnsetType = UNSET
    seen_by_pp_rank: int | UnsetType = UNSET
    launch_fatal: bool | UnsetType = UNSET
    history: BlockHistory | UnsetType = UNSET


class FindingCount(msgspec.Struct, kw_only=True):
    """All findings of one reason in one group (``group_id`` null: of no group).

    ``written`` of them are kv.violation records; ``unnamed`` are those of requests (or blocks) of which none was
    written, because there were too many. ``last_request_id`` and ``last_block_id`` are those of the last one.
    """

    reason: str
    group_id: int | None
    count: int
    first_step: int
    last_step: int
    written: Count = 0
    unnamed: Count = 0
    last_request_id: RequestId | UnsetType = UNSET
    last_block_id: int | UnsetType = UNSET
