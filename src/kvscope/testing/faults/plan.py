"""One view of what both model runners are about to hand to attention: rows, slots, tables, lengths of one group.

V1 (`v1/worker/gpu_model_runner.py`): final after `_prepare_inputs`, except for the padding that `_get_slot_mappings`
still fills. V2 (`v1/worker/gpu/model_runner.py`): `prepare_inputs` fixes positions and lengths, and then
`BlockTables.compute_slot_mappings`, the last callee of `prepare_attn`, the slots; the tables are gathered before it.
Block sizes and ids are the manager's: kernel blocks are derived from them only inside the metadata builders.
"""

import copy
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from kvscope.testing.faults.hooks import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request in one step. `first_token` counts in the flat batch; `prefill_tokens` must be computed before the
    request decodes (V2: includes what it had generated before a preemption)."""

    index: int
    request_id: str
    first_token: int
    num_tokens: int
    num_computed: int
    prefill_tokens: int
    state_index: int

    @property
    def seq_len(self) -> int:
        return self.num_computed + self.num_tokens

    @property
    def decodes(self) -> bool:
        return self.num_tokens == 1 and self.num_computed >= self.prefill_tokens


class Plan(ABC):
    """Tensors are the host's own, to be read and to be corrupted."""

    name: str
    group_id: int
    block_size: int
    rows: list[Row]
    positions: Any
    seq_lens: Any
    resumed: set[str]

    def __init__(self, runner: Any, scheduler_output: Any, group_id: int, undo: Undo) -> None:
        self.runner, self.group_id, self.undo = runner, group_id, undo
        self.pool_blocks = int(runner.kv_cache_config.num_blocks)
        cached = scheduler_output.scheduled_cached_reqs
        # V1 marks a resumed request; V2 sends it as a new one, which the caller knows from its earlier steps.
        self.resumed = set(cached.resumed_req_ids) | {new.req_id for new in scheduler_output.scheduled_new_reqs}

    @property
    @abstractmethod
    def slots(self) -> Any:
        """The slot of each token, padding included; int64."""

    @abstractmethod
    def table(self, row: Row) -> Any:
        """The row's block ids as attention gets them, at full width; int32."""

    @abstractmethod
    def counted_blocks(self, row: Row) -> int:
        """How many blocks the runner's own book-keeping says that the row has."""

    @abstractmethod
    def count_blocks(self, row: Row, number: int) -> None:
        """Change that book-keeping until the step is over."""

    @property
    @abstractmethod
    def offsets(self) -> Any:
        """Where each row begins among the tokens, and where the last one ends; int32."""

    @abstractmethod
    def cut_slots(self, number: int) -> None:
        """Hand on only the first slots, until the step is over. They stay where they are in memory."""

    @abstractmethod
    def recompute_slots(self) -> None:
        """Let the host derive the slots from the positions, if it has already done so."""

    def needed(self, row: Row) -> int:
        """How many blocks the row's length covers."""
        return -(-row.seq_len // self.block_size)

    def visible(self, row: Row) -> list[int]:
        """The block ids that the row's length covers."""
        return [int(block) for block in self.table(row)[: self.needed(row)].tolist()]

    def set_table(self, row: Row, index: int, block_id: int) -> None:
        """Change one entry of a row's table until the step is over."""
        table = self.table(row)
        self.undo.value(table, index)
        table[index] = block_id

    def decoding(self) -> list[Row]:
        return [row for row in self.rows if row.decodes]


class PlanV1(Plan):
    name = "v1"

    def __init__(self, runner: Any, scheduler_output: Any, group_id: int, undo: Undo) -> None:
        super().__init__(runner, scheduler_output, group_id, undo)
        self._batch = batch = runner.input_batch
        self._table = batch.block_table[group_id]
        self.block_size = int(self._table.block_size)
        self.positions, self.seq_lens = runner.positions, runner.seq_lens
        self._num_tokens = int(scheduler_output.total_num_scheduled_tokens)
        starts = runner.query_start_loc.np
        self.rows = [
            Row(
                index=index,
                request_id=request_id,
                first_token=int(starts[index]),
                num_tokens=int(starts[index + 1] - starts[index]),
                num_computed=int(batch.num_computed_tokens_cpu[index]),
                prefill_tokens=int(batch.num_prompt_tokens[index]),
                state_index=index,
            )
            for index, request_id in enumerate(batch.req_ids)
        ]

    @property
    def slots(self) -> Any:
        return self._table.slot_mapping.gpu

    def table(self, row: Row) -> Any:
        return self._table.block_table.gpu[row.index]

    def counted_blocks(self, row: Row) -> int:
        return int(self._table.num_blocks_per_row[row.index])

    def count_blocks(self, row: Row, number: int) -> None:
        self.undo.value(self._table.num_blocks_per_row, row.index)
        self._table.num_blocks_per_row[row.index] = number

    @property
    def offsets(self) -> Any:
        return self.runner.query_start_loc.np[: len(self.rows) + 1]

    def cut_slots(self, number: int) -> None:
        table = self._table
        self.undo.later(functools.partial(setattr, table, "slot_mapping", table.slot_mapping))
        table.slot_mapping = copy.copy(table.slot_mapping)
        table.slot_mapping.gpu = table.slot_mapping.gpu[:number]

    def recompute_slots(self) -> None:
        # As `_prepare_inputs` calls it.
        rows = len(self.rows)
        starts = self.runner.query_start_loc.gpu[: rows + 1]
        self._batch.block_table.compute_slot_mapping(rows, starts, self.positions[: self._num_tokens])


class PlanV2(Plan):
    """`gathered` says whether the tables of this step are in place yet (`compute_slot_mappings` comes after them)."""

    name = "v2"

    def __init__(
        self, runner: Any, scheduler_output: Any, group_id: int, undo: Undo, *, batch: Any, gathered: bool
    ) -> None:
        super().__init__(runner, scheduler_output, group_id, undo)
        self._tables, self._gathered = runner.block_tables, gathered
        self._batch = batch
        self.handed_slots: int | None = None
        self.block_size = int(self._tables.block_sizes[group_id])
        self.positions, self.seq_lens = batch.positions, batch.seq_lens
        starts = batch.query_start_loc_np
        self.rows = [
            Row(
                index=index,
                request_id=request_id,
                first_token=int(starts[index]),
                num_tokens=int(starts[index + 1] - starts[index]),
                num_computed=int(batch.num_computed_tokens_np[index]),
                prefill_tokens=int(batch.prefill_len_np[index]),
                state_index=int(batch.idx_mapping_np[index]),
            )
            for index, request_id in enumerate(batch.req_ids)
        ]

    @property
    def slots(self) -> Any:
        return self._tables.slot_mappings[self.group_id]

    def table(self, row: Row) -> Any:
        if self._gathered:
            return self._tables.input_block_tables[self.group_id][row.index]
        return self._tables.block_tables[self.group_id].gpu[row.state_index]

    def counted_blocks(self, row: Row) -> int:
        return int(self._tables.num_blocks.np[self.group_id, row.state_index])

    def count_blocks(self, row: Row, number: int) -> None:
        # The gathering kernel reads the device copy, which may or may not be the same memory.
        index = (self.group_id, row.state_index)
        for array in (self._tables.num_blocks.np, self._tables.num_blocks.gpu):
            self.undo.value(array, index)
            array[index] = number

    @property
    def offsets(self) -> Any:
        return self._batch.query_start_loc_np[: len(self.rows) + 1]

    def cut_slots(self, number: int) -> None:
        # What `compute_slot_mappings` returns is cut by whoever wraps it.
        self.handed_slots = number

    def recompute_slots(self) -> None:
        """At this point of the V2 runner the slots are still to come."""
