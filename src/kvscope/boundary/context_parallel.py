"""Reads a context-parallel rank's own coordinates, and the part of a batch that is its.

Sources (vLLM 0.32): ``BlockTable`` (``vllm/v1/worker/block_table.py``), ``BlockTables``
(``vllm/v1/worker/gpu/block_table.py``), ``PCPManager`` (``vllm/v1/worker/gpu/pcp_manager.py``), and for local lengths
``_build_attention_metadata`` (``vllm/v1/worker/gpu_model_runner.py``) and ``execute_model``
(``vllm/v1/worker/gpu/model_runner.py``), which both leave them behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..facts.context_parallel import NO_WRITER, ContextParallel, LocalLengths, LocalRows
from ..facts.plans import PAD_SLOT, GroupPlan, Int32, Int64, Plan
from .slots import as_slots

CONTEXT = "_kvscope_context"
"""Attribute by which a runner carries what was read of its block tables, which a device may have."""


def context_of_v1(runner: Any) -> ContextParallel | None:
    """The coordinates by which V1's tables compute slots; None where every rank stores all tokens.

    V1 deals the tokens out in every group that has a slot mapping. It knows no prefill context parallelism.
    """
    tables = runner.input_batch.block_table.block_tables
    size = getattr(tables[0], "dcp_world_size", 1) if tables else 1
    if size == 1:
        return None
    sharded = (index for index, table in enumerate(tables) if table.slot_mapping_mode.value != "none")
    return ContextParallel(
        dcp_size=size,
        dcp_rank=tables[0].dcp_rank,
        interleave=tables[0].cp_kv_cache_interleave_size,
        sharded=tuple(sharded),
    )


def context_of_v2(runner: Any) -> ContextParallel | None:
    """The coordinates by which V2's tables compute slots, and its PCP manager chunks; None where there is neither."""
    tables, manager = runner.block_tables, getattr(runner, "pcp_manager", None)
    size = getattr(tables, "cp_size", 1)
    if size == 1 and manager is None:
        return None
    pcp = (1, 0) if manager is None else (manager.pcp_world_size, manager.pcp_rank)
    numbers = (size, tables.cp_rank, tables.cp_interleave, *pcp)
    known = runner.__dict__.get(CONTEXT)
    if known is not None and known[0] is tables and known[1] == numbers:
        context: ContextParallel = known[2]
        return context
    dealt_out = tables.dcp_sharded.tolist() if size > 1 else []
    sharded = (index for index, dealt in enumerate(dealt_out) if dealt and tables._slot_mapping_enabled[index])
    context = ContextParallel(
        dcp_size=size,
        dcp_rank=tables.cp_rank,
        interleave=tables.cp_interleave,
        pcp_size=pcp[0],
        pcp_rank=pcp[1],
        sharded=tuple(sharded),
    )
    setattr(runner, CONTEXT, (tables, numbers, context))
    return context


def read_partitioned_plan(
    runner: Any, context: ContextParallel, batch: Any, block_tables: Any, slot_mappings: Any
) -> Plan:
    """The plan of a rank that computes a part of the batch; ``batch`` holds that part, the manager the whole.

    The slots are those of the gathered keys and values of all ranks. They are put back in the order of the whole batch
    by the manager's own map; what it marks as nobody's stands behind them. The tables are those that slots are computed
    by, and where the rank's own rows differ from them, those: attention reads them.
    """
    manager, whole = runner.pcp_manager, runner.pcp_manager.global_batch
    is_written = manager._gathered_kv_write_mask.numpy()
    writers = np.where(is_written, manager._padded_gather_idx.numpy(), NO_WRITER)
    rows = whole.num_reqs
    row_of = {request_id: row for row, request_id in enumerate(whole.req_ids)}
    local = LocalRows(
        request_ids=batch.req_ids,
        query_start=batch.query_start_loc_np[: batch.num_reqs + 1],
        positions=batch.positions.numpy()[: batch.num_tokens],
        seq_lens=batch.seq_lens.numpy()[: batch.num_reqs],
        writers=writers,
    )
    part_of = np.fromiter(map(row_of.__getitem__, batch.req_ids), np.intp)
    counts = runner.block_tables.num_blocks.np[:, whole.idx_mapping_np]
    groups = []
    for group_id, table in enumerate(block_tables):
        gathered = slot_mappings[group_id].numpy()
        own = table.numpy()[: batch.num_reqs]
        source = runner.block_tables.block_tables[group_id].gpu.numpy()[whole.idx_mapping_np]
        slots = as_slots(gathered, runner.block_tables.block_sizes[group_id])
        groups.append(
            GroupPlan(
                group_id=group_id,
                tables=_as_read(source, own, part_of, counts[group_id]),
                table_blocks=counts[group_id],
                slots=_put_back(slots, writers, whole.num_tokens),
                host_slots=gathered,
                host_tables=own,
            )
        )
    return Plan(
        request_ids=whole.req_ids,
        query_start=whole.query_start_loc_np[: rows + 1],
        positions=whole.positions.numpy()[: whole.num_tokens],
        seq_lens=whole.seq_lens.numpy()[:rows],
        num_tokens=whole.num_tokens,
        groups=groups,
        context=context,
        local=local,
    )


def _put_back(gathered: Int64, writers: Int64, num_tokens: int) -> Int64:
    """The slot of each token of the whole batch, and behind them the slots of places from which nothing is stored."""
    slots = np.full(num_tokens, PAD_SLOT, np.int64)
    stored = (writers >= 0) & (writers < num_tokens)
    slots[writers[stored]] = gathered[stored]
    return np.concatenate((slots, gathered[~stored]))


def _as_read(source: Int32, own: Int32, part_of: Any, counts: Int32) -> Int32:
    """The rows of the whole batch, each as the rank's own rows have it where they differ."""
    width = min(source.shape[1], own.shape[1])
    meant = np.arange(width) < counts[part_of][:, None]
    differs = ((own[:, :width] != source[part_of, :width]) & meant).any(axis=1)
    source[part_of[differs], :width] = own[differs, :width]
    return source


def read_local_lengths(runner: Any) -> LocalLengths | None:
    """How many tokens of each row the rank was told to have in the step that was launched last.

    None if there was no step, or where V2 has them on a device.
    """
    buffer = getattr(runner, "dcp_local_seq_lens", None)
    if buffer is not None:  # V1 fills it for every batch
        rows = runner.input_batch.num_reqs
        return LocalLengths(request_ids=runner.input_batch.req_ids[:rows], lengths=buffer.np[:rows].copy())
    state = getattr(runner, "execute_model_state", None)
    batch = state.input_batch if state is not None else None
    if batch is None or batch.dcp_local_seq_lens is None or batch.dcp_local_seq_lens.device.type != "cpu":
        return None
    lengths = batch.dcp_local_seq_lens.numpy()[: batch.num_reqs].copy()
    is_part = getattr(runner, "pcp_manager", None) is not None
    seq_lens = batch.seq_lens.numpy()[: batch.num_reqs].copy() if is_part else None
    return LocalLengths(request_ids=list(batch.req_ids), lengths=lengths, seq_lens=seq_lens)


def unjudged_cause(vllm_config: Any) -> str | None:
    """Why no plan of this engine can be judged, if so: runner V1 does not say which part of a batch a PCP rank has."""
    pcp_size = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    return "prefill_context_parallel" if pcp_size > 1 and not vllm_config.use_v2_model_runner else None
