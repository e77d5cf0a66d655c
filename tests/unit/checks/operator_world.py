"""What attention operators are called with, made from a plan by loops over single entries, and read back the same way.

Nothing here uses the code under test but its fact types. A builder of metadata is imitated: it may expand blocks into
those of a kernel, and cut a batch into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvscope.checks.finding import Finding
from kvscope.checks.handed import HandedPlan
from kvscope.checks.judge import judge_operators
from kvscope.checks.operator import OperatorView
from kvscope.checks.rule import Part
from kvscope.facts.operators import OperatorArguments, OperatorGroup, OperatorRows, OperatorSlots
from kvscope.facts.plans import Plan
from kvscope.facts.topology import Topology
from unit.checks.worlds import blocks_for, first_visible

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")

Cut = tuple[int, int, int, int]
"""First row and row after the last, first token and token after the last."""


def kernel_table(blocks: Sequence[int], ratio: int, stride: int) -> list[int]:
    """Each block of the manager, spelled out in blocks of a kernel."""
    expanded: list[int] = []
    for block in blocks:
        for offset in range(ratio):
            expanded.append(block * stride + offset)  # noqa: PERF401  a loop that can be read is the point here
    return expanded


def operators(
    plan: Plan, *, ratio: dict[int, int] | None = None, stride: dict[int, int] | None = None, cuts: Sequence[Cut] = ()
) -> OperatorArguments:
    """Sound arguments in arrays of their own. ``ratio`` and ``stride`` by group; ``cuts`` are micro-batches."""
    rows = len(plan.request_ids)
    groups = []
    for first_row, end_row, first, end in cuts or [(0, rows, 0, max(plan.num_tokens, plan.groups[0].slots.size))]:
        for planned in plan.groups:
            blocks = (ratio or {}).get(planned.group_id, 1)
            apart = (stride or {}).get(planned.group_id, blocks)
            tables, lengths, starts = [], [], [0]
            for row in range(first_row, end_row):
                tables.append(kernel_table(planned.tables[row].tolist(), blocks, apart))
                stop = int(plan.query_start[row + 1])
                behind = stop - end if stop > end else 0
                lengths.append(int(plan.seq_lens[row]) - behind)
                starts.append(min(max(stop - first, 0), end - first))
            slots = np.array(planned.slots.tolist()[first:end], np.int64)
            real = max(min(end, plan.num_tokens) - first, 0)
            groups.append(
                OperatorGroup(
                    group_id=planned.group_id,
                    parts=[
                        OperatorRows(
                            first_row=first_row,
                            rows=end_row - first_row,
                            first_token=first,
                            end_token=end,
                            tables=np.array(tables, np.int32).reshape(end_row - first_row, -1),
                            seq_lens=np.array(lengths, np.int32),
                            query_start=np.array(starts, np.int32),
                        )
                    ],
                    slots=[
                        OperatorSlots(first_token=first, tokens=real, slots=slots),
                        OperatorSlots(first_token=first, tokens=real, slots=slots.copy()),
                    ],
                    kernel_blocks=blocks,
                    kernel_stride=apart,
                )
            )
    return OperatorArguments(groups=groups)


def hand_over(plan: Plan, topology: Topology) -> HandedPlan:
    handed = HandedPlan(topology)
    handed.keep(plan)
    return handed


def judged(
    plan: Plan, arguments: OperatorArguments, topology: Topology, handed: HandedPlan | None = None
) -> list[Finding]:
    """What is found; where every byte agrees the rule is asked all the same, and must say nothing."""
    handed = handed or hand_over(plan, topology)
    agreed = not handed.doubtful(arguments)
    found = judge_operators(OperatorView(7, "t7", handed.plan(), arguments, topology), PARTS)
    assert not (agreed and found), "the comparison of bytes says otherwise than the rule itself"
    return found


def reference(plan: Plan, arguments: OperatorArguments, topology: Topology) -> set[tuple[int, int | None]]:
    """``(group, row)`` of everything that an operator would do and the plan does not say; row None is padding.

    Entry by entry: which token goes where, and through which block each token that is attended to is read.
    """
    wrong: set[tuple[int, int | None]] = set()
    of_group = {group.group_id: group for group in topology.groups}
    planned = {group.group_id: group for group in plan.groups}
    row_of = [row for row in range(len(plan.request_ids)) for _ in range(int(np.diff(plan.query_start)[row]))]
    for group in arguments.groups:
        size, plan_group = of_group[group.group_id].block_size, planned[group.group_id]
        for mapping in group.slots:
            for index, slot in enumerate(mapping.slots.tolist()):
                token = mapping.first_token + index
                expected = plan_group.slots[token] if token < plan_group.slots.size else -1
                if slot != expected:
                    wrong.add((group.group_id, row_of[token] if token < plan.num_tokens else None))
        kernel_size = size // group.kernel_blocks
        for part in group.parts:
            assert part.seq_lens is not None
            assert part.query_start is not None
            for index in range(part.rows):
                row = part.first_row + index
                stop = int(plan.query_start[row + 1])
                length = int(plan.seq_lens[row]) - max(stop - part.end_token, 0)
                begin = max(int(plan.query_start[row]) - part.first_token, 0)
                end = min(stop, part.end_token) - part.first_token
                if int(part.seq_lens[index]) != length:
                    wrong.add((group.group_id, row))
                if [int(part.query_start[index]), int(part.query_start[index + 1])] != [begin, end]:
                    wrong.add((group.group_id, row))
                computed = int(plan.seq_lens[row]) - int(plan.query_start[row + 1] - plan.query_start[row])
                first = min(first_visible(of_group[group.group_id], computed), blocks_for(length, size))
                for position in range(first * size, blocks_for(length, size) * size):
                    logical, offset = divmod(position, size)
                    expected = int(plan_group.tables[row, logical]) * group.kernel_stride + offset // kernel_size
                    if int(part.tables[index, position // kernel_size]) != expected:
                        wrong.add((group.group_id, row))
    return wrong


def said(found: Sequence[Finding]) -> set[tuple[int | None, int | None]]:
    return {(finding.group_id, finding.row) for finding in found}


def write(array: Any, index: Any, value: int) -> None:
    array[index] = value
