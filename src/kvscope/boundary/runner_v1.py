"""Model Runner V1: final slots and tables. Source: ``vllm/v1/worker/gpu_model_runner.py`` (0.32).

``_get_slot_mappings`` is the last call before the attention metadata is built; ``_dummy_run`` calls it too, and only
afterwards turns every slot off, so a dummy run is read when it has ended.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..facts.plans import DummyRun, GroupPlan, Plan


def _on_host(*tensors: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def after_slot_mappings(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    by_group, _ = result
    if by_group is None or observer.expects_no_plan:
        return
    if not _on_host(runner.positions, *by_group.values()):
        observer.on_plan_skipped("device_tensors")
        return
    observer.on_plan(read_plan(runner, by_group, kwargs["num_tokens_unpadded"]))


def read_plan(runner: Any, slots_by_group: Any, num_tokens: int) -> Plan:
    """The plan as views of the runner's own buffers.

    Slicing a NumPy array costs a tenth of slicing a tensor; that is why whole buffers are turned into arrays first.
    """
    batch = runner.input_batch
    rows = batch.num_reqs
    groups = []
    for group_id, slots in slots_by_group.items():
        table = batch.block_table[group_id]
        groups.append(
            GroupPlan(
                group_id=group_id,
                tables=table.block_table.gpu.numpy()[:rows],
                table_blocks=table.num_blocks_per_row[:rows],
                slots=slots.numpy(),
            )
        )
    return Plan(
        request_ids=batch.req_ids[:rows],
        query_start=runner.query_start_loc.np[: rows + 1],
        positions=runner.positions.numpy()[:num_tokens],
        seq_lens=runner.seq_lens.numpy()[:rows],
        num_tokens=num_tokens,
        groups=groups,
        exact=not getattr(runner, "use_async_spec_decode", False),
    )


def after_dummy_run(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    num_tokens = args[0] if args else kwargs["num_tokens"]
    observer.on_dummy(read_dummy(runner, num_tokens))


def read_dummy(runner: Any, num_tokens: int) -> DummyRun:
    """The slots that a dummy run has left in the buffers it handed to attention."""
    slots = {}
    for group_id in range(len(runner.kv_cache_config.kv_cache_groups)):
        mapping = runner.input_batch.block_table[group_id].slot_mapping.gpu[:num_tokens]
        if _on_host(mapping):
            slots[group_id] = mapping.numpy().astype(np.int64, copy=False)
    return DummyRun(slots=slots, num_tokens=num_tokens)
