"""Model Runner V2: final slots and tables. Source: ``vllm/v1/worker/gpu/model_runner.py`` (0.32).

``prepare_attn`` returns the very tensors that the metadata builders, graphs and kernels use; it is called for real
batches only, ``prepare_dummy_attn`` for the others. Among the real ones are those of a warm-up, whose requests the
worker makes up (``vllm/v1/worker/gpu/warmup.py``) before there are others. A capture takes its slots elsewhere
(``prepare_inputs_to_capture``, ``cudagraph_utils.py``), and nothing of ours runs inside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..facts.plans import PAD_SLOT, DummyRun, GroupPlan, PersistentSlots, Plan


def after_prepare_attn(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    if observer.expects_no_plan:
        if observer.is_warming_up:
            _read_warm_up(observer, result[1])
        return
    block_tables, slot_mappings = result
    if not observer.reads_host_tensors:
        observer.on_plan_skipped("device_tensors")
        return
    batch = args[0] if args else kwargs["input_batch"]
    observer.on_plan(read_plan(runner, batch, block_tables, slot_mappings))


def read_plan(runner: Any, batch: Any, block_tables: Any, slot_mappings: Any) -> Plan:
    """The plan as views of the runner's own buffers (whole ones first: slicing an array costs less than a tensor)."""
    rows = batch.num_reqs
    lengths = runner.block_tables.num_blocks.np[:, batch.idx_mapping_np]
    slots = slot_mappings.numpy()
    groups = [
        GroupPlan(
            group_id=group_id,
            tables=table.numpy()[:rows],
            table_blocks=lengths[group_id],
            slots=slots_of_group,
        )
        for group_id, (table, slots_of_group) in enumerate(zip(block_tables, slots, strict=False))  # one may be missing
    ]
    return Plan(
        request_ids=batch.req_ids,
        query_start=batch.query_start_loc_np[: rows + 1],
        positions=batch.positions.numpy()[: batch.num_tokens],
        seq_lens=batch.seq_lens.numpy()[:rows],
        num_tokens=batch.num_tokens,
        groups=groups,
        exact=not (runner.num_speculative_steps > 0 and runner.scheduler_config.async_scheduling),
    )


def after_prepare_dummy_attn(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    _, slot_mappings = result
    if slot_mappings.device.type != "cpu":
        observer.on_dummy_skipped("device_tensors")
        return
    # A context-parallel manager hands on a buffer of its own.
    whole = runner.block_tables.slot_mappings if runner.pcp_manager is None else slot_mappings
    observer.on_dummy(read_dummy(slot_mappings, whole))


def read_dummy(slot_mappings: Any, whole: Any) -> DummyRun:
    """The slots that a dummy run hands to attention, and what else the buffer holds that graphs read them from.

    ``get_dummy_slot_mappings`` turns off the whole buffer, since a kernel may look beyond the tokens.
    """
    slots, buffer = slot_mappings.numpy(), whole.numpy()
    num_tokens = slots.shape[1]
    persistent = {}
    for group_id, rest in enumerate(buffer[:, num_tokens:]):
        enabled = np.flatnonzero(rest != PAD_SLOT)
        persistent[group_id] = PersistentSlots(
            checked=rest.size, indexes=enabled + num_tokens, slots=rest[enabled].astype(np.int64)
        )
    return DummyRun(slots=dict(enumerate(slots)), num_tokens=num_tokens, persistent=persistent)


def _read_warm_up(observer: Any, slot_mappings: Any) -> None:
    if slot_mappings.device.type != "cpu":
        observer.on_dummy_skipped("device_tensors")
        return
    slots = slot_mappings.numpy()
    observer.on_dummy(DummyRun(slots=dict(enumerate(slots)), num_tokens=slots.shape[1], warm_up=True))


def after_capture(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    observer.on_dummy_skipped("graph_capture")
