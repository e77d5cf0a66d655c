"""The published parts of records that are about context parallelism."""

from __future__ import annotations

import msgspec


class ContextSizes(msgspec.Struct, kw_only=True):
    """Over how many ranks prefill and decode context parallelism are configured."""

    pcp_size: int
    dcp_size: int


class RankCoordinates(msgspec.Struct, kw_only=True):
    """Where a context-parallel rank stands, by its own account: of every ``interleave * dcp_size`` tokens it stores the
    ``dcp_rank``-th ``interleave``.
    """

    pcp_size: int
    pcp_rank: int
    dcp_size: int
    dcp_rank: int
    interleave: int
