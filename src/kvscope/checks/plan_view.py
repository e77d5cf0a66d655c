"""What the declaration says a plan must be, computed once for all rules that look at it.

Everything is vectorised over rows and tokens; the only Python loops are over KV-cache groups. Agreement is found by
comparing bytes, which for small arrays costs a tenth of an elementwise comparison; only where that fails are the
arrays made that tell where.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..facts.context_parallel import ContextParallel
from ..facts.plans import PAD_SLOT, GroupPlan, Int32, Int64, Plan
from ..facts.requests import Declaration
from ..facts.topology import Group
from ..state.batches import BatchTable
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.legality import Legality
from ..state.token_shares import block_offset, local_offsets, owned

Bool = npt.NDArray[np.bool_]


class StepView:
    """One plan beside its declaration. ``rows`` below is the number of rows in the plan.

    ``computed`` and ``seq_lens`` (``int64 [rows]``) are the declared tokens before and after the step, ``scheduled``
    (``int64``) those in it; ``query_lens`` are the plan's. ``single`` says that every row has exactly one token.

    ``ledger`` and ``legality`` have been advanced to the declaration. They are None where the blocks of the pool are
    not followed; then nothing is said about them.
    """

    def __init__(
        self,
        plan: Plan,
        declaration: Declaration,
        bindings: Bindings,
        ledger: BlockLedger | None = None,
        legality: Legality | None = None,
    ) -> None:
        self.plan = plan
        self.declaration = declaration
        self.bindings = bindings
        self.ledger = ledger
        self.legality = legality
        self.rows = rows = bindings.rows_of(plan.request_ids)
        self.computed = bindings.computed[rows]
        self.seq_lens = bindings.seq_lens[rows]
        self.single = plan.num_tokens == len(rows) and plan.query_start.tolist() == list(range(len(rows) + 1))
        if self.single:
            self.expected_positions = self.computed
            self.lengths_agree = not plan.exact or (
                plan.seq_lens.astype(np.int64).tobytes() == self.seq_lens.tobytes()
                and declaration.total_num_scheduled_tokens == len(declaration.requests.scheduled)
            )
        else:
            offsets = np.arange(plan.num_tokens) - plan.query_start[self.token_row]
            self.expected_positions = self.computed[self.token_row] + offsets
            self.lengths_agree = not plan.exact or bool(
                (self.query_lens == self.scheduled).all()
                and (plan.seq_lens == self.seq_lens).all()
                and self.offsets_agree
            )
        self.positions_agree = not plan.exact or plan.positions.tobytes() == self.expected_positions.tobytes()

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The row of each request of the plan."""
        return {request_id: row for row, request_id in enumerate(self.plan.request_ids)}

    @cached_property
    def scheduled(self) -> Int64:
        """``int64 [rows]``: declared tokens in this step."""
        scheduled: Int64 = self.seq_lens - self.computed
        return scheduled

    @cached_property
    def query_lens(self) -> Int32:
        """``int32 [rows]``: tokens of each row in the plan."""
        return np.diff(self.plan.query_start)

    @property
    def offsets_agree(self) -> bool:
        """Whether the query offsets run from 0 to the number of tokens and never back."""
        starts = self.plan.query_start
        return bool(starts[0] == 0 and starts[-1] == self.plan.num_tokens and (self.query_lens >= 0).all())

    @cached_property
    def slots_needed(self) -> int:
        """How many tokens must have a slot: those of the plan, and those declared where the host does not estimate."""
        return max(self.plan.num_tokens, int(self.scheduled.sum()) if self.plan.exact else 0)

    @cached_property
    def token_row(self) -> npt.NDArray[np.intp]:
        """``intp [num_tokens]``: the row of each token. Where the offsets do not cover the tokens once and in order, a
        token is its row's from whose offset on it lies, the first or the last one's where there is none.
        """
        count = self.plan.num_tokens
        if self.single:
            return np.arange(count)
        rows = np.repeat(np.arange(len(self.rows)), np.maximum(self.query_lens, 0))
        if rows.size != count:
            ends = np.maximum.accumulate(self.plan.query_start[1:])
            rows = np.minimum(np.searchsorted(ends, np.arange(count), side="right"), len(self.rows) - 1)
        return rows

    @property
    def basis(self) -> Int64:
        """Positions by which slots are expected: the declared ones, or the plan's own where only those are exact."""
        return self.expected_positions if self.plan.exact else self.plan.positions

    def group(self, batch: BatchTable) -> GroupView | None:
        """The view of one group, through the table that is kept for it; None if the plan has nothing for the group."""
        plan = self.plan.group(batch.group_index, batch.group.group_id)
        return None if plan is None else GroupView(self, batch, plan)

    def groups(self, batches: Iterable[BatchTable]) -> list[GroupView]:
        """The views of those groups that the plan has."""
        return [view for view in map(self.group, batches) if view is not None]


class GroupView:
    """One group of a :class:`StepView`; ``batch`` holds what is declared for it.

    ``slots`` are those of the real tokens, ``padding`` what the mapping holds behind them. Where the mapping ends
    before the tokens do, ``unmapped`` of them have none, and stand in ``slots`` with the declared ones.
    """

    def __init__(self, step: StepView, batch: BatchTable, plan: GroupPlan) -> None:
        self.step = step
        self.batch = batch
        self.group_index = batch.group_index
        self.group: Group = batch.group
        self.plan = plan
        # Where the host only has an upper bound, it is the declared one: what attention gets is at most that.
        seq_lens = step.seq_lens if step.plan.exact else np.minimum(step.plan.seq_lens, step.seq_lens)
        batch.refresh(step.rows, step.computed, seq_lens)
        self.slots: Int64 = plan.slots[: step.plan.num_tokens]
        self.padding: Int64 = plan.slots[step.plan.num_tokens :]
        self.unmapped = step.plan.num_tokens - self.slots.size
        if self.unmapped:
            self.slots = np.concatenate((self.slots, self.expected_slots[self.slots.size :]))

    @property
    def needed(self) -> Int64:
        """``int64 [rows]``: blocks that the declared sequence spans."""
        return self.batch.needed

    @property
    def declared(self) -> Int32:
        """``int32 [rows, width]``: the replayed tables of the plan's rows."""
        return self.batch.declared

    @property
    def visible(self) -> Bool:
        """``bool [rows, width]``: entries that attention reads."""
        return self.batch.visible

    @cached_property
    def tables(self) -> Int32:
        """``int32 [rows, width]``: the plan's tables; where they are narrower the rest reads as the null block."""
        tables, width = self.plan.tables[: len(self.step.rows), : self.batch.width], self.batch.width
        if tables.shape[1] == width:
            return tables
        short = np.zeros((tables.shape[0], width), np.int32)
        short[:, : tables.shape[1]] = tables
        return short

    @property
    def share(self) -> ContextParallel | None:
        """How the tokens of this group are dealt out over ranks, None where each rank stores them all."""
        context = self.step.plan.context
        return context if context is not None and self.group.shards > 1 else None

    @cached_property
    def expected_blocks(self) -> Int64:
        """``int64 [num_tokens]``: the declared block of each token's position."""
        logical = self.step.basis // self.group.block_size
        return self.batch.blocks_at(logical, None if self.step.single else self.step.token_row)

    @cached_property
    def mine(self) -> Bool:
        """``bool [num_tokens]``: the tokens that this rank stores."""
        share = self.share
        return np.ones(self.step.plan.num_tokens, bool) if share is None else owned(share, self.step.basis)

    @cached_property
    def expected_slots(self) -> Int64:
        """``int64 [num_tokens]``: the declared block of each token's position, times its slots, plus the offset; the
        padding value for a token that another rank stores.
        """
        block_size, share = self.group.block_size, self.share
        basis = self.step.basis
        if share is not None:
            local = local_offsets(share, basis % block_size)
            shared: Int64 = np.where(self.mine, self.expected_blocks * self.group.slots_per_block + local, PAD_SLOT)
            return shared
        slots: Int64 = (self.expected_blocks - basis // block_size) * block_size + basis
        return slots

    @cached_property
    def target_blocks(self) -> Int64:
        """``int64 [num_tokens]``: the block in which each real token is stored; -1 for the padding value."""
        blocks: Int64 = self.slots // self.group.slots_per_block
        return blocks

    def token_offset(self, slot: int) -> int:
        """Which token of its block is stored in a slot of this rank."""
        offset, share = slot % self.group.slots_per_block, self.share
        return offset if share is None else block_offset(share, offset)

    @cached_property
    def slots_differ(self) -> Bool:
        """``bool [num_tokens]``: real tokens that are stored, inside the cache, elsewhere than declared."""
        inside = (self.slots != PAD_SLOT) & (self.slots >= 0) & (self.slots < self.end_slot)
        differ: Bool = inside & (self.slots != self.expected_slots)
        return differ

    @property
    def end_slot(self) -> int:
        """One past the highest slot of the cache."""
        return self.step.bindings.topology.num_blocks * self.group.slots_per_block

    @cached_property
    def entries_differ(self) -> Bool:
        """``bool [rows, width]``: visible entries that are not the declared ones."""
        differ: Bool = (self.tables != self.declared) & self.visible
        return differ

    @cached_property
    def writes_agree(self) -> bool:
        """Whether every real token has its declared slot, in a sound block that no other row writes, and every
        padding slot is off. True means that no write rule can fire.
        """
        return bool(
            self.slots.tobytes() == self.expected_slots.tobytes()
            and self.plan.slots.size >= self.step.slots_needed
            and self.batch.sound
            and (self.padding.size == 0 or (self.padding == PAD_SLOT).all())
            and self.batch.rows_write_apart(self.expected_blocks, None if self.step.single else self.step.token_row)
        )

    @cached_property
    def reads_agree(self) -> bool:
        """Whether every visible table entry is the declared one and sound, and every row is long enough.

        True means that no rule about tables can fire.
        """
        return (
            self.batch.equals_declared(self.plan.tables)
            and self.batch.sound
            and self.batch.long_enough(self.plan.table_blocks)
        )
