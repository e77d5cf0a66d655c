"""Model Runner V2: final slots and tables. Source: ``vllm/v1/worker/gpu/model_runner.py`` (0.32).

``prepare_attn`` returns the very tensors that the metadata builders, graphs and kernels use; it is called for real
batches only, ``prepare_dummy_attn`` for the others.
"""

from __future__ import annotations

from typing import Any

from ..facts.plans import DummyRun, GroupPlan, Int64, Plan
from .context_parallel import context_of_v2, read_partitioned_plan
from .graphs import graph_mode_of
from .slots import as_slots


def after_prepare_attn(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    if observer.expects_no_plan:
        return
    block_tables, slot_mappings = result
    if not observer.reads_host_tensors:
        observer.on_plan_skipped("device_tensors")
        return
    batch = args[0] if args else kwargs["input_batch"]
    observer.on_plan(read_plan(runner, batch, block_tables, slot_mappings))


def read_plan(runner: Any, batch: Any, block_tables: Any, slot_mappings: Any) -> Plan:
    """The plan as views of the runner's own buffers (whole ones first: slicing an array costs less than a tensor)."""
    context, exact = context_of_v2(runner), not _estimates(runner)
    if context is not None and context.pcp_size > 1:
        plan = read_partitioned_plan(runner, context, batch, block_tables, slot_mappings)
        plan.exact, plan.graph_mode = exact, graph_mode_of(runner)
        return plan
    rows = batch.num_reqs
    lengths = runner.block_tables.num_blocks.np[:, batch.idx_mapping_np]
    mappings = slot_mappings.numpy()
    is_direct = _is_direct(mappings)
    slots = mappings if is_direct else _converted(runner, mappings)
    groups = [
        GroupPlan(
            group_id=group_id,
            tables=table.numpy()[:rows],
            table_blocks=lengths[group_id],
            slots=slots[group_id],
            host_slots=None if is_direct else mappings[group_id],
        )
        for group_id, table in enumerate(block_tables)
    ]
    return Plan(
        request_ids=batch.req_ids,
        query_start=batch.query_start_loc_np[: rows + 1],
        positions=batch.positions.numpy()[: batch.num_tokens],
        seq_lens=batch.seq_lens.numpy()[:rows],
        num_tokens=batch.num_tokens,
        groups=groups,
        graph_mode=graph_mode_of(runner),
        exact=exact,
        context=context,
    )


def _estimates(runner: Any) -> bool:
    """Whether the runner itself only has an upper bound of the computed tokens."""
    return bool(runner.num_speculative_steps > 0 and runner.scheduler_config.async_scheduling)


def _is_direct(mappings: Any) -> bool:
    """Whether the slots are vLLM's own ``int64 [groups, tokens]``."""
    return bool(mappings.itemsize == 8 and mappings.ndim == 2)


def _converted(runner: Any, mappings: Any) -> list[Int64]:
    """Slots of a host that has them in another shape than vLLM, by group."""
    return [as_slots(of, size) for of, size in zip(mappings, runner.block_tables.block_sizes, strict=True)]


def after_prepare_dummy_attn(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    _, slot_mappings = result
    if slot_mappings.device.type == "cpu":
        observer.on_dummy(read_dummy(runner, slot_mappings))


def read_dummy(runner: Any, slot_mappings: Any) -> DummyRun:
    """The slots that a dummy run hands to attention."""
    mappings = slot_mappings.numpy()
    slots = mappings if _is_direct(mappings) else _converted(runner, mappings)
    return DummyRun(slots=dict(enumerate(slots)), num_tokens=mappings.shape[1])
