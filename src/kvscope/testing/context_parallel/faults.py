"""Faults of one rank that shares out sequences with others, put into its worker's own process.

    additional_config={"kvscope_context_fault": {"name": "cp_slot_missing", "rank": 1, "report": "/tmp/x.json"}}

``report`` is a file that gets what was done as JSON, once it has been done. Only steps that came through the
executor's RPC count; a fault waits for the first occasion after ``after_steps`` of them.
"""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvscope.testing.faults.hooks import Hook

EXPECTED = {
    "cp_slot_foreign": "cp_slot_owner_mismatch",
    "cp_slot_missing": "cp_slot_owner_mismatch",
    "cp_slots_swapped": "cp_order_mismatch",
    "cp_rank_of_another": "cp_rank_invalid",
    "cp_length_plus": "cp_local_length_mismatch",
}
"""Fault -> the reason that must be found."""

PAD = -1


class Steps:
    """Whose turn it is: steps that arrived so far, and whether one of them is under way."""

    def __init__(self, after_steps: int) -> None:
        self.after, self.arrived, self.running = after_steps, 0, False

    @property
    def due(self) -> bool:
        return self.running and self.arrived > self.after

    def around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.arrived, self.running = self.arrived + 1, True
        try:
            return original(*args, **kwargs)
        finally:
            self.running = False


class Fault:
    """One fault of one worker, done once. ``around_*`` stand in place of the host's own functions."""

    def __init__(self, name: str, report: Path, after_steps: int) -> None:
        self.name, self.report = name, report
        self.steps = Steps(after_steps)
        self.done = False

    @property
    def due(self) -> bool:
        return self.steps.due and not self.done

    def note(self, what: Mapping[str, int] | None) -> None:
        """Written beside and renamed, so that a reader never finds half of it; None: there was no occasion."""
        if what is not None:
            self.done = True
            draft = self.report.with_suffix(".draft")
            draft.write_text(json.dumps(what), encoding="utf-8")
            draft.replace(self.report)

    def around_slots_v1(self, original: Any, table: Any, num_reqs: int, starts: Any, positions: Any) -> Any:
        if self.due and self.name == "cp_rank_of_another":
            table.dcp_rank = (table.dcp_rank + 1) % table.dcp_world_size
            self.note({"dcp_rank": table.dcp_rank})
        result = original(table, num_reqs, starts, positions)
        if self.due:
            slots = table.slot_mapping.gpu[: int(starts[num_reqs])]
            rows, ranks = table.block_table.gpu, table.dcp_world_size
            self.note(_SLOTS[self.name](Batch(slots, positions, starts, rows, table.block_size, ranks)))
        return result

    def around_slots_v2(
        self, original: Any, tables: Any, idx: Any, starts: Any, positions: Any, *args: Any, **more: Any
    ) -> Any:
        if self.due and self.name == "cp_rank_of_another":
            tables.cp_rank = (tables.cp_rank + 1) % tables.cp_size
            self.note({"dcp_rank": tables.cp_rank})
        result = original(tables, idx, starts, positions, *args, **more)
        if self.due:
            slots, rows = result[0][: int(starts[idx.shape[0]])], tables.block_tables[0].gpu[idx]
            size, ranks = tables.block_sizes[0], tables.cp_size
            self.note(_SLOTS[self.name](Batch(slots, positions, starts, rows, size, ranks)))
        return result

    def around_lengths(self, original: Any, *args: Any, **more: Any) -> Any:
        result = original(*args, **more)
        if self.due:
            result[0] += 1
            self.note({"row": 0, "actual": int(result[0])})
        return result


def install(settings: Mapping[str, Any], rank: int) -> None:
    """Put a fault into this worker, if it is meant."""
    name = settings["name"]
    if name not in EXPECTED:
        raise ValueError(f"there is no fault {name!r}; there are {', '.join(EXPECTED)}")
    if int(settings["rank"]) != rank:
        return
    from vllm.v1.worker import block_table, gpu_model_runner, worker_base
    from vllm.v1.worker.gpu import block_table as block_table_v2
    from vllm.v1.worker.gpu import model_runner as model_runner_v2

    fault = Fault(name, Path(settings["report"]), int(settings.get("after_steps", 4)))
    Hook(worker_base.WorkerWrapperBase, "execute_model", fault.steps.around)
    if name == "cp_length_plus":
        Hook(gpu_model_runner, "get_dcp_local_seq_lens", fault.around_lengths)
        Hook(model_runner_v2, "prepare_dcp_local_seq_lens", fault.around_lengths)
    else:
        Hook(block_table.BlockTable, "compute_slot_mapping", fault.around_slots_v1)
        Hook(block_table_v2.BlockTables, "compute_slot_mappings", fault.around_slots_v2)


class Batch(NamedTuple):
    """Slots and positions of each token, where rows begin, their tables, the slots of a block, and the ranks."""

    slots: Any
    positions: Any
    starts: Any
    tables: Any
    size: int
    ranks: int

    def note(self, token: int) -> dict[str, int]:
        position, slot = int(self.positions[token]), int(self.slots[token])
        return {"token_index": token, "slot": slot, "position": position, "row": self.row_of(token)}

    def row_of(self, token: int) -> int:
        starts = self.starts.tolist()[:-1]
        return max(row for row, start in enumerate(starts) if start <= token)

    def of(self, *, stored: bool) -> list[int]:
        """The tokens that this rank stores, or those that it does not."""
        tokens: list[int] = ((self.slots != PAD) == stored).nonzero().flatten().tolist()
        return tokens


def _slot_foreign(batch: Batch) -> dict[str, int] | None:
    """A token that another rank stores gets a slot here that no other token has, in the block of its position."""
    taken = set(batch.slots.tolist())
    for token in batch.of(stored=False):
        logical = int(batch.positions[token]) // (batch.size * batch.ranks)
        block = int(batch.tables[batch.row_of(token), logical])
        free = [slot for slot in range(block * batch.size, (block + 1) * batch.size) if slot not in taken]
        if block and free:
            batch.slots[token] = free[-1]
            return batch.note(token)
    return None


def _slot_missing(batch: Batch) -> dict[str, int] | None:
    for token in batch.of(stored=True):
        batch.slots[token] = PAD
        return batch.note(token)
    return None


def _slots_swapped(batch: Batch) -> dict[str, int] | None:
    """Two tokens of one block change places; a batch that only decodes offers none."""
    for token, other in pairwise(batch.of(stored=True)):
        first, second = int(batch.slots[token]), int(batch.slots[other])
        if first // batch.size == second // batch.size:
            batch.slots[token], batch.slots[other] = second, first
            return batch.note(token)
    return None


_SLOTS: dict[str, Callable[[Batch], dict[str, int] | None]] = {
    "cp_slot_foreign": _slot_foreign,
    "cp_slot_missing": _slot_missing,
    "cp_slots_swapped": _slots_swapped,
}
