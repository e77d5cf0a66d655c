"""What does not change while an engine lives: the pool, its groups, and where this process stands among the ranks."""

from __future__ import annotations

import msgspec

FULL_ATTENTION = "full_attention"
MLA = "mla"
SLIDING_WINDOW = "sliding_window"
CHUNKED_LOCAL = "chunked_local"

JUDGED_KINDS = frozenset({FULL_ATTENTION, MLA, SLIDING_WINDOW, CHUNKED_LOCAL})
"""Group kinds whose logical block ``i`` holds the tokens ``i * block_size .. (i + 1) * block_size - 1``.

Everything else (a Mamba state slot, a ring, cross-attention) means something different by a block table; the checks
that read tables and slots are off for such a group, which is announced in kv.enabled and counted in kv.coverage.
"""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV-cache group. ``block_size`` is in tokens, as the manager counts; ``kernel_block_size`` is what the
    attention backend was given (vLLM 0.32 expands manager blocks only inside the metadata builders).

    ``visible_tokens`` is None when attention sees the whole sequence, else how far back a token can look. ``shards`` is
    over how many ranks the tokens of a block are dealt out (decode context parallelism): each rank has room for
    ``slots_per_block`` of them, and the table of a sequence is the same on all.
    """

    group_id: int
    kind: str
    block_size: int
    kernel_block_size: int | None
    layers: int
    visible_tokens: int | None = None
    shards: int = 1

    @property
    def slots_per_block(self) -> int:
        """Slots that a block has on one rank, by which slots are counted."""
        return self.block_size // self.shards

    @property
    def judged(self) -> bool:
        return self.kind in JUDGED_KINDS


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The pool that all groups share. Valid block ids are ``0 .. num_blocks - 1``; ``null_block_id`` is never owned.

    ``pcp_size`` and ``dcp_size`` are how many ranks prefill and decode context parallelism were configured with.
    """

    num_blocks: int
    null_block_id: int
    groups: tuple[Group, ...]
    pcp_size: int = 1
    dcp_size: int = 1

    @property
    def context_parallel(self) -> bool:
        """Whether the tokens of a sequence are shared out over ranks, in memory or in computation."""
        return self.pcp_size > 1 or self.dcp_size > 1


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Coordinates of one process. A rank that does not apply (the scheduler has no TP rank) is None."""

    dp: int = 0
    tp: int | None = None
    pp: int | None = None
    pcp: int | None = None
    dcp: int | None = None
    world: int | None = None
