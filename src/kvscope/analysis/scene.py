"""What surrounded a finding at its step: who the block was declared to, before and now, and its neighbours."""

from __future__ import annotations

import msgspec

from kvscope.analysis.blocks import BlockDiary, Tenure
from kvscope.checks.finding import Finding
from kvscope.events.finding_schema import BlockHistory
from kvscope.events.histories import history_of
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger

STRIP_BLOCKS = 16

OWN = "own"
OTHER = "other"
SHARED = "shared"
NOBODY = "nobody"
NULL = "null"
OUTSIDE = "outside"


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """One block of the strip. ``whose`` is one of the words above, from the view of the finding's request."""

    block_id: int
    whose: str


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """``holders`` are the requests whose declared table has the block at that step. ``tenures`` are those of the block
    up to then, the latest first. ``declared_block`` is the block that the declaration has at the finding's position,
    ``logical_block`` its index. ``strip`` is empty where the finding names no block.

    ``history`` is what the pool itself did with the block until then: more, and nearer to it, than ``holders``,
    ``tenures`` and ``strip``, which only know what was declared. None where the trace does not have it.
    """

    num_blocks: int
    null_block_id: int
    slots_per_block: int | None
    logical_block: int | None
    declared_block: int | None
    holders: list[str]
    tenures: list[Tenure]
    strip: list[Neighbour]
    history: BlockHistory | None = None


def scene_of(finding: Finding, bindings: Bindings, diary: BlockDiary, ledger: BlockLedger | None = None) -> Scene:
    """The scene of a finding, from bindings and ledger in the state in which it was judged."""
    topology = bindings.topology
    index = next((i for i, group in enumerate(topology.groups) if group.group_id == finding.group_id), None)
    block_size = None if index is None else topology.groups[index].block_size
    logical = finding.position // block_size if block_size and finding.position is not None else None
    declared: int | None = None
    if index is not None and logical is not None and finding.request_id is not None:
        table = bindings.table(finding.request_id, index)
        declared = int(table[logical]) if 0 <= logical < len(table) else None
    block = finding.block_id
    return Scene(
        num_blocks=topology.num_blocks,
        null_block_id=topology.null_block_id,
        slots_per_block=None if index is None else topology.groups[index].slots_per_block,
        logical_block=logical,
        declared_block=declared,
        holders=[] if block is None else _holders(bindings, block),
        tenures=[] if block is None else diary.tenures(block, finding.step),
        strip=[] if block is None else _strip(finding, block, bindings),
        history=None if ledger is None else history_of(finding, ledger),
    )


def _holders(bindings: Bindings, block_id: int) -> list[str]:
    groups = range(len(bindings.topology.groups))
    return list(dict.fromkeys(holder for group in groups for holder in bindings.holders(group, block_id)))


def _strip(finding: Finding, block: int, bindings: Bindings) -> list[Neighbour]:
    """The block and its neighbours: inside the pool as far as possible, around the block where it lies outside."""
    topology = bindings.topology
    start = block - STRIP_BLOCKS // 2
    if 0 <= block < topology.num_blocks:
        start = max(min(start, topology.num_blocks - STRIP_BLOCKS), 0)
    return [
        Neighbour(block_id=neighbour, whose=_whose(neighbour, finding.request_id, bindings))
        for neighbour in range(start, start + STRIP_BLOCKS)
    ]


def _whose(block: int, request_id: str | None, bindings: Bindings) -> str:
    topology = bindings.topology
    if not 0 <= block < topology.num_blocks:
        return OUTSIDE
    if block == topology.null_block_id:
        return NULL
    holders = _holders(bindings, block)
    if request_id in holders:
        return OWN if len(holders) == 1 else SHARED
    return OTHER if holders else NOBODY
