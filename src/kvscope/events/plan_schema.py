"""The records of a plan: kv.write and kv.read, which belong together. They go the way of every other record (see
``events.schema``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvscope.events.envelope import Envelope, Ranges, RequestId, Runs


class WriteRecord(Envelope, kw_only=True, tag="kv.write"):
    """Where the runner is about to write the KV of this step's tokens. Left out in compact where

    - ``last_position`` is ``first_position + query_len - 1``, ``computed_before`` is ``first_position``, and
      ``seq_len`` is ``computed_before + query_len``;
    - ``positions`` are consecutive in every row (``positions_consecutive`` says so where they are spelled out);
    - ``padding_enabled`` (padding slots that would be written) is empty in every group;
    - ``target_blocks`` follow from ``slots`` and the block size (absent, too, where that is unknown);
    - ``coordinates`` is ``global`` (``local``: slots within a context-parallel rank's share of the blocks),
      ``is_dummy`` false, ``exact`` true. Not exact: the host itself only has an upper bound of the computed tokens, so
      that positions and lengths are not judged.

    ``slots_rest`` and ``positions_rest`` are what lies behind the last row, where the rows do not cover everything.
    ``first_offset`` is where the query offsets begin; left out where that is 0, as in any sound plan.
    """

    requests: list[RequestId]
    groups: list[int]
    num_tokens: int
    graph_mode: str
    query_len: list[int]
    first_position: list[int]
    slots: list[list[Runs]]
    padding_slots: list[int]
    last_position: list[int] | UnsetType = UNSET
    computed_before: list[int] | UnsetType = UNSET
    seq_len: list[int] | UnsetType = UNSET
    positions: list[Runs] | UnsetType = UNSET
    positions_rest: Runs | UnsetType = UNSET
    positions_consecutive: bool | UnsetType = UNSET
    slots_rest: list[Runs] | UnsetType = UNSET
    padding_enabled: list[Runs] | UnsetType = UNSET
    target_blocks: list[list[Runs]] | UnsetType = UNSET
    coordinates: Annotated[str, Meta(extra_json_schema={"enum": ["global", "local"]})] | UnsetType = UNSET
    is_dummy: bool | UnsetType = UNSET
    exact: bool | UnsetType = UNSET
    first_offset: int | UnsetType = UNSET


class TableRow(msgspec.Struct, kw_only=True):
    """The judged entries of one row's block table: ``window_skipped .. blocks_needed``."""

    row: int
    blocks: Ranges


class ReadRecord(Envelope, kw_only=True, tag="kv.read"):
    """What attention is about to read through. It belongs to the kv.write of the same step and process.

    ``digest`` stands for the judged entries of each row; ``tables`` spells out those rows of each group that differ
    from the declaration, in full all of them. ``tail_ignored`` is how many entries the table has beyond
    ``blocks_needed`` (negative: how many it lacks). Left out in compact where ``seq_len`` is the kv.write's, where
    ``window_skipped`` or ``tail_ignored`` is zero throughout, and where no table is spelled out.
    """

    requests: list[RequestId]
    groups: list[int]
    blocks_needed: list[list[int]]
    digest: list[list[Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]]]
    seq_len: list[int] | UnsetType = UNSET
    window_skipped: list[list[int]] | UnsetType = UNSET
    tail_ignored: list[list[int]] | UnsetType = UNSET
    tables: list[list[TableRow]] | UnsetType = UNSET
