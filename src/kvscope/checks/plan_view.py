"""What the declaration says a plan must be, computed once for all rules that look at it.

Everything is vectorised over rows and tokens; the only Python loops are over KV-cache groups.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..facts.plans import PAD_SLOT, GroupPlan, Int32, Int64, Plan
from ..facts.requests import Declaration
from ..facts.topology import Group
from ..state.bindings import Bindings
from ..state.visibility import first_visible_block

Bool = npt.NDArray[np.bool_]


class StepView:
    """One plan beside its declaration. ``rows`` below is the number of rows in the plan.

    ``computed``, ``scheduled`` and ``seq_lens`` (``int64 [rows]``) are the declared tokens before, in and after the
    step; ``query_lens`` are the plan's. ``token_row`` ``intp [num_tokens]`` is the row of each token and
    ``expected_positions`` ``int64 [num_tokens]`` the position that the declaration gives it.
    """

    def __init__(self, plan: Plan, declaration: Declaration, bindings: Bindings) -> None:
        self.plan = plan
        self.declaration = declaration
        self.bindings = bindings
        self.rows = bindings.rows_of(plan.request_ids)
        self.computed = bindings.computed[self.rows]
        self.scheduled = bindings.scheduled[self.rows]
        self.seq_lens = self.computed + self.scheduled
        starts = plan.query_start[: len(plan.request_ids) + 1]
        self.query_lens = np.diff(starts)
        if plan.num_tokens == len(self.rows) and (self.query_lens == 1).all():
            self.token_row = np.arange(plan.num_tokens)
            self.expected_positions = self.computed
        else:
            self.token_row = np.repeat(np.arange(len(self.rows)), self.query_lens)[: plan.num_tokens]
            offsets = np.arange(plan.num_tokens) - starts[self.token_row]
            self.expected_positions = self.computed[self.token_row] + offsets
        self.positions_agree = bool((plan.positions == self.expected_positions).all()) if plan.exact else True
        self.lengths_agree = (
            bool((self.query_lens == self.scheduled).all() and (plan.seq_lens == self.seq_lens).all())
            if plan.exact
            else True
        )

    @property
    def basis(self) -> Int64:
        """Positions by which slots are expected: the declared ones, or the plan's own where only those are exact."""
        return self.expected_positions if self.plan.exact else self.plan.positions

    def group(self, group_index: int) -> GroupView:
        """The view of one group."""
        return GroupView(self, group_index)


class GroupView:
    """One group of a :class:`StepView`.

    ``declared`` ``int32 [rows, width]`` are the replayed tables of the plan's rows; ``width`` covers the longest
    declared sequence. ``needed`` ``int64 [rows]`` is how many blocks that sequence spans, ``first_visible`` where the
    attention window begins, and ``visible`` ``bool [rows, width]`` marks the entries that attention reads.
    """

    def __init__(self, step: StepView, group_index: int) -> None:
        self.step = step
        self.group_index = group_index
        self.group: Group = step.bindings.topology.groups[group_index]
        self.plan: GroupPlan = step.plan.groups[group_index]
        block_size = self.group.block_size
        self.seq_lens = step.seq_lens if step.plan.exact else step.plan.seq_lens.astype(np.int64)
        self.needed = (self.seq_lens + (block_size - 1)) // block_size
        self.width = int(self.needed.max(initial=1))
        step.bindings.ensure_width(group_index, self.width)
        self.declared: Int32 = step.bindings.tables[group_index][step.rows, : self.width]
        self.first_visible = first_visible_block(self.group, step.computed)
        columns = np.arange(self.width)
        self.visible: Bool = columns < self.needed[:, None]
        if self.group.visible_tokens is not None:
            self.visible &= columns >= self.first_visible[:, None]
        self.tables: Int32 = self._plan_tables()
        self.slots: Int64 = self.plan.slots[: step.plan.num_tokens]
        self.padding: Int64 = self.plan.slots[step.plan.num_tokens :]

    def _plan_tables(self) -> Int32:
        tables = self.plan.tables[: len(self.step.rows), : self.width]
        if tables.shape[1] == self.width:
            return tables
        short = np.zeros((tables.shape[0], self.width), np.int32)
        short[:, : tables.shape[1]] = tables
        return short

    @cached_property
    def expected_slots(self) -> Int64:
        """``int64 [num_tokens]``: the declared block of each token's position, times block size, plus the offset."""
        block_size = self.group.block_size
        basis = self.step.basis
        logical = basis // block_size
        block = self.declared[self.step.token_row, np.minimum(logical, self.width - 1)].astype(np.int64)
        slots: Int64 = block * block_size + (basis - logical * block_size)
        return slots

    @cached_property
    def first_slot(self) -> int:
        """Lowest slot that a real token may have, when the null block is block 0 as vLLM makes it."""
        return self.group.block_size

    @cached_property
    def end_slot(self) -> int:
        """One past the highest slot of the cache."""
        return self.step.bindings.topology.num_blocks * self.group.block_size

    @cached_property
    def entries_differ(self) -> Bool:
        """``bool [rows, width]``: visible entries that are not the declared ones."""
        differ: Bool = (self.tables != self.declared) & self.visible
        return differ

    @cached_property
    def writes_agree(self) -> bool:
        """Whether every real token has its declared slot, inside the cache and outside the null block, and every
        padding slot is off. True means that no write rule can fire.
        """
        slots = self.slots
        if slots.size == 0:
            return True
        topology = self.step.bindings.topology
        return bool(
            (slots == self.expected_slots).all()
            and int(slots.min()) >= self.first_slot
            and int(slots.max()) < self.end_slot
            and (topology.null_block_id == 0 or not (slots // self.group.block_size == topology.null_block_id).any())
            and (self.padding.size == 0 or bool((self.padding == PAD_SLOT).all()))
            and self.rows_write_apart
        )

    @cached_property
    def rows_write_apart(self) -> bool:
        """Whether no two rows write the same block.

        Within one row declared positions are distinct and the table has no duplicate, so two tokens can only meet in
        one slot if two rows write in one block. The rule then looks at the slots themselves.
        """
        blocks = self.expected_slots // self.group.block_size
        token_row = self.step.token_row
        if len(self.step.rows) == blocks.size:
            return bool(len(np.unique(blocks)) == blocks.size)
        first = np.ones(blocks.size, bool)
        first[1:] = (blocks[1:] != blocks[:-1]) | (token_row[1:] != token_row[:-1])
        touched = blocks[first]
        return bool(len(np.unique(touched)) == touched.size)

    @cached_property
    def reads_agree(self) -> bool:
        """Whether every visible table entry is the declared one and lies in the pool, and every row is long enough.

        True means that no rule about tables can fire.
        """
        pool = self.step.bindings.topology
        # One comparison catches the null block (0 wraps around), negative ids and ids beyond the pool.
        invalid = (self.tables.astype(np.int64) - 1).view(np.uint64) >= pool.num_blocks - 1
        return bool(
            not self.entries_differ.any()
            and not (invalid & self.visible).any()
            and (self.plan.table_blocks >= self.needed).all()
        )
