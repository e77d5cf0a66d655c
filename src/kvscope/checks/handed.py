"""The plan as it was judged, kept until the forward begins: what the operators get must still be just that.

Between the two points the host goes on working on the same buffers, and the builders of metadata may copy, cut and
reorder what is in them. So contents are compared, as bytes; which memory they lie in says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..facts.operators import OperatorArguments, OperatorGroup, OperatorSlots
from ..facts.plans import AgreedGroup, GroupPlan, Int32, Plan
from ..facts.topology import Topology

_SEQ_LENS, _QUERY_START, _GROUPS = 0, 1, 2

Pair = tuple[npt.NDArray[np.generic], int]


class HandedPlan:
    """One worker's plan of the current step.

    What is kept are the bytes of each array, in the order: lengths, query offsets, then slots and tables of each judged
    group. Tables are kept as wide as anybody reads them.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rows = 0
        self.groups_read = 0
        self._indices = [index for index, group in enumerate(topology.groups) if group.judged]
        self._position = {topology.groups[index].group_id: n for n, index in enumerate(self._indices)}
        self._all_judged = len(self._indices) == len(topology.groups)
        self._plan: Plan
        self._groups: list[GroupPlan] = []
        self._widths: list[int] = []
        self._bytes: list[bytes] = []
        self._arguments: OperatorArguments | None = None
        self._paired_plan: Plan | None = None
        self._pairs: list[Pair] = []
        self._kernel: list[tuple[Int32, int, OperatorGroup]] = []
        self._expanded: dict[int, tuple[bytes, bytes]] = {}
        self._unpaired: list[OperatorGroup] = []

    def keep(self, plan: Plan, agreed: Sequence[AgreedGroup] | None = None) -> bool:
        """Keep what has just been judged. ``agreed`` has the tables of the judged groups, if somebody kept them
        already. A plan without rows, or in which a group is missing, is not kept, and False: no forward can be made of
        it.
        """
        kept = [plan.seq_lens.tobytes(), plan.query_start.tobytes()]
        widths = []
        if agreed is not None:
            groups = plan.groups if self._all_judged else [plan.groups[index] for index in self._indices]
            for group, of in zip(groups, agreed, strict=True):
                kept += (group.slots.tobytes(), of.tables)
                widths.append(of.width)
        else:
            found = [plan.group(index, self.topology.groups[index].group_id) for index in self._indices]
            groups = [group for group in found if group is not None]
            if len(groups) < len(found) or not plan.request_ids:
                return False
            for group, index in zip(groups, self._indices, strict=True):
                width = self._read_blocks(plan, group, index)
                tables = group.tables[: len(plan.request_ids), :width]
                kept += (group.slots.tobytes(), tables.tobytes())
                widths.append(width)
        if widths != self._widths:
            self._widths, self._paired_plan = widths, None
        self._plan, self._groups, self._bytes = plan, groups, kept
        self.rows = len(plan.request_ids)
        return True

    def _read_blocks(self, plan: Plan, group: GroupPlan, index: int) -> int:
        longest = int(plan.seq_lens.max(initial=1))
        return max(min(-(-longest // self.topology.groups[index].block_size), int(group.tables.shape[1])), 0)

    def plan(self) -> Plan:
        """The plan as it was, in arrays of its own, with the positions that follow from its lengths. Groups that are
        not judged are left out; ``table_blocks`` are those of now, since operators are not given any.
        """
        plan = self._plan
        rows = len(plan.request_ids)
        query_start = np.frombuffer(self._bytes[_QUERY_START], np.int32)
        seq_lens = np.frombuffer(self._bytes[_SEQ_LENS], np.int32)
        row = np.searchsorted(query_start[1:], np.arange(plan.num_tokens), side="right").clip(max=rows - 1)
        groups = []
        for n, group in enumerate(self._groups):
            slots, tables = self._bytes[_GROUPS + 2 * n], self._bytes[_GROUPS + 2 * n + 1]
            groups.append(
                GroupPlan(
                    group_id=group.group_id,
                    tables=np.frombuffer(tables, np.int32).reshape(rows, self._widths[n]),
                    table_blocks=group.table_blocks,
                    slots=np.frombuffer(slots, np.int64),
                )
            )
        return Plan(
            request_ids=plan.request_ids,
            query_start=query_start,
            positions=seq_lens[row].astype(np.int64) - query_start[row + 1] + np.arange(plan.num_tokens),
            seq_lens=seq_lens,
            num_tokens=plan.num_tokens,
            groups=groups,
            graph_mode=plan.graph_mode,
            exact=plan.exact,
        )

    # At a glance ------------------------------------------------------------------------------------------------------

    def doubtful(self, arguments: OperatorArguments) -> list[OperatorGroup]:
        """The groups that a rule must look at: all, if one byte is not what was judged; else those alone that are not
        handed over as a whole.
        """
        if arguments is not self._arguments or self._plan is not self._paired_plan:
            self._pair(arguments)
        kept = self._bytes
        for array, index in self._pairs:
            if array.tobytes() != kept[index]:
                return arguments.groups
        if self._kernel and not all(self._expands(*of) for of in self._kernel):
            return arguments.groups
        return self._unpaired

    def _pair(self, arguments: OperatorArguments) -> None:
        """Lay out which array must have which bytes, where a group is handed over as a whole."""
        self._arguments = self._paired_plan = None  # until all is laid out
        self.groups_read = len({group.group_id for group in arguments.groups})
        self._kernel, self._expanded, self._unpaired = [], {}, []
        paired: list[Pair] = []
        for group in arguments.groups:
            self._pairs = []
            if self._pair_group(group):
                paired += self._pairs
            else:
                self._unpaired.append(group)
        # Several groups and layers are given the same arrays: each is looked at once.
        once = {(id(array), index): (array, index) for array, index in paired}
        self._pairs = list(once.values())
        self._arguments, self._paired_plan = arguments, self._plan

    def _pair_group(self, group: OperatorGroup) -> bool:
        plan, position = self._plan, self._position.get(group.group_id)
        index = _GROUPS + 2 * (position or 0)
        if position is None or len(group.parts) > 1 or not all(self._pair_slots(each, index) for each in group.slots):
            return False
        if not group.parts:
            return True
        (part,) = group.parts
        rows, width = self.rows, self._widths[position]
        whole = part.first_row == part.first_token == 0 and part.rows == rows and part.end_token >= plan.num_tokens
        if not whole or part.chunk_tokens is not None:
            return False
        if part.tables.shape[0] < rows or part.tables.shape[1] < width * group.kernel_blocks:
            return False
        for array, ends, which in (
            (part.seq_lens, rows, _SEQ_LENS),
            (part.query_start, rows + 1, _QUERY_START),
        ):
            if array is not None:
                if array.dtype != np.int32 or array.shape[0] < ends:
                    return False
                self._pairs.append((array if array.shape[0] == ends else array[:ends], which))
        tables = part.tables[:rows, : width * group.kernel_blocks]
        if tables.dtype != np.int32:
            return False
        if group.kernel_blocks == group.kernel_stride == 1:
            self._pairs.append((tables, index + 1))
        else:
            self._kernel.append((tables, index + 1, group))
        return True

    def _pair_slots(self, mapping: OperatorSlots, index: int) -> bool:
        planned = self._groups[(index - _GROUPS) // 2].slots
        if mapping.slots.shape != planned.shape or mapping.slots.dtype != planned.dtype or mapping.first_token != 0:
            return False
        self._pairs.append((mapping.slots, index))
        return True

    def _expands(self, tables: Int32, index: int, group: OperatorGroup) -> bool:
        """Whether a kernel's tables are those of the manager, each block spelled out. They change seldom."""
        kept = self._bytes[index]
        key = id(tables)
        if key not in self._expanded or self._expanded[key][0] != kept:
            blocks = np.frombuffer(kept, np.int32).reshape(tables.shape[0], -1)
            self._expanded[key] = kept, kernel_tables(blocks, group).tobytes()
        return tables.tobytes() == self._expanded[key][1]


def kernel_tables(tables: Int32, group: OperatorGroup) -> Int32:
    """Tables of manager blocks as the kernel of a group counts them, ``int32 [rows, width * kernel_blocks]``."""
    offsets = np.arange(group.kernel_blocks, dtype=np.int32)
    expanded: Int32 = tables[:, :, None] * np.int32(group.kernel_stride) + offsets
    return expanded.reshape(tables.shape[0], -1)
