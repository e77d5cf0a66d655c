"""Context parallelism by hand: tokens are dealt out and chunks cut one by one, and nothing is computed by formula.

This is what the rules are held against, so it uses nothing of theirs but the fact types.
"""

from __future__ import annotations

import numpy as np

from kvscope.facts.context_parallel import NO_WRITER, ContextParallel, LocalRows
from kvscope.facts.plans import PAD_SLOT, GroupPlan, Plan
from kvscope.facts.topology import FULL_ATTENTION, Group, Topology


def sharded(group_id: int = 0, slots: int = 16, shards: int = 2, kind: str = FULL_ATTENTION) -> Group:
    """A group with ``slots`` slots a block on each of ``shards`` ranks."""
    return Group(
        group_id=group_id, kind=kind, block_size=slots * shards, kernel_block_size=None, layers=1, shards=shards
    )


def dcp_pool(*groups: Group, size: int = 2, pcp_size: int = 1, num_blocks: int = 64) -> Topology:
    return Topology(num_blocks=num_blocks, null_block_id=0, groups=groups, dcp_size=size, pcp_size=pcp_size)


def deal(block_size: int, size: int, interleave: int) -> list[tuple[int, int]]:
    """Of each token of a block, the rank that gets it and how many that rank had before: cards dealt to players."""
    dealt, have, player, in_a_row = [], [0] * size, 0, 0
    for _ in range(block_size):
        dealt.append((player, have[player]))
        have[player] += 1
        in_a_row += 1
        if in_a_row == interleave:
            player, in_a_row = (player + 1) % size, 0
    return dealt


def share_of(length: int, block_size: int, context: ContextParallel) -> int:
    """How many of the first ``length`` tokens of a sequence the rank gets."""
    dealt, mine = deal(block_size, context.dcp_size, context.interleave), 0
    for position in range(length):
        mine += dealt[position % block_size][0] == context.dcp_rank
    return mine


def on_rank(plan: Plan, topology: Topology, tables: dict[str, list[list[int]]], context: ContextParallel) -> Plan:
    """The plan of one DCP rank, from the plan of an engine without ranks; padding stays as it is."""
    owners = [
        name
        for row, name in enumerate(plan.request_ids)
        for _ in range(int(plan.query_start[row + 1] - plan.query_start[row]))
    ]
    groups = []
    for index, (of, group) in enumerate(zip(topology.groups, plan.groups, strict=True)):
        dealt = deal(of.block_size, of.shards, context.interleave)
        slots = []
        for name, position in zip(owners, plan.positions.tolist(), strict=True):
            rank, before = dealt[position % of.block_size]
            block = tables[name][index][position // of.block_size]
            is_mine = of.shards == 1 or rank == context.dcp_rank
            slots.append(block * (of.block_size // of.shards) + before if is_mine else PAD_SLOT)
        padding = group.slots[plan.num_tokens :].tolist()
        groups.append(
            GroupPlan(
                group_id=group.group_id,
                tables=group.tables,
                table_blocks=group.table_blocks,
                slots=np.array(slots + padding, np.int64),
            )
        )
    return Plan(
        request_ids=plan.request_ids,
        query_start=plan.query_start,
        positions=plan.positions,
        seq_lens=plan.seq_lens,
        num_tokens=plan.num_tokens,
        groups=groups,
        context=context,
    )


def cut(tokens: list[int], size: int) -> list[list[int]]:
    """A prompt in ``2 * size`` chunks of equal length but for the last ones, which may be short or empty."""
    length = 0
    while length * 2 * size < len(tokens):
        length += 1
    chunks, rest = [], list(tokens)
    for _ in range(2 * size):
        chunks.append(rest[:length])
        rest = rest[length:]
    return chunks


def rows_of_rank(plan: Plan, whole: set[str], size: int, rank: int) -> list[tuple[str, list[int]]]:
    """Request and tokens of the batch of each local row: decodes first, then the two chunks of each prompt.

    ``whole`` are the requests that every rank computes in whole.
    """
    spans = {
        name: list(range(int(plan.query_start[row]), int(plan.query_start[row + 1])))
        for row, name in enumerate(plan.request_ids)
    }
    rows = [(name, tokens) for name, tokens in spans.items() if name in whole]
    for name, tokens in spans.items():
        if name not in whole:
            chunks = cut(tokens, size)
            rows += [(name, chunk) for chunk in (chunks[rank], chunks[2 * size - 1 - rank]) if chunk]
    return rows


def partitioned(plan: Plan, context: ContextParallel, whole: set[str]) -> Plan:
    """The same plan with the local rows of a PCP rank, and the map of the gathered keys and values of all ranks."""
    by_rank = [rows_of_rank(plan, whole, context.pcp_size, rank) for rank in range(context.pcp_size)]
    longest = max(sum(len(tokens) for _, tokens in rows) for rows in by_rank)
    writers: list[int] = []
    for rank, rows in enumerate(by_rank):
        places = [token if rank == 0 or name not in whole else NO_WRITER for name, tokens in rows for token in tokens]
        writers += places + [NO_WRITER] * (longest - len(places))
    mine = by_rank[context.pcp_rank] or [(plan.request_ids[0], [])]
    tokens = [token for _, row in mine for token in row]
    ends = [int(plan.positions[row[-1]]) + 1 if row else 0 for _, row in mine]
    plan.context = context
    plan.local = LocalRows(
        request_ids=[name for name, _ in mine],
        query_start=np.array([0, *np.cumsum([len(row) for _, row in mine])], np.int32),
        positions=plan.positions[tokens],
        seq_lens=np.array(ends, np.int32),
        writers=np.array(writers, np.int64),
    )
    return plan
